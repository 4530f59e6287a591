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

import numpy as np
from jaxtyping import Int

from tnsim.errors import TooLarge
from tnsim.models.arrays import add, library
from tnsim.models.attention import Attention
from tnsim.models.layers import Linear, affine_maps, bias_name, innermost, residual_rule
from tnsim.models.model import Model
from tnsim.models.protocol import Layer
from tnsim.names import ONES, OUTPUT, WEIGHT, Side, bias_of, model_leaf
from tnsim.tensors.lifted import in_float64
from tnsim.tensors.positional import sequence_arrays

TABLE, TOKENS, HERE, REACH = "TABLE", "TOKENS", "HERE", "REACH"


class TokenKind(NamedTuple):
    """What a model over tokens consists of.

    Args:
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

    Example:
        >>> import tnsim
        >>> token_kind(tnsim.Model([tnsim.Linear(np.eye(2))], n_ctx=3)).attends
        False
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
    """Distances D of a key before the output that occur in any of the models, in order.

    Example:
        >>> causal = TokenKind(True, False, False, False, causal=True)
        >>> distances([causal], n_ctx=3)
        array([0, 1, 2])
    """
    causal = all(kind.causal for kind in kinds)
    return np.arange(0 if causal else 1 - n_ctx, n_ctx)


def token_weights(
    side: Side, model: Model, kinds: Sequence[TokenKind], n_ctx: int
) -> dict[str, Any]:
    """The arrays of one model.

    Args:
        side: The model's name.
        model: Its weights; NumPy, or JAX where one of them is.
        kinds: Of all models compared: they say which distances occur.
        n_ctx: Positions of the sequences.

    Returns:
        Leaf name -> array, as the head of this file lists them.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=1)
        >>> token_weights("A", model, [token_kind(model)], n_ctx=1)["A.TABLE"]
        array([[1.],
               [2.]])
    """
    at = distances(kinds, n_ctx)
    key = np.arange(n_ctx)[:, None] - at[None, :]
    seen = (key >= 0) & (key < n_ctx) & (at != 0)
    if token_kind(model).causal:
        seen &= at > 0
    leaves = {model_leaf(side, REACH): seen.astype(float)}
    for role, array in token_arrays(model, at).items():
        leaves[model_leaf(side, role)] = array
    return leaves


def token_inputs(probabilities: Any, kinds: Sequence[TokenKind], n_ctx: int) -> dict[str, Any]:
    """The arrays that are not a model's.

    Args:
        probabilities: Of every token, (vocabulary,).
        kinds: Of all models compared.
        n_ctx: Positions of the sequences.

    Returns:
        Leaf name -> array, as the head of this file lists them.

    Example:
        >>> kind = TokenKind(True, False, False, False, causal=True)
        >>> token_inputs(np.array([0.5, 0.5]), [kind], n_ctx=2)["HERE"]
        array([1., 0.])
    """
    return {
        TOKENS: probabilities,
        HERE: (distances(kinds, n_ctx) == 0).astype(float),
        ONES: np.ones(n_ctx),
    }


def token_arrays(model: Model, at: Int[np.ndarray, " distance"]) -> dict[str, Any]:
    """The arrays of one model but REACH, with queries turned to the distances `at`.

    Returns:
        Role -> array, as the head of this file lists them.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=1)
        >>> list(token_arrays(model, np.arange(1)))
        ['TABLE']
    """
    model = in_float64(model)
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
    """Linear layers in a row as one.

    W2 (W1 x + b1) + b2 = (W2 W1) x + (W2 b1 + b2).

    Returns:
        WEIGHT, (d_out, d_in), and where one of them has a bias WEIGHT_BIAS, (d_out,).

    Example:
        >>> import tnsim
        >>> merged_tail([tnsim.Linear([[2.0]], [1.0]), tnsim.Linear([[3.0]])])
        {'WEIGHT': array([[6.]]), 'WEIGHT_BIAS': array([3.])}
    """
    first, *others = layers
    weight, bias = _affine_map(first)
    for layer in others:
        matrix, shift = _affine_map(layer)
        weight = matrix @ weight
        if bias is not None:
            shift = add(matrix @ bias, shift)
        bias = shift
    if bias is None:
        return {WEIGHT: weight}
    return {WEIGHT: weight, bias_of(WEIGHT): bias}


def merged_linear(layers: Iterable[Layer]) -> Layer:
    """Linear layers in a row as one layer.

    Example:
        >>> import tnsim
        >>> merged_linear([tnsim.Linear([[2.0]], [1.0]), tnsim.Linear([[3.0]])]).weight
        array([[6.]])
    """
    arrays = merged_tail(layers)
    return Linear(arrays[WEIGHT], arrays.get(bias_of(WEIGHT)))


def _affine_map(layer: Layer) -> tuple[Any, Any | None]:
    """Matrix and bias of a linear layer, a residual's skip included."""
    arrays = sequence_arrays(layer, 1)
    return arrays[WEIGHT], arrays.get(bias_of(WEIGHT))


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
        table = add(embedding.weight.T, embedding.bias)
        layers = layers[1:]
    else:
        table = library(model).eye(model.d_in)
    for layer in layers:
        table = layer(table)
    return table


def _attention_arrays(
    layer: Layer, core: Attention, table: Any, at: Int[np.ndarray, " distance"]
) -> dict[str, Any]:
    """Arrays of an attention layer that reads a table; `core` is what its residuals are around."""
    skip, scale = residual_rule(layer)
    xp = library(layer, table)
    rotations = core.rotations(int(np.abs(at).max()) + 1)
    arrays: dict[str, Any] = {}
    for name in affine_maps(core)[0]:
        leg = add(table @ getattr(core, name).T, getattr(core, bias_name(name)))
        leg = leg.reshape(len(table), core.n_heads, -1)
        if name.startswith("q"):  # 1 / d_head for each of the two scores
            leg = leg / core.d_head
            if rotations is not None:
                leg = xp.stack([_turned(leg, rotations, distance) for distance in at])
        arrays[name.upper()] = leg
    arrays[OUTPUT] = scale * core.o.reshape(core.d_out, core.n_heads, -1)
    past = xp.zeros((len(table), core.d_out))  # what does not pass through attention
    if layer is not core:
        past = skip * table
    if core.o_bias is not None:
        past = scale * core.o_bias + past
    arrays[TABLE] = past
    return arrays


def _turned(queries: Any, rotations: Any, distance: int) -> Any:
    """R_D q for every query q, a row: the score with a key k at the distance D is (R_D q) . k."""
    # (R_s q) . (R_t k) = (R_(s - t) q) . k, as R_t^T R_s = R_(s - t); a row is multiplied by R_D^T.
    inverse = rotations[distance].T if distance >= 0 else rotations[-distance]
    return queries @ inverse
