"""Contraction paths from cotengra. In: labels and sizes of one product. Out: a few good routes.

Several routes are returned because the one that is best for a product alone need not share most
with the products beside it; `stage_search` picks. All depends on the arguments alone: cotengra's
hyper-optimisers stop by the clock and start processes, so they are not used. Its greedy, optimal
and seeded random-greedy searches are; they run in `cotengrust`, some thirty times as fast as in
Python, which for three nonlinear layers, with thousands of products, is the difference between
seconds and a minute.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.sessions import session_cache

Labels = tuple[int, ...]


Path = tuple[tuple[int, int], ...]
"""SSA form: each step names two tensors, operands first, then the results of earlier steps."""


OPTIMAL_UP_TO = 10
"""Tensors for which every path is tried; beyond it paths are guessed and improved."""


KEPT = 8
"""Routes returned."""


SEEDS = 16
"""Random-greedy searches. Each gives its best path; many short ones give more different paths, and
so more to choose from, than few long ones."""


TRIALS = 8
"""Paths that a random-greedy search tries."""


class Route(NamedTuple):
    """A way to contract one product.

    Args:
        path: The pairwise contractions.
        chunks: Labels that it loops over to stay small.
        multiplications: Scalar ones, all turns of the loop together.
        price: What it costs, see `Cost.price`.
        largest: Elements of the largest intermediate.
    """

    path: Path
    chunks: Labels
    multiplications: int
    price: int
    largest: int


class Cost(NamedTuple):
    """What one product costs along one path.

    Args:
        multiplications: Scalar ones.
        written: Elements written to memory beyond the cache.
        largest: Elements of the largest intermediate.
    """

    multiplications: int
    written: int
    largest: int

    @property
    def price(self) -> int:
        """Multiplications, and those that could have been done while memory was written."""
        return self.multiplications + WRITING * self.written


def version() -> str:
    """Name and version of what searches; plans are kept under it."""
    names = ("cotengra", "cotengrust")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@session_cache
def routes(
    inputs: tuple[Labels, ...],
    output: Labels,
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
) -> tuple[Route, ...]:
    """Distinct routes of one product, the cheapest first.

    Args:
        inputs: Labels of every operand, once each, none of which is its own alone.
        output: Labels of the result.
        items: Label and size, for every label.
        effort: 0 gives one greedy path; 1 the optimal paths of few tensors, and some random-greedy
            ones; 2 of many tensors also the best two of these, improved subtree by subtree.
        large: Elements that no intermediate exceeds where chunks can prevent it.

    Returns:
        Up to `KEPT` routes.

    Example:
        A chain of matrices of shapes (2, 9), (9, 9) and (9, 9) is contracted from its short end.

        >>> best, *_ = routes(((0, 1), (1, 2), (2, 3)), (0, 3), ((0, 2), (1, 9), (2, 9), (3, 9)),
        ...                   effort=1, large=10**6)
        >>> best.path, best.multiplications
        (((0, 1), (2, 3)), 324)
    """
    product = LabelledProduct(inputs, output, dict(items))
    if len(inputs) < 3:
        paths: list[Path] = [((0, 1),)] if len(inputs) == 2 else [()]
    else:
        paths = _search(inputs, output, product, effort)
    distinct = list(dict.fromkeys(paths))
    if len(distinct) > KEPT:
        # Chunking takes longer than searching: only what is cheap without has a chance with it.
        prices = {path: product.cost(path).price for path in distinct}
        distinct = sorted(distinct, key=prices.__getitem__)[: 2 * KEPT]
    found = [_routed(product, output, path, large) for path in distinct]
    return tuple(sorted(found, key=lambda route: (route.price, route.path))[:KEPT])


class LabelledProduct:
    """One product, whose paths are priced. Sets of labels are bit masks: there are many paths.

    Args:
        inputs: Labels of every operand.
        output: Labels of the result.
        sizes: Of every label.

    Example:
        >>> product = LabelledProduct([(0, 1), (1, 2)], (0, 2), {0: 2, 1: 3, 2: 5})
        >>> product.cost(((0, 1),))
        Cost(multiplications=30, written=0, largest=10)
        >>> product.cost(((0, 1),), chunks=(1,))
        Cost(multiplications=10, written=0, largest=10)
    """

    def __init__(
        self, inputs: Sequence[Sequence[int]], output: Sequence[int], sizes: dict[int, int]
    ) -> None:
        self.sizes = sizes
        self.bit = {label: 1 << n for n, label in enumerate(sizes)}
        self.inputs = [self._mask(labels) for labels in inputs]
        self.output = self._mask(output)
        self._elements: dict[int, int] = {0: 1}

    def _mask(self, labels: Iterable[int]) -> int:
        return sum({self.bit[label] for label in labels})

    def steps(self, path: Path) -> tuple[tuple[int, int], ...]:
        """Of every step of a path: the labels of both tensors, and those that their product keeps.

        A label is kept as long as another tensor or the output has it.
        """
        found = []
        pool = dict(enumerate(self.inputs))
        for number, (one, two) in enumerate(path, start=len(pool)):
            both = pool.pop(one) | pool.pop(two)
            read = self.output
            for labels in pool.values():
                read |= labels
            pool[number] = both & read
            found.append((both, both & read))
        return tuple(found)

    def cost(self, path: Path, chunks: Labels = ()) -> Cost:
        """What it costs along a path, of which one turn of a loop over `chunks`."""
        return self.cost_of(self.steps(path), chunks)

    def cost_of(self, steps: Iterable[tuple[int, int]], chunks: Labels = ()) -> Cost:
        """As `cost`, of the steps of a path."""
        inside = ~self._mask(chunks)
        known = self._elements  # read here: three layers ask for six million sizes
        multiplications, written, largest = 0, 0, 0
        for both, kept in steps:
            multiplications += known.get(both & inside) or self._size(both & inside)
            size = known.get(kept & inside) or self._size(kept & inside)
            if size > largest:
                largest = size
            if size > CACHED:
                written += size
        return Cost(multiplications, written, largest)

    def _size(self, mask: int) -> int:
        """Elements of a tensor with the labels of a mask."""
        size = math.prod(n for label, n in self.sizes.items() if self.bit[label] & mask)
        self._elements[mask] = size
        return size


def _search(
    inputs: Sequence[Labels], output: Labels, product: LabelledProduct, effort: int
) -> list[Path]:
    """Paths by cotengra's basic searches; its functions take labels as letters."""
    import cotengrust

    count = len(inputs)
    letters = [list(map(_letter, labels)) for labels in inputs]
    out = list(map(_letter, output))
    size = {_letter(label): float(n) for label, n in product.sizes.items()}
    paths = [_pairs(cotengrust.optimize_greedy(letters, out, size, use_ssa=True), count)]
    if effort == 0:
        return paths
    if count <= OPTIMAL_UP_TO:
        best = cotengrust.optimize_optimal(letters, out, size, use_ssa=True)
        paths.append(_pairs(best, count))
        # Of several optimal paths the first is returned: from the other end it is another one.
        mirrored = cotengrust.optimize_optimal(letters[::-1], out, size, use_ssa=True)
        paths.append(tuple(_mirrored(_pairs(mirrored, count), count)))
    for seed in range(SEEDS):
        path, _ = cotengrust.optimize_random_greedy_track_flops(
            letters, out, size, ntrials=TRIALS, seed=seed, use_ssa=True
        )
        paths.append(_pairs(path, count))
    if count > OPTIMAL_UP_TO and effort == 2:
        best_two = sorted(dict.fromkeys(paths), key=lambda path: product.cost(path).price)[:2]
        paths += [_reconfigured(letters, out, size, path) for path in best_two]
    return paths


def _routed(product: LabelledProduct, output: Labels, path: Path, large: int) -> Route:
    """A path, chunked until its intermediates fit.

    It loops over the label that leaves the least work, one more at a time.
    """
    chunks: Labels = ()
    steps = product.steps(path)
    whole = product.cost_of(steps)
    multiplications, price, largest = whole.multiplications, whole.price, whole.largest
    while largest > large:
        fitting, smaller = [], []
        for label in sorted(set(product.sizes) - set(output) - set(chunks)):
            turns = math.prod(product.sizes[x] for x in (*chunks, label))
            turn = product.cost_of(steps, (*chunks, label))
            found = (turn.price * turns, turn.largest, label, turn.multiplications * turns)
            if turn.largest <= large:
                fitting.append(found)
            elif turn.largest < largest:
                smaller.append(found)
        if fitting:
            chosen = min(fitting)
        elif smaller:
            chosen = min(smaller, key=lambda found: (found[1], found[0]))
        else:
            break
        price, largest, label, multiplications = chosen
        chunks = (*chunks, label)
    return Route(path, chunks, multiplications, price, largest)


def _reconfigured(letters: list[list[str]], out: list[str], size: dict, path: Path) -> Path:
    """A path with its subtrees of up to eight tensors replaced by optimal ones."""
    import cotengra

    tree = cotengra.ContractionTree.from_path(letters, out, size, ssa_path=path)
    tree.subtree_reconfigure_(subtree_size=8, minimize="combo")
    return _pairs(tree.get_ssa_path(), len(letters))


def _letter(label: int) -> str:
    return chr(0x100 + label)


def _pairs(path: Sequence[Sequence[int]], count: int) -> Path:
    """A path without the steps of a single tensor, which cotengra's simplifications insert."""
    number = list(range(count))  # of every tensor of the path, the number that it has without them
    steps: list[tuple[int, int]] = []
    for step in path:
        tensors = [number[tensor] for tensor in step]
        if len(tensors) == 1:
            number.append(tensors[0])
            continue
        one, two = tensors
        number.append(count + len(steps))
        steps.append((one, two))
    return tuple(steps)


def _mirrored(path: Path, count: int) -> Iterator[tuple[int, int]]:
    """A path of operands in reverse order, for the operands in order."""
    for one, two in path:
        yield (
            count - 1 - one if one < count else one,
            count - 1 - two if two < count else two,
        )
