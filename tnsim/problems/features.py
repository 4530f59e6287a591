"""Models as vectors of features, with dot products equal to inner products.

The work per model is done once, and K x K inner products are a single matrix product.

A *space* says how a model becomes such a vector, and at which cost. Each family of spaces is a
function of the kinds of all models and the metric, which returns None where it has no vectors for
them; the rest of the program uses the protocol `FeatureSpace` and never asks which space it is. A
space with long vectors is a sum of parts, made in turn: inner products are sums over the parts.

The families are `polynomial_space` and, for `Frobenius`, `EntrySpace` below. `Frobenius` tells the
two legs of a bilinear layer apart, so the features are the entries of the (lifted) form as written:

    sum_h D[o, h] L[h, i] R[h, j],      with a skip + (copy[o, i] skip[j] + skip[i] copy[o, j]) / 2.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Float

from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import one_blas_thread, processors, replicated, shared, spread
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import digest_of
from tnsim.models.model import Model, kept_with
from tnsim.problems.layer_kinds import Kinds, kinds
from tnsim.problems.layer_tensors import arrays
from tnsim.problems.polynomial_space import (
    making_seconds,
    merged_layers,
    polynomials,
    rule_of_one_layer,
)
from tnsim.problems.receptive_fields import receptive_fields
from tnsim.problems.units import ScaledModel
from tnsim.scaled import (
    SMALLEST,
    Numeric,
    ScaledSum,
    contribution,
    library,
    scale_exponent,
    shifted,
    split,
    total,
)
from tnsim.sessions import per_object_cache

# Most numbers of a vector that is kept with its model, 8 MiB. Of two layers of width 24 a warm
# comparison takes a fifth of the time.
KEPT = 2**20
_TOGETHER = 4  # models that are made together
# Multiplications of a model from which another thread is worth waking: 20 models of width 24 took
# 0.4 s by the clock of two busy cores, and 1.1 s one after another.
_REPAYS = 2**20
_LARGEST = 2**24  # most numbers in a vector of a combination, 128 MiB


class FeatureSpace(Hashable, Protocol):
    """A way to make vectors of models. Hashable, as a key of what is kept."""

    @property
    def route(self) -> str:
        """Name of the route that the space offers, among the routes of a run."""
        ...

    @property
    def d_out(self) -> int:
        """Number of outputs of the models."""
        ...

    @property
    def length(self) -> int:
        """Number of features per output."""
        ...

    @property
    def parts(self) -> Sequence[FeatureSpace]:
        """Spaces that are made in turn; dot products are sums over the parts."""
        ...

    @property
    def at_once(self) -> int:
        """Most models with vectors that are made at one time, in threads."""
        ...

    @property
    def is_sparse(self) -> bool:
        """Whether models have too many zeros for any plan to be as short."""
        ...

    @property
    def tells_mean(self) -> bool:
        """Whether the first feature is the mean of the outputs over the inputs."""
        ...

    def multiplications(self, layers: Kinds) -> int:
        """Number of scalar multiplications for the vector of a single model."""
        ...

    def seconds(self, models: Collection[Kinds]) -> float:
        """Expected seconds until the vectors of some models are made, on a usual processor.

        Tables of the space are among them, whether the session has them already or not.
        """
        ...

    def in_flight(self, layers: Kinds, models: int) -> int:
        """Number of elements of intermediates while a part of some models' vectors is made."""
        ...

    def inputs(self, metric: Metric) -> Any:
        """The arrays besides the weights that all vectors depend on, as a pytree."""
        ...

    def vector(self, model: Model, inputs: Any) -> Float[Any, "out features"]:
        """The vector of a model, in NumPy's float64."""
        ...


class EntrySpace(NamedTuple):
    """The entries of quadratic forms. Hashable."""

    d_in: int
    d_out: int
    lifted: bool

    route = "features"
    at_once = _TOGETHER
    is_sparse = False
    tells_mean = False

    @property
    def length(self) -> int:
        return (self.d_in + self.lifted) ** 2

    @property
    def parts(self) -> tuple[EntrySpace, ...]:
        return (self,)

    def multiplications(self, layers: Kinds) -> int:
        rank = max(kind.rank for kind in layers)
        return self.d_out * rank * self.length

    def seconds(self, models: Collection[Kinds]) -> float:
        return making_seconds(sum(map(self.multiplications, models)), 0)

    def in_flight(self, layers: Kinds, models: int) -> int:
        rank = max(kind.rank for kind in layers)
        once = self.d_out * (2 * self.length + rank * (self.d_in + self.lifted))
        return min(models, _TOGETHER) * once + models * self.length * self.d_out

    def inputs(self, metric: Metric) -> None:
        return None

    def vector(self, model: Model, inputs: None) -> Float[Any, "out entries"]:
        # `before` is the product of the linear layers below, which goes into both legs.
        before, (layer,) = merged_layers([arrays(x, self.lifted) for x in model.layers])
        left, right = (leg if before is None else leg @ before for leg in layer.legs)
        outputs = slice(int(self.lifted), None)
        # Entries (out, i, j) of the bilinear form.
        form = np.einsum("oh,hi,hj->oij", layer.down[outputs], left, right)
        if layer.copy is not None:
            copy = layer.copy[outputs]
            copy = copy if before is None else copy @ before
            # A skip reads x on one leg and the constant, coordinate 0, on the other, in both ways
            # with weight 1/2.
            one = np.eye(1, copy.shape[1])[0]
            form = form + 0.5 * (copy[:, :, None] * one + one[:, None] * copy[:, None, :])
        return form.reshape(len(form), -1)


def entries(models: Sequence[Kinds], metric: Metric, n_ctx: int | None) -> EntrySpace | None:
    """The space of single bilinear layers under a metric that joins legs as written."""
    flat = [kind for layers in models for kind in layers]
    orders = {tuple(sorted(kind.order for kind in layers if kind.order > 1)) for layers in models}
    if (
        n_ctx is not None
        or orders != {(2,)}
        or rule_of_one_layer(metric) is not PairingRule.AS_WRITTEN
    ):
        return None
    lifted = any(kind.constant for kind in flat)
    return EntrySpace(models[0][0].d_in, models[0][-1].d_out, lifted)


def spaces(
    models: Sequence[Kinds], metric: Metric, n_ctx: int | None = None
) -> tuple[FeatureSpace, ...]:
    """The spaces that hold all models of these layers.

    Args:
        models: Kinds of the layers of every model.
        metric: Any metric.
        n_ctx: Number of positions of the sequences that the models read, None for vectors.

    Returns:
        A space of each family that has vectors for the models; of models with receptive fields
        the space of these alone, with which no other and no plan competes.

    Example:
        >>> import numpy as np, tnsim
        >>> from tnsim.problems.layer_kinds import kinds
        >>> square = tnsim.Bilinear(*[np.eye(2)] * 3)
        >>> deep = tnsim.Model([square, square])
        >>> [space.length for space in spaces([kinds(deep)], tnsim.Gaussian())]
        [9]
    """
    fields = receptive_fields(models, metric, n_ctx)
    if fields is not None:
        return (fields,)
    candidates = polynomials(models, metric, n_ctx), entries(models, metric, n_ctx)
    return tuple(space for space in candidates if space is not None)


def fits(space: FeatureSpace) -> bool:
    """Whether vectors of combinations fit; they lose fewer digits than sums of products."""
    return space.is_sparse or space.length * space.d_out <= _LARGEST


class FeatureBlock(NamedTuple):
    """Features `values * 2 ** exponent` of some models, each model's largest value near 1.

    Args:
        values: Vectors, output by output; those of forward passes may have further rows.
        exponent: Exponents of the scales of whole models or of every output.
        lengths: Lengths of `values`, output by output.
        sizes: Sums of the lengths of the terms; they exceed `lengths` by the parts that cancel
            within a model (see `conditioning`) and between the terms of a combination.
    """

    values: Float[Numeric, "models out features"]
    exponent: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    lengths: Float[np.ndarray, "models out"]
    sizes: Float[np.ndarray, "models out"]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the vectors."""
        return self.values.nbytes


def common_space(models: Sequence[Model], metric: Metric) -> FeatureSpace | None:
    """A space that holds some models, with vectors that fit.

    Args:
        models: Models that are not traced.
        metric: Any metric.

    Example:
        >>> import tnsim
        >>> square = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> common_space([square], tnsim.Gaussian()).length
        4
    """
    several = spaces([kinds(model) for model in models], metric, models[0].n_ctx)
    return next((space for space in several if fits(space)), None)


def block(
    models: Sequence[ScaledModel],
    weights: Float[np.ndarray, "rows models"] | None,
    space: FeatureSpace,
    metric: Metric,
    keep: bool = True,
) -> FeatureBlock:
    """Features of models, or of combinations of these, in float64.

    Args:
        models: Models that the space holds, in scientific notation.
        weights: Coefficients of the combinations, in rows; None for the models themselves.
        space: Space of the vectors.
        metric: Metric of the inner products.
        keep: Whether small vectors may stay with their models for further comparisons.
    """
    exponents = np.array([model.exponent for model in models])
    values, own = _of_models([model.value for model in models], space, metric, keep)
    if exponents.ndim == 2:  # one exponent per output
        own = own[:, None]
    lengths = _vector_lengths(values)
    is_zero = lengths == 0 if exponents.ndim == 2 else (lengths == 0).all(axis=1)
    exponent = np.where(is_zero, SMALLEST, own + exponents)
    # The relative error of a vector is the root of the factor for its square.
    factors = np.sqrt([model.cancels for model in models])
    single = FeatureBlock(values, exponent, lengths, factors[:, None] * lengths)
    return single if weights is None else _combined_features(single, weights)


def _combined_features(
    single: FeatureBlock, weights: Float[np.ndarray, "rows models"]
) -> FeatureBlock:
    """Features of combinations of models, from the features of the models."""
    # A row is a sum of w_m 2^(e_m) v_m. Every coefficient w_m is split into a mantissa and a power
    # of two, and the largest power of the row is taken out, so that no factor is beyond a float.
    by_output = single.exponent.ndim == 2
    mantissas, powers = split(weights[:, :, None] if by_output else weights)
    powers = powers + single.exponent
    exponent = powers.max(axis=1)
    factors = mantissas * np.exp2(powers - exponent[:, None])
    sizes = (np.abs(factors).reshape(*weights.shape, -1) * single.sizes).sum(axis=1)
    # k rows, m models, o outputs, f features.
    sums = "kmo,mof->kof" if by_output else "km,mof->kof"
    values = np.einsum(sums, factors, single.values, optimize=True)
    return FeatureBlock(values, exponent, _vector_lengths(values), sizes)


def norms(block: FeatureBlock, slices: bool) -> ScaledSum:
    """Squared norms of the models of a block.

    With lengths N and sizes S, a vector is off by about eps S and its squared norm by
    (N + eps S)^2 - N^2 ~ 2 eps N S: cancellation costs a difference of vectors half the digits that
    it costs a difference of products.
    """
    eps = float(np.finfo(block.values.dtype).eps)
    # Times eps this is the first-order error eps N S plus the second-order term (eps S)^2, which
    # stays where N cancels to zero.
    size = (block.lengths + eps * block.sizes) * block.sizes
    squares = ScaledSum(block.lengths**2, 2 * block.exponent, size)
    return squares if slices else total(squares, slices=True)


def means(block: FeatureBlock, space: FeatureSpace) -> ScaledSum | None:
    """The means of the outputs of the models of a block over the inputs; None without a feature."""
    if not space.tells_mean:
        return None
    return contribution(np.asarray(block.values[:, :, 0], np.float64), block.exponent)


def products(rows: FeatureBlock, columns: FeatureBlock, slices: bool) -> ScaledSum:
    """Inner products of every row with every column.

    The error of a dot product is about eps (|a| S_b + S_a |b|) / 2 with lengths |a|, |b| and
    `sizes` S; the size of the product is chosen accordingly.

    Returns:
        Products (rows, columns), or (rows, columns, out) where outputs are told apart.
    """
    if library(rows.values) is np:
        gram = _gram_block(rows.values, columns.values, slices)
    else:
        with execution.precision():
            gram = _compiled_gram(spread(rows.values), replicated(columns.values), slices)
    # Rows that were repeated, to fill the devices or as room for further models, are cut off.
    mantissa = np.asarray(gram, np.float64)[: len(rows.exponent), : len(columns.exponent)]
    equation = "ko,lo->klo" if slices else "ko,lo->kl"
    size = np.einsum(equation, rows.lengths, columns.sizes)
    size += np.einsum(equation, rows.sizes, columns.lengths)
    exponent = rows.exponent[:, None] + columns.exponent[None, :]
    return ScaledSum(mantissa, exponent, size / 2)


def _vector_lengths(values: Any) -> Float[np.ndarray, "models out"]:
    """Lengths of vectors by output."""
    return np.sqrt(np.einsum("mof,mof->mo", values, values, dtype=np.float64))


def _gram_block(rows: Any, columns: Any, slices: bool) -> Any:
    """Dot products of all rows with all columns."""
    if slices:
        return library(rows).einsum("kof,lof->klo", rows, columns, optimize=True)
    if all(isinstance(x, np.ndarray) and x.strides[1] < x.strides[2] for x in (rows, columns)):
        # In the order in which both lie in memory, so that no copy is made.
        rows, columns = (x.swapaxes(1, 2) for x in (rows, columns))
    return rows.reshape(len(rows), -1) @ columns.reshape(len(columns), -1).T


_compiled_gram = jax.jit(_gram_block, static_argnames="slices")


def _of_models(
    models: Sequence[Model], space: FeatureSpace, metric: Metric, keep: bool
) -> tuple[Float[np.ndarray, "models out features"], Float[np.ndarray, " models"]]:
    """Features of all models, and the exponents of their scales; some models at a time."""
    inputs = functools.cache(partial(space.inputs, metric))
    key = _of_models, space, _digest_of_inputs(metric, space)

    def vector(model: Model) -> Float[np.ndarray, "out features"]:
        def make() -> Float[np.ndarray, "out features"]:
            return space.vector(model, inputs())

        # Small vectors of models that nobody can write to are kept as long as these live.
        is_small = keep and space.length * space.d_out <= KEPT
        return kept_with(model, key, make, lambda made: made.nbytes) if is_small else make()

    tasks = [partial(vector, model) for model in models]
    threads = 1
    if max(space.multiplications(kinds(model)) for model in models) >= _REPAYS:
        threads = min(space.at_once, processors(), len(tasks))
    alone = one_blas_thread() if threads > 1 else contextlib.nullcontext()
    with alone:
        vectors = shared(tasks, threads)
    # Row after row, as products read them; each vector is freed as its row is written.
    made, exponents = np.empty((len(vectors), *vectors[0].shape)), np.empty(len(vectors))
    for n in range(len(made)):
        row: np.ndarray = made[n]
        row[...] = vectors[n]
        vectors[n] = None
        exponents[n] = scale_exponent(row)
        shifted(row, -exponents[n], out=row)
    return made, exponents


@per_object_cache
def _digest_of_inputs(metric: Metric, space: FeatureSpace) -> bytes:
    """A digest of the arrays besides the weights on which vectors depend."""
    return digest_of(space.inputs(metric))
