"""A single layer as named arrays, whatever its class.

Read `kinds`, then `positional`, `affine`, `lifted`, `layer_networks` and `packed`.
"""
