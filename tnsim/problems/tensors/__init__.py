"""A single layer as named arrays, whatever its class.

The modules in their reading order:

    kinds           layers without their numbers
    positional      layers of sequence models, with their shapes
    affine          linear layers in a row as one affine map
    lifted          the tensor of a layer over lifted bonds
    layer_networks  a layer as an unrolled network
    packed          symmetric tensors, stored once per sorted index
"""
