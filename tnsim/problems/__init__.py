"""Two models and a metric become a `Problem` for the engine.

Read `base` first, then `families`, which picks the family that answers a comparison:
`sequences/` (with `alignment`), `whole_tree` (with `diagrams`) or `tokens`. `leaves` names the
arrays that problems read, and `tensors/` has the layers as named arrays. `state_sizes` and
`conditioning` choose the units and the bases in which a model is computed. `polynomial_space`,
`features` and `forward` are routes without a plan.
"""
