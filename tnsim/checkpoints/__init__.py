"""The only code that knows file formats.

In: paths of safetensors, npz and PyTorch files, dialects that say how foreign ones are laid out.
Out: models, lazy series of models, and files in tnsim's own format.

To be read in this order:

    load                      what a user calls: paths into models and series
    checkpoint, series        one file; many files, read lazily
    formats, inventory        what a file declares; its tensors are read when asked for
    rules, dialects, presets  how foreign state dicts are laid out
    state_dict, unused, norms a dialect applied to named arrays, with nothing dropped in silence
    named_arrays, layer_rules one rule of a dialect becomes one layer
    native                    tnsim's own format, both ways
    modules, module_calls, module_rules, module_attention   PyTorch modules become dialects
    suggestions               a template of a dialect for a file
    folders, hub_cache        folders that hold one model, revisions in a cache of downloads
    configurations            small text files
    guard                     whatever goes wrong becomes one sentence
"""
