"""Layers and models as checked pytrees, with their forward passes.

Reading order: `protocol`, `arrays`, `matrices`, `attention`, `layers`, `checks`, `origin`, `model`,
`scaling`, `forward`, `differences`, `powers`, `functions`.
"""
