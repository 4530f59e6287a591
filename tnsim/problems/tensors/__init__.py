"""One layer as named arrays: the only code that asks for the class of a layer.

Read `kinds`, then `lifted`, `positional`, `layer_networks` and `packed`.
"""
