"""A single layer as named arrays, whatever its class.

The modules in their reading order:

    kinds           layers without their numbers
    lifted          the tensor of a layer over lifted bonds
    positional      layers of sequence models, with their shapes
    layer_networks  a layer as an unrolled network
    packed          symmetric tensors, stored once per sorted index
"""
