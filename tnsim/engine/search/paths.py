"""Contraction paths of a single product, found with cotengra.

Paths depend on the arguments alone: cotengra's hyper-optimisers stop by the clock and start
processes, so they are not used. Up to ten tensors the path is optimal. Longer products take the
best of the greedy path and of some seeded random-greedy ones, improved by rotations of its tree
and, where a product is dear, by optimal subtrees. Searches run in `cotengrust`, some thirty times
as fast as in Python.

A caller may search with an optimiser of cotengra instead (`searched_by`). Nothing that it finds is
kept for others.

*The process while it plans.* Planning makes some million small tuples that live until the plan is
there and form no cycles. The collector of cycles goes through all of them again and again, a third
of the time of a plan of a language model, and finds nothing. It is switched off while any thread
plans.

A plan of three nonlinear layers takes many seconds. Lines of progress go to the logger of this
module at level INFO, the first after `FIRST_LINE` seconds, each later line after twice the time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.engine.ir.program import Labels, postorder
from tnsim.errors import ModelError, in_one_line
from tnsim.options import shown
from tnsim.sessions import session_cache

log = logging.getLogger(__name__)

FIRST_LINE = 2.0
"""Seconds of planning after which the first line of progress is logged."""
_changing = threading.Lock()
_found: list[bool] = []  # for each thread that plans, whether it found the collector switched on


Path = tuple[tuple[int, int], ...]
"""A contraction path in SSA form.

Each step names two tensors by number: operands first, then the results of earlier steps.
"""
OPTIMAL_UP_TO = 10
"""Largest number of tensors for which optimal paths are searched."""
TRIALS = 32
"""Number of random-greedy paths of a longer product."""
SUBTREE = 8
"""Number of tensors up to which subtrees of dear products become optimal."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch the collector of cycles off; the last of several threads restores its first state."""
    with _changing:
        _found.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _changing:
            was_enabled = _found[0]
            _found.pop()
            if not _found and was_enabled:
                gc.enable()


class _Progress:
    """How far the planning of a plan has come.

    Args:
        name: Name of the plan.

    Attributes:
        searched: Number of products whose contraction paths have been searched.
        stage: Description of the stage that is planned.
        spoken: Whether a line has been logged.
        begun: Time at which the planning began.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.searched = 0
        self.stage = ""
        self.spoken = False
        self.begun = time.monotonic()
        self._next = FIRST_LINE

    def speak(self) -> None:
        """Log a line where a line is due."""
        seconds = time.monotonic() - self.begun
        if seconds < self._next:
            return
        self._next = 2 * seconds
        self.spoken = True
        log.info(
            "planning %s for %.0f s: %sproducts searched: %d",
            self.name,
            seconds,
            self.stage and f"{self.stage}, ",
            self.searched,
        )


_current: ContextVar[_Progress | None] = ContextVar("planning in progress", default=None)


@contextmanager
def planning(name: str) -> Iterator[None]:
    """Make a plan inside a `with` block, without collections of garbage and with progress.

    Blocks inside another block belong to the plan of the outermost block.

    Args:
        name: Name of the plan, for lines of progress.

    Example:
        >>> with planning("a plan"):
        ...     gc.isenabled()
        False
    """
    if _current.get() is not None:
        yield
        return
    progress = _Progress(name)
    token = _current.set(progress)
    try:
        with _without_collections():
            yield
        if progress.spoken:
            log.info("planned %s in %.1f s", name, time.monotonic() - progress.begun)
    finally:
        _current.reset(token)


def tell(stage: str = "", searched: int = 0) -> None:
    """Say how far the plan in progress has come.

    Args:
        stage: Description of the stage that is planned from now on; empty where it goes on.
        searched: Number of products whose contraction paths are searched now.
    """
    progress = _current.get()
    if progress is not None:
        progress.searched += searched
        progress.stage = stage or progress.stage
        progress.speak()


class Route(NamedTuple):
    """A way to contract a single product.

    Args:
        path: Pairwise contractions.
        chunks: Labels of the loop that keeps intermediates small; empty for no loop.
        multiplications: Scalar multiplications of all turns of the loop.
        price: Price of all turns of the loop, see `Cost.price`.
    """

    path: Path
    chunks: Labels
    multiplications: int
    price: int


class Cost(NamedTuple):
    """The cost of a product along a path.

    Args:
        multiplications: Scalar multiplications.
        written: Elements of intermediates too large for the cache.
        largest: Elements of the largest intermediate.
    """

    multiplications: int
    written: int
    largest: int

    @property
    def price(self) -> int:
        """Multiplications, with every element written to memory counted as `WRITING` of them."""
        return self.multiplications + WRITING * self.written


@cache
def version() -> str:
    """Names and versions of the search tools, part of the keys of cached plans."""
    names = ("cotengra", "cotengrust")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


class _Search(NamedTuple):
    """A search with an optimiser of a caller.

    Args:
        optimizer: Optimiser of cotengra, or its name.
        found: Paths of the products searched so far; an optimiser may find another path each time.
    """

    optimizer: Any
    found: dict[tuple[Any, ...], Path]


_SEARCH: ContextVar[_Search | None] = ContextVar("search", default=None)


@contextmanager
def searched_by(optimizer: Any) -> Iterator[None]:
    """Search paths with an optimiser of cotengra; None searches as always.

    Args:
        optimizer: Name of a method of cotengra, such as "greedy", or an optimiser, such as a
            `cotengra.ReusableHyperOptimizer`.

    Raises:
        ModelError: The optimiser fails on a product, or is a path.

    Example:
        >>> chain = ((0, 1), (1, 2), (2, 3)), (0, 3), ((0, 2), (1, 9), (2, 9), (3, 9))
        >>> with searched_by("greedy"):
        ...     route(*chain, effort=2, large=10**6).path
        ((0, 1), (2, 3))
    """
    if isinstance(optimizer, (tuple, list)):
        raise ModelError(
            "optimize is the name of a method of cotengra or an optimiser, which search a path for "
            "every product of a sum; found a path"
        )
    token = _SEARCH.set(None if optimizer is None else _Search(optimizer, {}))
    try:
        yield
    finally:
        _SEARCH.reset(token)


def callers_searcher() -> str | None:
    """The name of the optimiser of a caller, None where paths are searched as always."""
    search = _SEARCH.get()
    if search is None:
        return None
    name = search.optimizer
    return f"{version()}: {name if isinstance(name, str) else type(name).__name__}"


def _by_optimizer(
    search: _Search, inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> Path:
    """The path that an optimiser of a caller finds for a product."""
    import cotengra

    key = inputs, output, items
    if key not in search.found:
        product = LabelledProduct(inputs, output, dict(items))
        letters, out, sizes = product.spelled
        whole = {letter: int(size) for letter, size in sizes.items()}
        try:
            tree: Any = cotengra.array_contract_tree(
                letters, out, whole, optimize=search.optimizer, canonicalize=False
            )
            read, path = [set(labels) for labels in tree.inputs], tree.get_ssa_path()
        except Exception as error:  # whatever an optimiser of the caller raises
            raise ModelError(
                f"optimize={shown(search.optimizer)} finds no path: {in_one_line(error)}; give the "
                'name of a method of cotengra, such as "greedy", or an optimiser'
            ) from error
        if read != [set(labels) for labels in letters]:
            raise ModelError(
                f"optimize={shown(search.optimizer)} gives the path of another product: an "
                "optimiser for a single contraction; give a cotengra.ReusableHyperOptimizer"
            )
        search.found[key] = path
    return search.found[key]


def route(
    inputs: tuple[Labels, ...],
    output: Labels,
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
) -> Route:
    """The cheapest route of a product that the search finds.

    Args:
        inputs: Labels of every operand. An operand has a label once, and every label is also on
            another operand or in the output.
        output: Labels of the result.
        items: Pairs (label, size) of all labels.
        effort: Effort of the search. 0 gives the greedy path. 1 gives the optimal path of up to
            `OPTIMAL_UP_TO` tensors, and of more the best of `TRIALS` random-greedy ones, with its
            tree rotated. 2 improves the subtrees of longer products besides.
        large: Elements beyond which intermediates are chunked where chunks can make them smaller.

    Example:
        A chain of matrices of shapes (2, 9), (9, 9) and (9, 9) is contracted from its short end.

        >>> best = route(((0, 1), (1, 2), (2, 3)), (0, 3), ((0, 2), (1, 9), (2, 9), (3, 9)),
        ...              effort=1, large=10**6)
        >>> best.path, best.multiplications
        (((0, 1), (2, 3)), 324)
    """
    tell(searched=1)
    search = _SEARCH.get()
    product = LabelledProduct(inputs, output, dict(items))
    if len(inputs) < 3:
        path: Path = ((0, 1),) if len(inputs) == 2 else ()
    elif search is not None:
        path = _by_optimizer(search, inputs, output, items)
    else:
        path = _searched_path(inputs, output, items, effort)
    return _route_along(product, output, path, large)


@session_cache
def _searched_path(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...], effort: int
) -> Path:
    """The path of a product by the searches of this module, see `route`."""
    import cotengrust

    product = LabelledProduct(inputs, output, dict(items))
    greedy = _as_pairs(cotengrust.optimize_greedy(*product.spelled, use_ssa=True))
    if effort == 0:
        return greedy
    if product.count <= OPTIMAL_UP_TO:
        found = cotengrust.optimize_optimal(*product.spelled, use_ssa=True)
        # Optimal paths have the fewest multiplications; a path may write less at as many. The
        # flattest of equally good paths is taken: powers of a matrix share squares.
        paths = map(product.rotated, (_as_pairs(found), greedy))
        return min(paths, key=lambda path: (product.price(path), product.depth(path)))
    found, _ = cotengrust.optimize_random_greedy_track_flops(
        *product.spelled, ntrials=TRIALS, seed=0, use_ssa=True
    )
    # Of equally good paths the greedy path comes first: greedy paths of products that are much
    # alike, as those of a sum, share more than random ones, 1.8 times as much over 105 pairings.
    paths = map(product.rotated, (greedy, _as_pairs(found)))
    best = min(paths, key=product.price)
    return best if effort == 1 else min(best, _reconfigured_path(product, best), key=product.price)


def greedy_work(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> int:
    """The multiplications of a product along its greedy path, see `route` for the arguments."""
    if len(inputs) < 2:
        return 0
    path = _searched_path(inputs, output, items, 0) if len(inputs) > 2 else ((0, 1),)
    return LabelledProduct(inputs, output, dict(items)).cost(path).multiplications


def least_work(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...], limit: float
) -> int:
    """The multiplications of the dearest contraction of a product along the best path for it.

    Where a path is within the limit, the number is within the limit, but need not be the least.

    Args:
        inputs, output, items: The product, see `route`.
        limit: Multiplications that are allowed.
    """
    if len(inputs) < 3:
        return greedy_work(inputs, output, items)
    product = LabelledProduct(inputs, output, dict(items))
    least = math.inf
    for effort in range(3):
        if least > limit:
            path = _searched_path(inputs, output, items, effort)
            least = min(least, product.dearest(path))
    return int(least)


class LabelledProduct:
    """A product with the costs of its paths.

    Sets of labels are bit masks, because very many paths are priced.

    Args:
        inputs: Labels of every operand.
        output: Labels of the result.
        sizes: Size of every label.

    Example:
        >>> product = LabelledProduct([(0, 1), (1, 2)], (0, 2), {0: 2, 1: 3, 2: 5})
        >>> product.cost(((0, 1),))
        Cost(multiplications=30, written=0, largest=10)
        >>> product.cost_of(product.steps(((0, 1),)), chunks=(1,))
        Cost(multiplications=10, written=0, largest=10)
    """

    def __init__(
        self, inputs: Sequence[Sequence[int]], output: Sequence[int], sizes: dict[int, int]
    ) -> None:
        self.sizes = sizes
        self.count = len(inputs)
        self.labels = inputs, output
        self.bit = {label: 1 << n for n, label in enumerate(sizes)}
        self._size_of = {bit: sizes[label] for label, bit in self.bit.items()}
        self.inputs = [self._label_mask(labels) for labels in inputs]
        self.output = self._label_mask(output)
        self._elements: dict[int, int] = {0: 1}

    @property
    def spelled(self) -> tuple[list[list[str]], list[str], dict[str, float]]:
        """Inputs, output and sizes as cotengra takes them, with letters for labels."""
        inputs, output = self.labels
        letters = [list(map(_letter, labels)) for labels in inputs]
        size = {_letter(label): float(n) for label, n in self.sizes.items()}
        return letters, list(map(_letter, output)), size

    def _label_mask(self, labels: Iterable[int]) -> int:
        return sum({self.bit[label] for label in labels})

    def steps(self, path: Path) -> tuple[tuple[int, int], ...]:
        """The labels of both tensors, and the labels of their product, for every step of a path.

        A product keeps the labels that another tensor or the output has.
        """
        contracted = []
        # Tensors not contracted yet, as sets of labels; the result of a step gets the next number,
        # as SSA paths count.
        pool = dict(enumerate(self.inputs))
        for number, (one, two) in enumerate(path, start=len(pool)):
            both = pool.pop(one) | pool.pop(two)
            read = self.output
            for labels in pool.values():
                read |= labels
            pool[number] = both & read
            contracted.append((both, both & read))
        return tuple(contracted)

    def cost(self, path: Path) -> Cost:
        """The cost of the product along a path."""
        return self.cost_of(self.steps(path))

    def cost_of(self, steps: Iterable[tuple[int, int]], chunks: Labels = ()) -> Cost:
        """The cost of the steps of a path, or of a single turn where `chunks` are looped over."""
        # A label that is looped over has a single value in a turn, so it is masked out of all
        # sizes.
        inside = ~self._label_mask(chunks)
        known = self._elements  # cached sizes: a model of three layers asks for six million
        multiplications, written, largest = 0, 0, 0
        for both, kept in steps:
            multiplications += known.get(both & inside) or self._mask_size(both & inside)
            size = known.get(kept & inside) or self._mask_size(kept & inside)
            if size > largest:
                largest = size
            if size > CACHED:
                written += size
        return Cost(multiplications, written, largest)

    def price(self, path: Path) -> int:
        """The price of a path, see `Cost.price`."""
        return self.cost(path).price

    def depth(self, path: Path) -> int:
        """The most contractions that follow each other along a path."""
        depths = [0] * self.count
        for one, two in path:
            depths.append(1 + max(depths[one], depths[two]))
        return depths[-1]

    def dearest(self, path: Path) -> int:
        """The multiplications of the dearest contraction along a path, without chunks."""
        return max((self._mask_size(both) for both, _ in self.steps(path)), default=0)

    def rotated(self, path: Path) -> Path:
        """The path improved by rotations of its tree until none makes it cheaper.

        A rotation contracts `a b c` as `(a c) b` or `(b c) a` in the place of `(a b) c`.
        """
        children: dict[int, tuple[int, int]] = {}
        labels = dict(enumerate(self.inputs))
        for number, ((one, two), (_, kept)) in enumerate(
            zip(path, self.steps(path), strict=True), start=self.count
        ):
            children[number] = one, two
            labels[number] = kept
        waiting = [*children]
        while waiting:
            node = waiting.pop()
            if self._rotate(node, children, labels):
                waiting = [*children]
        return _path_of_tree(children, self.count)

    def _rotate(
        self, node: int, children: dict[int, tuple[int, int]], labels: dict[int, int]
    ) -> bool:
        """Rotate a tree at a node where that makes it cheaper; whether it did."""
        for below, other in (children[node], children[node][::-1]):
            if below not in children:
                continue
            one, two = children[below]
            price = self._pair_price(labels[one], labels[two], labels[below])
            price += self._pair_price(labels[below], labels[other], 0)
            for moved, left in ((one, two), (two, one)):
                # What the new pair keeps is read by the tensor left or outside of the node.
                kept = (labels[moved] | labels[other]) & (labels[left] | labels[node])
                new = self._pair_price(labels[moved], labels[other], kept)
                if new + self._pair_price(kept, labels[left], 0) < price:
                    children[below], labels[below] = (moved, other), kept
                    children[node] = below, left
                    return True
        return False

    def _pair_price(self, one: int, two: int, kept: int) -> int:
        """The price of a contraction of two tensors, see `Cost.price`."""
        known = self._elements
        size = known.get(kept) or self._mask_size(kept)
        both = one | two
        work = known.get(both) or self._mask_size(both)
        return work + (WRITING * size if size > CACHED else 0)

    def _mask_size(self, mask: int) -> int:
        """The number of elements of a tensor with the labels of a mask."""
        # `left & -left` is the lowest bit that is set.
        size, left = 1, mask
        while left:
            bit = left & -left
            size *= self._size_of[bit]
            left ^= bit
        self._elements[mask] = size
        return size


def _path_of_tree(children: dict[int, tuple[int, int]], count: int) -> Path:
    """The path of a tree, given by the children of every node, the root last."""
    nodes = postorder([max(children)], lambda node: children.get(node, ()))
    inner = [node for node in nodes if node in children]
    number = {node: count + n for n, node in enumerate(inner)}
    return tuple((number.get(a, a), number.get(b, b)) for a, b in map(children.__getitem__, inner))


def _route_along(product: LabelledProduct, output: Labels, path: Path, large: int) -> Route:
    """The route along a path, with chunks added until its intermediates fit.

    Each round adds a label to the loop: the label of the lowest price where a label makes the
    intermediates fit, else the label of the smallest intermediates. The route keeps large
    intermediates where no label makes them smaller.
    """
    chunks: Labels = ()
    steps = product.steps(path)
    whole = product.cost_of(steps)
    multiplications, price, largest = whole.multiplications, whole.price, whole.largest
    while largest > large:
        fitting, smaller = [], []
        # Output labels are never looped over: a loop adds up, and its result must have them.
        for label in sorted(set(product.sizes) - set(output) - set(chunks)):
            turns = math.prod(product.sizes[x] for x in (*chunks, label))
            turn = product.cost_of(steps, (*chunks, label))
            candidate = (turn.price * turns, turn.largest, label, turn.multiplications * turns)
            if turn.largest <= large:
                fitting.append(candidate)
            elif turn.largest < largest:
                smaller.append(candidate)
        if fitting:
            chosen = min(fitting)
        elif smaller:
            chosen = min(smaller, key=lambda found: (found[1], found[0]))
        else:
            break
        price, largest, label, multiplications = chosen
        chunks = (*chunks, label)
    return Route(path, chunks, multiplications, price)


def _reconfigured_path(product: LabelledProduct, path: Path) -> Path:
    """The path with its subtrees of up to eight tensors replaced by optimal subtrees."""
    import cotengra

    tree = cotengra.ContractionTree.from_path(*product.spelled, ssa_path=path)
    tree.subtree_reconfigure_(subtree_size=SUBTREE, minimize="combo")
    return tree.get_ssa_path()


def _letter(label: int) -> str:
    return chr(0x100 + label)  # there are more labels than ASCII letters


def _as_pairs(path: Iterable[Sequence[int]]) -> Path:
    """The path as tuples. Every step has two tensors, as labels of one alone are summed before."""
    return tuple((one, two) for one, two in path)
