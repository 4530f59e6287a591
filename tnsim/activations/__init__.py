"""Activations and their Gaussian kernels: E f(u) g(v) for hidden units of any two layers.

The modules in their reading order:

    normal        one and two normal variables
    activation    activations, and the parts whose moments are known
    coefficients  Hermite coefficients
    pairs         single pairs of variables, up to correlation 1 and -1
    kernels       all pairs of hidden units, those of gated layers too
"""
