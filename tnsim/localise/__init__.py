"""Which part of a model: paths through a model, and the parts of a change.

The modules in their reading order:

    grams                inner products of many models that share layers
    paths                a model split by the components, or the units, that a signal goes through
    slopes               integrals of derivatives along a segment of switches
    edges                paths split by the legs that read a component
    runs                 checkpoints of a run, and tables of what was found of each
    change, exchanges    the difference of two networks, split by component
    change_of_functions  of polynomials, by whose functions components have
    switched_weights     networks with weights between those of two
    change_of_weights    of any two networks, by whose weights they have
    differences          on which inputs, and along which outputs, two networks differ
"""
