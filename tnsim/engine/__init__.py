"""A `Problem` in, numbers out: a compiler for sums of tensor contractions.

Read `ir/` first (what is compiled), then `costs` and `plan`, `search/` (paths and sharing),
`passes/` (rewrites), `planner` and `budget` (which put these together), `runtime/` (compiled
programs compiled and run), and at last `scaled` and `precision`: what numbers come with.
"""
