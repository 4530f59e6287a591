"""The same inner products as quimb networks, and sums of any quimb networks through the engine.

Reading order: `model_networks`, `closed_networks`, `network_sums`, `contraction`.
"""

import lazy_loader

# The names of `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
