"""Two models compared: the functions that a user calls first.

Read `similarity` first (the verbs), then `request` (questions and answers), `inner_products` (the
inner products of models and of their sums), `planned` and `by_points` (its two ways: plans and
forward passes), `resident` (a model's arrays between calls), `numbers` (labels, standard errors),
`comparison` and `gradients` (derivatives along plans), and at last `monte_carlo`, which builds on
these, and `surrogate` (polynomials in the place of activations).
"""
