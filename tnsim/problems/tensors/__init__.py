"""A single layer as named arrays, whatever its class.

Read `kinds`, then `lifted`, `positional`, `layer_networks` and `packed`.
"""
