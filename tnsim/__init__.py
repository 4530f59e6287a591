"""tnsim: exact similarity of polynomial networks, from their weights.

Names are loaded on first use, so that `import tnsim` is cheap and changes nothing in JAX.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "Linear": "layers",
    "Bilinear": "layers",
    "Attention": "layers",
    "Residual": "layers",
    "Model": "model",
    "Combination": "model",
    "Frobenius": "metrics",
    "TreeSymmetric": "metrics",
    "Symmetric": "metrics",
    "Gaussian": "metrics",
    "GaussianClosure": "metrics",
    "Categorical": "metrics",
    "similarity": "verbs",
    "slices": "verbs",
    "inner": "verbs",
    "log_inner": "verbs",
    "plan": "verbs",
    "Budget": "structure",
    "pairwise": "runs",
    "plan_pairwise": "runs",
    "open_pairwise": "runs",
    "Pairwise": "pairs",
    "check": "checking",
    "attribution": "attributing",
    "Attribution": "attributing",
    "Plan": "plans",
    "network": "unrolled",
    "networks": "closing",
    "load": "checkpoints",
    "save": "checkpoints",
    "from_state_dict": "checkpoints",
    "Series": "checkpoints",
    "Dialect": "dialects",
    "compare_forward": "checkpoints",
    "TnsimError": "errors",
    "ModelError": "errors",
    "CheckpointError": "errors",
    "UnsupportedLayer": "errors",
    "TooLarge": "errors",
    "MissingExtra": "errors",
    "StoreMismatch": "errors",
    "PrecisionWarning": "errors",
    "DuplicateWarning": "errors",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"tnsim.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tnsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
