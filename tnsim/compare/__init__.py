"""Two models compared: the functions that a user calls first.

The modules in their reading order:

    similarity        the verbs
    request, numbers  questions, what they would take, and the numbers that answer them
    routes            the table of routes, and inner products along them
    operands          sums of models, multiplied out, and a model's arrays between calls
    by_plans          contractions, planned within a budget
    by_features       vectors of coefficients
    by_kernels        kernels of activations
    by_points         forward passes at points
    gradients         a comparison apart into structure and numbers, and its derivatives
    centred           functions without their means
    surrogate         polynomials in the place of activations
"""
