"""Contracts what it is given; knows no model and no metric.

In: a `Problem`, definitions and products over named arrays, and the arrays.
Out: a `Plan` with its cost, and numbers as mantissas and logarithms.
"""
