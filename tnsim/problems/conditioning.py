"""The amplification of rounding within a model, and a gauge that avoids it.

Two hidden units may nearly undo each other, and a hidden basis may be far from orthogonal: outputs
are then small differences of large numbers. A plan adds up *within* its contractions, so the size
of the sum of its contributions does not show the cancellation. Forward passes do. Let every weight
be off by a relative eps, at random, and let the outputs then be off by kappa eps of their root mean
square. A polynomial of degree n reads its weights n times over, so kappa is about n at most where
nothing cancels. Moments are products of two states, and a plan forms moments of hidden states
before a later layer undoes their large parts, so the relative error of an inner product is of the
order

    n A eps,        A = (kappa / n)^2,

or larger where a map reads a small part of large states (`_lost_by_maps`).

*Gauge.* A bond may take any basis: multiplying the layer below by `T` and the layer above by `T^-1`
leaves the network unchanged. Where A is large for a model, every bond inside gets the basis of the
principal axes of the states there: their coordinates are then uncorrelated, and a sum over them
cancels no more. The basis stays as it was given where the new one raises A, as it may do a
thousandfold beside biases that are far larger than the weights. The change of basis itself would
round by kappa eps: products with T cancel as the network does, and no bound that is measured in the
new basis shows it (plain products, like QR of the rows that read a bond, were off by 170 to 270 of
their bounds). Its products are therefore taken with 31 bits more than a float has, and the inverse
of T is that of the rounded T, `T' (1 - E)` with `E = T T' - 1`. Rounding is then relative to every
entry. Bonds at the ends of a skip have one basis in common; the input and the output retain their
bases.

*Inside a JAX trace* the same functions run on arrays of JAX. The change of a forward pass is there
a derivative, since float32 has no room for a step that is small and yet above rounding. Derivatives
by weights take T as a constant, because the function does not depend on T.

Measured on two bilinear layers and the same function in a hidden basis of condition kappa (40
pairs, float64, `TreeSymmetric`): the worst error of a similarity of 1 is 4.5e-12, 1.9e-6 and 3.4e-3
at kappa = 10^2, 10^4 and 10^5 as the model is given, and 1.4e-14 at 10^2, 10^4 and 10^6 in this
gauge.

*Range.* Whether a computation in plain float32 has the range for a model shows on few inputs
(`fits_float32`).

*Products to more bits than a float has.* Matrices are cut into slices of few bits, so that products
of slices are exact, and the products are added up with what rounding leaves out of every sum.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.engine.precision import USELESS, VISIBLE, Arithmetic
from tnsim.engine.runtime.devices import one_blas_thread
from tnsim.metrics.finite_measures import Categorical
from tnsim.metrics.input_moments import ROUNDING_OF_COVARIANCES, marginals, root_of
from tnsim.metrics.protocol import Metric, Points
from tnsim.models.arrays import affine, bias_name, in_float64, is_traced
from tnsim.models.forward import (
    ScaledLayers,
    State,
    as_read,
    forward,
    in_own_units,
    is_tokens,
    plain_forward,
    scaled_layers,
    states,
)
from tnsim.models.layers import Layer, Residual, affine_maps, innermost, map_names
from tnsim.models.model import Model, kept_with
from tnsim.models.scaling import replaced
from tnsim.scaled import Scaled, exponents_of, library, not_differentiated, shifted

_MORE_BITS = 31
"""Bits beyond those of a float to which products are computed."""
_BLOCK = 1024
"""Rows and columns of a product in NumPy that are computed at once."""


SKEWED = 1.0
"""Least amplification for which a model gets another gauge."""
_WORSE = 4.0
"""Ratio of two amplifications that tells nothing: few inputs and changes measure them."""
_POINTS = 16
"""Least number of inputs on which a model is run."""
_MOST_POINTS = 256
"""Number of inputs on which a narrow model is run, whose few units meet rare inputs alone: of seven
layers of width 2, 16 inputs told an amplification of 0.7 for 10^4."""
_NUMBERS = 2**11
"""Number of coordinates of the widest state on all inputs, between these two numbers of inputs."""
_SHIFT = 2.0**-30
"""Relative change of the weights: far above rounding of the forward pass, far below one."""
_LEAST_SHIFT = 2.0**-44
"""Relative change of the weights of the deepest models: above rounding by two digits."""
_LINEAR = 2.0**-10
"""Largest change of outputs that is taken as linear in the change of the weights."""
_DRAWS = 3
"""Number of random changes of the weights; the largest result counts."""
_POSITIONS = 32
"""Most positions of a sequence on which a model is run: few show the cancellation."""
_ELEMENTS = 2**22
"""Most elements of a state on all inputs; wider models are measured on fewer inputs."""
_LARGEST = 3
"""Exponent of the largest states beside the median, where the axes of states are looked for."""
_PLAIN = 2.0**24
"""Largest number, and one over the least, in the arrays of a computation in plain float32."""
Samples = Float[np.ndarray, "points width"] | Float[np.ndarray, "points positions width"]


def exact_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The product of two matrices as a sum of two, with 31 bits more than a float for large terms.

    Both matrices are cut into slices of so few bits that products of slices are exact. The sum is a
    function with derivatives inside a JAX trace.

    Args:
        a: Matrix (rows, inner).
        b: Matrix (inner, columns).

    Returns:
        The product, rounded to floats, and the rest.

    Example:
        >>> product, rest = exact_product(np.array([[1.0, 2.0**-60]]), np.ones((2, 1)))
        >>> float(product[0, 0]), float(rest[0, 0]) == 2.0**-60
        (1.0, True)

    Source:
        Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication, 2012.
    """
    if library(a, b) is np:
        return _in_blocks(a, b)
    with jax.default_matmul_precision("highest"):
        known, rest = _sliced_product(*map(jax.lax.stop_gradient, (a, b)))
        # Slices have no derivative of use; that of the plain product cancels no further than
        # products of rounded numbers do.
        plain = a @ b
    return plain + jax.lax.stop_gradient(known - plain), rest


def _in_blocks(a: Any, b: Any) -> tuple[Any, Any]:
    """The product by blocks of its rows and columns, whose slices take little memory: no bit of a
    product depends on other rows and columns."""
    shape = len(a), b.shape[1]
    if max(shape) <= _BLOCK:
        return _sliced_product(a, b)
    product, rest = np.empty(shape, a.dtype), np.empty(shape, a.dtype)
    starts = (range(0, size, _BLOCK) for size in shape)
    for row, column in itertools.product(*starts):
        rows, columns = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
        product[rows, columns], rest[rows, columns] = _sliced_product(a[rows], b[:, columns])
    return product, rest


def _sliced_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The product, in the library of the arrays."""
    xp = library(a, b)
    # A sum of n products of two numbers of b bits has 2 b + log2(n) bits, which must fit into the
    # mantissa.
    mantissa = xp.finfo(a.dtype).nmant + 1
    bits = (mantissa - math.ceil(math.log2(a.shape[1]))) // 2
    count = math.ceil((mantissa + _MORE_BITS) / bits)
    lefts, rights = _slices(a, bits, count), _slices(b.T, bits, count)
    # Slices k and n - k multiply to order n; orders beyond the wanted bits are left out, and the
    # smallest products come first.
    places = [(k, n - k) for n in reversed(range(count)) for k in range(n + 1)]
    zero = xp.zeros((len(a), b.shape[1]), a.dtype)
    if xp is np:
        terms = (lefts[k] @ rights[n].T for k, n in places)
        total, rest = functools.reduce(_added, terms, (zero, zero))
    else:  # a loop, which compiles in a fraction of the time
        of_left, of_right = np.array(places).T
        terms = lefts[of_left] @ rights[of_right].swapaxes(1, 2)
        (total, rest), _ = jax.lax.scan(lambda x, y: (_added(x, y), None), (zero, zero), terms)
    both = total + rest
    rest = rest - (both - total)
    return both, rest


def _added(summed: tuple[Any, Any], term: Any) -> tuple[Any, Any]:
    """A sum with one term more, and what rounding has left out (Knuth, section 4.2.2)."""
    # `part` is the summand as it arrived in the sum; what is missing of either summand is exact in
    # floats.
    total, rest = summed
    both = total + term
    part = both - total
    return both, rest + ((total - (both - part)) + (term - part))


def _slices(matrix: Any, bits: int, count: int) -> Float[np.ndarray, "slices rows columns"]:
    """Matrices of few bits relative to the largest entry of each row, which add up to a matrix."""
    xp = library(matrix)
    exponent = exponents_of(abs(matrix).max(axis=1, keepdims=True))
    about = xp.finfo(matrix.dtype)
    least = about.minexp if xp is jnp else about.minexp - about.nmant  # XLA has no subnormals
    # Slice k is a multiple of 2^(exponent - bits k), so it has at most `bits` bits.
    powers = exponent - bits * np.arange(1, count + 1)[:, None, None]
    units = shifted(xp.ones((), matrix.dtype), xp.maximum(powers, least))
    # The matrix in multiples of each unit, of which slices are the differences: no step rounds, as
    # quotients by powers of two are exact and differences have few bits.
    reached = xp.rint(matrix / units) * units
    return xp.concatenate([reached[:1], xp.diff(reached, axis=0)])


Bases: TypeAlias = dict[int, "Basis"]
"""The bases of some bonds by the number of the bond; bond n stands before layer n."""


def amplification(model: Model, metric: Metric) -> Any:
    """The factor A by which a model amplifies the rounding of its weights.

    Args:
        model: A model in scientific notation, so that its states stay in range; traced or not.
        metric: Metric with the mean and variances of the inputs.

    Returns:
        A as a float, inside a trace as an array; the larger of two values: for all
        outputs together, and the median over inputs, as few inputs may have by far the largest
        outputs. 1 where the outputs of all inputs vanish relative to the sizes of states under the
        metric, so that they show nothing.

    Example:
        The first model adds 1,000 times a coordinate and subtracts it again.

        >>> import tnsim
        >>> steep = tnsim.Linear([[1.0, 1e3], [0.0, 1e3]]), tnsim.Linear([[1.0, -1.0]])
        >>> plain = tnsim.Linear([[1.0, 0.0]]), tnsim.Linear([[1.0]])
        >>> models = tnsim.Model(steep), tnsim.Model(plain)
        >>> [amplification(model, tnsim.Gaussian()) > 1e5 for model in models]
        [True, False]
    """
    # A generator with a fixed seed: equal models are judged equally in every process.
    widest = max(model.d_in, *(layer.d_out for layer in model.layers))
    points = min(max(_NUMBERS // widest, _POINTS), _MOST_POINTS)
    inputs = sampled_inputs(model, metric, np.random.default_rng(0), points)
    model = not_differentiated(_widest(model))
    if is_traced((model, inputs)):
        return _amplified_by_jax(model, inputs)
    return float(_amplified(model, inputs))


def cancellation_at(
    model: Model, points: Points, dtype: str = "float64", slices: bool = False
) -> float:
    """The factor by which forward passes of a model enlarge the rounding of inner products.

    Outputs are off by kappa eps, and inner products of outputs, which are formed after everything
    has cancelled, by twice that. The rounding of a polynomial of degree n is counted as 4 n eps, so
    the factor is kappa / n, at least 1. In float32 hidden states may leave the range of floats too,
    beside biases that hide the loss: outputs are held against those of float64.

    Args:
        model: Model on arrays of numbers.
        points: Inputs of the metric, of which the first few with a weight are run.
        dtype: Precision of the forward passes.
        slices: Whether outputs are told apart, so that the worst of them counts.

    Returns:
        The factor, measured once for a model that never changes and these inputs.

    Example:
        >>> import tnsim
        >>> steep = tnsim.Linear([[1.0, 1e3], [0.0, 1e3]]), tnsim.Linear([[1.0, -1.0]])
        >>> points = tnsim.Empirical([[1.0, 1.0], [2.0, 0.5]]).points(None)
        >>> 100 < cancellation_at(tnsim.Model(steep), points) < 1e4
        True
    """
    inputs = _few_of(model, points)
    if not len(inputs):
        return 1.0

    def measured() -> float:
        wide = _widest(model)
        with np.errstate(all="ignore"):
            outputs = float(_change_of_outputs(wide, inputs))
        factor = max(1.0, float(np.nan_to_num(outputs)) / model.growth)
        if dtype == "float32":
            missed = _missed_by_float32(wide, inputs, slices)
            factor = max(factor, 2 * missed / Arithmetic(model.growth, dtype).rounding)
        return factor

    key = cancellation_at, inputs.shape, inputs.tobytes(), dtype, slices
    return kept_with(model, key, measured)


def _missed_by_float32(model: Model, inputs: Any, slices: bool) -> float:
    """The distance of outputs in float32 and float64, relative to those in float64.

    Args:
        model: Model in float64.
        inputs: Few inputs.
        slices: Whether the output that is farthest off counts, and not all together.
    """
    read, unit = (inputs, None) if is_tokens(inputs) else in_own_units(model, inputs)
    layers = scaled_layers(model, slices, unit)
    with np.errstate(all="ignore"):
        exact, own = forward(layers, read)
        narrow = [
            Scaled(jax.tree.map(lambda x: np.asarray(x, np.float32), layer), exponent)
            for layer, exponent in layers
        ]
        found, other = forward(tuple(narrow), read if is_tokens(read) else read.astype(np.float32))
        # Exponents have the axes (points, 1), or (points, outputs).
        shape = len(exact), *(1,) * (exact.ndim - 2), -1
        factors = np.exp2(own - own.max(axis=0)).reshape(shape)
        off = (found * np.exp2(other - own).reshape(shape) - exact) * factors
        over = tuple(range(exact.ndim - 1)) if slices else None
        squares, sizes = (np.square(x).sum(axis=over) for x in (off, exact * factors))
        missed = np.sqrt(np.asarray(squares)[sizes > 0] / np.asarray(sizes)[sizes > 0])
    # States that are NaN are refused by themselves.
    return float(np.nan_to_num(missed, nan=0.0).max(initial=0.0))


def _few_of(model: Model, points: Points) -> Any:
    """The first few inputs with a weight, as a model reads them."""
    if points.continuations:  # token ids; any tell how far weights cancel
        shape = _POINTS, model.n_ctx or 1
        inputs = np.random.default_rng(0).integers(model.d_in, size=shape)
        return inputs if model.n_ctx else inputs[:, 0]
    of_one = max(model.d_in, *(layer.d_out for layer in model.layers)) * (model.n_ctx or 1)
    count = max(1, min(points.count, _POINTS, _ELEMENTS // of_one))
    block = points.block(0, count)
    return as_read(model, np.asarray(block.inputs))[np.isfinite(block.log_weights)]


def _amplified(model: Model, inputs: Any) -> Any:
    """The amplification as the inputs show it."""
    xp = library(model, inputs)
    with np.errstate(all="ignore"):
        kappa = _change_of_outputs(model, inputs)
        found = xp.fmax((kappa / model.growth) ** 2, _lost_by_maps(model, inputs, kappa))
        return xp.where(xp.isnan(kappa), 1.0, found)


def _change_of_outputs(model: Model, inputs: Any) -> Any:
    """The relative change kappa of outputs by random changes of all weights; NaN for no outputs."""
    xp = library(model, inputs)
    # Shapes: values (points, numbers), changes (draws, points, numbers).
    outputs, changes = _with_changes(model, inputs)
    values = outputs.value.reshape(len(outputs.value), -1)
    sizes, changed = xp.square(values).sum(axis=-1), xp.square(changes).sum(axis=-1)
    return _relative(sizes, changed, outputs.exponent)


def _lost_by_maps(model: Model, inputs: Any, kappa: Any) -> Any:
    """The amplification by maps that read a small part of large states; 0 where there are none.

    Let changes of a map's own weights change what it reads by kappa_m, which is 1 where nothing
    cancels. Moments of what it reads are then off by kappa_m^2 eps, and a polynomial of degree n
    has n / n_m copies of a state of degree n_m, so that n A eps holds with A = kappa_m^2 / n_m.
    Where outputs depend little on the map, kappa_m kappa takes the place of kappa_m^2.

    Such states are inputs of a large mean or of high correlation, which keep the basis that they
    have, and those beside large biases. Later layers dilute them in kappa, of which (kappa / n)^2
    then loses the square: squared norms were off by up to 117 times what it tells.

    Args:
        model: Model on arrays of one kind.
        inputs: Few inputs.
        kappa: Relative change of the outputs.
    """
    xp = library(model, inputs)
    degree, layers = 1, _of_unit_scale(model.layers)
    told, degrees = [], []
    for n, (values, exponent) in states(layers, inputs):
        if n == len(layers):
            break
        core: Any = innermost(model.layers[n])
        for name in map_names(core)[:-1] or map_names(core):
            weight, bias = getattr(core, name), getattr(core, bias_name(name))
            # The constant in the scale of each state.
            bias = 0.0 if bias is None else bias * xp.exp2(-exponent)
            read = (affine(values, weight, None) + bias) ** 2
            own = affine(values**2, jax.tree.map(xp.square, weight), None) + bias**2
            sizes, changed = (x.reshape(len(x), -1).sum(axis=-1) for x in (read, own))
            told.append((sizes, changed[None], exponent.reshape(len(sizes), -1)[:, 0]))
            degrees.append(degree)
        degree *= Model([model.layers[n]]).growth
    if xp is np or not told:
        changes = [_relative(*each) for each in told]
    else:  # of all maps at once: a median of its own for each is a sixth of what XLA compiles
        changes = jax.vmap(_relative)(*map(jnp.stack, zip(*told, strict=True)))
    largest: Any = 0.0
    for change, degree in zip(changes, degrees, strict=True):
        largest = xp.fmax(largest, xp.fmin(change**2 - 1, change * kappa) / degree)
    return largest


def _relative(sizes: Any, changed: Any, exponents: Any) -> Any:
    """The change of states relative to their size; NaN where no input tells it.

    Args:
        sizes: Squares of the states, (points,), in the scale of each.
        changed: Squares of their changes, (draws, points).
        exponents: Exponents of two of the states.
    """
    xp = library(sizes)
    # An input whose outputs vanish has no exponent to tell changes in, and one whose outputs or
    # changes are beyond floats tells nothing: either would hide those of all other inputs.
    told = (sizes > 0) & xp.isfinite(sizes) & xp.isfinite(changed).all(axis=0)
    if xp is np and not told.any():
        return np.nan
    sizes, changed = xp.where(told, sizes, 0.0), xp.where(told, changed, 0.0)
    # Squared relative change of each input that tells one.
    of_each = xp.where(told, changed / xp.where(told, sizes, 1.0), np.nan)
    # Powers of two between inputs are squared, as sums of squares are weighed by them.
    exponents = exponents.reshape(len(sizes), -1)[:, 0]
    counts = xp.exp2(2 * (exponents - xp.where(told, exponents, -xp.inf).max()))
    counts = xp.where(told, counts, 0.0)
    of_all = (counts * changed).sum(axis=-1) / (counts * sizes).sum()
    # NumPy's median of numbers is ten times as fast as that of numbers with NaN among them.
    median = np.median(of_each[:, told], axis=-1) if xp is np else xp.nanmedian(of_each, axis=-1)
    return xp.sqrt(xp.maximum(of_all, median).max())


_amplified_by_jax = jax.jit(_amplified)  # models of one form are traced once


def _with_changes(
    model: Model, inputs: Any
) -> tuple[State, Float[np.ndarray, "draws points numbers"]]:
    """The outputs, and their changes in proportion to random changes of the weights."""
    rng = np.random.default_rng(0)
    is_host = library(model, inputs) is np

    def drawn(leaf: Any) -> np.ndarray:
        """Whole numbers from -128 to 127, for each draw.

        Numbers of many sizes: signs alone change matrices of two rows by little more than units.
        Random bytes take a tenth of the time of other random numbers, and an eighth of the memory.
        """
        shape = (_DRAWS, *np.shape(leaf))
        return np.frombuffer(rng.bytes(math.prod(shape)), np.int8).reshape(shape)

    def factors(leaf: Any, levels: np.ndarray, scale: float, base: float) -> Any:
        """`base` and random numbers of root mean square `scale`; `base` for numbers."""
        unit = scale * math.sqrt(3.0) / 128 if np.ndim(leaf) else 0.0
        numbers = np.multiply(levels, unit, dtype=np.float64)
        numbers += base + unit / 2  # levels have the mean -1/2
        return numbers

    def run(model: Model) -> State:
        return forward(_of_unit_scale(model.layers), inputs)

    # Each leaf has its changes along a new first axis, one entry for each draw.
    if not is_host:
        changes = jax.tree.map(lambda x: x * factors(x, drawn(x), 1.0, 0.0).astype(x.dtype), model)
        # The linear map of the derivative is made once and applied to all draws.
        outputs, derivative = jax.linearize(run, model)
        moved = jax.vmap(derivative)(changes).value
        return outputs, moved.reshape(*moved.shape[:2], -1)

    # A polynomial of degree n changes n times as much as its weights, in exponents for large n.
    shift = min(_SHIFT, max(_LEAST_SHIFT, _LINEAR / model.growth))

    def changed_leaf(leaf: np.ndarray, levels: np.ndarray) -> np.ndarray:
        numbers = factors(leaf, levels, shift, 1.0)
        numbers *= leaf  # in place: all weights of a model pass here, three times
        return numbers

    # In NumPy the derivative is a difference of two runs, so small that it is linear and so large
    # that rounding is below it. Few inputs make small products, for which threads of BLAS wait
    # longer than they compute: beside other work 16 layers of width 256 took .26 s for .10.
    levels = jax.tree.map(drawn, model)
    with one_blas_thread():
        outputs, changed = run(model), []
        for n in range(_DRAWS):
            one = jax.tree.map(operator.itemgetter(n), levels)
            moved, exponents = run(jax.tree.map(changed_leaf, model, one))
            shape = -1, *(1,) * (np.ndim(moved) - 1)
            # The changed run has exponents of its own; its outputs are brought to the exponents of
            # the first run before they are subtracted.
            moved = moved * np.exp2(exponents - outputs.exponent).reshape(shape)
            changed.append((moved - outputs.value).reshape(len(moved), -1) / shift)
    return outputs, np.stack(changed)


def _widest(model: Model) -> Model:
    """A model with NumPy arrays in float64, and with arrays of JAX in the widest floats it has."""
    if library(model) is np:
        return in_float64(jax.tree.map(np.asarray, model))
    widest = jax.dtypes.canonicalize_dtype(np.float64)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, widest), model)


def without_skew(model: Model, metric: Metric) -> tuple[Model, Bases | None, Any]:
    """A model in another basis where the basis that it has makes sums cancel more, else the model.

    Args:
        model: A model in scientific notation, traced or not.
        metric: Metric with the mean and variances of the inputs.

    Returns:
        The model; the bases that its bonds have been given, None where the model is unchanged, and
        inside a trace; the amplification of the model that is returned, 1 where its degree leaves
        no digit.

    Example:
        >>> import tnsim
        >>> layers = tnsim.Linear([[1.0, 1.0], [1.0, 1.001]]), tnsim.Linear([[1e3, -1e3]])
        >>> model, metric = tnsim.Model(layers), tnsim.Gaussian()
        >>> _, bases, amplified = without_skew(model, metric)
        >>> amplification(model, metric) > 1e4, list(bases), amplified > 1e4
        (True, [1], False)
    """
    if Arithmetic(model.growth, "float64").alone > USELESS:
        # Some fifty layers, each of which squares, leave no digit in any basis, as a warning says.
        return model, None, 1.0
    given = amplification(model, metric)
    if not any(_free_bonds(model.layers)):
        return model, None, given
    if not is_traced(given):
        if given < SKEWED:
            return model, None, given
        other, bases = regauged(model, metric)
        found = amplification(other, metric)
        return (other, bases, found) if found <= _WORSE * given else (model, None, given)

    def in_another_basis(model: Model) -> tuple[Model, Any]:
        other, _ = regauged(model, metric)
        found = amplification(other, metric)
        is_better = found <= _WORSE * given

        def better(new: Any, old: Any) -> Any:
            return jnp.where(is_better, jnp.asarray(new, old.dtype), old)

        return jax.tree.map(better, (other, found), (model, given))

    # A trace cannot branch in Python: both models are prepared as arrays of equal types, and the
    # condition chooses when the program runs.
    arrays = jax.tree.map(jnp.asarray, model)
    made, amplified = jax.lax.cond(
        given >= SKEWED, in_another_basis, lambda model: (model, given), arrays
    )
    return made, None, amplified


def regauged(model: Model, metric: Metric) -> tuple[Model, Bases]:
    """The same function with uncorrelated states at every bond with a free basis.

    Args:
        model: A model in scientific notation, traced or not.
        metric: Metric with the mean and variances of the inputs.

    Returns:
        Model with arrays of float64, or of the widest floats of a trace, and the bases of its
        bonds.

    Example:
        >>> import tnsim
        >>> layers = tnsim.Linear([[1.0, 1.0], [1.0, 1.001]]), tnsim.Linear([[1e3, -1e3]])
        >>> skewed = tnsim.Model(layers)
        >>> model, _ = regauged(skewed, tnsim.Gaussian())
        >>> [amplification(each, tnsim.Gaussian()) > 1e4 for each in (skewed, model)]
        [True, False]
        >>> x = np.array([1.0, 2.0])
        >>> bool(abs(model(x) - skewed(x)) < 1e-9)
        True
    """
    # More inputs than coordinates, so that the principal axes of every state are determined.
    widest = max(layer.d_out for layer in model.layers)
    inputs = sampled_inputs(model, metric, np.random.default_rng(0), 2 * widest + _POINTS)
    model = _widest(model)
    return (_regauged_by_jax if library(model, inputs) is jnp else _regauged)(model, inputs)


def _regauged(model: Model, inputs: Any) -> tuple[Model, Bases]:
    """The same function with states that are uncorrelated on the inputs."""
    layers = model.layers
    # States at every bond; bond n stands before layer n. Token ids have no state of their own, so
    # that the first state is then the output of the first layer.
    fixed = _of_unit_scale([not_differentiated(layer) for layer in layers])
    reached = {bond: _in_one_scale(state) for bond, state in states(fixed, inputs)}
    bases: Bases = {}
    for bonds in _free_bonds(layers):
        axes = _principal_axes([reached[bond] for bond in bonds])
        bases |= dict.fromkeys(bonds, axes)
    return _in_bases(model, bases), bases


def in_given_bases(model: Model, bases: Bases) -> Model:
    """The same function with bases that were found for it, which derivatives take as constants.

    Args:
        model: A model in scientific notation, traced or not.
        bases: Bases of bonds, as `regauged` gives them.

    Example:
        >>> import tnsim
        >>> layers = tnsim.Linear([[1.0, 1.0], [1.0, 1.001]]), tnsim.Linear([[1e3, -1e3]])
        >>> model, bases = regauged(tnsim.Model(layers), tnsim.Gaussian())
        >>> again = in_given_bases(tnsim.Model(layers), bases)
        >>> bool((again.layers[0].weight == model.layers[0].weight).all())
        True
    """
    return _in_bases(_widest(model), bases)


def _in_bases(model: Model, bases: Bases) -> Model:
    """A model after a change of the bases of some bonds."""
    layers = enumerate(model.layers)
    changed = [_layer_in_bases(layer, bases.get(n), bases.get(n + 1)) for n, layer in layers]
    return Model(changed, model.n_ctx)


_regauged_by_jax = jax.jit(_regauged)  # one program, also where a derivative runs step by step


def _in_one_scale(states: State) -> Any:
    """States as numbers of one scale, the largest no more than `2 ** _LARGEST` times the median.

    In a deep model few inputs have by far the largest states, which would be all that is seen.
    States that a forward pass has lost (`forward.states`) are seen no more than those of zeros.
    """
    values, exponents = states
    xp = library(values, exponents)
    values = xp.where(xp.isnan(values), 0.0, values)
    median = xp.sort(exponents.ravel())[exponents.size // 2]
    return values * xp.exp2(xp.minimum(exponents - median, _LARGEST))


def _of_unit_scale(layers: Sequence[Layer]) -> ScaledLayers:
    """Layers in scientific notation that stand for themselves."""
    return tuple(Scaled(layer, np.zeros(())) for layer in layers)


def _free_bonds(layers: Sequence[Layer]) -> Iterator[list[int]]:
    """Groups of bonds that share a basis, without the groups of the input and of the output."""
    # A layer without a skip ends a group of bonds, since its ends need no common basis. The group
    # of the input holds bond 0, and the group of the output is never yielded.
    group = [0]
    for n, layer in enumerate(layers):
        if not isinstance(layer, Residual):
            if group[0] != 0:
                yield group
            group = []
        group.append(n + 1)


class Basis(NamedTuple):
    """A basis of a state: the coordinates `axes @ h`.

    Args:
        axes: Orthogonal matrix T, a row for each new coordinate.
        excess: `T T' - 1`, what rounding has left of T being orthogonal.
    """

    axes: Float[np.ndarray, "width width"]
    excess: Float[np.ndarray, "width width"]


def _principal_axes(states: Sequence[Samples]) -> Basis:
    """A basis that makes the coordinates of states uncorrelated."""
    xp = library(states[0])
    moment: Any = 0.0
    # Each bond of a group counts by its own size, so that a large state does not hide the axes of a
    # small one.
    for state in states:
        flat = state.reshape(-1, state.shape[-1])
        flat = flat / xp.maximum(abs(flat).max(), xp.finfo(flat.dtype).tiny)
        square = flat.T @ flat
        moment = moment + square / xp.maximum(square.trace(), 1.0)
    _, vectors = xp.linalg.eigh(moment)
    square, error = exact_product(vectors.T, vectors)
    excess = square - xp.eye(len(square)) + error
    return Basis(vectors.T, excess)


def _layer_in_bases(layer: Layer, below: Basis | None, above: Basis | None) -> Layer:
    """A layer after a change of the bases of the bonds at its ends; None leaves a basis alone."""
    if isinstance(layer, Residual):
        return replaced(layer, {"layer": _layer_in_bases(layer.layer, below, above)})
    names, output = affine_maps(innermost(layer))
    arrays = {}
    for name in dict.fromkeys((*names, output)):
        weight, bias = getattr(layer, name), getattr(layer, bias_name(name))
        # `weight + rest` is the product to more bits than a float has; it is rounded once, at the
        # end.
        rest: Any = 0.0
        # Maps of the input read the basis below. A layer without such maps reads it with its only
        # matrix.
        reads = below if name in (names or (output,)) else None
        writes = above if name == output else None
        if reads is not None:
            # A linear layer changes both bases, and is rounded only once.
            weight, rest = exact_product(weight, reads.axes.T)
            # The inverse of T is T' (1 - E), and `weight` is W T' here already.
            rest = rest - weight @ reads.excess
        if writes is not None:
            # The rest of the first product is small, so its own product needs no further bits.
            rest = writes.axes @ rest if np.ndim(rest) else rest
            weight, more = exact_product(writes.axes, weight)
            rest = rest + more
            if bias is not None:
                turned, left = exact_product(writes.axes, bias[:, None])
                arrays[bias_name(name)] = (turned + left)[:, 0]
        arrays[name] = weight + rest
    return replaced(layer, arrays)


def sampled_inputs(model: Model, metric: Metric, rng: np.random.Generator, points: int) -> Any:
    """Inputs with the means and variances of a metric; token ids under `Categorical`.

    Args:
        model: Model that reads the inputs.
        metric: Metric with the mean and variances of the inputs.
        rng: Generator of the draws.
        points: Number of inputs; fewer where states are large.
    """
    count = min(model.n_ctx or 1, _POSITIONS)
    positions = () if model.n_ctx is None else (count,)
    of_one = max(model.d_in, *(layer.d_out for layer in model.layers)) * count
    shape = (max(1, min(points, _ELEMENTS // of_one)), *positions)
    if isinstance(metric, Categorical):
        chances = metric.distribution(model.d_in)
        if is_traced(chances):  # no draw can follow them; they hardly change what cancels
            chances = np.ones(model.d_in)
        return rng.choice(model.d_in, shape, p=chances / chances.sum())
    mean, cov = _moments_of_a_position(metric, model.d_in, model.n_ctx)
    normal = rng.standard_normal((*shape, model.d_in))
    if cov.ndim == 1:
        return mean + library(cov).sqrt(cov) * normal
    # As correlated as they are: in a direction of large variance that a model does not read, what
    # single weights read cancels.
    return mean + normal @ _factor(cov).T


def _moments_of_a_position(metric: Metric, d_in: int, n_ctx: int | None) -> tuple[Any, Any]:
    """The mean and the covariance of an input at a position chosen at random, without derivatives.

    Returns:
        Mean (d,) and covariance (d, d), or its diagonal (d,) where no position has a matrix.
    """
    groups = not_differentiated(marginals(metric, d_in, n_ctx))
    shares = [count / (n_ctx or 1) for count, _, _ in groups]
    means: list[Any] = [np.zeros(d_in) if mean is None else mean for _, mean, _ in groups]
    covs: list[Any] = [np.ones(d_in) if cov is None else cov for _, _, cov in groups]
    mean: Any = sum(map(operator.mul, shares, means))
    parts = []
    for share, own, cov in zip(shares, means, covs, strict=True):
        off = own - mean
        is_matrix = max(x.ndim for x in covs) == 2
        cov = library(cov).diag(cov) if is_matrix and cov.ndim == 1 else cov
        parts.append(share * (cov + (off[:, None] * off if is_matrix else off**2)))
    return mean, sum(parts)


def _factor(cov: Any) -> Any:
    """A matrix L with `L L^T` a covariance (d, d) and the rounding of its entries.

    A factor by Cholesky takes a seventh of the time of a root by eigenvectors. Only a covariance
    that was rounded to fewer digits than float64 has none.
    """
    xp = library(cov)
    variances = cov.diagonal()
    units = xp.sqrt(xp.where(variances > 0, variances, 1.0))
    noise = len(cov) * xp.eye(len(cov)) * (ROUNDING_OF_COVARIANCES * xp.finfo(cov.dtype).eps)
    try:
        return units[:, None] * xp.linalg.cholesky(cov / units / units[:, None] + noise)
    except np.linalg.LinAlgError:
        return root_of(cov)


def fits_float32(model: Model, metric: Metric, points: Points | None) -> bool:
    """Whether plain float32 has the range for a model, its forward passes and its derivatives.

    Hidden states of 2^-70, whose squares later weights enlarge, have none, and no forward pass in
    scientific notation shows it. Products of five legs, each no farther from 1 than `_PLAIN`, have.

    Args:
        model: Polynomial model on arrays of numbers.
        metric: Metric with the mean and variances of the inputs.
        points: Inputs of the metric; None where it compares along a plan.

    Returns:
        Whether weights, few inputs and their outputs are near 1, and outputs are those of float64;
        True where float64 gives no outputs either.

    Example:
        >>> import tnsim
        >>> small, large = (tnsim.Bilinear(*[[[x]]] * 2, [[1 / x**2]]) for x in (1e-22, 1.0))
        >>> [fits_float32(tnsim.Model([x]), tnsim.Gaussian(), None) for x in (small, large)]
        [False, True]
    """
    if points is None:
        inputs = sampled_inputs(model, metric, np.random.default_rng(0), _POINTS)
    else:
        inputs = _few_of(model, points)
    model = in_float64(jax.tree.map(np.asarray, model))
    with np.errstate(all="ignore"):
        exact = np.asarray(plain_forward(model, inputs))
        if not np.isfinite(exact).all():
            return True
        read = [] if is_tokens(inputs) else [inputs]
        tops = [np.abs(x).max(initial=0.0) for x in (*jax.tree.leaves(model), *read, exact)]
        if not all(top == 0 or 1 / _PLAIN <= top <= _PLAIN for top in tops):
            return False
        narrow, *few = jax.tree.map(lambda x: x.astype(np.float32), [model, *read])
        missed = abs(np.asarray(plain_forward(narrow, *(few or [inputs]))) - exact).max(initial=0.0)
    return bool(missed <= VISIBLE * abs(exact).max(initial=0.0))
