"""Token inputs as a folded problem. In: what models over tokens consist of. Out: a `Problem`.

Under `Categorical` an input position is the token x with probability p[x], independent of the
others, so its moments of every order are one copy tensor: all legs that read a position share a
single index over the vocabulary, weighted with p. Models are tables over tokens (see
`tensors.token_tables`, also for the names of leaves).

For an output at position s, with x the token there and y that at a key at the distance D,

    f[s](x, ...) = c(x) + t_0(x, x) + sum over D != 0 with REACH[s, D] of t_D(x, y_D),
    t_D(x, y) = w_D(x, y) v(y).

Given x, the tokens at different distances are independent, and so are the terms t_D of two models f
and g, except at equal distances. With the means given x, `U_D(x) = E_y[t_D(x, y)]` of each term and
`G[s](x) = E[f[s] | x]` of the output,

    E[f[s] g[s] | x] = G^f[s](x) G^g[s](x)
                     + sum_D REACH^f[s, D] REACH^g[s, D] (E_y[t^f_D t^g_D] - U^f_D(x) U^g_D(x)).

Exact; the tests enumerate all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tnsim.engine.problem import Definition, Operand, Problem, ScaleGroup, Stage, Term, prune
from tnsim.names import ONES, OUTPUT, SCORES, VALUE, WEIGHT, Pair, Side, bias_of, model_leaf
from tnsim.tensors.token_tables import HERE, REACH, TABLE, TOKENS, TokenKind


def fold_tokens(
    kinds: dict[Side, TokenKind],
    shapes: dict[str, tuple[int, ...]],
    pairs: Iterable[Pair],
    per_output: bool,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions.

    Args:
        kinds: What every model consists of.
        shapes: Of all leaves, as `tensors.token_tables` makes them.
        pairs: The inner products asked for.
        per_output: Whether they are wanted for every output coordinate, or summed over them.

    Returns:
        A problem of one stage, whose outputs are named by their pair.

    Source:
        The definition of an expectation, with independence given the token at the output.
    """
    pairs = tuple(pairs)
    definitions: list[Definition] = []
    for side, kind in kinds.items():
        definitions += _means(side, kind)
    for pair in pairs:
        both = kinds[pair.bra], kinds[pair.ket]
        definitions.append(_before_tails(pair, both))
        definitions.append(_inner_product(pair, both, per_output))
    scale_groups = tuple(ScaleGroup(pair.group, degree=1, definition=pair.group) for pair in pairs)
    stages = (Stage(tuple(definitions), scale_groups),)
    return prune(Problem(stages, shapes, frozenset(), tuple(pair.group for pair in pairs)))


def _head_means(side: Side, kind: TokenKind, heads: tuple[str, str]) -> Operand:
    """U[D, x, a, v] of a model, what each head gives on average, before the output matrix."""
    distance = ("D",) if kind.turned else ()
    return Operand(f"U.{side}", (*distance, "x", *heads))


def _output_mean(side: Side, end: str) -> Operand:
    """G[s, x, k] of a model, before the linear layers after attention."""
    return Operand(f"G.{side}", ("s", "x", end))


def _attended(side: Side, kind: TokenKind, key: str, heads: tuple[str, str]) -> tuple[Operand, ...]:
    """t_D(x, key) of every head, before the output matrix: axes D, x, key, and heads.

    Args:
        side: The model.
        kind: What it consists of.
        key: Index of the token at the key; "x" where it is the output's own.
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


def _means(side: Side, kind: TokenKind) -> Iterator[Definition]:
    """U and G of one model, the means given the token at the output."""
    heads = ("a", "v")
    # U_D(x) = sum_y p[y] t_D(x, y)
    # G[s](x) = c(x) + t_0(x, x) + sum_D REACH[s, D] U_D(x)
    table = Operand(model_leaf(side, TABLE), ("x", "k"))
    terms = [Term(1.0, (table, Operand(ONES, ("s",))))]
    if kind.attends:
        output = Operand(model_leaf(side, OUTPUT), ("k", *heads))
        means = _head_means(side, kind, heads)
        over_keys = (Operand(TOKENS, ("y",)), *_attended(side, kind, "y", heads))
        yield Definition(means.name, means.indices, (Term(1.0, over_keys),), kept=False)
        own_token = (
            Operand(HERE, ("D",)),
            output,
            *_attended(side, kind, "x", heads),
            Operand(ONES, ("s",)),
        )
        other_tokens = (Operand(model_leaf(side, REACH), ("s", "D")), output, means)
        terms += [Term(1.0, own_token), Term(1.0, other_tokens)]
    mean = _output_mean(side, "k")
    yield Definition(mean.name, mean.indices, tuple(terms), kept=False)


def _before_tails(pair: Pair, kinds: tuple[TokenKind, TokenKind]) -> Definition:
    """M[k, l] = E sum_s f[s, k] g[s, l], before the linear layers after attention."""
    # sum_x p[x] G^f[s](x) G^g[s](x), which would be all if the terms t_D were independent given x
    token = Operand(TOKENS, ("x",))
    terms = [Term(1.0, (token, _output_mean(pair.bra, "k"), _output_mean(pair.ket, "l")))]
    if all(kind.attends for kind in kinds):
        # Those at one distance read one token: + E_y[t^f_D t^g_D] - U^f_D U^g_D
        bra_heads, ket_heads = ("a", "v"), ("b", "w")
        outputs = (
            Operand(model_leaf(pair.bra, OUTPUT), ("k", *bra_heads)),
            Operand(model_leaf(pair.ket, OUTPUT), ("l", *ket_heads)),
        )
        # A model with itself sees what it sees: REACH is 0 or 1, and its square is itself.
        sides = dict.fromkeys(pair)
        weights = (*(Operand(model_leaf(side, REACH), ("s", "D")) for side in sides), token)
        jointly = (
            Operand(TOKENS, ("y",)),
            *_attended(pair.bra, kinds[0], "y", bra_heads),
            *_attended(pair.ket, kinds[1], "y", ket_heads),
        )
        apart = (
            _head_means(pair.bra, kinds[0], bra_heads),
            _head_means(pair.ket, kinds[1], ket_heads),
        )
        terms.append(Term(1.0, (*weights, *jointly, *outputs)))
        terms.append(Term(-1.0, (*weights, *apart, *outputs)))
    return Definition(_before_tails_name(pair), ("k", "l"), tuple(terms), kept=False)


def _before_tails_name(pair: Pair) -> str:
    return f"M.{pair.group}"


def _inner_product(pair: Pair, kinds: tuple[TokenKind, TokenKind], per_output: bool) -> Definition:
    """sum_s E <W f[s] + b, V g[s] + c> for the linear layers W, b and V, c after attention.

    Multiplied out: the moment M between W and V, each bias against the other model's mean, and the
    biases against each other. A model without linear layers has its outputs as they are.
    """
    tails: list[tuple[Operand, ...]] = []  # W and V, where they are there
    ends: list[str] = []  # index of the outputs that they read
    biases: list[Operand | None] = []
    for side, kind, end in zip(pair, kinds, ("i", "j"), strict=True):
        weight = Operand(model_leaf(side, WEIGHT), ("k", end))
        tails.append((weight,) if kind.tail else ())
        ends.append(end if kind.tail else "k")
        bias = Operand(model_leaf(side, bias_of(WEIGHT)), ("k",))
        biases.append(bias if kind.tail_bias else None)

    moment = Operand(_before_tails_name(pair), tuple(ends))
    terms = [Term(1.0, (moment, *tails[0], *tails[1]))]
    for side, end, tail, bias in zip(pair, ends, tails, reversed(biases), strict=True):
        if bias is not None:
            mean = (Operand(TOKENS, ("x",)), _output_mean(side, end), *tail)
            terms.append(Term(1.0, (*mean, bias)))
    present = [bias for bias in biases if bias is not None]
    if len(present) == 2:
        terms.append(Term(1.0, (*present, Operand(ONES, ("s",)))))
    outputs = ("k",) if per_output else ()
    return Definition(pair.group, outputs, tuple(terms), powers=((pair.group, 1),))
