"""Which inner product on functions is meant.

In: moments of the inputs, orders of layers.
Out: metric classes, weighted ways of joining input legs, the orbits of those ways.
"""
