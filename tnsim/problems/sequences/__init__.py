"""Models of sequences become a `Problem`: the layer-wise fold with an index of positions.

Reading order:

    notation                  names of indices, legs, products of arrays
    joining_rules             the legs of two layers that a metric joins
    bra_ket                   states, the layers of a step, and their arrays as operands
    fold                      the problem step by step, and its scale groups
    moments                   a single step: means and covariances of the outputs of layers
    position_wise             legs, their moments, and layers that act position by position
    attention                 attention layers
    expansions                sums over positions, and moments of attention scores
    coincidences              patterns of coinciding positions
"""
