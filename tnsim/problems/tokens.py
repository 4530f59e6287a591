"""Token inputs as a folded problem: models over one-hot tokens as tables.

Under `Categorical` an input position is the token x with probability p[x], independent of the
others, so its moments of every order are a copy tensor: all legs that read a position share a
single index over the vocabulary, weighted with p. Models are tables over tokens.

*Tables.* The layers before the first attention layer act on every position alone, so together they
are a function of a single token: a table with a row per token, made by a forward pass over the
vocabulary. For a single attention layer with linear layers after it, and with x the token at an
output s and y_D the token at a key at the distance D from it,

    f[s](x, ...) = c(x) + t_0(x, x) + sum over D != 0 with REACH[s, D] of t_D(x, y_D),
    t_D(x, y) = w_D(x, y) v(y),
    w_D(x, y) = (q1_D(x) . k1(y)) (q2_D(x) . k2(y)) / d_head^2,

summed over heads and followed by the linear layers. c is the part of the output that does not pass
through attention. Under RoPE a score depends on positions through D alone, and the rotation is put
into the queries. The leaves are

    TABLE[x, k]                           c; without attention, the model itself
    Q1, Q2[D, x, a, i]                    queries of head a, with 1 / d_head; no axis D without RoPE
    K1, K2[y, a, i], V[y, a, v]           keys and values
    O[k, a, v]                            output matrix, with the residual's scale
    WEIGHT[o, k], WEIGHT_BIAS[o]          the linear layers after it, as a single map
    REACH[s, D]                           1 where a key at the distance D != 0 is seen from s
    TOKENS[x]                             probabilities
    HERE[D]                               1 at the distance 0
    ONES[s]                               a 1 for every position

*Inner products.* Given x, the tokens at different distances are independent, and so are the terms
t_D of two models f and g, except at equal distances. With the means given x, `U_D(x) =
E_y[t_D(x, y)]` of each term and `G[s](x) = E[f[s] | x]` of the output,

    E[f[s] g[s] | x] = G^f[s](x) G^g[s](x)
                     + sum_D REACH^f[s, D] REACH^g[s, D] (E_y[t^f_D t^g_D] - U^f_D(x) U^g_D(x)).

This is exact; the tests enumerate all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from tnsim.engine.ir.problem import Definition, Operand, Problem, ScaleGroup, Stage, Term, prune
from tnsim.errors import TooLarge
from tnsim.models.arrays import affine, bias_name, in_float64
from tnsim.models.forward import plain_states
from tnsim.models.layers import Attention, Layer, affine_maps, innermost, residual_rule
from tnsim.models.model import Model
from tnsim.names import ONES, OUTPUT, SCORES, VALUE, WEIGHT, Pair, Side, bias_of, model_leaf
from tnsim.problems.layer_tensors import Affine, affine_of
from tnsim.scaled import library

TABLE, TOKENS, HERE, REACH = "TABLE", "TOKENS", "HERE", "REACH"


class TokenKind(NamedTuple):
    """A model over tokens without its numbers: the sorts of layers that it has.

    Args:
        attends: Whether there is an attention layer besides the table.
        tail: Whether linear layers come after the attention layer.
        tail_bias: Whether a linear layer of the tail has a bias.
        turned: Whether scores depend on distances, as under RoPE.
        causal: Whether a position sees no later position.
    """

    attends: bool
    tail: bool
    tail_bias: bool
    turned: bool
    causal: bool


def token_kind(model: Model) -> TokenKind:
    """The sorts of layers that a model over tokens has.

    Raises:
        TooLarge: The model is more than a table, a single attention layer and linear layers.

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
    bias = any(affine_of(layer).bias is not None for layer in tail)
    return TokenKind(True, bool(tail), bias, core.rope_base is not None, core.mask == "causal")


def distances(kinds: Iterable[TokenKind], n_ctx: int) -> Int[np.ndarray, " distance"]:
    """Distances D of a key before the output that occur in any of the models, in order.

    Example:
        >>> causal = TokenKind(True, False, False, False, causal=True)
        >>> distances([causal], n_ctx=3)
        array([0, 1, 2])
    """
    # Without a mask keys also stand behind the output, at distances below 0.
    causal = all(kind.causal for kind in kinds)
    return np.arange(0 if causal else 1 - n_ctx, n_ctx)


def token_weights(
    side: Side, model: Model, kinds: Sequence[TokenKind], n_ctx: int
) -> dict[str, Any]:
    """The arrays of a single model.

    Args:
        side: Name of the model.
        model: Model with NumPy weights, or JAX where a weight is.
        kinds: Kinds of all models compared, which say which distances occur.
        n_ctx: Number of positions of the sequences.

    Returns:
        Arrays by leaf name, as the head of this module lists them.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=1)
        >>> token_weights("A", model, [token_kind(model)], n_ctx=1)["A.TABLE"]
        array([[1.],
               [2.]])
    """
    at = distances(kinds, n_ctx)
    # The key of an output at position s, a distance D before it, is at s - D. D = 0 is the output's
    # own token, which `HERE` marks.
    key = np.arange(n_ctx)[:, None] - at[None, :]
    seen = (key >= 0) & (key < n_ctx) & (at != 0)
    if token_kind(model).causal:
        seen &= at > 0
    leaves = {model_leaf(side, REACH): seen.astype(float)}
    for role, array in token_arrays(model, at).items():
        leaves[model_leaf(side, role)] = array
    return leaves


def token_inputs(probabilities: Any, kinds: Sequence[TokenKind], n_ctx: int) -> dict[str, Any]:
    """The arrays that belong to no model.

    Args:
        probabilities: Probability of every token, (vocabulary,).
        kinds: Kinds of all models compared.
        n_ctx: Number of positions of the sequences.

    Returns:
        Arrays by leaf name, as the head of this module lists them.

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
    """The arrays of a single model without REACH, with queries rotated to the distances `at`.

    Returns:
        Arrays by role, as the head of this module lists them.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=1)
        >>> list(token_arrays(model, np.arange(1)))
        ['TABLE']
    """
    model = in_float64(model)
    attention = _first_attention(model)
    if attention is None:
        return {TABLE: _token_table(model, len(model.layers))}
    number, core = attention
    table = _token_table(model, number)
    arrays = _attention_arrays(model.layers[number], core, table, at)
    tail = Affine()
    for layer in model.layers[number + 1 :]:
        tail = affine_of(layer).after(tail)
    if tail.weight is not None:
        arrays[WEIGHT] = tail.weight
    if tail.bias is not None:
        arrays[bias_of(WEIGHT)] = tail.bias
    return arrays


def _first_attention(model: Model) -> tuple[int, Attention] | None:
    """Number of the first attention layer, and the attention inside its residuals."""
    for number, layer in enumerate(model.layers):
        core = innermost(layer)
        if isinstance(core, Attention):
            return number, core
    return None


def _token_table(model: Model, number: int) -> Any:
    """The states of all tokens behind the first layers of a model, (vocabulary, width).

    These layers act on every position alone, so that each token is an input of a forward pass.
    """
    states = plain_states(model.layers, np.arange(model.d_in))
    return next(state for below, state in states if below == number)


def _attention_arrays(
    layer: Layer, core: Attention, table: Any, at: Int[np.ndarray, " distance"]
) -> dict[str, Any]:
    """Arrays of an attention layer that reads a table; `core` is the layer inside residuals."""
    skip, scale = residual_rule(layer)
    xp = library(layer, table)
    rotations = core.rotations(int(np.abs(at).max()) + 1)
    arrays: dict[str, Any] = {}
    for name in affine_maps(core)[0]:
        # Shape (vocabulary, heads, coordinates of a head): every token at once.
        leg = affine(table, getattr(core, name), getattr(core, bias_name(name)))
        leg = leg.reshape(len(table), core.n_heads, -1)
        if name.startswith("q"):  # 1 / d_head for each of the two scores
            leg = leg / core.d_head
            if rotations is not None:
                leg = xp.stack([_turned_queries(leg, rotations, distance) for distance in at])
        arrays[name.upper()] = leg
    arrays[OUTPUT] = scale * core.o.reshape(core.d_out, core.n_heads, -1)
    past = xp.zeros((len(table), core.d_out))  # the part c that does not pass through attention
    if layer is not core:
        past = skip * table
    if core.o_bias is not None:
        past = scale * core.o_bias + past
    arrays[TABLE] = past
    return arrays


def _turned_queries(queries: Any, rotations: Any, distance: int) -> Any:
    """The rows R_D q of queries q; the score with a key k at the distance D is (R_D q) . k."""
    # (R_s q) . (R_t k) = (R_(s - t) q) . k, as R_t^T R_s = R_(s - t); a row is multiplied by R_D^T.
    inverse = rotations[distance].T if distance >= 0 else rotations[-distance]
    return queries @ inverse


def fold_tokens(
    kinds: dict[Side, TokenKind],
    shapes: dict[str, tuple[int, ...]],
    pairs: Iterable[Pair],
    slices: bool,
) -> Problem:
    """The problem that has the inner products `pairs`, summed over positions, for outputs.

    Args:
        kinds: Kind of every model.
        shapes: Shapes of all leaves, by name.
        pairs: The inner products asked for.
        slices: Whether there is an inner product for every output coordinate, or their sum.

    Returns:
        Problem of a single stage with outputs named by their pair.

    Source:
        The definition of an expectation, with independence given the token at the output.
    """
    pairs = tuple(pairs)
    definitions: list[Definition] = []
    for side, kind in kinds.items():
        definitions += _token_means(side, kind)
    for pair in pairs:
        both = kinds[pair.bra], kinds[pair.ket]
        definitions.append(_before_tails(pair, both))
        definitions.append(_inner_product(pair, both, slices))
    scale_groups = tuple(ScaleGroup(pair.group, degree=1, definition=pair.group) for pair in pairs)
    stages = (Stage(tuple(definitions), scale_groups),)
    return prune(Problem(stages, shapes, frozenset(), tuple(pair.group for pair in pairs)))


def _head_means(side: Side, kind: TokenKind, heads: tuple[str, str]) -> Operand:
    """U[D, x, a, v] of a model, the mean of each head before the output matrix."""
    distance = ("D",) if kind.turned else ()
    return Operand(f"U.{side}", (*distance, "x", *heads))


def _output_mean(side: Side, end: str) -> Operand:
    """G[s, x, k] of a model, before the linear layers after attention."""
    return Operand(f"G.{side}", ("s", "x", end))


def _attended_tokens(
    side: Side, kind: TokenKind, key: str, heads: tuple[str, str]
) -> tuple[Operand, ...]:
    """t_D(x, key) of every head, before the output matrix: axes D, x, key, and heads.

    Args:
        side: Name of the model.
        kind: Kind of the model.
        key: Index of the token at the key; "x" where the key is the output's own token.
        heads: Indices of the head and of the value's coordinate.
    """
    distance = ("D",) if kind.turned else ()
    head, coordinate = heads
    operands = []
    for number, (query_role, key_role) in enumerate(SCORES):
        inner = f"{head}{number}"
        operands += [
            Operand(model_leaf(side, query_role), (*distance, "x", head, inner)),
            Operand(model_leaf(side, key_role), (key, head, inner)),
        ]
    value = Operand(model_leaf(side, VALUE), (key, head, coordinate))
    return (*operands, value)


def _token_means(side: Side, kind: TokenKind) -> Iterator[Definition]:
    """U and G of a model: means of heads and of the output, given the token at the output."""
    heads = ("a", "v")
    # U_D(x) = sum_y p[y] t_D(x, y)
    # G[s](x) = c(x) + t_0(x, x) + sum_D REACH[s, D] U_D(x)
    table = Operand(model_leaf(side, TABLE), ("x", "k"))
    terms = [Term(1.0, (table, Operand(ONES, ("s",))))]
    if kind.attends:
        output = Operand(model_leaf(side, OUTPUT), ("k", *heads))
        means = _head_means(side, kind, heads)
        # Tokens are independent, so the mean over the token y at any other key is a sum with its
        # probability.
        over_keys = (Operand(TOKENS, ("y",)), *_attended_tokens(side, kind, "y", heads))
        yield Definition(means.name, means.indices, (Term(1.0, over_keys),))
        own_token = (
            Operand(HERE, ("D",)),
            output,
            *_attended_tokens(side, kind, "x", heads),
            Operand(ONES, ("s",)),
        )
        other_tokens = (Operand(model_leaf(side, REACH), ("s", "D")), output, means)
        terms += [Term(1.0, own_token), Term(1.0, other_tokens)]
    mean = _output_mean(side, "k")
    yield Definition(mean.name, mean.indices, tuple(terms))


def _before_tails(pair: Pair, kinds: tuple[TokenKind, TokenKind]) -> Definition:
    """M[k, l] = E sum_s f[s, k] g[s, l], before the linear layers after attention."""
    # sum_x p[x] G^f[s](x) G^g[s](x): the whole moment if all terms t_D were independent given x
    token = Operand(TOKENS, ("x",))
    terms = [Term(1.0, (token, _output_mean(pair.bra, "k"), _output_mean(pair.ket, "l")))]
    if all(kind.attends for kind in kinds):
        # Terms at one distance read one token: + E_y[t^f_D t^g_D] - U^f_D U^g_D
        bra_heads, ket_heads = ("a", "v"), ("b", "w")
        outputs = (
            Operand(model_leaf(pair.bra, OUTPUT), ("k", *bra_heads)),
            Operand(model_leaf(pair.ket, OUTPUT), ("l", *ket_heads)),
        )
        # REACH is 0 or 1 and so its own square: of a model with itself it stands once.
        sides = dict.fromkeys(pair)
        weights = (*(Operand(model_leaf(side, REACH), ("s", "D")) for side in sides), token)
        jointly = (
            Operand(TOKENS, ("y",)),
            *_attended_tokens(pair.bra, kinds[0], "y", bra_heads),
            *_attended_tokens(pair.ket, kinds[1], "y", ket_heads),
        )
        apart = (
            _head_means(pair.bra, kinds[0], bra_heads),
            _head_means(pair.ket, kinds[1], ket_heads),
        )
        terms.append(Term(1.0, (*weights, *jointly, *outputs)))
        terms.append(Term(-1.0, (*weights, *apart, *outputs)))
    return Definition(_before_tails_name(pair), ("k", "l"), tuple(terms))


def _before_tails_name(pair: Pair) -> str:
    """Name of the moment M of two models."""
    return f"M.{pair.group}"


def _inner_product(pair: Pair, kinds: tuple[TokenKind, TokenKind], slices: bool) -> Definition:
    """sum_s E <W f[s] + b, V g[s] + c> for the linear layers W, b and V, c after attention.

    Multiplied out, the sum has the moment M between W and V, each bias times the other model's
    mean, and the product of the biases. For a model without linear layers W is the identity.
    """
    tails: list[tuple[Operand, ...]] = []  # W and V, where a model has them
    ends: list[str] = []  # index of the outputs that W and V read
    biases: list[Operand | None] = []
    for side, kind, end in zip(pair, kinds, ("i", "j"), strict=True):
        weight = Operand(model_leaf(side, WEIGHT), ("k", end))
        tails.append((weight,) if kind.tail else ())
        ends.append(end if kind.tail else "k")
        bias = Operand(model_leaf(side, bias_of(WEIGHT)), ("k",))
        biases.append(bias if kind.tail_bias else None)

    # sum_s E <W f + b, V g + c> = tr(W M V^T) + c . W E sum_s f + b . V E sum_s g + n b . c
    moment = Operand(_before_tails_name(pair), tuple(ends))
    terms = [Term(1.0, (moment, *tails[0], *tails[1]))]
    # The bias of the other model meets the mean of this one, hence the reversed order.
    for side, end, tail, bias in zip(pair, ends, tails, reversed(biases), strict=True):
        if bias is not None:
            mean = (Operand(TOKENS, ("x",)), _output_mean(side, end), *tail)
            terms.append(Term(1.0, (*mean, bias)))
    present = [bias for bias in biases if bias is not None]
    if len(present) == 2:
        terms.append(Term(1.0, (*present, Operand(ONES, ("s",)))))
    outputs = ("k",) if slices else ()
    return Definition(pair.group, outputs, tuple(terms), powers=((pair.group, 1),))
