"""Models of sequences become one Problem: layer kinds, a metric and n_ctx in, definitions out.

To be read in this order:

    notation, states          words: names of indices, moments of states, the layers of a step
    fold                      the problem step by step; scales: what is renormalised with what
    layer_means               one step: the mean of one layer's output
    layer_covariances         one step: the covariance of two layers' outputs
    position_wise, attention  the two sorts of layers
    joining_rules             which legs of two layers a metric joins
    bra_ket, projections      the legs of two layers, their means and covariances
    expansions                sums over positions: frames, and in each of them
    coincidences              which positions coincide, and
    wick                      moments of attention scores
    attribution               an inner product by components of the outputs
"""
