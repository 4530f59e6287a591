"""Layers and models as checked pytrees, with their forward passes.

The modules in their reading order:

    protocol                      what a layer answers, those from outside included
    arrays, matrices              weights of any library as arrays of one kind; sparse matrices
    layers, attention, activated  the layers
    model, origin                 rows of layers, sums of models, and how a model was read
    checks                        checks of models and numbers that every verb makes first
    scaling, powers               models in scientific notation
    forward                       forward passes that never leave the range of floats
    differences, offsets          nearly equal models, and constants, as models of their own
    components                    names, switches and exchanges of parts of a model
    functions                     plain functions and PyTorch modules in the place of models
"""
