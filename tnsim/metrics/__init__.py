"""Metrics: the inner products on functions under which models are compared.

The modules in their reading order:

    protocol         what a metric answers, and finite measures, block by block
    orbits           how legs are joined, of a layer and of whole trees
    input_moments    means and covariances of inputs, nodes and draws of Gaussian ones
    metric           the metrics that join legs, and the estimate of a Gaussian one
    finite_measures  finite measures: tokens, own inputs, independent coordinates
"""
