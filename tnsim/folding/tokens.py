"""Token inputs: one-hot, independent across positions. In: models of sequences. Out: tables over tokens, a `Problem`.

Under `Categorical` an input position is the token tau with probability p[tau], so its moments of every order are one copy
tensor: all legs that read a position share a single index over the vocabulary. What comes before the first attention layer
is a function of one token, hence a table (a forward pass over the vocabulary). For one attention layer with linear layers
after it, and with x the token at an output, y that at a key at the distance D,

    f[s](x, ...) = c(x) + sum_D w_D(x, y_D) v(y_D),        w_D(x, y) = (q1_D(x) . k1(y)) (q2_D(x) . k2(y)) / d_head^2,

and given x the tokens at different distances are independent: E[f_A f_B] needs the mean over y for each model and, at equal
distances, the product of both. Exact; checked in the tests by enumerating all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine.problem import Definition, Gauge, Operand, Problem, Stage, Term, prune
from tnsim.errors import TooLarge
from tnsim.models.layers import Attention, Linear, innermost
from tnsim.models.model import Model
from tnsim.names import ONES, OUTPUT, SCORES, VALUE, WEIGHT, Pair, Side, bias_of
from tnsim.tensors.lifted import residual_rule
from tnsim.tensors.positional import sequence_arrays

TABLE, TOKENS, HERE, REACH = "TABLE", "TOKENS", "HERE", "REACH"
"""Leaves: values by token; probabilities; which distance is zero; REACH[s, D], whether a key at distance D lies in the sequence."""


class TokenKind(NamedTuple):
    """What is there: an attention layer or only a table, a last linear layer, its bias; and distances D, if the scores know them."""

    attends: bool
    tail: bool
    tail_bias: bool
    turned: bool
    causal: bool


def token_kind(model: Model) -> TokenKind:
    """Raises `TooLarge` for a model that is not a table, at most one attention layer, and linear layers."""
    mixing = [n for n, layer in enumerate(model.layers) if isinstance(innermost(layer), Attention)]
    if not mixing:
        return TokenKind(False, False, False, False, True)
    tail = model.layers[mixing[0] + 1 :]
    if any(layer.order > 1 for layer in tail):
        raise TooLarge(
            "Categorical is exact for models with one attention layer and only linear layers after it; here another nonlinear layer "
            "follows. Use GaussianClosure(), with the mean and covariance of one-hot tokens if they matter"
        )
    core = innermost(model.layers[mixing[0]])
    bias = any(bias_of(WEIGHT) in sequence_arrays(layer, 1) for layer in tail)
    return TokenKind(True, bool(tail), bias, core.rope_base is not None, core.mask == "causal")


def distances(kinds: Iterable[TokenKind], n_ctx: int) -> np.ndarray:
    """Distances of a key from the output that occur in any of the models."""
    return np.arange(0 if all(kind.causal for kind in kinds) else 1 - n_ctx, n_ctx)


def token_arrays(model: Model, at: np.ndarray) -> dict[str, Any]:
    """Arrays of a model by role, NumPy, or JAX where a weight is. At the distances `at`: queries (D, token, head, x) under
    RoPE; else queries, keys and values by (token, head, x). TABLE: what does not pass through attention, (token, width).
    """
    xp = jnp if any(isinstance(x, jax.Array) for x in jax.tree.leaves(model)) else np
    mixing = [n for n, layer in enumerate(model.layers) if isinstance(innermost(layer), Attention)]
    first = mixing[0] if mixing else len(model.layers)
    table = xp.eye(model.d_in)
    for n, layer in enumerate(model.layers[:first]):
        plain = n == 0 and isinstance(
            layer, Linear
        )  # a row per token as it stands, instead of a product with the identity
        table = (
            (layer.weight.T + (0.0 if layer.bias is None else layer.bias))
            if plain
            else layer(table)
        )
    if not mixing:
        return {TABLE: table}
    layer, core = model.layers[first], innermost(model.layers[first])
    skip, scale = residual_rule(layer)
    rotations = core.rotations(int(np.abs(at).max()) + 1)
    found: dict[str, Any] = {}
    for name in ("q1", "k1", "q2", "k2", "v"):
        bias = getattr(core, f"{name}_bias")
        leg = table @ getattr(core, name).T + (0.0 if bias is None else bias)
        leg = leg.reshape(len(table), core.n_heads, -1)
        if name.startswith("q"):
            leg = leg / core.d_head
            if rotations is not None:  # the score at distance D is (R_D q) . k
                leg = xp.stack([leg @ (rotations[d].T if d >= 0 else rotations[-d]) for d in at])
        found[name.upper()] = leg
    found[OUTPUT] = scale * core.o.reshape(core.d_out, core.n_heads, -1)
    shift = xp.zeros(core.d_out) if core.o_bias is None else scale * core.o_bias
    found[TABLE] = shift + (xp.zeros((len(table), core.d_out)) if layer is core else skip * table)
    return found | (merged_tail(model.layers[first + 1 :]) if model.layers[first + 1 :] else {})


def merged_tail(layers: Iterable[Any]) -> dict[str, Any]:
    """Linear layers in a row as one: WEIGHT, and its bias where there is one."""
    weight, bias = None, None
    for layer in layers:
        here = sequence_arrays(layer, 1)
        shift = here.get(bias_of(WEIGHT))
        if bias is not None:
            shift = here[WEIGHT] @ bias + (0.0 if shift is None else shift)
        weight, bias = here[WEIGHT] if weight is None else here[WEIGHT] @ weight, shift
    return {WEIGHT: weight} | ({} if bias is None else {bias_of(WEIGHT): bias})


def token_weights(side: Side, model: Model, kinds: Iterable[TokenKind]) -> dict[str, Any]:
    """The arrays of one model by name; `kinds`: those of all models compared, which say what distances occur."""
    at = distances(kinds, model.n_ctx)
    key = np.arange(model.n_ctx)[:, None] - at[None, :]
    allowed = (
        (key >= 0)
        & (key < model.n_ctx)
        & (at != 0)
        & (at >= (1 if token_kind(model).causal else -model.n_ctx))
    )
    return {leaf(side, REACH): allowed.astype(float)} | {
        leaf(side, role): array for role, array in token_arrays(model, at).items()
    }


def token_inputs(probabilities: Any, kinds: Iterable[TokenKind], n_ctx: int) -> dict[str, Any]:
    """The arrays that are not a model's, by name."""
    return {
        TOKENS: probabilities,
        HERE: (distances(kinds, n_ctx) == 0).astype(float),
        ONES: np.ones(n_ctx),
    }


def fold_tokens(
    kinds: dict[Side, TokenKind],
    shapes: dict[str, tuple[int, ...]],
    pairs: Iterable[Pair],
    per_output: bool,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions. Leaves are named by `leaf`."""
    definitions: list[Definition] = []
    for side, kind in kinds.items():
        definitions += _alone(side, kind)
    outputs = ("k",) if per_output else ()
    pairs = tuple(pairs)
    for pair in pairs:
        definitions += _together(pair, [kinds[side] for side in pair], outputs)
    gauges = tuple(Gauge(pair.group, 1, pair.group, 1) for pair in pairs)
    return prune(
        Problem(
            (Stage(tuple(definitions), gauges),),
            shapes,
            frozenset(),
            tuple(pair.group for pair in pairs),
        )
    )


def leaf(side: Side, role: str) -> str:
    return f"{side}.{role}"


def _attended(
    side: Side, kind: TokenKind, out: str, key: str, head: str, end: str
) -> tuple[Operand, ...]:
    """w_D(out, key) v(key) of every head: axes D, out, key, head, end."""
    turned = ("D",) if kind.turned else ()
    found = []
    for n, (q, k) in enumerate(SCORES):
        inner = f"{head}{n}"
        found += [
            Operand(leaf(side, q), (*turned, out, head, inner)),
            Operand(leaf(side, k), (key, head, inner)),
        ]
    return (*found, Operand(leaf(side, VALUE), (key, head, end)))


def _alone(side: Side, kind: TokenKind) -> list[Definition]:
    """Mean of a model's output given the token there, G[s, x, k], and of each distance's heads, U[D, x, a, v]."""
    table = Operand(leaf(side, TABLE), ("x", "k"))
    terms = [Term(1.0, (table, Operand(ONES, ("s",))))]
    definitions = []
    if kind.attends:
        output = Operand(leaf(side, OUTPUT), ("k", "a", "v"))
        mean = Term(1.0, (Operand(TOKENS, ("y",)), *_attended(side, kind, "x", "y", "a", "v")))
        indices = (*(("D",) if kind.turned else ()), "x", "a", "v")
        definitions.append(Definition(f"U.{side}", indices, (mean,), kept=False))
        own = _attended(side, kind, "x", "x", "a", "v")
        terms.append(Term(1.0, (Operand(HERE, ("D",)), output, *own, Operand(ONES, ("s",)))))
        terms.append(
            Term(
                1.0, (Operand(leaf(side, REACH), ("s", "D")), output, Operand(f"U.{side}", indices))
            )
        )
    return [*definitions, Definition(f"G.{side}", ("s", "x", "k"), tuple(terms), kept=False)]


def _together(pair: Pair, kinds: list[TokenKind], outputs: tuple[str, ...]) -> list[Definition]:
    """One inner product: products of means given the token at the output, and what two keys of equal distance add."""
    bra, ket = pair
    means = Term(
        1.0,
        (
            Operand(TOKENS, ("x",)),
            Operand(f"G.{bra}", ("s", "x", "k")),
            Operand(f"G.{ket}", ("s", "x", "l")),
        ),
    )
    terms = [means]
    if all(kind.attends for kind in kinds):
        outs = (
            Operand(leaf(bra, OUTPUT), ("k", "a", "v")),
            Operand(leaf(ket, OUTPUT), ("l", "b", "w")),
        )
        count = (
            *(Operand(leaf(side, REACH), ("s", "D")) for side in dict.fromkeys(pair)),
            Operand(TOKENS, ("x",)),
        )
        both = (
            *_attended(bra, kinds[0], "x", "y", "a", "v"),
            *_attended(ket, kinds[1], "x", "y", "b", "w"),
        )
        terms.append(Term(1.0, (*count, Operand(TOKENS, ("y",)), *both, *outs)))
        one, two = (
            Operand(f"U.{side}", (*(("D",) if kind.turned else ()), "x", *heads))
            for side, kind, heads in zip(pair, kinds, (("a", "v"), ("b", "w")), strict=True)
        )
        terms.append(Term(-1.0, (*count, one, two, *outs)))
    name = f"M.{pair.group}"
    found = [Definition(name, ("k", "l"), tuple(terms), kept=False)]
    sides = list(zip((0, 1), pair, kinds, "kl", strict=True))
    weights = {
        n: (Operand(leaf(side, WEIGHT), ("o", end)),) if kind.tail else ()
        for n, side, kind, end in sides
    }
    names = {end: "o" for _, _, kind, end in sides if not kind.tail}

    def place(operands):
        return tuple(Operand(o.name, tuple(names.get(i, i) for i in o.indices)) for o in operands)

    closed = [Term(1.0, place((Operand(name, ("k", "l")), *weights[0], *weights[1])))]
    biases = {
        n: Operand(leaf(side, bias_of(WEIGHT)), ("o",))
        for n, side, kind, _ in sides
        if kind.tail_bias
    }
    for n, side, _, end in sides:
        if 1 - n in biases:
            mean = Operand(TOKENS, ("x",)), Operand(f"G.{side}", ("s", "x", end)), *weights[n]
            closed.append(Term(1.0, (*place(mean), biases[1 - n])))
    if len(biases) == 2:
        closed.append(Term(1.0, (biases[0], biases[1], Operand(ONES, ("s",)))))
    final = tuple(
        Term(
            t.weight,
            tuple(
                Operand(o.name, tuple("k" if i == "o" else f"{i}'" for i in o.indices))
                for o in t.operands
            ),
        )
        for t in closed
    )
    return [*found, Definition(pair.group, outputs, final, powers=((pair.group, 1),))]
