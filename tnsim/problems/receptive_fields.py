"""Models of few inputs for every hidden unit, as vectors of the coefficients of their polynomials.

A unit of a convolution reads a patch of the image, and a unit of the next convolution reads the
patch of its patches. Its polynomial is one of these coordinates alone, the *receptive field* of the
unit: two layers of 3 x 3 see 25 pixels, with 20,475 coefficients of order four, where the image of
784 pixels has 1.6e10. A model that ends in linear layers is a sum over units,

    f_o = c_o + sum_v R[o, v] h_v(x_field(v)),

and so are its coefficients, as in `polynomial_space`: those of a field stand in the vector at the
places of their indices among all coordinates. Places that no field of any model reaches are left
out. Inputs are independent of one another, so that a coordinate of the input stays a coordinate of
the series; correlated inputs have no fields.

Units of the same field are a *group*. The series of a group depends on the weights below it alone.
Groups with equal weights below, as all those of a convolution within the image, share a series.
Fields keep the order of the coordinates, so the indices of a field with a largest coordinate in a
range are a slice, and vectors are made in parts by the largest coordinate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tnsim.metrics.input_moments import mean_of
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import MOST_DENSE, Columns, SparseMatrix, bias_name, digest_of, in_float64
from tnsim.models.layers import affine_maps, residual_rule
from tnsim.models.model import Model, kept_with
from tnsim.problems import packed
from tnsim.problems.layer_kinds import Kinds, LayerKind, core_of, kinds, need_constant
from tnsim.problems.layer_tensors import Affine, shapes
from tnsim.problems.polynomial_space import (
    ProductSizes,
    Series,
    basis_norms,
    degrees_of,
    making_seconds,
    mapped,
    orders_of,
    plus,
    product,
    rule_of,
    whole,
)
from tnsim.sessions import session, session_cache

_LARGEST = 2**26
"""Most coefficients of the units of a group, 512 MiB in float64."""
_PART = 2**24
"""Numbers of all fields and outputs together from which a part of a vector ends, 128 MiB."""
_KEPT = 2**27
"""Coefficients of units that are kept between the parts of a vector, 1 GiB."""
_LARGEST_DENSE = 2**22
"""Most entries of a dense matrix among sparse ones."""
_AT_ONCE = 2**24
"""Most elements of the products of some units."""
_SLOWER = 10
"""Ratio of the rates of matrix products and of the features of fields, which wait for memory."""
_GROUPING, _ADDED, _PLACED = 2.5e-4, 5e7, 1e7
"""Seconds for the weights below a group; coefficients that are added to a vector, and indices of
fields that are found once among all, in a second."""
_SORTED = 7.2  # arrays of positions that `numpy.unique` holds at once, and the positions
_PLACES = 2**62
"""Number of indices over all coordinates that an integer can count."""
_table = packed.kept(packed.sorted_indices)
"""The sorted indices over a field of some width, once in a session."""


class _Group(NamedTuple):
    """Some units of equal receptive fields.

    Args:
        level: Number of layers below the units.
        hidden: Whether the units are hidden units of the layer, or coordinates of the state below.
        units: Numbers of the units.
        field: Coordinates of the input that the units read, sorted.
    """

    level: int
    hidden: bool
    units: Int[np.ndarray, " units"]
    field: Int[np.ndarray, " field"]


class FieldSpace(NamedTuple):
    """The coefficients of the polynomials of models with receptive fields, or a part of them.

    Hashable.

    Args:
        d_in, d_out: Numbers of inputs and outputs of the models.
        degree: Largest degree of the polynomials.
        orders: Orders of the coefficients.
        gaussian: Whether the coefficients are of Hermite polynomials instead of monomials.
        layers: Kinds of the layers of the models that are compared, each once.
        start, stop: Range of the largest coordinate of an index.
    """

    d_in: int
    d_out: int
    degree: int
    orders: tuple[int, ...]
    gaussian: bool
    layers: tuple[Kinds, ...]
    start: int
    stop: int

    route = "receptive fields"
    is_sparse = True
    at_once = 1

    @property
    def length(self) -> int:
        """Most coefficients per output: those that fields have in common count for each of them."""
        counted = _by_largest(self.layers, self.orders)[self.start : self.stop].sum()
        return int(counted) // self.d_out

    @property
    def tells_mean(self) -> bool:
        """Whether the first feature is the mean: the coefficient of order 0 of a series."""
        return self.gaussian and self.orders[0] == 0 and self.start == 0

    @property
    def parts(self) -> tuple[FieldSpace, ...]:
        """Ranges that are made in turn; dot products are sums over the ranges."""
        ends = _part_ends(self)
        starts = self.start, *ends[:-1]
        return tuple(
            self._replace(start=start, stop=stop) for start, stop in zip(starts, ends, strict=True)
        )

    def multiplications(self, layers: Kinds) -> int:
        """Number of scalar multiplications for the vector of a model, no two groups being alike."""
        # Those of the readout, and of the products of every group.
        return sum(
            self.d_out * _entries(self, group) + self._making(layers, group)[0]
            for group in _groups(layers)
        )

    def _making(self, layers: Kinds, group: _Group) -> tuple[int, int]:
        """Multiplications of the products of a group, and entries of matrices that are read."""
        if not group.hidden:
            return 0, 0
        degree = math.prod(kind.order for kind in layers[: group.level])
        # Orders of the series of the state below the layer.
        below = orders_of(degree, 1 in self.orders and 0 in self.orders, self.gaussian)
        orders, width = below, len(group.field)
        multiplications = read = 0
        for _ in range(layers[group.level].order - 1):
            sizes = ProductSizes(orders, below, len(group.units), None, self.gaussian)
            multiplications += sizes.multiplications(width)
            read += sizes.read(width)
            orders = tuple(range(max(orders) + max(below) + 1))
        return multiplications, read

    def seconds(self, models: Collection[Kinds]) -> float:
        """See `features.FeatureSpace`. Groups of one pattern count once, as of a convolution."""
        seconds = 0.0
        for layers, count in Counter(models).items():
            groups = _groups(layers)
            patterns = {
                (group.level, len(group.units), (group.field - group.field[0]).tobytes()): group
                for group in groups
            }
            making = [self._making(layers, group) for group in patterns.values()]
            added = self.d_out * sum(_entries(self, group) // len(group.units) for group in groups)
            seconds += count * (
                len(groups) * _GROUPING
                + sum(making_seconds(*each) for each in making)
                + added / _ADDED
            )
        ends = sum(
            sum(packed.count(len(field), n) for n in self.orders) for field in _fields(self.layers)
        )
        return seconds + ends / _PLACED

    def in_flight(self, layers: Kinds, models: int) -> int:
        """Number of elements of intermediates while a part of a model's vector is made."""
        groups = _groups(layers)
        widest = max(_entries(self, group) for group in groups)
        distinct = sum(_entries(self, group) for group in groups)
        length = max(part.length for part in self.parts)
        of_one = min(distinct, _KEPT)
        # The series of all models wait for the next part, as far as a session keeps them.
        kept = max(of_one, int(min(models * of_one, session().belongings.limit / 8)))
        made = kept + 4 * widest + 3 * min(widest, _AT_ONCE)
        # Places are found by a sort of all positions, before any series is made. Then the vector is
        # made order by order, and put together.
        return max(math.ceil(_SORTED * length), made + length // 2 + 2 * self.d_out * length)

    def inputs(self, metric: Metric) -> tuple[Any, Any]:
        """Means and deviations of the inputs; monomials are those of the inputs as they are."""
        if not self.gaussian:
            return np.zeros(self.d_in), np.ones(self.d_in)
        moments = _independent(metric, self.d_in)
        assert moments is not None  # a space is made only where there are moments
        mean, variances = moments
        return mean, np.sqrt(variances)

    def vector(self, model: Model, inputs: tuple[Any, Any]) -> Float[np.ndarray, "out features"]:
        steps, readout = _steps(model)
        groups = _groups(kinds(model))
        places = _places(self)
        # All outputs of a feature stand together, as they are added to together.
        vector = {order: np.zeros((count, self.d_out)) for order, count in places.counts.items()}
        if not self.start and 0 in vector:
            vector[0][0] = readout.constant * basis_norms(whole(1), 0, self.degree, self.gaussian)
        made = _all_series(model, groups, steps, inputs, self)
        for group, key in zip(groups, made.keys, strict=True):
            columns = readout.of(group)
            if columns is None or not _meets(group.field, self):
                continue
            series = made.known.get(key)
            if series is None:
                series = _normalised(_local(group, steps, inputs), len(group.field), self)
            for order, entries in series.items():
                within = _indices_within(group.field, order, self)
                # The indices of a field are distinct, so none is added to twice.
                at = places.of_fields[group.field.tobytes(), order]
                vector[order][at] += entries[within] @ columns.T
        parts = [vector[order] for order in self.orders]
        return np.concatenate(parts).T


def receptive_fields(
    models: Sequence[Kinds], metric: Metric, n_ctx: int | None
) -> FieldSpace | None:
    """The space of the receptive fields of all models.

    Args:
        models: Kinds of the layers of every model.
        metric: Any metric.
        n_ctx: Number of positions of the input; None for vectors, the only inputs with a space.

    Returns:
        Space, or None where a model has no receptive fields, the metric has none, or vectors are
        too long.
    """
    distinct = tuple(dict.fromkeys(models))
    if n_ctx is not None or not all(map(_reads_fields, distinct)):
        return None
    rule = rule_of(distinct, metric)
    if rule is None:
        return None
    gaussian = rule is PairingRule.ISSERLIS
    d_in, d_out = distinct[0][0].d_in, distinct[0][-1].d_out
    constants = need_constant(distinct)
    if gaussian:
        moments = _independent(metric, d_in)
        if moments is None:
            return None
        constants = constants or bool(moments[0].any())
    degree = max(degrees_of(distinct))
    orders = orders_of(degree, constants, gaussian)
    space = FieldSpace(d_in, d_out, degree, orders, gaussian, distinct, 0, d_in)
    ranks = max(layers[_last_nonlinear(layers) or 0].rank for layers in distinct)
    if packed.count(d_in, degree) > _PLACES or d_out * ranks > _LARGEST:
        return None
    groups = [group for layers in distinct for group in _groups(layers)]
    if max(_entries(space, group) for group in groups) > _LARGEST:
        return None
    if _by_largest(distinct, orders).max() > 16 * _PART:
        return None
    by_fields = sum(map(space.multiplications, distinct))
    written_out = sum(map(_dense_multiplications, distinct))
    return space if _SLOWER * by_fields <= written_out else None


def _dense_multiplications(layers: Kinds) -> float:
    """Multiplications of the products of a model, written out, with another of its kind.

    Fitted to plans of `Gaussian` and two bilinear layers of U and V hidden units, which take
    between 70 and 140 times V U^3 + V^2 U^2. Two layers of 2 channels over 8 x 8 pixels take 0.3 s
    by their plan and 6 s by fields; over 12 x 12 pixels 6.8 s and 0.3.
    """
    ranks = [kind.rank for kind in layers if kind.down is not None]
    orders = {kind.order for kind in layers if kind.down is not None}
    entries = max(kind.rank * kind.d_in for kind in layers)
    if len(ranks) > 2 or orders != {2} or entries > MOST_DENSE:
        return math.inf
    first = ranks[0]
    grams = 4.0 * first**2 * layers[0].d_in
    if len(ranks) == 1:
        return grams
    return grams + 100.0 * (ranks[1] * first**3 + ranks[1] ** 2 * first**2)


def _reads_fields(layers: Kinds) -> bool:
    """Whether layers up to the last nonlinear layer are sparse, and linear layers follow.

    Small layers among them may be dense, such as a convolution of few pixels.
    """
    last = _last_nonlinear(layers)
    if last is None or not any(kind.sparse for kind in layers[: last + 1]):
        return False
    for n, kind in enumerate(layers[: last + 1]):
        # The output map of the last nonlinear layer is a readout.
        read = kind.legs if kind.down is None or n == last else (*kind.legs, kind.down)
        dense = [role for role in read if role not in dict(kind.sparse)]
        if any(math.prod(shapes(kind, False)[role]) > _LARGEST_DENSE for role in dense):
            return False
    return True


def _last_nonlinear(layers: Kinds) -> int | None:
    nonlinear = [n for n, kind in enumerate(layers) if kind.down is not None]
    return nonlinear[-1] if nonlinear else None


def _independent(metric: Metric, d_in: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Means and variances of independent inputs; None for correlated inputs."""
    mean, cov = mean_of(metric, d_in), getattr(metric, "cov", None)
    if cov is None:
        return mean, np.ones(d_in)
    cov = np.asarray(cov, np.float64)
    if cov.ndim == 2:
        if np.count_nonzero(cov) > np.count_nonzero(cov.diagonal()):
            return None
        cov = cov.diagonal()
    return mean, np.maximum(cov, 0.0)


def _pattern(kind: LayerKind, role: str) -> Any:
    """Where the array of a role has entries."""
    columns = dict(kind.sparse).get(role)
    if columns is None:
        return SparseMatrix.of(np.ones(shapes(kind, False)[role])).csr()
    ones = np.where(columns.filled, 1.0, 0.0)
    return SparseMatrix(ones, columns).csr()


@session_cache
def _groups(layers: Kinds) -> tuple[_Group, ...]:
    """The units that the readout of a model adds up, in groups of equal fields."""
    last = _last_nonlinear(layers)
    assert last is not None  # as `_reads_fields` says
    below: Any = _identity(layers[0].d_in)
    for kind in layers[:last]:
        below = _fields_after(kind, below)
    legs: Any = sum(_pattern(layers[last], role) for role in layers[last].legs)
    groups = list(_grouped(legs @ below, last, True))
    if layers[last].skips:
        groups += _grouped(below, last, False)
    return tuple(groups)


def _fields_after(kind: LayerKind, below: Any) -> Any:
    """The fields of the outputs of a layer, as a sparse matrix (outputs, inputs of the model)."""
    if kind.down is None:
        (leg,) = kind.legs
        after = _pattern(kind, leg) @ below
        # A residual around a linear layer leaves no trace in its kind.
        square = kind.d_in == kind.d_out
        return after + below if square else after
    legs: Any = sum(_pattern(kind, role) for role in kind.legs)
    after = _pattern(kind, kind.down) @ (legs @ below)
    after = after + below if kind.skips else after
    after.data[:] = 1.0  # numbers of paths would grow with depth
    return after


def _grouped(fields: Any, level: int, hidden: bool) -> Iterator[_Group]:
    """Units in groups of equal fields, given as rows of a sparse matrix."""
    fields.sort_indices()
    units: dict[bytes, list[int]] = {}
    rows = np.split(fields.indices, fields.indptr[1:-1])
    for n, row in enumerate(rows):
        units.setdefault(row.tobytes(), []).append(n)
    for members in units.values():
        field = rows[members[0]].astype(np.int64)
        # Units that read nothing are constants in any coordinate.
        field = field if len(field) else np.zeros(1, np.int64)
        yield _Group(level, hidden, np.array(members), field)


def _entries(space: FieldSpace, group: _Group) -> int:
    """Number of coefficients of the units of a group."""
    width = len(group.field)
    return len(group.units) * sum(packed.count(width, order) for order in space.orders)


def _meets(field: np.ndarray, space: FieldSpace) -> bool:
    """Whether an index of a field is in the range of a space."""
    if not space.start:
        return True  # the index of order 0 is in the first range
    first, last = np.searchsorted(field, (space.start, space.stop))
    return first < last


def _indices_within(field: np.ndarray, order: int, space: FieldSpace) -> slice:
    """The slice of the indices of a field with a largest coordinate in the range of a space."""
    if order == 0:
        return packed.block_slice(space.start, space.stop, 0)
    first, last = (int(n) for n in np.searchsorted(field, (space.start, space.stop)))
    return packed.block_slice(first, last, order)


@session_cache
def _part_ends(space: FieldSpace) -> tuple[int, ...]:
    """Ends of the ranges of the largest coordinate in which the parts of a space are made."""
    by_largest = _by_largest(space.layers, space.orders)
    ends, held = [], 0.0
    for coordinate in range(space.start, space.stop):
        if held and held + by_largest[coordinate] > _PART:
            ends.append(coordinate)
            held = 0.0
        held += by_largest[coordinate]
    return (*ends, space.stop)


@session_cache
def _by_largest(
    models: tuple[Kinds, ...], orders: tuple[int, ...]
) -> Float[np.ndarray, " coordinates"]:
    """Numbers of the features of all fields and outputs, by the largest coordinate of an index."""
    d_in, d_out = models[0][0].d_in, models[0][-1].d_out
    numbers = np.zeros(d_in)
    numbers[0] = d_out
    for field in _fields(models):
        for order in orders:
            ends = [packed.count(n, order) for n in range(len(field) + 1)] if order else [0]
            numbers[field[: len(ends) - 1]] += d_out * np.diff(ends)
    return numbers


@session_cache
def _fields(models: tuple[Kinds, ...]) -> tuple[Int[np.ndarray, " field"], ...]:
    """The distinct fields of some models."""
    groups = [group for layers in models for group in _groups(layers)]
    return tuple({group.field.tobytes(): group.field for group in groups}.values())


class _Places(NamedTuple):
    """The places of indices in the vector of a part of a space.

    Args:
        counts: Number of features of every order.
        of_fields: Places of the indices of a field, by the field and their order.
    """

    counts: dict[int, int]
    of_fields: dict[tuple[bytes, int], Int[np.ndarray, " indices"]]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all places."""
        return sum(places.nbytes for places in self.of_fields.values())


def _places(space: FieldSpace) -> _Places:
    """The places of all indices that a field of any model reaches."""

    def make() -> _Places:
        fields = [field for field in _fields(space.layers) if _meets(field, space)]
        counts, of_fields = {}, {}
        for order in space.orders:
            # Positions of the indices of every field among those of all coordinates.
            several = []
            for field in fields:
                within = _indices_within(field, order, space)
                several.append(packed.positions(field[_table(len(field), order)[within]]))
            known, back = np.unique(np.concatenate(several), return_inverse=True)
            counts[order] = len(known)
            ends = np.cumsum([len(each) for each in several])[:-1]
            for field, places in zip(fields, np.split(back.astype(np.int32), ends), strict=True):
                of_fields[field.tobytes(), order] = places
        return _Places(counts, of_fields)

    return session().places.get(space, make)


class _Step(NamedTuple):
    """A layer `skip x + down (leg_1 * leg_2 * ...) + bias`; without legs `down` reads x itself.

    Args:
        legs: Pairs of a matrix of SciPy and a bias, None for no bias.
        down: Output matrix; of SciPy where groups read its rows.
        bias: Bias of the output, None for none.
        skip: Factor of the input.
    """

    legs: tuple[tuple[Any, Any], ...]
    down: Any
    bias: Any
    skip: float


class _Readout(NamedTuple):
    """The linear map of a model behind its last nonlinear layer.

    Args:
        hidden: Matrix (out, hidden units).
        state: Matrix (out, coordinates below the layer), None without a skip or with the skip 0.
        constant: Constant (out,).
    """

    hidden: Float[np.ndarray, "out units"]
    state: Float[np.ndarray, "out coordinates"] | None
    constant: Float[np.ndarray, " out"]

    def of(self, group: _Group) -> Float[np.ndarray, "out units"] | None:
        """The columns that read the units of a group, None where nothing reads them."""
        matrix = self.hidden if group.hidden else self.state
        return None if matrix is None else matrix[:, group.units]


def _steps(model: Model) -> tuple[list[_Step], _Readout]:
    """The layers up to the last nonlinear layer, and the readout behind it."""
    layers = [in_float64(layer) for layer in model.layers]
    last = _last_nonlinear(kinds(model))
    assert last is not None
    steps = [_step(layer) for layer in layers[: last + 1]]
    final, out = steps[-1], layers[last].d_out
    behind = Affine()
    for step in map(_step, layers[last + 1 :]):
        weight = step.down
        if step.skip:
            weight = weight + step.skip * _identity(weight.shape[0])
        behind = Affine(weight, step.bias).after(behind)
    read: Any = behind.after(Affine(final.down, final.bias))
    constant = np.zeros(read.weight.shape[0]) if read.bias is None else np.asarray(read.bias)
    state = None
    if final.skip:
        state = final.skip * (_identity(out) if behind.weight is None else behind.weight)
    # Groups read rows of all output matrices but the last, which is a part of the readout.
    steps = [*(step._replace(down=_sparse(step.down)) for step in steps[:-1]), final]
    return steps, _Readout(
        _as_dense(read.weight), None if state is None else _as_dense(state), constant
    )


def _as_dense(matrix: Any) -> np.ndarray:
    return matrix.toarray() if hasattr(matrix, "toarray") else np.asarray(matrix)


def _step(layer: Any) -> _Step:
    core = core_of(layer)
    rows, output = affine_maps(core)
    skip, scale = residual_rule(layer)
    bias = getattr(core, bias_name(output))
    legs = tuple((_sparse(_plain(getattr(core, x))), getattr(core, bias_name(x))) for x in rows)
    down = scale * _plain(getattr(core, output))
    return _Step(legs, down, None if bias is None else scale * np.asarray(bias), float(skip))


def _identity(size: int) -> Any:
    """The identity as a sparse matrix of SciPy."""
    return SparseMatrix(np.ones((size, 1)), Columns(np.arange(size)[:, None], size)).csr()


def _plain(matrix: Any) -> Any:
    """A matrix of SciPy or NumPy."""
    return matrix.csr() if isinstance(matrix, SparseMatrix) else np.asarray(matrix)


def _sparse(matrix: Any) -> Any:
    """A matrix of SciPy, of one of NumPy as well."""
    return matrix if hasattr(matrix, "tocsr") else SparseMatrix.of(matrix).csr()


class _LocalLayer(NamedTuple):
    """The rows and columns of a layer that units above it read, as dense matrices.

    Args:
        legs: Pairs of a matrix (hidden units, state below) and a bias; none of a linear layer.
        down: Matrix (coordinates, hidden units), of a linear layer (coordinates, state below); None
            where the hidden units themselves are asked for.
        bias: Constants (coordinates,), None for none.
        stream: Factor of the same coordinates below, and their places there; None without a skip.
    """

    legs: tuple[tuple[Any, Any], ...]
    down: Any
    bias: Any
    stream: tuple[float, Any] | None


class _Local(NamedTuple):
    """The units of a group, as the weights below them on their receptive field.

    Args:
        root: Matrix (coordinates, field) of the inputs that are read.
        mean: Means (coordinates,) of these inputs.
        layers: Layers from the input up.
    """

    root: Float[np.ndarray, "coordinates field"]
    mean: Float[np.ndarray, " coordinates"]
    layers: tuple[_LocalLayer, ...]


class _Made(NamedTuple):
    """The series of the units of a model.

    Args:
        keys: Digest of the weights below each group.
        known: Normalised coefficients of the first groups by digest and order, up to `_KEPT`.
    """

    keys: list[bytes]
    known: dict[bytes, dict[int, Float[np.ndarray, "indices units"]]]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the series."""
        return sum(entries.nbytes for series in self.known.values() for entries in series.values())


def _all_series(
    model: Model,
    groups: Sequence[_Group],
    steps: Sequence[_Step],
    inputs: tuple[Any, Any],
    space: FieldSpace,
) -> _Made:
    """The series of all groups of a model, made once for all parts of its vector."""

    def make() -> _Made:
        made = _Made([], {})
        held = 0
        for group in groups:
            local = _local(group, steps, inputs)
            key = digest_of(local)
            made.keys.append(key)
            if key not in made.known and held < _KEPT:
                made.known[key] = _normalised(local, len(group.field), space)
                held += sum(entries.size for entries in made.known[key].values())
        return made

    key = _all_series, space.gaussian, space.degree, *(array.tobytes() for array in inputs)
    return kept_with(model, key, make, lambda made: made.nbytes)


def _normalised(
    local: _Local, width: int, space: FieldSpace
) -> dict[int, Float[np.ndarray, "indices units"]]:
    """Coefficients of some units by order, in a basis of length one, unit beside unit."""
    normalised = {}
    for order, entries in _series(local, width, space.gaussian).items():
        norms = basis_norms(whole(width), order, space.degree, space.gaussian)
        normalised[order] = np.ascontiguousarray((entries * norms).T)
    return normalised


def _local(group: _Group, steps: Sequence[_Step], inputs: tuple[Any, Any]) -> _Local:
    """The units of a group with the weights below them, layer by layer from the units down."""
    layers: list[_LocalLayer] = []
    needed = group.units
    if group.hidden:
        legs, needed = _legs_at(steps[group.level], needed, ())
        layers.append(_LocalLayer(legs, None, None, None))
    for step in reversed(steps[: group.level]):
        above, rows = needed, step.down[needed]
        units = np.unique(rows.indices)
        beside = [*([] if step.legs else [units]), *([above] if step.skip else [])]
        legs, needed = _legs_at(step, units, beside)
        down = rows[:, units if legs else needed].toarray()
        bias = None if step.bias is None else step.bias[above]
        stream = (step.skip, np.searchsorted(needed, above)) if step.skip else None
        layers.append(_LocalLayer(legs, down, bias, stream))
    mean, deviation = inputs
    root = np.zeros((len(needed), len(group.field)))
    root[np.arange(len(needed)), np.searchsorted(group.field, needed)] = deviation[needed]
    return _Local(root, mean[needed], tuple(reversed(layers)))


def _legs_at(
    step: _Step, units: np.ndarray, beside: Iterable[np.ndarray]
) -> tuple[tuple[tuple[Any, Any], ...], np.ndarray]:
    """The legs of some hidden units, and the coordinates below that these and others read."""
    rows = [(matrix[units], bias) for matrix, bias in step.legs]
    needed = np.unique(np.concatenate([*(leg.indices for leg, _ in rows), *beside]))
    legs = tuple(
        (leg[:, needed].toarray(), None if bias is None else np.asarray(bias)[units])
        for leg, bias in rows
    )
    return legs, needed


def _series(local: _Local, width: int, gaussian: bool) -> Series:
    """The series of some units in the coordinates of their receptive field."""
    state = _shifted_series({1: local.root}, local.mean)
    for layer in local.layers:
        factors = [_shifted_series(mapped(leg, state), bias) for leg, bias in layer.legs]
        made = factors[0] if factors else state
        for factor in factors[1:]:
            made = _products(made, factor, width, gaussian)
        if layer.down is not None:
            made = _shifted_series(mapped(layer.down, made), layer.bias)
        if layer.stream is not None:
            factor, places = layer.stream
            made = plus(made, {order: factor * state[order][places] for order in state})
        state = made
    return state


def _shifted_series(series: Series, bias: Any) -> Series:
    """A series after constants were added."""
    if bias is None or not np.any(bias):
        return series
    return plus(series, {0: np.asarray(bias)[:, None]})


def _products(one: Series, two: Series, width: int, gaussian: bool) -> Series:
    """The products of two series, unit by unit, some units at a time."""
    orders = max(one) + max(two)
    largest = packed.count(width, max(one)) * packed.count(width, max(two))
    count = len(next(iter(one.values())))
    block = max(1, _AT_ONCE // max(largest, packed.count(width, orders)))
    made = []
    # Coordinates whose rows have no entries read no units: products of none have orders as well.
    for start in range(0, max(1, count), block):
        some = slice(start, start + block)
        first, second = ({n: entries[some] for n, entries in half.items()} for half in (one, two))
        made.append(product(first, second, None, whole(width), gaussian))
    return {n: np.concatenate([each[n] for each in made]) for n in made[0]}
