"""Layers and models as checked pytrees, with their forward passes.

The modules in their reading order:

    arrays       weights of any library as arrays of one kind; sparse matrices
    layers       the layers, and what a layer from outside answers
    model        rows of layers, sums of models, how a model was read, checks of all verbs
    scaling      models in scientific notation, equal factors as powers
    forward      forward passes that never leave the range of floats
    differences  nearly equal models, and constants, as models of their own
    components   names, switches and exchanges of parts of a model
    functions    plain functions and PyTorch modules in the place of models
"""
