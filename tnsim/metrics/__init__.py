"""Metrics: the inner products on functions under which models are compared.

The modules in their reading order:

    pairings, orbits                 how legs are joined, of a layer and of whole trees
    points                           finite measures, block by block
    protocol                         what a metric answers
    input_moments                    means and covariances of inputs
    metric                           the metrics that join legs
    categorical, empirical, product  finite measures: tokens, own inputs, independent coordinates
    quadrature                       nodes and draws of Gaussian inputs
    estimate                         the estimate of a Gaussian metric
"""
