"""Two models and a metric become a `Problem` for the engine, or vectors, kernels, forward passes.

The modules in their reading order:

    families                    what a family answers, and which family answers a comparison
    layer_kinds, layer_tensors  layers without their numbers, and as named arrays
    sequences                   layer over layer
    diagrams, whole_tree        sums over diagrams of whole trees
    tokens                      models over one-hot tokens as tables
    units                       units and bases in which models are written, sizes of states
    conditioning                how far sums cancel within a model, and the basis that avoids it
    features                    models as vectors
    polynomial_space, packed    vectors of coefficients, and how symmetric tensors are stored
    receptive_fields            the same of sparse layers
    hidden_units                models as functions of hidden units, a nonlinear layer each
    kernels                     sums over pairs of hidden units, of one layer and of several
    at_points                   what forward passes at points take, and their sums
"""
