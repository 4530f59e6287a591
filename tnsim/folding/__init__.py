"""Two models and a metric become one Problem.

In: the kinds of both models' layers, and a metric.
Out: a family of problems (layer-wise, whole-tree, sequence or token), its `Problem` and arrays.
"""
