"""The search for the cheapest program of a stage.

The modules in their reading order:

    paths      contraction paths of a product, from cotengra
    canonical  equal sub-networks
    sharing    every distinct value once
    sums       sums made cheaper as a whole
    routes     a route for every product
    stages     the program of a stage
    progress   lines of progress while a plan is made
"""
