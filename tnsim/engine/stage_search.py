"""The cheapest assembly of a stage. In: a numbered stage. Out: a `Piece`.

Routes are searched product by product (`route_search`), and what products have in common is shared
(`assembly`). A stage of few products is then tuned as a whole, by coordinate descent over the
routes of its dearest products: the best path for one alone need not share most with the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tnsim.engine.assembly import Assembly
from tnsim.engine.canonical import Tensor, canonical
from tnsim.engine.piece import Piece
from tnsim.engine.problem import Definition, Stage, Term
from tnsim.engine.route_search import FEW, GAINS, WORTH_SEARCHING, RouteSearch, Shapes, Ways
from tnsim.engine.sharing import Forms
from tnsim.engine.tiling import tiled

SMALL_STAGE = 60
"""Products up to which a stage is tuned: each attempt puts the whole stage together again."""
MAX_ATTEMPTS = 100
TURNS_ROOM = 8
"""Elements of the turns of a loop that run at once, in units of what counts as `large`."""
NEGLIGIBLE = 0.01
"""Share of a stage's price below which a product's route is not tuned."""


def build_piece(stage: Stage, shapes: Shapes, exchangeable: tuple[int, ...], large: int) -> Piece:
    """Search routes for every product of a stage and assemble them with what they share.

    Args:
        stage: Its inputs are named in0, in1, ...
        shapes: Of the inputs.
        exchangeable: Of each input, how many axes, the last ones, may be exchanged.
        large: Elements beyond which an intermediate is computed in chunks.
    """
    stage = Stage(tuple(_distinct_terms(d) for d in stage.definitions), stage.scale_groups)
    search = RouteSearch(large)
    search.cheapest_ways(stage, shapes)
    forms: Forms = {}

    def assembled(room: int | None = None) -> Assembly:
        return Assembly(stage, shapes, exchangeable, search.pick, forms, room)

    best = assembled()
    terms = sum(len(definition.terms) for definition in stage.definitions)
    worth = GAINS if terms <= FEW else WORTH_SEARCHING
    if terms <= SMALL_STAGE and best.price >= worth:
        best = _tuned(search, best, assembled)
    piece = best.piece()
    if piece.peak_elements > large and any(d.over for d in stage.definitions):
        looped = assembled(room=TURNS_ROOM * large).piece()
        piece = min(piece, looped, key=lambda p: p.peak_elements)
    return tiled(piece)


def settle(stage: Stage, shapes: Shapes, large: int) -> tuple[Ways, ...]:
    """For every definition, the cheapest of the ways in which it may be written."""
    return RouteSearch(large).cheapest_ways(stage, shapes)


def _tuned(search: RouteSearch, best: Assembly, assembled: Callable[[], Assembly]) -> Assembly:
    """Coordinate descent: a route stays if it makes the whole stage cheaper."""
    attempts = 0
    improved = True
    keys = sorted(best.keys, key=lambda key: search.best(key).price, reverse=True)
    while improved:
        improved = False
        for key in keys:
            if search.best(key).price < NEGLIGIBLE * best.price:
                continue
            search.look(key, 1)
            for number in range(len(search.found[key])):
                kept = search.chosen.get(key, 0)
                if number == kept or attempts >= MAX_ATTEMPTS:
                    continue
                attempts += 1
                search.chosen[key] = number
                attempt = assembled()
                if attempt.price < best.price:
                    best, improved = attempt, True
                else:
                    search.chosen[key] = kept
    return best


def _distinct_terms(definition: Definition) -> Definition:
    """Terms that are one network, up to the names of summed indices, become one.

    Its weight is the sum of theirs.
    """
    names: dict[str, int] = {}
    merged: dict[object, Term] = {}
    for term in definition.terms:
        labels = {index: n for n, index in enumerate(definition.indices)}
        # Every output index is marked by a tensor of its own, so that none is taken for another.
        tensors: list[Tensor] = [(-1 - n, (n,)) for n in range(len(labels))]
        for operand in term.operands:
            ref = names.setdefault(operand.name, len(names))
            axes = [labels.setdefault(index, len(labels)) for index in operand.indices]
            tensors.append((ref, tuple(axes)))
        key, _ = canonical(tensors, range(len(definition.indices)), lambda ref: 0)
        known = merged.get(key, dataclasses.replace(term, weight=0.0))
        merged[key] = dataclasses.replace(known, weight=known.weight + term.weight)
    left = [term for term in merged.values() if term.weight]
    terms = left or list(merged.values())[:1]  # where all cancels, zero has a shape
    return dataclasses.replace(definition, terms=tuple(terms))
