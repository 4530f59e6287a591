"""The same inner products as quimb networks, and sums of any quimb networks through the engine.

The modules in their reading order:

    model_networks   models as tagged tree tensor networks
    closed_networks  inner products as closed networks
    network_sums     sums of networks as problems of the engine
    contraction      contraction of any networks
"""

import lazy_loader

# The names of `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
