"""A compiler for sums of tensor contractions, from a `Problem` by way of a `Plan` to numbers.

The modules in their reading order:

    ir          problems, programs, stages, and plans as text
    costs       memory and seconds of programs
    plan        a plan, and its contractions to be looked at
    disk_cache  results of searches on disk
    search      paths, and what products share
    hoisting    plans of pairs cut into shares
    runtime     plans on arrays
    planner     from a problem to a plan within a budget
    precision   the digits of a cosine
"""
