"""The search for the cheapest program of a stage.

The modules in their reading order:

    paths    contraction paths of a product, from cotengra
    sharing  every distinct value once, and sums made cheaper as a whole
    routes   a route for every product
    stages   the program of a stage, large values in blocks
"""
