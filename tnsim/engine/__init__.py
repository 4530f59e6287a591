"""A compiler for sums of tensor contractions, from a `Problem` by way of a `Plan` to numbers.

The modules in their reading order:

    ir                       problems, programs, stages, and plans as text
    costs                    memory and seconds of programs
    plan, contraction_paths  a plan, and its contractions to be looked at
    disk_cache               results of searches on disk
    search                   paths, and what products share
    passes                   rewrites of programs and plans
    planner                  from a problem to a plan
    runtime                  plans on arrays
    budget                   limits of a plan
    precision                the digits of a cosine
"""
