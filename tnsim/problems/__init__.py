"""Two models and a metric become one `Problem`.

Read `base` first, then `families`, which picks the family that answers. The families: `layerwise`
(with `alignment`), `whole_tree` (with `diagrams`, `leaves`), `sequences/` and `tokens`. `tensors/`
has a layer as named arrays; `polynomial_space`, `features` and
`forward` are routes without a plan.
"""
