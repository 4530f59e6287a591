"""Two models compared: the functions that a user calls first.

The modules in their reading order:

    similarity             the verbs
    request, numbers       questions, and the numbers that answer them
    inner_products         the inner products of models and of their sums
    sums_of_models         sums of models, multiplied out
    routes, estimates      the table of routes, and what each would take
    by_plans, planned      contractions, planned within a budget
    by_features            vectors of coefficients
    by_kernels             kernels of activations
    by_points              forward passes at points
    resident               a model's arrays between calls
    comparison, gradients  a comparison apart into structure and numbers, and its derivatives
    centred                functions without their means
    monte_carlo            a similarity checked by sampling
    surrogate              polynomials in the place of activations
"""
