"""Layers and models as checked pytrees, with their forward pass.

In: arrays of NumPy, JAX or PyTorch. Out: a `Model`, callable, and its weights in the range of
floats (`scaling`).
"""
