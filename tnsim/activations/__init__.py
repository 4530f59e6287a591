"""Activations and their Gaussian kernels: E f(u) g(v) for hidden units of any two layers.

Reading order: `normal`, `activation`, `coefficients`, `pairs`, `kernels`, `gated`.
"""
