"""Contraction paths of a single product, found with cotengra.

`routes` returns several routes, because the best route of a product alone need not share most with
the other products of its stage; `search/stages` chooses among them. Routes depend on the arguments
alone: cotengra's hyper-optimisers stop by the clock and start processes, so they are not used.
Its greedy, optimal and seeded random-greedy searches are used. They run in `cotengrust`, some
thirty times as fast as in Python: for three nonlinear layers, with thousands of products, the
search takes seconds instead of a minute.

A caller may search with an optimiser of cotengra instead (`searched_by`). Its path is then the only
route of a product, and nothing that it finds is kept for others.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.engine.search.progress import count_search
from tnsim.errors import ModelError
from tnsim.sessions import session_cache

Labels = tuple[int, ...]


Path = tuple[tuple[int, int], ...]
"""A contraction path in SSA form.

Each step names two tensors by number: operands first, then the results of earlier steps.
"""


OPTIMAL_UP_TO = 10
"""Largest number of tensors for which optimal paths are searched; longer products get
random-greedy paths, of which the best are improved."""


KEPT = 8
"""Most routes that a search returns."""


SEEDS = 16
"""Number of random-greedy searches. Each search gives its best path, so many short searches give
more distinct paths than a few long searches."""


TRIALS = 8
"""Number of paths that a random-greedy search tries."""


class Route(NamedTuple):
    """A way to contract a single product.

    Args:
        path: Pairwise contractions.
        chunks: Labels of the loop that keeps intermediates small; empty for no loop.
        multiplications: Scalar multiplications of all turns of the loop.
        price: Price of all turns of the loop, see `Cost.price`.
        largest: Elements of the largest intermediate in a turn.
    """

    path: Path
    chunks: Labels
    multiplications: int
    price: int
    largest: int


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
        ...     [route.path for route in routes(*chain, effort=2, large=10**6)]
        [((0, 1), (2, 3))]
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


def foreign() -> str | None:
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
        except Exception as error:  # whatever an optimiser of the caller raises
            raise ModelError(
                f"optimize={search.optimizer!r} finds no path: {error}; give the name of a method "
                'of cotengra, such as "greedy", or an optimiser'
            ) from error
        if [set(labels) for labels in tree.inputs] != [set(labels) for labels in letters]:
            raise ModelError(
                f"optimize={search.optimizer!r} gives the path of another product: an optimiser "
                "for a single contraction; give a cotengra.ReusableHyperOptimizer"
            )
        search.found[key] = _pair_steps(tree.get_ssa_path(), product.count)
    return search.found[key]


def routes(
    inputs: tuple[Labels, ...],
    output: Labels,
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
    many: bool = False,
) -> tuple[Route, ...]:
    """The distinct routes of a product, the cheapest first.

    Args:
        inputs: Labels of every operand. An operand has a label once, and every label is also on
            another operand or in the output.
        output: Labels of the result.
        items: Pairs (label, size) of all labels.
        effort: Effort of the search. 0 gives a greedy path. 1 adds random-greedy paths, and optimal
            paths of products of up to `OPTIMAL_UP_TO` tensors. 2 adds, for longer products, the two
            best of these paths with their subtrees improved.
        large: Elements beyond which intermediates are chunked where chunks can make them smaller.
        many: Whether the product is among many, which take long to search. Then products of more
            than `OPTIMAL_UP_TO` tensors and of the same network are searched once. Otherwise each
            is searched as it is written, which gives more distinct routes.

    Returns:
        At most `KEPT` routes.

    Example:
        A chain of matrices of shapes (2, 9), (9, 9) and (9, 9) is contracted from its short end.

        >>> best, *_ = routes(((0, 1), (1, 2), (2, 3)), (0, 3), ((0, 2), (1, 9), (2, 9), (3, 9)),
        ...                   effort=1, large=10**6)
        >>> best.path, best.multiplications
        (((0, 1), (2, 3)), 324)
    """
    search = _SEARCH.get()
    if search is None or len(inputs) < 3:
        return _searched(inputs, output, items, effort, large, many)
    path = _by_optimizer(search, inputs, output, items)
    return (_route_along(LabelledProduct(inputs, output, dict(items)), output, path, large),)


@session_cache
def _searched(
    inputs: tuple[Labels, ...],
    output: Labels,
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
    many: bool,
) -> tuple[Route, ...]:
    """The routes of a product by the searches of this module, see `routes`."""
    count_search()
    if effort == 0 or len(inputs) <= OPTIMAL_UP_TO or not many:
        return _routes_of(inputs, output, items, effort, large)
    normal = _normal_form(inputs, output, items)
    routes_found = _routes_of(normal.inputs, normal.output, normal.items, effort, large)
    # Among routes of equal price the first operands as written go first, so that products that
    # are written alike are contracted alike and share more.
    restored = map(normal.restored, routes_found)
    return tuple(sorted(restored, key=lambda route: (route.price, route.path)))


@session_cache
def _routes_of(
    inputs: tuple[Labels, ...],
    output: Labels,
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
) -> tuple[Route, ...]:
    """The routes of a product as it is written, see `routes`."""
    product = LabelledProduct(inputs, output, dict(items))
    if len(inputs) < 3:
        paths: Sequence[Path] = [((0, 1),)] if len(inputs) == 2 else [()]
    elif effort == 0:
        paths = [_greedy_path(product)]
    else:
        paths = _sampled_paths(inputs, output, items)
        if len(inputs) > OPTIMAL_UP_TO and effort == 2:
            improved = [_reconfigured_path(product, path) for path in _two_cheapest(product, paths)]
            paths = (*paths, *improved)
    distinct = list(dict.fromkeys(paths))
    if len(distinct) > KEPT:
        # Chunking takes longer than searching, so only the cheapest paths without it are chunked.
        prices = {path: product.cost(path).price for path in distinct}
        distinct = sorted(distinct, key=prices.__getitem__)[: 2 * KEPT]
    candidates = [_route_along(product, output, path, large) for path in distinct]
    return tuple(sorted(candidates, key=lambda route: (route.price, route.path))[:KEPT])


def greedy_work(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> int:
    """The multiplications of a product along its greedy path, see `routes` for the arguments."""
    product = LabelledProduct(inputs, output, dict(items))
    return product.cost(_greedy_path(product)).multiplications if len(inputs) > 1 else 0


def least_work(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...], limit: float
) -> int:
    """The multiplications of the dearest contraction of a product along the best path for it.

    Where a path is within the limit, the number is within the limit, but need not be the least.

    Args:
        inputs, output, items: The product, see `routes`.
        limit: Multiplications that are allowed.
    """
    if len(inputs) < 3:
        return greedy_work(inputs, output, items)
    normal = _normal_form(inputs, output, items)
    product = LabelledProduct(normal.inputs, normal.output, dict(normal.items))
    paths = _sampled_paths(normal.inputs, normal.output, normal.items)
    least = min(map(product.dearest, paths))
    if least > limit and len(inputs) > OPTIMAL_UP_TO:
        for path in _two_cheapest(product, paths):
            least = min(least, product.dearest(_reconfigured_path(product, path)))
    return least


def _two_cheapest(product: LabelledProduct, paths: Sequence[Path]) -> list[Path]:
    """The two cheapest paths of a product, which are worth improving."""
    return sorted(paths, key=lambda path: product.cost(path).price)[:2]


class _NormalForm(NamedTuple):
    """A product with its operands and labels in an order that its structure gives.

    Args:
        inputs: Labels of every operand.
        output: Labels of the result.
        items: Pairs (label, size) of all labels.
        operands: Position in the product as it was written, for every operand.
        labels: Label in the product as it was written, for every label.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    items: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    labels: Labels

    def restored(self, route: Route) -> Route:
        """The route for the product as it was written."""
        # A path names intermediates by the numbers behind the operands, in order of steps, whatever
        # the order of the operands is.
        numbers = (*self.operands, *range(len(self.operands), 2 * len(self.operands)))
        path = tuple([(numbers[one], numbers[two]) for one, two in route.path])
        return route._replace(path=path, chunks=tuple(self.labels[x] for x in route.chunks))


def _normal_form(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> _NormalForm:
    """The normal form of a product, which products of the same network share.

    Diagrams that differ in an exchange of equal legs, or of bra and ket, are the same network in
    another order: two of five products of three nonlinear layers. Labels are told apart by their
    sizes and by the operands that have them, as in `search/canonical`. Where labels remain alike,
    the first is singled out. Such labels nearly always are exchanged by a symmetry; otherwise a
    network has two normal forms, and is searched twice.
    """
    on: dict[int, list[int]] = {label: [] for label, _ in items}
    for number, labels in enumerate(inputs):
        for label in labels:
            on[label].append(number)

    def refined(colours: dict[int, int]) -> dict[int, int]:
        """The colours after splitting classes by the operands of labels until no class splits."""
        count = len(set(colours.values()))
        while count < len(colours):
            seen = [sorted([colours[label] for label in labels]) for labels in inputs]
            signatures = {
                label: (colour, sorted([seen[number] for number in on[label]]))
                for label, colour in colours.items()
            }
            # Labels of equal signatures get the position of the first of them as their colour, so
            # that colours are the same whatever the names of labels are.
            order = sorted(signatures, key=signatures.__getitem__)
            colours, last = {}, None
            for place, label in enumerate(order):
                if signatures[label] != last:
                    colour, last = place, signatures[label]
                colours[label] = colour
            if len(set(colours.values())) == count:
                break
            count = len(set(colours.values()))
        return colours

    # No exchange maps a label to a label of another size, nor an open label to a summed one.
    first = {label: 2 * size + (label in output) for label, size in items}
    colours = refined(first)
    while len(set(colours.values())) < len(colours):
        members: dict[int, list[int]] = {}
        for label in sorted(colours):
            members.setdefault(colours[label], []).append(label)
        alike = min(colour for colour, labels in members.items() if len(labels) > 1)
        # Doubled colours leave room below each: the label that is singled out takes the place under
        # its class.
        doubled = {label: 2 * colour for label, colour in colours.items()}
        doubled[members[alike][0]] -= 1
        colours = refined(doubled)
    order = sorted(colours, key=colours.__getitem__)
    number = {label: place for place, label in enumerate(order)}
    # Operands with labels sorted by number: networks that differ in names and order alone are now
    # equal.
    written = [tuple(sorted([number[label] for label in labels])) for labels in inputs]
    operands = sorted(range(len(inputs)), key=written.__getitem__)
    sizes = dict(items)
    return _NormalForm(
        inputs=tuple(written[operand] for operand in operands),
        output=tuple(sorted([number[label] for label in output])),
        items=tuple((place, sizes[label]) for place, label in enumerate(order)),
        operands=tuple(operands),
        labels=tuple(order),
    )


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
        >>> product.cost(((0, 1),), chunks=(1,))
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

    def cost(self, path: Path, chunks: Labels = ()) -> Cost:
        """The cost of the product along a path, or of a turn where `chunks` are looped over."""
        return self.cost_of(self.steps(path), chunks)

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

    def dearest(self, path: Path) -> int:
        """The multiplications of the dearest contraction along a path, without chunks."""
        return max((self._mask_size(both) for both, _ in self.steps(path)), default=0)

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


def _greedy_path(product: LabelledProduct) -> Path:
    """The greedy path of a product."""
    import cotengrust

    return _pair_steps(cotengrust.optimize_greedy(*product.spelled, use_ssa=True), product.count)


@session_cache
def _sampled_paths(
    inputs: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> tuple[Path, ...]:
    """The distinct paths of a product by all searches but reconfiguration, the greedy path first.

    Args:
        inputs: Labels of every operand.
        output: Labels of the result.
        items: Pairs (label, size) of all labels.
    """
    import cotengrust

    product = LabelledProduct(inputs, output, dict(items))
    count = product.count
    letters, out, size = product.spelled
    paths = [_greedy_path(product)]
    if count <= OPTIMAL_UP_TO:
        best = cotengrust.optimize_optimal(letters, out, size, use_ssa=True)
        paths.append(_pair_steps(best, count))
        # cotengra returns the first of several optimal paths; reversed operands give another path.
        mirrored = cotengrust.optimize_optimal(letters[::-1], out, size, use_ssa=True)
        paths.append(tuple(_mirrored_path(_pair_steps(mirrored, count), count)))
    for seed in range(SEEDS):
        path, _ = cotengrust.optimize_random_greedy_track_flops(
            letters, out, size, ntrials=TRIALS, seed=seed, use_ssa=True
        )
        paths.append(_pair_steps(path, count))
    return tuple(dict.fromkeys(paths))


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
    return Route(path, chunks, multiplications, price, largest)


def _reconfigured_path(product: LabelledProduct, path: Path) -> Path:
    """The path with its subtrees of up to eight tensors replaced by optimal subtrees."""
    import cotengra

    tree = cotengra.ContractionTree.from_path(*product.spelled, ssa_path=path)
    tree.subtree_reconfigure_(subtree_size=8, minimize="combo")
    return _pair_steps(tree.get_ssa_path(), product.count)


def _letter(label: int) -> str:
    return chr(0x100 + label)  # there are more labels than ASCII letters


def _pair_steps(path: Sequence[Sequence[int]], count: int) -> Path:
    """The path without the steps of a single tensor, which cotengra's simplifications insert."""
    number = list(range(count))  # new number of every tensor, after the steps left out
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


def _mirrored_path(path: Path, count: int) -> Iterator[tuple[int, int]]:
    """The path for operands in order, from a path for the operands in reverse order."""
    for one, two in path:
        yield (
            count - 1 - one if one < count else one,
            count - 1 - two if two < count else two,
        )
