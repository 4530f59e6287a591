"""Reading and writing of checkpoints: no other package knows file formats.

The modules in their reading order:

    load                           entry points: paths into models and lazy series of models
    folders                        folders of one model, and revisions in a hub cache
    formats                        inventories of files, whose tensors are read when asked for
    given                          models in whatever a verb was given: files, modules, functions
    rules, dialects                layouts of foreign state dicts, and presets of dialects
    state_dict                     a dialect applied to named arrays, nothing dropped in silence
    layer_rules                    a single rule of a dialect becomes a single layer
    norms                          norms as constants, folded into polynomial layers
    native                         tnsim's own format, both ways
    modules, module_calls          PyTorch modules, and files of their weights, become models
    adapters                       LoRA over a base
    operations                     what operations are, by name, and what the algebra asks of them
    graphs, jaxprs                 forward passes of PyTorch and of JAX as such operations
    functions                      functions of JAX become models
    entrywise, curves              chains of entrywise operations, and the functions that they are
    batches                        whether inputs of a batch are apart, layers beside a function
    affine_values                  affine maps of operations, dense or as rows of few entries
    unit_layers, unit_rows         operations become hidden units, which read rows of matrices
    attention_scores               scores of attention, which become layers
    read_graphs                    operations become layers
"""

import lazy_loader

__getattr__, _, _ = lazy_loader.attach(__name__, ("dialects",))  # a public name of tnsim
