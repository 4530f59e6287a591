"""Models of any depth as vectors of the coefficients of their polynomials.

A model is a polynomial of its input. Under a Gaussian `x = m + L z`, with L of as many columns as
the covariance has rank, z is standard normal. A polynomial of z is a *series* of symmetric tensors,
f = sum_n <a_n, He_n(z)> with `He_n` the Hermite polynomials of order n, and `E[f g] = sum_n n!
<a_n, b_n>`. Features are `sqrt(n! multiplicity) a_n[I]`, a feature for each sorted index I. With
two bilinear layers these are about d^4 / 24 numbers an output.

*Products of series.* Layers multiply series exactly. For a product of two polynomials, Wick's
theorem pairs r coordinates of a tensor with r of the other in all ways:

    <a, He_p> <b, He_q> = sum_r r! C(p, r) C(q, r) <Sym(a . b), He_(p + q - 2r)>,

where `a . b` sums over r shared coordinates. Nothing is subtracted, so no digit is lost: for two
quadratic forms P and Q these are `Sym(P (x) Q)`, `4 Sym(P Q)` and `2 tr(P Q)`. Terms of r = 0 alone
are the product of monomials, which have symmetric tensors for coefficients too.

A symmetric tensor is stored once per sorted index (`problems.packed`). Its entry at I is
the mean of `(a . b)` over all ways to split I into p - r and q - r coordinates: matrix products
make all entries of `a . b`, of which as many are read as there are ways. Blocks of I by its largest
coordinate bound the size of these matrices and multiply nothing twice: either part of I has that
coordinate. Linear layers are merged into the multiplying layer before them first.

*Symmetric tensors.* `Symmetric` compares the symmetrised tensors of two models of equal degree N,
lifted by a constant coordinate. The monomials of order n < N appear C(N, n) times, once for every
choice of places of the constant, and share their coefficient: features are `sqrt(multiplicity /
C(N, n)) c_n[I]`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.metrics.input_moments import GaussianMoments, mean_and_root
from tnsim.metrics.metric import Gaussian, Symmetric, layer_by_layer
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.model import Model
from tnsim.names import DOWN, SKIP, UNIT, WEIGHT
from tnsim.problems import packed
from tnsim.problems.layer_kinds import Kinds, kinds, need_constant, nonlinear
from tnsim.problems.layer_tensors import arrays
from tnsim.sessions import session_cache

Series: TypeAlias = dict[int, Any]
"""Coefficients (units, numbers) of several polynomials by order; missing orders are zero."""
_MATRIX = 2**22  # most elements of a matrix from which a block is read
_SMALL = 2**22  # elements of a matrix so small that several models are made together
_TOGETHER = 4  # small models that are made together
_LONGEST = 2**31  # most numbers of a model's vector, 16 GiB in float64
_HEAPS = 1.4  # space that heaps take, over that of the arrays of a part (`benchmarks/memory.py`)
_MULTIPLIED, _READ, _PLACED = 1e10, 2e8, 4e7
"""Scalar multiplications, entries of matrices that are read, and positions of entries that are
found, in a second."""
_WAYS = 2**8  # most ways to split an index; reading more takes longer than any product


class IndexBlock(NamedTuple):
    """The indices over `width` coordinates with a largest coordinate within [start, stop)."""

    width: int
    start: int
    stop: int

    def of(self, order: int) -> slice:
        """The slice of these indices in a tensor of this order."""
        return packed.block_slice(self.start, self.stop, order)

    def length(self, order: int) -> int:
        """Number of these indices in a tensor of this order."""
        within = self.of(order)
        return within.stop - within.start


def whole(width: int) -> IndexBlock:
    """The block of all indices.

    Example:
        >>> whole(3).length(2)
        6
    """
    return IndexBlock(width, 0, width)


class HermiteTerm(NamedTuple):
    """A way to multiply two tensors: their orders and their number of shared coordinates."""

    left: int
    right: int
    shared: int

    @property
    def free(self) -> tuple[int, int]:
        """Numbers of coordinates of either tensor that are not shared."""
        return self.left - self.shared, self.right - self.shared

    @property
    def weight(self) -> float:
        """Number of ways to share, divided by the ways to split the coordinates of the product."""
        ways = math.comb(sum(self.free), self.free[0])
        choices = math.comb(self.left, self.shared) * math.comb(self.right, self.shared)
        # He_p He_q = sum_s s! C(p, s) C(q, s) He_(p+q-2s) in one coordinate. Entries are stored
        # once per sorted index, and `packed.splits` adds up all C(p+q-2s, p-s) ways to split an
        # index, so the product is a mean over these ways.
        return math.factorial(self.shared) * choices / ways


def terms(left: Collection[int], right: Collection[int], pairs: bool) -> Iterator[HermiteTerm]:
    """All terms of a product of series of these orders; without `pairs` nothing is shared.

    Example:
        Two linear maps without constants: a quadratic form and its trace.

        >>> [term.free for term in terms([1], [1], True)]
        [(1, 1), (0, 0)]
    """
    for p, q in itertools.product(left, right):
        for shared in range(min(p, q) + 1 if pairs else 1):
            yield HermiteTerm(p, q, shared)


def mapped(weight: Any, series: Series) -> Series:
    """The linear map of several polynomials by a matrix."""
    return {order: weight @ entries for order, entries in series.items()}


def plus(first: Series, second: Series) -> Series:
    """The sum of two series, unit by unit."""
    missing = {order: entries for order, entries in second.items() if order not in first}
    both = {n: x + second[n] if n in second else x for n, x in first.items()}
    return both | missing


def within(series: Series, block: IndexBlock) -> Series:
    """The numbers of a series in a block."""
    return {order: entries[:, block.of(order)] for order, entries in series.items()}


def product(left: Series, right: Series, down: Any, block: IndexBlock, pairs: bool) -> Series:
    """The numbers of `sum_k down[o, k] left_k right_k` in a block.

    Args:
        left, right: Series of k polynomials each.
        down: Matrix (out, k), or None for the k products themselves.
        block: Block of the numbers of the product.
        pairs: Whether coordinates are shared: for Hermite polynomials, not for monomials.

    Returns:
        Series of the products, (out, numbers) for every order.

    Example:
        The square of `He_1(z) = z` is `He_2 + 1`.

        >>> z = {1: np.ones((1, 1))}
        >>> product(z, z, np.ones((1, 1)), whole(1), True)
        {2: array([[1.]]), 0: array([[1.]])}

    Source:
        The product formula of Wiener chaos, e.g. Nualart, The Malliavin Calculus, prop. 1.1.3.
    """
    matrices: dict[tuple[int, int], Any] = {}
    for term in terms(left, right, pairs):
        if sum(term.free) or not block.start:  # order 0 is one number, which is in the first block
            # Terms of different orders with the same numbers of free coordinates are read off
            # alike, so their matrices are added first and read once.
            matrix = _matrix(left[term.left], right[term.right], down, term, block)
            if term.free in matrices:
                matrix = matrix + matrices[term.free]
            matrices[term.free] = matrix
    product_terms: Series = {}
    # Every sorted index of the product is read off at all its splits, and the entries are added.
    for rows, columns in list(matrices):
        # In the order in which it is read, else every way would copy it.
        matrix = np.ascontiguousarray(matrices.pop((rows, columns)))
        first, *others = packed.splits(rows, columns, block.start, block.stop)
        read = np.take(matrix, first, axis=0)
        for way in others:
            read = read + np.take(matrix, way, axis=0)
        product_terms = plus(product_terms, {rows + columns: read.T})
    return product_terms


class ProductSizes(NamedTuple):
    """The orders and sizes of a `product`, on which its costs depend.

    Args:
        left, right: Orders of both series.
        k: Number of polynomials.
        out: Number of rows of the matrix of the products; None for the products themselves.
        pairs: Whether coordinates are shared.

    Example:
        >>> sizes = ProductSizes((1,), (1,), k=5, out=2, pairs=True)
        >>> sizes.multiplications(3), sizes.read(3), sizes.peak(whole(3))
        (115, 26, 63)
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    k: int
    out: int | None
    pairs: bool

    @property
    def orders(self) -> tuple[int, ...]:
        """Orders of the product."""
        return tuple(sorted({sum(term.free) for term in self._terms}))

    @property
    def _terms(self) -> list[HermiteTerm]:
        return list(terms(self.left, self.right, self.pairs))

    def multiplications(self, width: int) -> int:
        """Number of scalar multiplications, all blocks together."""
        number = 0
        for term in self._terms:
            rows, columns = (packed.count(width, order) for order in term.free)
            shared = packed.count(width, term.shared) if term.shared else 0
            # Each of k products is an outer product of free indices, summed over shared ones, and
            # every entry is then multiplied with a column of `down`.
            number += self.k * rows * columns * (shared + (self.out or 1))
        return number

    def read(self, width: int) -> int:
        """Number of entries of matrices that are read, all blocks together."""
        out = self.k if self.out is None else self.out
        ways = (
            math.comb(rows + columns, rows) * packed.count(width, rows + columns)
            for rows, columns in {term.free for term in self._terms}
        )
        return out * sum(ways)

    def peak(self, block: IndexBlock) -> int:
        """Largest number of elements alive at once in `product`, its result among them."""
        out = self.k if self.out is None else self.out
        matrices: dict[tuple[int, int], int] = {}
        peak = 0
        for term in self._terms:
            pieces = [self._piece(term, block, IndexBlock(block.width, 0, block.stop))]
            if block.start:
                below = IndexBlock(block.width, 0, block.start)
                pieces.append(self._piece(term, below, block))
            held, entries = sum(matrices.values()), sum(size for _, size in pieces)
            # Two pieces are put together, and matrices of equal free indices are added.
            copies = 2 * entries * (len(pieces) > 1 or term.free in matrices)
            peak = max(peak, held + copies, held + max(most for most, _ in pieces))
            peak = max(peak, held + pieces[0][1] + pieces[-1][0] * (len(pieces) > 1))
            matrices[term.free] = entries
        held = sum(matrices.values())
        given: Counter[int] = Counter()
        before = 0  # the matrix that was read before, which is given up when it is replaced
        for free, entries in matrices.items():
            order, ways = sum(free), math.comb(sum(free), free[0])
            length = block.length(order)
            # Entries read so far, those of one more way and their sum; NumPy reads by positions
            # of 64 bits.
            read = (3 if ways > 2 else min(ways, 2)) * length * out + length
            copied = before + (entries if self.out is None else 0)
            peak = max(peak, held + max(copied, read, 2 * given[order]))
            given[order] = length * out
            held += length * out - entries
            before = entries
        return peak

    def _piece(self, term: HermiteTerm, rows: IndexBlock, columns: IndexBlock) -> tuple[int, int]:
        """Most elements alive while a piece of a matrix is made, and its number of entries."""
        first, second = (
            self.k * side.length(order)
            for side, order in zip((rows, columns), term.free, strict=True)
        )
        products = first * columns.length(term.free[1])  # of each of the k polynomials
        if self.out is not None and not term.shared:
            entries = products // self.k * self.out
            return first * self.out + max(first, entries), entries
        entries = products if self.out is None else products // self.k * self.out
        shared = packed.count(rows.width, term.shared)
        first, second = first * shared, second * shared * (term.shared > 0)
        made = products + entries * (self.out is not None)
        return first + max(first, 2 * second, second + made), entries


def _matrix(left: Any, right: Any, down: Any, term: HermiteTerm, block: IndexBlock) -> Any:
    """`weight * (a . b)` summed over k as `packed.splits` reads it, (entries, out)."""
    # An index of the block is split in a part of a, the row, and a part of b, the column. Its
    # largest coordinate, at least `start`, is in one of them: in the row, with any column below
    # `stop`; or in the column alone, with a row below `start`.
    width, start, stop = block
    pieces = [_matrix_piece(left, right, down, term, block, IndexBlock(width, 0, stop))]
    if start:
        pieces.append(_matrix_piece(left, right, down, term, IndexBlock(width, 0, start), block))
    return np.concatenate(pieces) if start else pieces[0]


def _matrix_piece(
    left: Any, right: Any, down: Any, term: HermiteTerm, rows: IndexBlock, columns: IndexBlock
) -> Any:
    """Some rows and columns of the matrix of `_matrix`, (columns * rows, out).

    Without shared coordinates `down` is multiplied into a single factor, and the sum over k is a
    matrix product; with them `down` comes last, since many entries of each k are summed before.
    """
    first = term.weight * _unpacked_tensors(left, term.free[0], term.shared, rows)
    second = _unpacked_tensors(right, term.free[1], term.shared, columns)
    k = len(first)
    # A sorted shared index stands for all its permutations, which have equal entries in both
    # tensors: the sum over all of them is the sum over sorted ones times their multiplicity.
    if term.shared:
        multiple = packed.multiplicities(rows.width, term.shared)
        second = second * multiple
    elif down is not None:
        first = first * down.T[:, None, :]
        return (second[:, :, 0].T @ first.reshape(k, -1)).reshape(-1, len(down))
    # The size is not left to `reshape`, which finds none for products of no polynomials.
    products = (second @ first.swapaxes(1, 2)).reshape(k, second.shape[1] * first.shape[1]).T
    return products if down is None else products @ down.T


def _unpacked_tensors(entries: Any, own: int, shared: int, block: IndexBlock) -> Any:
    """Tensors (k, numbers) as (k, indices of the block, shared indices)."""
    if not shared:
        return entries[:, block.of(own), None]
    at = packed.joined(own, shared, *block)
    return np.take(entries, at, axis=1)


class MergedLayer(NamedTuple):
    """A layer `down (leg_1 x * leg_2 x * ...) + copy x`; `copy` is None without a skip.

    `down` and `copy` include the linear layers that follow the layer.
    """

    legs: list[Any]
    down: Any
    copy: Any


def merged_layers(layers: list[dict[str, Any]]) -> tuple[Any, list[MergedLayer]]:
    """The linear map before the first multiplying layer, and the multiplying layers.

    Args:
        layers: Arrays of every layer by role, from `problems.layer_tensors.arrays`.

    Returns:
        Matrix of the linear map, None without a map, and the layers with linear layers merged in.

    Example:
        >>> square = {"LEFT": np.eye(1), "RIGHT": np.eye(1), "DOWN": np.eye(1)}
        >>> before, (layer,) = merged_layers([square, {"WEIGHT": np.array([[3.0]])}])
        >>> before is None, layer.down
        (True, array([[3.]]))
    """
    before, multiplying = None, []
    # Linear layers behind a product are multiplied into its output matrix and into its skip.
    for roles in layers:
        if WEIGHT not in roles:
            multiplying.append(_multiplying_layer(roles))
        elif multiplying:
            last, weight = multiplying[-1], roles[WEIGHT]
            copy = None if last.copy is None else weight @ last.copy
            multiplying[-1] = MergedLayer(last.legs, weight @ last.down, copy)
        else:
            # Linear maps in front of the first product act on the input, where they are smallest.
            before = roles[WEIGHT] if before is None else roles[WEIGHT] @ before
    return before, multiplying


def _multiplying_layer(roles: dict[str, Any]) -> MergedLayer:
    """A multiplying layer from its arrays by role, without linear layers after it."""
    legs = [array for role, array in sorted(roles.items()) if role not in (DOWN, SKIP, UNIT)]
    if SKIP not in roles:
        return MergedLayer(legs, roles[DOWN], None)
    skip = roles[SKIP]  # the factor of the input, at the constant's place
    return MergedLayer(legs, roles[DOWN], skip[0] * np.eye(len(skip), dtype=skip.dtype))


class PolynomialSpace(NamedTuple):
    """The coefficients of the polynomials of some models, or a block of them. Hashable.

    Args:
        d_in, d_out: Numbers of inputs and outputs of the models.
        degree: Largest degree of the polynomials.
        orders: Orders of the coefficients.
        lifted: Whether there are constants, so that all orders may occur.
        gaussian: Whether the coefficients are of Hermite polynomials instead of monomials.
        block: Block of the coefficients, by the largest coordinate of their index.
    """

    d_in: int
    d_out: int
    degree: int
    orders: tuple[int, ...]
    lifted: bool
    gaussian: bool
    block: IndexBlock

    route = "features"
    is_sparse = False

    @property
    def length(self) -> int:
        """Number of coefficients per output."""
        return sum(self.block.length(order) for order in self.orders)

    @property
    def tells_mean(self) -> bool:
        """Whether the first feature is the mean: the coefficient of order 0 of a series."""
        return self.gaussian and self.orders[0] == 0 and self.block.start == 0

    @property
    @session_cache
    def parts(self) -> tuple[PolynomialSpace, ...]:
        """Blocks that are made in turn; dot products are sums over the blocks."""
        width, start, parts = self.block.width, 0, []
        for stop in range(1, width + 1):
            # A block ends where one coordinate more would make its matrix too large.
            if stop == width or self._matrix(start, stop + 1) > _MATRIX:
                parts.append(self._replace(block=IndexBlock(width, start, stop)))
                start = stop
        return tuple(parts)

    def _matrix(self, start: int, stop: int) -> int:
        """Elements of the largest matrix from which a block is read, see `packed.splits`."""
        # The largest matrix has the two halves of an index as rows and columns: C(w + n - 1, n)
        # sorted indices of n coordinates below w.
        half = math.ceil(self.degree / 2)
        halves = half, self.degree - half
        below, inner = (math.prod(packed.count(w, n) for n in halves) for w in (stop, start))
        return self.d_out * (below - inner)

    @session_cache
    def multiplications(self, layers: Kinds) -> int:
        """Number of scalar multiplications for the features of a single model."""
        width, lifted = self.block.width, self.lifted
        steps = [kind for kind in layers if kind.down is not None]
        if not steps:
            # Matrices of all layers times the coordinates, from the input up.
            return sum(kind.d_out * kind.d_in for kind in layers) * (width + lifted)
        number = 0
        for kind, products in zip(steps, self._products(layers), strict=True):
            # Legs are linear maps of all coefficients; then n - 1 products, of which the last is
            # mapped to the outputs at once.
            entries = sum(packed.count(width, order) for order in products[0].right)
            number += kind.order * (kind.rank + lifted) * kind.d_in * entries
            number += sum(sizes.multiplications(width) for sizes in products)
        return number

    @session_cache
    def _products(self, layers: Kinds) -> tuple[tuple[ProductSizes, ...], ...]:
        """The products of series of every multiplying layer, from the input up."""
        steps = [kind for kind in layers if kind.down is not None]
        orders = (0, 1) if self.lifted else (1,)
        found = []
        for kind in steps:
            out = self.d_out if kind is steps[-1] else kind.d_out + self.lifted
            read, products = orders, []
            for leg in range(1, kind.order):
                mapped = out if leg == kind.order - 1 else None
                # A lifted layer has a hidden unit more, which computes the constant.
                rank = kind.rank + self.lifted
                products.append(ProductSizes(read, orders, rank, mapped, self.gaussian))
                read = products[-1].orders
            found.append(tuple(products))
            orders = read
        return tuple(found)

    def seconds(self, models: Collection[Kinds]) -> float:
        """See `features.FeatureSpace`."""
        width, places, seconds = self.block.width, 0, 0.0
        for layers, count in Counter(models).items():
            sizes = list(itertools.chain(*self._products(layers)))
            read = sum(each.read(width) for each in sizes)
            seconds += count * making_seconds(self.multiplications(layers), read)
            # Positions are the same for all polynomials, and are found once.
            alone = (each._replace(out=1).read(width) for each in sizes)
            places = max(places, max(alone, default=0))
        return seconds + places / _PLACED

    @session_cache
    def in_flight(self, layers: Kinds, models: int) -> int:
        """Number of elements of intermediates while some models' features are made, by blocks."""
        width = self.block.width
        # Hidden layers need all coefficients, the last product those of a block.
        block = max(self.parts, key=lambda part: self._matrix(*part.block[1:])).block
        blocks = itertools.chain(
            itertools.repeat(whole(width), sum(map(len, self._products(layers))) - 1), [block]
        )
        state = peak = (layers[0].d_in + self.lifted) * (width + self.lifted)
        for products in self._products(layers):
            entries = sum(packed.count(width, order) for order in products[0].right)
            factors = state + (len(products) + 1) * products[0].k * entries
            state = 0  # the product of the first legs
            for sizes, own in zip(products, blocks, strict=False):
                peak = max(peak, factors + state + sizes.peak(own))
                out = sizes.k if sizes.out is None else sizes.out
                state = out * sum(own.length(order) for order in sizes.orders)
        longest = max(part.length for part in self.parts)
        # A vector, its orders times their norms, and these one after another.
        peak = max(peak, 3 * longest * self.d_out)
        # Tables of 32-bit integers say where all splits of an index stand, and of floats how many
        # entries an index stands for. A table is made of the coordinates of the indices and of
        # what each adds to a position; every thread may make it.
        half = math.ceil(self.degree / 2)
        ways = math.comb(self.degree, half)
        tables = (ways // 2 + 1) * sum(packed.count(width, order) for order in self.orders)
        making = (self.degree + half * (self.degree - half + 1) // 2 + 2 + ways // 2) * longest
        # Heaps keep space that a part gave back, in which arrays of the next one may not fit.
        kept = _HEAPS if len(self.parts) > 1 else 1.0
        return tables + math.ceil(min(models, self.at_once) * kept * (peak + making))

    @property
    def at_once(self) -> int:
        """Number of models that are made together: several where each is small."""
        return _TOGETHER if self._matrix(0, self.block.width) <= _SMALL else 2

    def inputs(self, metric: Metric) -> Series:
        """The input, lifted or not, as polynomials of degree 1 in the space's coordinates."""
        mean, root = np.zeros(self.d_in), np.eye(self.d_in)
        if self.gaussian:
            # m and L of x = m + L z, with z standard normal and L of full column rank.
            mean, root = mean_and_root(metric, self.d_in)
            root = np.diag(root) if root.ndim == 1 else root
            root = root[:, root.any(axis=0)]
        if not self.lifted:
            return {1: root}
        # Row 0 is the constant coordinate 1, with no linear part.
        constant = np.concatenate([[1.0], mean])[:, None]
        root = np.concatenate([np.zeros((1, root.shape[1])), root])
        return {0: constant, 1: root}

    def vector(self, model: Model, inputs: Series) -> Float[Any, "out features"]:
        coefficients = _block_coefficients(model, inputs, self)
        parts = []
        for order in self.orders:
            norm = basis_norms(self.block, order, self.degree, self.gaussian)
            parts.append(coefficients.get(order, np.zeros((self.d_out, 1))) * norm)
        return np.concatenate(parts, axis=1)


def making_seconds(multiplications: int, read: int) -> float:
    """Expected seconds of products of series, by the entries that are read from their matrices."""
    return multiplications / _MULTIPLIED + read / _READ


def basis_norms(
    block: IndexBlock, order: int, degree: int, gaussian: bool
) -> Float[np.ndarray, " numbers"]:
    """Lengths of the basis: roots of the weights of squared coefficients.

    Args:
        block: Block of the indices, over all coordinates or over those of a receptive field.
        order: Order of the coefficients.
        degree: Largest degree of the polynomials.
        gaussian: Whether the coefficients are of Hermite polynomials instead of monomials.

    Example:
        E[He_2(z)^2] = 2, and z_1 z_2 stands for two entries of its tensor.

        >>> (basis_norms(whole(2), 2, degree=2, gaussian=True) ** 2).round(9).tolist()
        [2.0, 4.0, 2.0]
    """
    multiple = packed.multiplicities(block.stop, order, block.start)
    if gaussian:
        # E[He_n He_n] = n!, and each sorted index stands for `multiplicities` entries.
        return np.sqrt(math.factorial(order) * multiple)
    return np.sqrt(multiple / math.comb(degree, order))


def polynomials(
    models: Sequence[Kinds], metric: Metric, n_ctx: int | None
) -> PolynomialSpace | None:
    """The space that holds the polynomials of all models.

    Args:
        models: Kinds of the layers of every model.
        metric: Any metric.
        n_ctx: Number of positions of the input; None for vectors, the only inputs with a space.

    Returns:
        Space, or None where the metric compares no polynomials or their vectors are too long.
    """
    flat = [kind for layers in models for kind in layers]
    if n_ctx is not None or any(kind.mixes_positions for kind in flat):
        return None
    rule = rule_of(models, metric)
    if rule is None:
        return None
    degrees = degrees_of(models)
    degree = max(degrees)
    if degree > _WAYS or math.comb(degree, degree // 2) > _WAYS:
        return None  # the first test spares large binomials
    d_in, d_out = models[0][0].d_in, models[0][-1].d_out
    gaussian = rule is PairingRule.ISSERLIS
    lifted = need_constant(models)
    width = d_in
    if gaussian:
        mean, root = mean_and_root(metric, d_in)
        lifted = lifted or bool(mean.any())  # a mean is a constant too
        # No matrix is made where none was given, as of tokens.
        width = int(np.count_nonzero(root if root.ndim == 1 else root.any(axis=0)))
    orders = orders_of(degree, lifted, gaussian)
    block = whole(width)
    space = PolynomialSpace(d_in, d_out, degree, orders, lifted, gaussian, block)
    if width == 0 or space.length * space.d_out > _LONGEST:
        return None
    return space


def degrees_of(models: Sequence[Kinds]) -> set[int]:
    """The degrees of some polynomials, given by the kinds of their layers."""
    return {math.prod(kind.order for kind in layers) for layers in models}


def rule_of_one_layer(metric: Metric) -> PairingRule | None:
    """The rule by which a metric joins two nonlinear layers; None where it joins no legs."""
    return None if adds_up(metric) else layer_by_layer(metric, 1, (2, 2)).rule


def rule_of(models: Sequence[Kinds], metric: Metric) -> PairingRule | None:
    """The rule that says which coefficients have the metric's inner products; None for none.

    Symmetrised tensors of unequal degrees are not compared.

    Args:
        models: Kinds of the layers of every model.
        metric: Any metric.
    """
    depth = max(nonlinear(layers) for layers in models)
    if depth > 1:
        whole = {Gaussian: PairingRule.ISSERLIS, Symmetric: PairingRule.SYMMETRISED}
        rule = whole.get(type(metric))
    else:
        rule = rule_of_one_layer(metric)
    if rule is PairingRule.AS_WRITTEN:  # a single leg is symmetric as written
        rule = PairingRule.SYMMETRISED if depth == 0 else None
    comparable = rule is PairingRule.ISSERLIS or len(degrees_of(models)) == 1
    return rule if comparable else None


def orders_of(degree: int, lifted: bool, gaussian: bool) -> tuple[int, ...]:
    """Orders of the coefficients of the polynomials of some models.

    Without constants a polynomial is homogeneous, and its Hermite coefficients are of even or of
    odd order.

    Args:
        degree: Largest degree.
        lifted: Whether there are constants, so that all orders may occur.
        gaussian: Whether the coefficients are of Hermite polynomials instead of monomials.
    """
    if lifted:
        return tuple(range(degree + 1))
    return tuple(range(degree % 2, degree + 1, 2)) if gaussian else (degree,)


def _block_coefficients(model: Model, inputs: Series, space: PolynomialSpace) -> Series:
    """The coefficients of a model's outputs that are in the block of the space."""
    before, multiplying = merged_layers([arrays(layer, space.lifted) for layer in model.layers])
    state = inputs if before is None else mapped(before, inputs)
    outputs = slice(int(space.lifted), None)
    if not multiplying:
        own = {order: numbers[outputs] for order, numbers in state.items()}
        return within(own, space.block)
    *hidden, last = multiplying
    # Hidden layers need all coefficients, the last layer only those of the block.
    for layer in hidden:
        state = _applied_layer(layer, state, whole(space.block.width), space.gaussian)
    copy = None if last.copy is None else last.copy[outputs]
    last = MergedLayer(last.legs, last.down[outputs], copy)
    return _applied_layer(last, state, space.block, space.gaussian)


def _applied_layer(layer: MergedLayer, state: Series, block: IndexBlock, pairs: bool) -> Series:
    """The polynomials above a layer, from the polynomials below it."""
    # Products from left to right; the output matrix comes with the last product. A product of a
    # single leg is a linear layer, see `layer_kinds.core_of`.
    first, *between, last = (mapped(leg, state) for leg in layer.legs)
    everything = whole(block.width)
    for factor in between:
        first = product(first, factor, None, everything, pairs)
    result = product(first, last, layer.down, block, pairs)
    if layer.copy is None:
        return result
    carried = mapped(layer.copy, within(state, block))
    return plus(result, carried)


def mean_output(model: Model, metric: Metric) -> Float[np.ndarray, " out"] | None:
    """The mean of every output over the inputs, where one product at most is between them.

    A first comparison would take 1.2 to 1.4 times as long with the mean along a plan, of new models
    of the same form 1.1 times.

    Args:
        model: Model that is not traced, in units in which its squares are floats.
        metric: Any metric.

    Returns:
        Means; None where the metric has no Gaussian inputs, where several layers multiply, and for
        sequences, activations and sparse layers.

    Example:
        >>> import tnsim
        >>> square = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> mean_output(square, Gaussian())
        array([1., 1.])

    Source:
        Isserlis' theorem, for the product of the legs of a hidden unit.
    """
    layers = kinds(model)
    if (
        not isinstance(metric, GaussianMoments)
        or model.n_ctx is not None
        or sum(kind.down is not None for kind in layers) > 1
        or any(kind.mixes_positions or kind.activation or kind.sparse for kind in layers)
    ):
        return None
    mean, root = mean_and_root(metric, model.d_in)
    state = np.concatenate([[1.0], mean])
    below: list[Any] = []
    for layer in model.layers:
        roles = arrays(layer, True)
        if WEIGHT in roles:
            below.append(roles[WEIGHT])
            state = roles[WEIGHT] @ state
        else:
            state = _mean_of_products(_multiplying_layer(roles), below, state, root)
    return state[1:]


def _mean_of_products(layer: MergedLayer, below: Sequence[Any], state: Any, root: Any) -> Any:
    """The mean of a multiplying layer over linear maps of normal inputs.

    Args:
        layer: Layer, lifted.
        below: Linear maps below it, from the input up, lifted.
        state: Mean of the state that the layer reads.
        root: Root of the covariance of the inputs, or its diagonal.
    """
    means, spreads = [leg @ state for leg in layer.legs], []
    for spread in layer.legs:
        # From the legs down: products of the maps alone may be of the size of a vocabulary squared.
        for weight in reversed(below):
            spread = spread @ weight
        spreads.append(spread[:, 1:] * root if root.ndim == 1 else spread[:, 1:] @ root)

    @functools.cache
    def expected(places: tuple[int, ...]) -> Any:
        """E of the product of some legs of every hidden unit."""
        if not places:
            return 1.0
        first, *others = places
        value = means[first] * expected(tuple(others))
        for other in others:
            rest = tuple(place for place in others if place != other)
            value = value + (spreads[first] * spreads[other]).sum(1) * expected(rest)
        return value

    found = layer.down @ expected(tuple(range(len(means))))
    return found if layer.copy is None else found + layer.copy @ state
