"""The legs of two layers: their means and covariances. In: moments of the states below. Out: operands, definitions.

A layer reads the state below through legs, `leg = weight * state + bias` (see `positional`), and every moment of
its output is made of the means of its legs and the covariances between them. A leg of an attention layer has a
head index and `d_head` coordinates, so the state's width is summed out once per pair of legs. The residual
stream is a leg too: the state itself.

Indices: positions `s` (outputs, queries) and `t` (keys, values) of the bra, `S` and `T` of the ket; heads `a` and `b`;
the coordinates of two legs are the ends `u` and `w`. Where states at different positions are independent, two legs
have a covariance at one position only, which is called `s`.
"""

from __future__ import annotations

from typing import NamedTuple

from tnsim.engine.problem import MARK, Definition, Operand, Term
from tnsim.folding.sequences.wick import FIRST, HEADS, SECOND, End, Factor, Wick, renamed
from tnsim.names import IDENTITY, ONES, SCORES, STREAM, VALUE, Leaf, Pair, Side, bias_of
from tnsim.tensors.positional import SequenceKind

_QUERIES, _KEYS = zip(*SCORES, strict=True)


class Moment(NamedTuple):
    """A mean or a covariance over positions: "alike" at all of them, "each" its own, or "full", between all pairs.

    A covariance without a name is the identity; a `diagonal` one has one axis for both coordinates.
    """

    name: str
    form: str
    diagonal: bool = False


class States(NamedTuple):
    """What is known of both models below a step: covariances by pair, means and the constant 1 by model."""

    moments: dict[Pair, Moment]
    means: dict[Side, Moment | None]
    ones: dict[Side, str]


class Layers(NamedTuple):
    """The layers of a step by model: kind and number; None waits."""

    step: int
    kinds: dict[Side, SequenceKind | None]
    numbers: dict[Side, int | None]

    def rows(self, model: Side, role: str) -> tuple[str, ...]:
        """Axes of a leg's weight but the last: position under RoPE, head, coordinate."""
        kind = self.kinds[model]
        turned = ("s",) if kind.rotary and role in _QUERIES + _KEYS else ()
        return (*turned, *(("a",) if kind.name == "Attention" else ()), FIRST)


class Legs:
    """The legs of the bra's layer (of model `pair.bra`) and the ket's; what has to be computed is appended to `definitions`.

    `known`: names that earlier stages have defined; with `keep` those of this stage join them. `one_position`: bra
    and ket outputs are wanted at equal positions only, so both are called `s`.
    """

    def __init__(
        self,
        pair: Pair,
        layers: Layers,
        states: States,
        known: set[str],
        one_position: bool,
        keep: bool,
    ):
        self.models: dict[Side, Side] = {"A": pair.bra, "B": pair.ket}
        self.marks = {"A": "", "B": MARK if pair.bra == pair.ket else ""}
        self.layers, self.states, self.keep = layers, states, keep
        self.earlier, self.known = frozenset(known), known if keep else set()
        self.outputs = {"A": "s", "B": "s" if one_position else "S"}
        self.definitions: list[Definition] = []
        self.expansions: dict[str, Wick] = {}

    @property
    def group(self) -> str:
        return "".join(self.models.values())

    @property
    def form(self) -> str:
        """Form of the covariance between the two sides."""
        return self._below(End("A", STREAM), End("B", STREAM)).form

    def position(self, end: End) -> str:
        """Name of the position at which a leg reads."""
        return (
            {"A": "t", "B": "T"}[end.side]
            if end.role in (*_KEYS, VALUE)
            else self.outputs[end.side]
        )

    def leaf(self, side: Side, role: str, *indices: str) -> Operand:
        model = self.models[side]
        return Operand(
            str(Leaf(model, self.layers.numbers[model], role)) + self.marks[side], indices
        )

    def one(self, side: Side) -> Operand:
        return Operand(self.states.ones[self.models[side]] + self.marks[side], ())

    def define(
        self, name: str, mark: str, indices: tuple[str, ...], *terms: tuple[Operand, ...]
    ) -> Operand:
        """The operand of that name, defined if it is not yet; terms that lack the position `s` are spread over it."""
        name = f"{name}@{self.layers.step}"
        if name in self.earlier:
            return Operand(name + mark, indices)
        name += mark
        if name not in self.known:
            self.known.add(name)
            spread = [
                (
                    *t,
                    *(
                        ()
                        if any("s" in o.indices for o in t) or "s" not in indices
                        else (Operand(ONES, ("s",)),)
                    ),
                )
                for t in terms
            ]
            self.definitions.append(
                Definition(name, indices, tuple(Term(1.0, t) for t in spread), kept=self.keep)
            )
        return Operand(name, indices)

    def mean(self, end: End) -> Factor | None:
        """Mean of a leg, or of its value at the zero input for the tree metrics; None where it vanishes. End `FIRST`."""
        model, mark = self.models[end.side], self.marks[end.side]
        below = self.states.means[model]
        at = ("s",) if below and below.form == "each" else ()
        here = {"s": self.position(end), "a": HEADS[end.side]}
        if end.role == STREAM:
            return below and renamed([Operand(below.name + mark, (*at, FIRST))], here)
        rows = self.layers.rows(model, end.role)
        terms = []
        if below is not None:
            terms.append(
                (self.leaf(end.side, end.role, *rows, "i"), Operand(below.name + mark, (*at, "i")))
            )
        if end.role in self.layers.kinds[model].biases:
            terms.append((self.leaf(end.side, bias_of(end.role), *rows), self.one(end.side)))
        if not terms:
            return None
        indices = rows if "s" in rows else (*at, *rows)
        return renamed([self.define(f"mean.{model}.{end.role}", mark, indices, *terms)], here)

    def covariance(self, x: End, y: End) -> Factor:
        """Covariance of two legs with the ends `FIRST` and `SECOND`."""
        if x.role == STREAM == y.role:
            return self._of_states(x, y, (FIRST, SECOND))
        if x.role == STREAM or (y.role != STREAM and y < x):  # each pair of legs in one order only
            return renamed(self.covariance(y, x), {FIRST: SECOND, SECOND: FIRST})
        places = (
            (self.position(x), self.position(y)) if self._below(x, y).form == "full" else ("s", "s")
        )
        apart, model = places[0] != places[1], self.models[y.side]
        half = self._half(x, y)
        if y.role != STREAM:
            second = {
                "s": "S" if apart else "s",
                "a": "a" if x.side == y.side else "b",
                FIRST: SECOND,
            }
            row = tuple(second[i] for i in self.layers.rows(model, y.role))
            left = tuple(i if apart or i != "S" else "s" for i in half.indices)
            indices = tuple(dict.fromkeys(i for i in (*left, *row) if i != "j"))
            how = (".inside" if x.side == y.side else "") + (".apart" if apart else "")
            mark = self.marks[x.side] if x.side == y.side else ""
            leaf = self.leaf(y.side, y.role, *row, "j")
            name = f"cov.{self.models[x.side]}.{x.role}.{model}.{y.role}{how}"
            half = self.define(name, mark, indices, (Operand(half.name, left), leaf))
        table = {
            "s": places[0],
            "S": places[1],
            "a": HEADS[x.side],
            "b": HEADS[y.side],
            "j": SECOND,
        }
        return renamed([half], table)

    def through(self, x: End, y: End) -> Factor:
        """The covariance of two legs of linear layers, not contracted: it can be wide, as that of two vocabularies."""
        one, two = self.leaf(x.side, x.role, FIRST, "i"), self.leaf(y.side, y.role, SECOND, "j")
        if not self._below(x, y).name:
            return (one, renamed([two], {"j": "i"})[0])
        return (one, *self._of_states(x, y, ("i", "j")), two)

    def _below(self, x: End, y: End) -> Moment:
        models = self.models[x.side], self.models[y.side]
        found = self.states.moments[Pair(*models) if models != ("B", "A") else Pair("A", "B")]
        if models[0] != models[1] or not found.name:
            return found
        return found._replace(
            name=found.name + (self.marks[x.side] if x.side == y.side else self.marks["B"] * 2)
        )

    def _half(self, x: End, y: End) -> Operand:
        """The weight of x times the covariance of the two states: axes of the leg, position (`S`, if full) and `j`."""
        model, other, below = self.models[x.side], self.models[y.side], self._below(x, y)
        rows = self.layers.rows(model, x.role)
        if not below.name:
            return self.leaf(x.side, x.role, *rows, "j")
        at = ("s",) if below.form == "each" else ()
        if below.diagonal:
            moment, weight = Operand(below.name, (*at, "j")), self.leaf(x.side, x.role, *rows, "j")
        else:
            axes = ("s", "i", "S", "j") if below.form == "full" else (*at, "i", "j")
            if (model, other) == ("B", "A"):
                axes = ("S", "j", "s", "i") if below.form == "full" else (*at, "j", "i")
            moment, weight = Operand(below.name, axes), self.leaf(x.side, x.role, *rows, "i")
        indices = tuple(dict.fromkeys((*(("s",) if below.form != "alike" else ()), *rows)))
        name = f"half.{model}.{x.role}.{other}" + ("" if x.side == y.side else ".across")
        return self.define(
            name,
            self.marks[x.side],
            (*indices, *(("S",) if below.form == "full" else ()), "j"),
            (weight, moment),
        )

    def _of_states(self, x: End, y: End, ends: tuple[str, str]) -> Factor:
        below, places = self._below(x, y), (self.position(x), self.position(y))
        if (self.models[x.side], self.models[y.side]) == ("B", "A"):
            places, ends = places[::-1], ends[::-1]
        if below.form == "full":
            return (Operand(below.name, (places[0], ends[0], places[1], ends[1])),)
        at = ("s",) if below.form == "each" else ()
        if not below.name:
            return (Operand(IDENTITY, ends),)
        if below.diagonal:
            return (Operand(IDENTITY, ends), Operand(below.name, (*at, ends[0])))
        return (Operand(below.name, (*at, *ends)),)
