"""Reading and writing of checkpoints: no other package knows file formats.

The modules in their reading order:

    load                      entry points: paths into models and lazy series of models
    folders                   folders that hold a single model, revisions in a hub cache
    formats, pickles          inventories of files, whose tensors are read when asked for
    configurations            small text files beside checkpoints
    rules, dialects           layouts of foreign state dicts, and presets of dialects
    state_dict                a dialect applied to named arrays, with nothing dropped in silence
    named_arrays, layer_rules a single rule of a dialect becomes a single layer
    norms                     norms as constants, folded into polynomial layers
    native                    tnsim's own format, both ways
    modules, module_examples  PyTorch modules, and files of their weights, become models
    module_calls              states inside a module
    operations                what operations are, by their names, and what the algebra asks of them
    graphs, jaxprs            forward passes of PyTorch and of JAX as such operations
    entrywise, curves         chains of entrywise operations as functions of one number
    batches                   whether inputs of a batch are apart, and layers beside a function
    functions                 functions of JAX become models
    affine_values, unit_layers, attention_scores, read_graphs   operations become layers
    guard                     every failure of reading becomes a single sentence
"""

import lazy_loader

__getattr__, _, _ = lazy_loader.attach(__name__, ("dialects",))  # a public name of tnsim
