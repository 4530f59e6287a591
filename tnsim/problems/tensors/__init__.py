"""A single layer as named arrays, whatever its class.

Read `kinds`, then `lifted`, `positional`, `affine`, `layer_networks` and `packed`.
"""
