"""What a model is, by content. In: models, metrics. Out: hexadecimal digests.

Two checkpoints with one digest are one network: the same layers with the same numbers in the same
precision. Names, files and the libraries that the arrays came from play no part.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from tnsim.metrics.metric import Metric
from tnsim.metrics.protocol import joins_layers
from tnsim.metrics.ways import ASKED
from tnsim.models.model import Model

STANDARD = "standard"


def content_hash(model: Any) -> str:
    """Digest of the layers, settings and weights of a model or combination, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, model)
    return digest.hexdigest()


def metric_parameters(metric: Metric) -> str:
    """`standard` for a metric without parameters of its own, else their digest.

    Of a metric from outside that joins layer by layer the joinings are part of the digest, as its
    name and its numbers alone do not say what it is.
    """
    if joins_layers(metric) and not _is_ours(metric):
        joinings = tuple(tuple(metric.joinings(*one)) for one in ASKED)
        own = metric if dataclasses.is_dataclass(metric) else tuple(sorted(vars(metric).items()))
        return content_hash((type(metric).__name__, joinings, own))
    if _is_standard(metric):
        return STANDARD
    return content_hash(metric)


def _is_standard(metric: Metric) -> bool:
    if not dataclasses.is_dataclass(metric):
        return not vars(metric)
    fields = dataclasses.fields(metric)
    return all(getattr(metric, field.name) is field.default for field in fields)


def _feed(digest: Any, value: Any) -> None:
    """Every field by name, every array by dtype, shape and bytes: no two values look alike."""
    if hasattr(value, "shape"):
        array = np.ascontiguousarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    elif isinstance(value, tuple):
        digest.update(f"({len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif _is_ours(value) or dataclasses.is_dataclass(value):  # with all that they hold
        digest.update(f"<{type(value).__name__}".encode())
        for name in _state(value):
            digest.update(f".{name}=".encode())
            _feed(digest, getattr(value, name))
    else:
        digest.update(repr(value).encode())


def _state(value: Any) -> list[str]:
    """Names of all that a value is made of, in order.

    Not of what is worked out from that and kept beside it, nor of where a model was read.
    """
    names = []
    for name in sorted(vars(value)):
        worked_out = isinstance(getattr(type(value), name, None), cached_property)
        told = isinstance(value, Model) and name == "origin"
        if not (worked_out or told):
            names.append(name)
    return names


def _is_ours(value: Any) -> bool:
    """Whether it is a model, a layer or a metric of tnsim."""
    return type(value).__module__.startswith("tnsim.")
