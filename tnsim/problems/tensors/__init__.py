"""One layer as named arrays: `kinds`, then `lifted`, `positional`, `layer_networks` and `packed`.

The only code that asks which layer it has.
"""
