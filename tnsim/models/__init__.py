"""Layers and models as checked pytrees, with their forward passes.

Reading order: `protocol`, `arrays`, `attention`, `layers`, `checks`, `origin`, `model`, `scaling`,
`forward`, `differences`, `functions`.
"""
