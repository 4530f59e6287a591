"""Standard transformers part by part: QK and OV circuits of heads, MLP blocks, the direct path.

A standard transformer is no polynomial, as it has softmax and norms, yet most of it is: between
norm and softmax lie bilinear and linear maps. Each such part is a model of tnsim that is exact as a
function of the normalised input. The modules in their reading order:

    layouts         names of tensors and entries of configurations, family by family
    transformer     affine maps of heads and blocks, norms folded
    standard_parts  parts of standard transformers, and of tnsim's own models
    parts           parts as models, of one checkpoint or of a whole series, held to the module
"""
