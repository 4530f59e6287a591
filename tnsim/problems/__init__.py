"""Two models and a metric become a `Problem` for the engine, or vectors, kernels, forward passes.

The modules in their reading order:

    base, families             what a family answers, and which family answers a comparison
    tensors                    layers as named arrays
    sequences, alignment       layer over layer, the layers of two models matched
    diagrams, whole_tree       sums over diagrams of whole trees
    tokens                     models over one-hot tokens as tables
    units                      units and bases in which models are written
    state_sizes                sizes of states under a metric
    conditioning               how far sums cancel within a model, and the basis that avoids it
    exact_products             products to more bits than a float has
    features                   models as vectors
    polynomial_space           vectors of coefficients
    receptive_fields           the same of sparse layers
    hidden_units               models as functions of hidden units, a nonlinear layer each
    kernels, kernel_models     sums over pairs of hidden units, of one layer and of several
    batches, at_points         what forward passes at points take, and their sums
"""
