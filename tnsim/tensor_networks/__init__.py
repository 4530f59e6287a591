"""The same inner products as quimb networks, and sums of any quimb networks through the engine.

The modules in their reading order:

    quimb_networks  models as tagged tree tensor networks, and inner products as closed networks
    contraction     sums of any networks as problems of the engine
"""

import lazy_loader

# The names of `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
