"""Two models and a metric become one Problem.

In: the kinds of both models' layers, and a metric.
Out: a family of problems, one of layer-wise, whole-tree, sequence and token; its `Problem` and arrays.
"""
