"""Models of sequences become a `Problem`: the layer-wise fold with an index of positions.

Reading order:

    notation       names of indices, legs that a metric joins, the layers of a step as operands
    fold           the problem step by step, and its scale groups
    moments        a single step: means and covariances of the outputs of layers
    position_wise  legs, their moments, and layers that act position by position
    expansions     sums over positions, and moments of attention scores
"""
