"""Models over one-hot tokens as tables. In: models of sequences. Out: arrays over tokens, by name.

What comes before the first attention layer acts on every position alone, so it is a function of one
token: a table with a row per token, made by a forward pass over the vocabulary. For one attention
layer with linear layers after it, and with x the token at an output s and y that at a key at the
distance D from it,

    f[s](x, ...) = c(x) + sum_D w_D(x, y_D) v(y_D),
    w_D(x, y) = (q1_D(x) . k1(y)) (q2_D(x) . k2(y)) / d_head^2,

summed over heads and followed by the linear layers. c is what does not pass through attention.
Under RoPE a score depends on positions through D alone, and the rotation is put into the queries.

    TABLE[x, k]                           c; without attention, the model itself
    Q1, Q2[D, x, a, i]                    queries of head a, with 1 / d_head; no axis D without RoPE
    K1, K2[y, a, i], V[y, a, v]           keys and values
    O[k, a, v]                            output matrix, with the residual's scale
    WEIGHT[o, k], WEIGHT_BIAS[o]          the linear layers after it, as one
    REACH[s, D]                           1 where a key at the distance D != 0 is seen from s
    TOKENS[x]                             probabilities
    HERE[D]                               1 at the distance 0
    ONES[s]                               a 1 for every position
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from tnsim.errors import TooLarge
from tnsim.models.attention import Attention
from tnsim.models.layers import Linear, innermost, residual_rule
from tnsim.models.model import Model
from tnsim.names import ONES, OUTPUT, WEIGHT, Side, bias_of, model_leaf
from tnsim.tensors.positional import sequence_arrays

TABLE, TOKENS, HERE, REACH = "TABLE", "TOKENS", "HERE", "REACH"


class TokenKind(NamedTuple):
    """What a model over tokens consists of.

    attends: Whether there is an attention layer, or only a table.
    tail: Whether linear layers come after it.
    tail_bias: Whether these have a bias.
    turned: Whether scores know distances, as they do under RoPE.
    causal: Whether a position sees no later one.
    """

    attends: bool
    tail: bool
    tail_bias: bool
    turned: bool
    causal: bool


def token_kind(model: Model) -> TokenKind:
    """What a model over tokens consists of.

    Raises:
        TooLarge: It is not a table, at most one attention layer, and linear layers.
    """
    attention = _first_attention(model)
    if attention is None:
        return TokenKind(False, False, False, False, True)
    number, core = attention
    tail = model.layers[number + 1 :]
    if any(layer.order > 1 for layer in tail):
        raise TooLarge(
            "Categorical is exact for models with one attention layer and only linear layers "
            "after it; here another nonlinear layer follows. Use GaussianClosure(), "
            "with the mean and covariance of one-hot tokens if they matter"
        )
    bias = any(bias_of(WEIGHT) in sequence_arrays(layer, 1) for layer in tail)
    return TokenKind(True, bool(tail), bias, core.rope_base is not None, core.mask == "causal")


def distances(kinds: Iterable[TokenKind], n_ctx: int) -> Int[np.ndarray, " distance"]:
    """Distances D of a key before the output that occur in any of the models, in order."""
    causal = all(kind.causal for kind in kinds)
    return np.arange(0 if causal else 1 - n_ctx, n_ctx)


def token_weights(side: Side, model: Model, kinds: Sequence[TokenKind]) -> dict[str, Any]:
    """The arrays of one model by leaf name.

    Args:
        side: The model's name.
        model: Its weights; NumPy, or JAX where one of them is.
        kinds: Of all models compared: they say which distances occur.
    """
    at = distances(kinds, model.n_ctx)
    key = np.arange(model.n_ctx)[:, None] - at[None, :]
    seen = (key >= 0) & (key < model.n_ctx) & (at != 0)
    if token_kind(model).causal:
        seen &= at > 0
    leaves = {model_leaf(side, REACH): seen.astype(float)}
    for role, array in token_arrays(model, at).items():
        leaves[model_leaf(side, role)] = array
    return leaves


def token_inputs(probabilities: Any, kinds: Sequence[TokenKind], n_ctx: int) -> dict[str, Any]:
    """The arrays that are not a model's, by leaf name; probabilities are (vocabulary,)."""
    return {
        TOKENS: probabilities,
        HERE: (distances(kinds, n_ctx) == 0).astype(float),
        ONES: np.ones(n_ctx),
    }


def token_arrays(model: Model, at: Int[np.ndarray, " distance"]) -> dict[str, Any]:
    """Role -> array of one model, with queries turned to the distances `at`."""
    attention = _first_attention(model)
    if attention is None:
        return {TABLE: _table(model, model.layers)}
    number, core = attention
    table = _table(model, model.layers[:number])
    arrays = _attention_arrays(model.layers[number], core, table, at)
    tail = model.layers[number + 1 :]
    if tail:
        arrays |= merged_tail(tail)
    return arrays


def merged_tail(layers: Iterable[Layer]) -> dict[str, Any]:
    """Linear layers in a row as one: WEIGHT, and its bias where one of them has a bias.

    W2 (W1 x + b1) + b2 = (W2 W1) x + (W2 b1 + b2).
    """
    weight, bias = None, None
    for layer in layers:
        arrays = sequence_arrays(layer, 1)
        matrix, shift = arrays[WEIGHT], arrays.get(bias_of(WEIGHT))
        weight = matrix if weight is None else matrix @ weight
        if bias is None:
            bias = shift
        else:
            bias = matrix @ bias
            bias = bias if shift is None else bias + shift
    return {WEIGHT: weight} if bias is None else {WEIGHT: weight, bias_of(WEIGHT): bias}


def _first_attention(model: Model) -> tuple[int, Attention] | None:
    """The first layer that attends: its number, and what is inside its residuals."""
    for number, layer in enumerate(model.layers):
        core = innermost(layer)
        if isinstance(core, Attention):
            return number, core
    return None


def _table(model: Model, layers: Sequence[Layer]) -> Any:
    """Values of layers that act on each position alone, for every token: (vocabulary, width)."""
    embedding = layers[0] if layers else None
    if isinstance(embedding, Linear):
        # A row per token as it stands in the matrix, instead of a product with the identity.
        table = embedding.weight.T + (0.0 if embedding.bias is None else embedding.bias)
        layers = layers[1:]
    else:
        table = _namespace(model).eye(model.d_in)
    for layer in layers:
        table = layer(table)
    return table


def _attention_arrays(
    layer: Layer, core: Attention, table: Any, at: Int[np.ndarray, " distance"]
) -> dict[str, Any]:
    """Arrays of an attention layer that reads a table; `core` is what its residuals are around."""
    skip, scale = residual_rule(layer)
    xp = _namespace((layer, table))
    rotations = core.rotations(int(np.abs(at).max()) + 1)
    arrays: dict[str, Any] = {}
    for name in ("q1", "k1", "q2", "k2", "v"):
        bias = getattr(core, f"{name}_bias")
        leg = table @ getattr(core, name).T + (0.0 if bias is None else bias)
        leg = leg.reshape(len(table), core.n_heads, -1)
        if name.startswith("q"):
            leg = leg / core.d_head
            if rotations is not None:
                leg = xp.stack([_turned(leg, rotations, distance) for distance in at])
        arrays[name.upper()] = leg
    arrays[OUTPUT] = scale * core.o.reshape(core.d_out, core.n_heads, -1)
    shift = xp.zeros(core.d_out) if core.o_bias is None else scale * core.o_bias
    carried = xp.zeros((len(table), core.d_out)) if layer is core else skip * table
    arrays[TABLE] = shift + carried
    return arrays


def _turned(queries: Any, rotations: Any, distance: int) -> Any:
    """R_D q for every query q, a row: the score with a key k at the distance D is (R_D q) . k."""
    inverse = rotations[distance].T if distance >= 0 else rotations[-distance]
    return queries @ inverse


def _namespace(tree: Any) -> Any:
    """The array namespace of weights: JAX if any of them is of JAX, else NumPy."""
    return jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)) else np
