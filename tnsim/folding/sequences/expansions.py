"""Expansions over positions. In: legs of two layers, a rule for joining them. Out: sums over positions, expanded.

A moment of attention layers is summed over keys. Where positions are independent the sum falls into the patterns of
`places`, each with an expansion (`wick`) of its own in which only legs at one position are joined; otherwise one
expansion serves all positions, which are indices of its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tnsim.engine.problem import Operand
from tnsim.folding.sequences.coincidences import OUTPUTS, Pattern, patterns
from tnsim.folding.sequences.projections import Legs
from tnsim.folding.sequences.wick import FIRST, SECOND, End, Factor, Value, Wick, renamed
from tnsim.names import MASK, SCORES, SIDES, STREAM, Side


class Frame(NamedTuple):
    """An expansion over legs at certain positions, and the arrays that sum those positions."""

    wick: Wick
    pattern: Pattern | None
    sums: Factor

    @property
    def same(self) -> bool:
        """Whether both outputs are at one position, though two were asked for."""
        return self.pattern is not None and len(
            [v for v in OUTPUTS if v in self.pattern.groups]
        ) > len(self.pattern.outputs)

    @property
    def links(self) -> bool:
        """Whether a position of the bra coincides with one of the ket."""
        return any(
            set(group) & {"s", "t"} and set(group) & {"S", "T"}
            for group in self.pattern.groups.split("|")
        )


class Positions(NamedTuple):
    """What is known of positions below a step: are states at different ones independent, and do only differences matter?"""

    n_ctx: int
    independent: bool
    relative: bool


def frames(
    legs: Legs, mode: str, variables: dict[Side, str], at: Positions, gaussian: bool
) -> Iterator[Frame]:
    """How positions are summed: one sum over all of them, or one per pattern where the positions are independent.

    variables: the positions of a side, its output and, if it has an attention layer, its keys. mode: see `frame`.
    """
    kinds = {
        side: legs.layers.kinds[legs.models[side]]
        for side, names in variables.items()
        if len(names) == 2
    }
    if not at.independent:
        yield frame(
            legs,
            mode,
            None,
            tuple(legs.leaf(side, MASK, *variables[side]) for side in kinds),
            gaussian,
        )
        return
    masks = "".join(
        "-" if side not in kinds else "c" if kinds[side].causal else "n" for side in SIDES
    )
    for pattern in patterns(
        "".join(dict.fromkeys("".join(variables.values()))), masks, at.relative, at.n_ctx
    ):
        yield frame(
            legs,
            mode,
            pattern,
            (Operand(pattern.name("COUNT"), ("g", *pattern.outputs)),),
            gaussian,
        )


def frame(legs: Legs, mode: str, pattern: Pattern | None, sums: Factor, gaussian: bool) -> Frame:
    """The expansion of a pair of layers under one rule for joining legs, within one pattern of positions.

    mode: "all" legs; "inside" one model, if the metric pairs there; "cross" the sides or "straight" between equal roles, both
    with the product of two values at zero for the constant; "stream" with the layer of the other side.
    """
    name = (
        f"wick.{legs.group}.{mode}"
        + (f".{pattern.groups}" if pattern else "")
        + f"@{legs.layers.step}"
    )
    if name not in legs.expansions:
        constants = mode in ("cross", "straight")

        def at(factor: Factor, end: End) -> Factor:
            return (
                factor if pattern is None else gathered(legs, factor, pattern, legs.position(end))
            )

        def covariance(x: End, y: End) -> Value:
            across = x.side != y.side
            allowed = {
                "inside": gaussian,
                "cross": across,
                "stream": across and STREAM in (x.role, y.role),
            }
            allowed |= {"all": True, "straight": across and x.role == y.role}
            if not allowed[mode]:
                return ()
            found = []
            if pattern is None or pattern.class_of(legs.position(x)) == pattern.class_of(
                legs.position(y)
            ):
                found.append(at(legs.covariance(x, y), x))
            if constants and None not in (means := [legs.mean(x), legs.mean(y)]):
                found.append((*at(means[0], x), *renamed(at(means[1], y), {FIRST: SECOND})))
            return tuple(found)

        def mean(end: End) -> Factor | None:
            found = None if constants or end.role == STREAM else legs.mean(end)
            return found and at(found, end)

        legs.expansions[name] = Wick(
            name, scores_of("A") | scores_of("B"), covariance, mean, legs.definitions
        )
    return Frame(legs.expansions[name], pattern, sums)


def gathered(legs: Legs, factor: Factor, pattern: Pattern, variable: str) -> Factor:
    """Arrays of one position at the tuples of a pattern."""
    found, place = [], str(pattern.class_of(variable))
    for o in factor:
        here = [n for n, index in enumerate(o.indices) if index in "stST"]
        if here:
            axes = tuple(f"x{n}" for n in range(len(o.indices)))
            packed = tuple("g" if n in here else x for n, x in enumerate(axes))
            at = Operand(f"{pattern.name('AT')} {place}", ("g", axes[here[0]]))
            name = legs.define(
                f"{o.name}.{pattern.groups}.{place}", "", packed, (Operand(o.name, axes), at)
            ).name
            o = Operand(
                name, tuple("g" if n in here else index for n, index in enumerate(o.indices))
            )
        found.append(o)
    return tuple(found)


def scores_of(side: Side) -> dict[str, tuple[End, End]]:
    return {f"{side}{n}": (End(side, q), End(side, k)) for n, (q, k) in enumerate(SCORES)}
