"""What a comparison needs to know of a layer before its numbers. In: models. Out: kinds, hashable, by which plans are found."""

from __future__ import annotations

from typing import TypeAlias

from tnsim.models.model import Model
from tnsim.tensors.lifted import Kind, kind
from tnsim.tensors.positional import SequenceKind, sequence_kind

Kinds: TypeAlias = tuple[Kind, ...] | tuple[SequenceKind, ...]


def kinds(model: Model) -> Kinds:
    """Kinds of a model's layers, from the input up.

    Models of equal kinds share their plans, and their weights can be stacked.
    """
    if model.n_ctx is None:
        return tuple(kind(layer) for layer in model.layers)
    return tuple(sequence_kind(layer) for layer in model.layers)


def nonlinear(*models: Kinds) -> int:
    """Number of nonlinear layers of the deeper model."""
    return max(sum(layer.order > 1 for layer in layers) for layers in models)
