"""Which part of a model: paths through a model, and the parts of a change.

The modules in their reading order:

    paths                a model split by the components, the units or the edges of a signal's way
    switched_models      inner products of models that share layers, and integrals of derivatives
    change               the difference of two networks, split by component
    change_of_functions  of polynomials, by whose functions components have
    switched_weights     networks with weights between those of two
    change_of_weights    of any two networks, by whose weights they have
    differences          what a change is, where it lies on the data, and along a run
"""
