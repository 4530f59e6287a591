"""What a model of induction does, and through which part of it. In: a model. Out: curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

import tnsim
from tnsim.reproduce.induction.sequences import Repeated


def behaviour(model: tnsim.Model, repeated: Repeated) -> dict[str, float]:
    """Accuracies, and the induction score as a whole and part by part.

    The score is by how much the logit of the right token is above the mean of all, averaged over
    predictions that an earlier occurrence determines. It is linear in the outputs, so those of the
    parts add up to it.

    Args:
        model: Whose last layers are attention, added to its input, and a linear one.
        repeated: Sequences.

    Returns:
        `repeated accuracy` and `fresh accuracy`, on tokens that are determined and that are not;
        `induction score`; `through PART`, of every part.
    """
    outputs = outputs_of(model, repeated)
    right = outputs.argmax(axis=-1) == repeated.tokens[:, 1:]
    found = {
        "repeated accuracy": float(right[repeated.determined].mean()),
        "fresh accuracy": float(right[~repeated.determined].mean()),
        "induction score": advantage(outputs, repeated),
    }
    for name, part in parts(model).items():
        found[f"through {name}"] = advantage(outputs_of(part, repeated), repeated)
    return found


def parts(model: tnsim.Model) -> Mapping[str, tnsim.Combination]:
    """What the last layer of attention adds, head by head, and what passes it: models themselves.

    Args:
        model: Whose last layers are attention, added to its input, and a linear one.

    Returns:
        Functions that add up to the model.

    Raises:
        ModelError: The last layer but one is added to nothing.
    """
    *before, residual, logits = model.layers
    if not isinstance(residual, tnsim.Residual):
        raise tnsim.ModelError(f"attention is to be added to its input, found {residual}")
    attention: Any = residual.layer
    skip: Any = residual.skip
    scale: Any = residual.scale
    found = {"stream": skip * tnsim.Model([*before, logits], n_ctx=model.n_ctx)}
    rows = np.arange(attention.o.shape[1]) // attention.d_value
    for head in range(attention.n_heads):
        alone = tnsim.Attention(
            attention.q1,
            attention.k1,
            attention.q2,
            attention.k2,
            attention.v,
            np.where(rows == head, attention.o, 0.0),
            attention.n_heads,
            mask=attention.mask,
            rope_base=attention.rope_base,
        )
        added = tnsim.Model([*before, alone, logits], n_ctx=model.n_ctx)
        found[f"head {head}"] = scale * added
    return found


def outputs_of(
    model: tnsim.Model | tnsim.Combination, repeated: Repeated
) -> Float[np.ndarray, "n predicted words"]:
    """Logits of every token but the first."""
    one_hot = np.eye(model.d_in, dtype=np.float32)[repeated.tokens]
    return np.asarray(model(one_hot))[:, :-1]


def advantage(outputs: Float[np.ndarray, "n predicted words"], repeated: Repeated) -> float:
    """The logit of the right token above the mean of all, over determined predictions."""
    right = np.take_along_axis(outputs, repeated.tokens[:, 1:, None], axis=-1)[..., 0]
    above = right - outputs.mean(axis=-1)
    return float(above[repeated.determined].mean())
