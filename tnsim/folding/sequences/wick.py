"""Moments of attention scores, sums before products. In: covariances and means of legs. Out: definitions.

A head's output is a value leg times two scores, each the inner product of a query leg and a key leg. The
expectation of two such outputs joins ten legs in 945 ways (paper, appendix A.3), more where means are
handed out, but every pairing is a set of *chains*: a leg's partner sits in a score, whose other leg has a
partner, and so on. So the sum is expanded like a hafnian along a row, starting with the leg that carries the
output: pair it with every other leg, and what stays behind is the same question with one score less,

    E[u w^T prod D] = C_uw E[prod D] + m_u E[w prod D]^T + sum over legs x of D   C_ux E[x' w^T prod (D - score of x)],

x' the other leg of x's score. Each distinct question is one definition: 256 products of d_head x d_head matrices
per pair of heads for ten legs, instead of 945 chains of up to five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tnsim.engine.problem import Definition, Operand, Term
from tnsim.names import Side

HEADS = {"A": "a", "B": "b"}
FIRST, SECOND = "u", "w"


class End(NamedTuple):
    """A leg of the bra's or the ket's layer, by the role of its array."""

    side: Side
    role: str


Score = tuple[End, End]
Names = dict[str, str]

Factor = tuple[Operand, ...]
"""A product of arrays; its open ends are `FIRST` and `SECOND`, its other indices positions and heads."""

Value = tuple[Factor, ...]
"""A sum, one factor for every distinct set of indices: an array that does not depend on a position has no axis for it."""


class Wick:
    """Expectations of products of legs and scores, each question answered once.

    covariance(x, y) gives the ways in which two legs may be joined (none: they are independent), with ends `FIRST`
    and `SECOND`; mean(x) a leg's mean with the end `FIRST`, or None. Definitions are appended to `definitions`.
    """

    def __init__(
        self,
        name: str,
        scores: dict[str, Score],
        covariance: Callable[[End, End], Value],
        mean: Callable[[End], Factor | None],
        definitions: list[Definition],
    ):
        self.name, self.scores, self.covariance, self.mean = name, scores, covariance, mean
        self.definitions, self._count = definitions, 0
        self._known: dict[tuple, Value] = {}

    def matrix(self, u: End, w: End, scores: frozenset[str]) -> Value:
        """E[u w^T prod scores], ends `FIRST` and `SECOND`."""

        def terms() -> Iterable[Factor]:
            yield from product(self.covariance(u, w), self.scalar(scores))
            if (m := self.mean(u)) is not None:
                yield from product((m,), self.vector(w, scores), {FIRST: SECOND})
            for x, mate, rest in self.partners(scores):
                yield from product(
                    self.covariance(u, x), self.matrix(mate, w, rest), {FIRST: "z"}, {SECOND: "z"}
                )

        return self.once(("matrix", u, w, scores), terms)

    def vector(self, u: End, scores: frozenset[str]) -> Value:
        """E[u prod scores], end `FIRST`."""

        def terms() -> Iterable[Factor]:
            if (m := self.mean(u)) is not None:
                yield from product((m,), self.scalar(scores))
            for x, mate, rest in self.partners(scores):
                yield from product(
                    self.covariance(u, x), self.vector(mate, rest), {FIRST: "z"}, {SECOND: "z"}
                )

        return self.once(("vector", u, scores), terms)

    def scalar(self, scores: frozenset[str]) -> Value:
        """E[prod scores]."""
        if not scores:
            return ((),)
        first = min(scores)
        (q, k), rest = self.scores[first], scores - {first}

        def terms() -> Iterable[Factor]:
            yield from product(
                self.covariance(q, k), self.scalar(rest), {}, {FIRST: "z", SECOND: "z"}
            )
            if (m := self.mean(q)) is not None:
                yield from product((m,), self.vector(k, rest), {FIRST: "z"}, {FIRST: "z"})
            for x, mate, others in self.partners(rest):
                yield from product(
                    self.covariance(q, x),
                    self.matrix(mate, k, others),
                    {FIRST: "y", SECOND: "z"},
                    {FIRST: "z", SECOND: "y"},
                )

        return self.once(("scalar", scores), terms)

    def partners(self, scores: frozenset[str]) -> Iterable[tuple[End, End, frozenset[str]]]:
        """Every leg of the scores, the other leg of its score, and the scores left."""
        for name in sorted(scores):
            q, k = self.scores[name]
            yield q, k, scores - {name}
            yield k, q, scores - {name}

    def once(self, question: tuple, terms: Callable[[], Iterable[Factor]]) -> Value:
        if question not in self._known:
            self._known[question] = self.sum(terms())
        return self._known[question]

    def sum(self, products: Iterable[Factor]) -> Value:
        """Add up products of equal free indices, one definition for each set of them."""
        found: dict[tuple[str, ...], list[Factor]] = {}
        for operands in products:
            free = {i for o in operands for i in o.indices} - {"y", "z"}
            found.setdefault(tuple(sorted(free)), []).append(operands)
        values = []
        for indices, items in found.items():
            if (
                len(items) == 1
                and len(items[0]) < 2
                and not any({"y", "z"} & set(o.indices) for o in items[0])
            ):
                values.append(items[0])
                continue
            name, self._count = f"{self.name}.{self._count}", self._count + 1
            self.definitions.append(
                Definition(
                    name, indices, tuple(Term(1.0, operands) for operands in items), kept=False
                )
            )
            values.append((Operand(name, indices),))
        return tuple(values)


def product(
    ones: Value,
    twos: Value,
    rename_two: dict[str, str] | None = None,
    rename_one: dict[str, str] | None = None,
) -> Iterable[Factor]:
    """All products of a factor of each sum, with ends renamed."""
    for one in ones:
        for two in twos:
            yield (*renamed(one, rename_one), *renamed(two, rename_two))


def renamed(operands: Iterable[Operand], names: Names | None) -> Factor:
    """Operands with indices renamed."""
    if not names:
        return tuple(operands)
    return tuple(Operand(o.name, tuple(names.get(i, i) for i in o.indices)) for o in operands)
