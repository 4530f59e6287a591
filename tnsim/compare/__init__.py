"""Two models compared: the functions that a user calls first.

In: two models or combinations of models, and a metric.
Out: similarity, inner product, cosines by output, attribution, plan, Monte-Carlo check.
"""
