"""A compiler for sums of tensor contractions, from a `Problem` by way of a `Plan` to numbers.

Reading order: `ir/` (problem, program, stages), `costs` and `plan`, `disk_cache` (search results
on disk), `search/` (paths and sharing), `passes/` (rewrites), `planner` (from a problem to a
plan), `runtime/` (compiling and execution), `budget` (limits of a plan), `scaled` and `precision`
(exponents of scales, digits of a cosine).
"""
