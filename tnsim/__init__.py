"""tnsim: which neural networks are the same function, and where a run changed.

`similarity` compares two, `pairwise` all of a run, `parts` and `change` say which part. Polynomial
networks and networks with one hidden layer are compared exactly, from their weights; all others by
an estimate that says so. Types of results, errors, dialects and tensor networks stand in modules.

Names are loaded on first use, so that `import tnsim` is cheap and changes nothing in JAX. Functions
that need an optional package say so when they are called, not when they are named: `help(tnsim)`
and `from tnsim import *` work without optional packages.

Reading order of the packages: `models`, `metrics`, `problems`, `engine`, `compare`, `checkpoints`,
`circuits`, `tensor_networks`, `torch`, `all_pairs`, `localise`, `analysis`, `cli`.
"""

from __future__ import annotations

import gc
from typing import Any

import lazy_loader

# The names of `__init__.pyi`.
_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
_PUBLIC = frozenset(__all__)
# A star would put it in the place of PyTorch.
__all__.remove("torch")  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tnsim' has no attribute {name!r}")
    # All that an import makes stays, and a full collection on the way takes as long as a tiny
    # comparison with its imports: it would look through all of JAX and find nothing.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _load(name)  # and kept, so that later uses find it without this function
    finally:
        if enabled:
            gc.enable()


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, *_PUBLIC})
