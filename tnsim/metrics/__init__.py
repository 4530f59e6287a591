"""Metrics: the inner products on functions under which models are compared.

Reading order: `pairings`, `orbits`, `points`, `protocol`, `input_moments`, `metric`, `categorical`,
`empirical`, `quadrature`, `product`.
"""
