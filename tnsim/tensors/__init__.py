"""One layer as named arrays, and the only code that asks which kind a layer is.

In: layers of models, and n_ctx where they read sequences.
Out: kinds without numbers, by which plans are found; arrays by name: lifted, positional, tabulated.
"""
