"""Forward passes that never leave the range of floats, on inputs or on beginnings of sequences.

*Beginnings.* Where attention is causal, the state at position s is a function of the first s + 1
tokens: all sequences that begin alike share it. The `vocabulary ** n` sequences of n tokens have
`vocabulary ** s` beginnings of s tokens. The states of all beginnings together are hardly more than
the sequences, while a pass over every sequence by itself has n times as many states.

Beginnings form a tree (`Prefixes`). Level s holds the beginnings of s tokens in order, so that the
continuations of a beginning stand together, equally many for each. Layers read a row for every
beginning, level after level. A query of level s sees the keys of its own beginnings at levels
t <= s, and `reshape` finds these keys: level s seen from level t has the axes (beginnings at t,
continuations of each).

*Range.* A state h is stored as `h = 2^e h'` with the largest entry of h' near 1 and an exponent e
for every input, and the weights of every layer are scaled in the same way (see `scaling`). Over h',
with the constant `c = 2^-e` in the place of 1, a layer of order n is homogeneous,

    affine map   W h + b       = 2^e (W h' + c b)
    output       D y + d       = 2^(n e) (D y' + c^n d)
    skip         s h + f(h)    = 2^(n e) (c^(n - 1) s h' + f'(h')),

and so is a stack of layers. Powers of two are exact, so the outputs are those of an ordinary
forward pass to the last bit wherever the ordinary pass stays in range. Entries that underflow are
too small to count against the largest entry of their state. A layer with an activation is not
homogeneous, and reads the state itself, as an ordinary forward pass does.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Float, Int

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, add, affine, bias_name, is_sparse
from tnsim.models.layers import (
    Attention,
    Layer,
    Linear,
    Residual,
    activation_of,
    affine_maps,
    innermost,
    map_names,
    rotated,
)
from tnsim.models.model import Model
from tnsim.models.scaling import Unit, replaced, scaled
from tnsim.scaled import Scaled, larger, library, not_differentiated, shifted, split

Inputs: TypeAlias = Float[Array, "points *positions in"] | Int[Array, "points positions"]
"""Vectors, sequences of vectors, or sequences of token ids (which stand for one-hot vectors)."""
ScaledLayers: TypeAlias = tuple[Scaled[Layer], ...]
"""The layers of a model, each a layer with weights near one times a power of two."""
State: TypeAlias = Scaled[Float[Array, "points *positions width"]]
"""States between two layers, or outputs: an array (points, width), (points, positions, width) or a
row for every beginning, and exponents that broadcast against it, an entry for every input; of
outputs (points, 1) or, where outputs are told apart, (points, width)."""
_INPUT_STEP = 16
"""Units of inputs are powers of two to multiples of this exponent. Products of six legs that read
small coordinates alone then stay in the range of float32; at 64 products of two legs did not."""
_DIGITS = 16  # binary digits of the least state that count, above the end of the range of floats


class Prefixes(NamedTuple):
    """Beginnings of token sequences.

    Args:
        tokens: Last token of every beginning, in order, for each level.

    Example:
        The beginnings of 00, 01, 10 and 11.

        >>> import numpy as np
        >>> prefixes = Prefixes((np.array([0, 1]), np.array([0, 1, 0, 1])))
        >>> prefixes.counts, prefixes.ids.tolist()
        ((2, 4), [0, 1, 0, 1, 0, 1])
    """

    tokens: tuple[Int[Array, " beginnings"], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of beginnings at each level."""
        return tuple(level.shape[0] for level in self.tokens)

    @property
    def ids(self) -> Int[Array, " states"]:
        """The tokens of all levels, level after level."""
        return library(self.tokens[0]).concatenate(self.tokens)


def rising(exponents: Float[Array, "states 1"], counts: Sequence[int]) -> Float[Array, "states 1"]:
    """The largest exponent among every beginning and the shorter beginnings of it.

    Example:
        >>> import numpy as np
        >>> rising(np.array([[3.0], [0.0], [1.0], [4.0]]), counts=(2, 2)).ravel().tolist()
        [3.0, 0.0, 3.0, 4.0]
    """
    rises: list[Any] = []
    for level in _split_levels(exponents, counts):
        if rises:
            # Continuations of a beginning stand together, so each beginning repeats.
            each = len(level) // len(rises[-1])
            level = larger(level, rises[-1].repeat(each, axis=0))
        rises.append(level)
    return library(exponents).concatenate(rises)


def outputs_of_layer(
    layer: Layer,
    state: Float[Array, "points *positions in"],
    counts: Sequence[int] | None,
    exponents: Float[Array, "states 1"] | float = 0.0,
) -> Float[Array, "points *positions out"]:
    """The outputs of a layer, the step that every forward pass takes.

    Args:
        layer: Any layer; over beginnings of sequences attention must be causal.
        state: States on which the layer runs, of beginnings a row for each, level after level.
        counts: Number of beginnings at each level; None where every input is a point.
        exponents: Exponents of the states, which stand for `state * 2 ** exponents`. Along a
            sequence they never fall, see `rising`.

    Returns:
        Outputs, which have the exponents `layer.order * exponents`.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> outputs_of_layer(square, np.array([[2.0], [3.0]]), counts=(1, 1)).tolist()
        [[4.0], [9.0]]
    """
    if counts is None:
        return layer(state)
    if isinstance(layer, Residual):
        # `_homogeneous_layer` has already brought the skip to the exponents of the inner outputs.
        inner = outputs_of_layer(layer.layer, state, counts, exponents)
        return layer.skip * state + layer.scale * inner
    if not isinstance(layer, Attention):
        return layer(state)
    return affine(_causal_values(layer, state, exponents, counts), layer.o, layer.o_bias)


def _causal_values(layer: Attention, state: Any, exponents: Any, counts: Sequence[int]) -> Any:
    """The values of all heads of causal attention at every beginning, which O multiplies.

    With states `2^e h`, a term of query s and key t has two factors from s (the queries) and three
    from t (two keys and the value). The term is thus scaled by

        2^(2 e_s + 3 e_t) = 2^(5 e_s) 2^(3 (e_t - e_s)),

    where the second power is at most 1, since e_t is at most e_s.
    """
    heads = layer.n_heads
    angles = layer.angles(len(counts))

    def by_level(name: str) -> list[Any]:
        """Rows of queries, keys or values by level, with the axes (beginnings, head, row)."""
        rows = affine(state, getattr(layer, name), getattr(layer, bias_name(name)))
        levels = _split_levels(rows.reshape(len(rows), heads, -1), counts)
        # Values are not turned.
        if angles is None or name == "v":
            return levels
        return [rotated(level, own) for level, own in zip(levels, angles, strict=True)]

    q1, k1, q2, k2, values = map(by_level, ("q1", "k1", "q2", "k2", "v"))
    # Plain floats have the exponent 0 at every beginning.
    scales = _split_levels(exponents + np.zeros((len(state), 1)), counts)
    outputs = []
    for s, count in enumerate(counts):
        z: Any = 0.0
        for t, beginnings in enumerate(counts[: s + 1]):
            shape = beginnings, count // beginnings
            scores = _prefix_scores(q1[s], k1[t], shape) * _prefix_scores(q2[s], k2[t], shape)
            lower = scales[t][:, None] - scales[s].reshape(*shape, 1)  # e_t - e_s, at most 0
            share = shifted(lower.astype(state.dtype) * 0 + 1, 3 * lower)
            weights = scores * share / layer.d_head**2
            seen = weights[..., None] * values[t][:, None]
            # Beginnings in order: the continuations of each stand together, so the two axes flatten
            # into the level's own.
            z = z + seen.reshape(count, heads, -1)
        outputs.append(z)
    z = library(state).concatenate(outputs)
    return z.reshape(len(z), -1)


def _prefix_scores(queries: Any, keys: Any, shape: tuple[int, int]) -> Any:
    """Queries times keys of their beginnings, with axes (beginnings, continuations, head)."""
    by_beginning = queries.reshape(*shape, *queries.shape[1:])
    return (by_beginning * keys[:, None]).sum(axis=-1)


def _split_levels(rows: Any, counts: Sequence[int]) -> list[Any]:
    """Rows of all levels, split into levels."""
    ends = itertools.accumulate(counts)
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]


def scaled_layers(model: Model, slices: bool = False, inputs: Unit | None = None) -> ScaledLayers:
    """The layers of a model, each in scientific notation.

    Args:
        model: Any model.
        slices: Whether each output has an exponent of its own.
        inputs: Exponents of the units of the inputs, the same for all or for each coordinate;
            None for units of 1.

    Example:
        >>> first, _ = scaled_layers(Model([Linear([[1e200]]), Linear([[1.0]])]))
        >>> first.value.weight * 2.0**first.exponent
        array([[1.e+200]])
    """
    last = len(model.layers) - 1
    layers = []
    for n, layer in enumerate(model.layers):
        layers.append(scaled_layer(layer, slices and n == last, None if n else inputs))
    return tuple(layers)


def scaled_layer(layer: Layer, slices: bool = False, inputs: Unit | None = None) -> Scaled[Layer]:
    """A layer in scientific notation by itself, as a forward pass normalises between layers.

    Args:
        layer: Any layer.
        slices: Whether each output has an exponent of its own.
        inputs: Exponents of the units of the inputs; None for units of 1.

    Example:
        >>> weights, exponent = scaled_layer(Linear([[1e200]]))
        >>> weights.weight * 2.0**exponent
        array([[1.e+200]])
    """
    below = np.zeros(()) if inputs is None else inputs
    alone, exponent = scaled(Model([layer]), slices, below=below)
    return Scaled(alone.layers[0], exponent)


def in_own_units(model: Model, inputs: Array) -> tuple[Array, Unit]:
    """Inputs in units of their own, which keep coordinates in the range of floats, and the units.

    Every input has an exponent later. Units are for coordinates far from each other, and for
    inputs beyond float32. They are powers of 2^16, so that inputs of ordinary size are left alone.

    Args:
        model: Model that reads the inputs. A residual stream leaves a single unit, a function of
            every coordinate none.
        inputs: Floats (points, d_in) or (points, n_ctx, d_in).

    Returns:
        Inputs of the same dtype and shape, and the exponents of the units, a single exponent or an
        exponent for each coordinate.

    Example:
        >>> inputs, unit = in_own_units(Model([Linear([[1.0, 1.0]])]), np.array([[2.0**80, 3.0]]))
        >>> inputs.tolist(), unit.tolist()
        ([[1.0, 3.0]], [80.0, 0.0])
    """
    xp = library(inputs)
    if not map_names(innermost(model.layers[0])):  # no weights would take a unit up
        return inputs, np.zeros(())
    # Units are choices and no functions of the inputs: derivatives pass them by.
    read = not_differentiated(inputs)
    axes = tuple(range(inputs.ndim - 1))
    # Absolute values of all inputs would be a second array of their size.
    largest = xp.maximum(read.max(axis=axes), -read.min(axis=axes))
    sizes = xp.log2(xp.where(largest > 0, largest, 1.0))
    # A skip adds inputs to outputs, coordinate by coordinate, and needs them in one unit.
    sizes = sizes.max() if isinstance(model.layers[0], Residual) else sizes
    unit = _INPUT_STEP * xp.rint(sizes / _INPUT_STEP)
    # Inputs in ordinary units are no copy.
    if xp is np and not unit.any():
        return inputs, np.zeros(())
    return shifted(inputs, -unit), unit


def forward(
    model: ScaledLayers,
    inputs: Inputs | Prefixes | State,
    counts: tuple[int, ...] | None = None,
) -> State:
    """The outputs of a model on a batch of inputs, at any depth.

    Args:
        model: Layers in scientific notation, made by `scaled_layers`.
        inputs: Floats (points, d_in) or (points, n_ctx, d_in), or integers (points, n_ctx) below
            d_in. For causal models also `Prefixes`: every beginning is a point, and the output of
            its last position is the output of that point. Or a state that the first of these
            layers reads.
        counts: Number of beginnings at each level, for a state of `Prefixes`.

    Returns:
        Outputs (points, d_out) or (points, n_ctx, d_out) with their exponents. The largest value
        of each point lies in [1/2, 1) unless all are zero.

    Example:
        >>> large = scaled_layers(Model([Linear([[1e200]])]))
        >>> values, exponents = forward(large, np.array([[1e200]]))
        >>> log10 = np.log10(values[0, 0]) + exponents[0, 0] * np.log10(2)
        >>> round(float(log10), 9)
        400.0
    """
    ((_, state),) = deque(states(model, inputs, counts), maxlen=1)  # holds no earlier state
    # The exponent of the last layer may differ by output, so it is added here, where a state needs
    # no common exponent any more.
    return Scaled(state.value, state.exponent.reshape(-1, 1) + model[-1].exponent)


def states(
    model: ScaledLayers,
    inputs: Inputs | Prefixes | State,
    counts: tuple[int, ...] | None = None,
) -> Iterator[tuple[int, State]]:
    """The states of a forward pass, from the inputs up.

    Args:
        model, inputs, counts: As for `forward`.

    Yields:
        Number of layers below a state, and the state; the last one without the exponent of the last
        layer. Over tokens the first state stands behind a table of their rows.

    Example:
        >>> lines = scaled_layers(Model([Linear([[8.0]]), Linear([[2.0]])]))
        >>> [(n, state.exponent.item()) for n, state in states(lines, np.array([[1.0]]))][:2]
        [(0, 1.0), (1, 4.0)]
    """
    if isinstance(inputs, Scaled):
        state, first = inputs, 0
    else:
        counts = inputs.counts if isinstance(inputs, Prefixes) else None
        state, first = entered(model, inputs)
    yield first, state
    for n, (layer, unit) in enumerate(model[first:], start=first + 1):
        later = tuple(following for following, _ in model[n:])
        state = after(layer, unit if later else 0.0, state, ahead(later), counts)
        yield n, state


def entered(model: ScaledLayers, inputs: Inputs | Prefixes) -> tuple[State, int]:
    """The states with which a forward pass begins.

    Args:
        model: Layers in scientific notation, made by `scaled_layers`.
        inputs: Inputs as for `forward`.

    Returns:
        A pair: the inputs, or the states behind a first layer that is a table of tokens; the number
        of layers behind which the states are, 0 or 1.

    Example:
        >>> line = scaled_layers(Model([Linear([[2.0]])]))
        >>> state, layers = entered(line, np.array([[8.0]]))
        >>> state.value.tolist(), state.exponent.tolist(), layers
        ([[0.5]], [[4.0]], 0)
    """
    counts = inputs.counts if isinstance(inputs, Prefixes) else None
    layers = tuple(layer for layer, _ in model)
    values, first = embedded(layers, inputs)
    # The exponent of the last layer is added to the outputs.
    entry = Scaled(values, model[0].exponent if first and len(model) > 1 else 0.0)
    return _normalised_state(entry, ahead(layers[first:]), counts), first


def after(
    layer: Layer, unit: Unit | float, state: State, demands: Ahead, counts: tuple[int, ...] | None
) -> State:
    """The states behind the layer `2 ** unit * layer`.

    Args:
        layer: Layer with weights near 1.
        unit: Exponent of the layer.
        state: States below the layer.
        demands: Demands of the layers behind, from `ahead`.
        counts: Number of beginnings at each level; None where inputs are no `Prefixes`.

    Example:
        >>> double = Linear([[0.5]])
        >>> after(double, 2.0, Scaled(np.array([[0.5]]), np.zeros((1, 1))), ahead(()), None)
        Scaled(value=array([[0.5]]), exponent=array([[1.]]))
    """
    values, exponent = state
    # f(2^e h') = 2^(n e) f'(h') for a layer of order n. An activation is not homogeneous: its layer
    # reads the state itself.
    order, activated = layer.order, activation_of(layer) is not None
    if activated:
        values, exponent, order = shifted(values, exponent), exponent * 0.0, 1
    elif _reads_constant(layer):
        layer = _homogeneous_layer(layer, shifted(exponent.astype(values.dtype) * 0 + 1, -exponent))
    values = outputs_of_layer(layer, values, counts, exponent)
    # gelu(-37.5) is 1e-306 and gelu(-38) is 0: neither says that digits of others are lost.
    ends = activated and values.dtype == np.float64
    return _normalised_state(Scaled(values, order * exponent + unit), demands, counts, ends)


class Ahead(NamedTuple):
    """Demands of the layers ahead on the exponents of a state.

    Args:
        constant: Whether a layer reads the constant `2^-e`.
        order: Order of the next layer, 0 behind the last.
    """

    constant: bool
    order: int


def ahead(layers: Sequence[Layer]) -> Ahead:
    """The demands of layers that have not run, up to the next activation, which reads no exponent.

    Example:
        >>> ahead([Linear([[1.0]], [2.0])])
        Ahead(constant=True, order=1)
    """
    # Behind an activation the exponent is 0 again, so nothing beyond it matters.
    linked = tuple(itertools.takewhile(lambda layer: activation_of(layer) is None, layers))
    return Ahead(any(map(_reads_constant, linked)), layers[0].order if linked else 0)


def embedded(layers: Sequence[Layer], inputs: Any) -> tuple[Any, int]:
    """The state that the first layers leave behind, and the number of these layers (0 or 1).

    A linear first layer over tokens is a table whose rows are looked up. If the first layer is not
    linear, tokens become one-hot vectors.

    Example:
        >>> table = Model([Linear([[5.0, 7.0]]), Linear([[2.0]])])
        >>> state, done = embedded(table.layers, np.array([0, 1]))
        >>> state.ravel().tolist(), done
        ([5.0, 7.0], 1)
    """
    if not is_tokens(inputs):
        return inputs, 0
    if isinstance(inputs, Prefixes):
        inputs = inputs.ids
    first = layers[0]
    if isinstance(first, Linear) and not is_sparse(first):
        # A table of constants, as of a gated stream, is no array of JAX where tokens are traced.
        table = library(first.weight, inputs).asarray(first.weight.T)
        return add(table[inputs], first.bias), 1
    dtype = jax.tree.leaves(layers)[0].dtype
    return library(inputs).eye(first.d_in, dtype=dtype)[inputs], 0


def _homogeneous_layer(layer: Layer, one: Any) -> Any:
    """The layer over a state whose constant is `one` instead of 1, a number for every input."""
    if isinstance(layer, Residual):
        inner = _homogeneous_layer(layer.layer, one)
        skip = layer.skip * one ** (layer.order - 1)
        return replaced(layer, {"layer": inner, "skip": skip})
    rows, output = affine_maps(layer)
    orders = dict.fromkeys(rows, 1) | {output: layer.order}
    biases = {}
    for name, order in orders.items():
        bias = getattr(layer, bias_name(name))
        if bias is not None:
            # One after another: a large bias keeps what the power itself would lose of it.
            biases[bias_name(name)] = functools.reduce(operator.mul, [one] * order, bias)
    return replaced(layer, biases)


def _normalised_state(
    state: State, demands: Ahead, counts: tuple[int, ...] | None, ends: bool = False
) -> State:
    """The same state with its largest entry near 1, for every input.

    Where a later layer reads the constant `2^-e`, before the next activation, exponents stay so
    large that the constant stays a float. The state of a beginning has no smaller exponent than the
    states of shorter beginnings (see `rising`), as attention needs; `counts` are the beginnings at
    each level.

    Products of small coordinates alone, which large weights read, may leave the range of floats
    before their sum is normalised. Where their digits end there, the state is NaN, which a result
    refuses. So is a state of float32 that vanishes beside the constant, as a later layer may
    enlarge it. With `ends` the state keeps the digits that it has down to zero, as an activation in
    float64 does.
    """
    values, exponent = state
    xp = library(values)
    top = abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
    smallest = np.finfo(values.dtype).minexp + 2.0
    if not (demands.constant or ends):  # beside a constant a small state needs no digits
        is_lost = (top > 0) & (top < 2.0 ** (smallest + _DIGITS))
        values = xp.where(is_lost, xp.nan, values).astype(values.dtype)
        top = xp.where(is_lost, 1.0, top).astype(values.dtype)
    _, shift = split(top)
    # A state of zeros keeps an exponent near the bottom of the range, so that nothing becomes
    # infinite when it meets others.
    shift = larger(shift, smallest)
    if demands.constant:
        # A layer multiplies up to n copies of the constant 2^-e: the product must be a float.
        least = smallest // (demands.order + 1) - exponent
        if values.dtype == np.float32:
            vanishes = (top > 0) & (shift - least < smallest)
            values = xp.where(vanishes, xp.nan, values).astype(values.dtype)
        shift = larger(shift, least)
    if counts is not None:
        shift = rising(exponent + shift, counts) - exponent
    return Scaled(values * shifted(top * 0 + 1, -shift), exponent + shift)


def _reads_constant(layer: Layer) -> bool:
    """Whether a layer has a bias or a skip."""
    core = innermost(layer)
    biases = [getattr(core, bias_name(name)) for name in map_names(core)]
    return core is not layer or any(bias is not None for bias in biases)


def plain_forward(model: Model, inputs: Array | Prefixes) -> Float[Array, "points *positions out"]:
    """The outputs of a model in plain floats, as from a call, for token ids as well.

    Args:
        model: Any model.
        inputs: Floats (points, d_in) or (points, n_ctx, d_in), or integers (points, n_ctx) below
            d_in; for causal models also `Prefixes`, as for `forward`.

    Returns:
        An array (points, d_out) or (points, n_ctx, d_out), in the dtype that weights and inputs
        promote to.

    Example:
        >>> table = Model([Linear([[5.0, 7.0]]), Linear([[2.0]])])
        >>> plain_forward(table, np.array([[0, 1]])).tolist()
        [[[10.0], [14.0]]]
    """
    ((_, outputs),) = deque(plain_states(model.layers, inputs), maxlen=1)
    return outputs


def plain_states(
    layers: Sequence[Layer], inputs: Array | Prefixes
) -> Iterator[tuple[int, Float[Array, "points *positions width"]]]:
    """The states of a forward pass in plain floats, from the inputs up.

    Exponents cost a compiler more than all the rest, and derivatives do without them.

    Args:
        layers: Layers of a model.
        inputs: Inputs, as for `plain_forward`.

    Yields:
        Number of layers below a state, and the state; over tokens from the table of their rows on.

    Example:
        >>> lines = Linear([[8.0]]), Linear([[2.0]])
        >>> [(n, state.item()) for n, state in plain_states(lines, np.array([[1.0]]))]
        [(0, 1.0), (1, 8.0), (2, 16.0)]
    """
    counts = inputs.counts if isinstance(inputs, Prefixes) else None
    state, first = embedded(layers, inputs)
    yield first, state
    for n, layer in enumerate(layers[first:], start=first + 1):
        state = outputs_of_layer(layer, state, counts)
        yield n, state


def hidden_values(core: Any, state: Any, counts: tuple[int, ...] | None) -> Any:
    """The plain floats that the output map of a layer inside residuals multiplies.

    Args:
        core: Layer inside residuals.
        state: States that the layer reads.
        counts: Number of beginnings at each level; None where inputs are no `Prefixes`.

    Example:
        >>> hidden_values(Linear([[2.0]]), np.ones((3, 1)), None).ravel().tolist()
        [1.0, 1.0, 1.0]
    """
    if isinstance(core, Attention) and counts is not None:
        return _causal_values(core, state, 0.0, counts)
    return core.hidden(state)


def is_tokens(inputs: Any) -> bool:
    """Whether inputs are token ids.

    Example:
        >>> is_tokens(np.array([[0, 3]])), is_tokens(np.array([[0.0, 3.0]]))
        (True, False)
    """
    return isinstance(inputs, Prefixes) or inputs.dtype.kind in "iu"


def check_inputs(model: Model, inputs: Inputs | Prefixes) -> None:
    """Raise `ModelError` unless a model reads inputs of this shape.

    Example:
        >>> check_inputs(Model([Linear([[1.0]])]), np.ones((5, 2)))
        Traceback (most recent call last):
        tnsim.errors.ModelError: the models read inputs of shape (n, 1), found (n, 2)
    """
    if isinstance(inputs, Prefixes):
        sizes, ids = (len(inputs.counts),), inputs.ids
    else:
        sizes, ids = tuple(inputs.shape[1:]), inputs
    if not is_tokens(inputs):
        positions = () if model.n_ctx is None else (model.n_ctx,)
        wanted = (*positions, model.d_in)
    elif model.n_ctx is None:
        raise ModelError(
            "inputs of integers are token ids, for models of sequences: give "
            "tnsim.Model(layers, n_ctx=...), or floats for vectors"
        )
    else:
        wanted = (model.n_ctx,)
    if sizes != wanted:
        raise ModelError(
            f"the models read inputs of shape {_batch_shape(wanted)}, found {_batch_shape(sizes)}"
        )
    if not is_tokens(inputs) or isinstance(ids, Tracer):
        return  # of a traced array only the shape is known
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < model.d_in:
        raise ModelError(
            f"token ids from {ids.min()} to {ids.max()} were given, "
            f"but the models read {model.d_in} tokens, counted from 0"
        )


def as_read(model: Any, inputs: Any) -> Any:
    """Inputs in the shape that a model reads, which is a vector for images.

    Args:
        model: Model or combination of models.
        inputs: Floats (n, ...) or token ids.

    Returns:
        The inputs; floats of another shape with as many numbers as a model of vectors reads are
        (n, d_in).

    Raises:
        ModelError: The model reads inputs of another shape.

    Example:
        >>> as_read(Model([Linear(np.ones((1, 12)))]), np.ones((5, 3, 2, 2))).shape
        (5, 12)
    """
    has_axes = not is_tokens(inputs) and inputs.ndim > 2
    if has_axes and model.n_ctx is None and math.prod(inputs.shape[1:]) == model.d_in:
        inputs = inputs.reshape(len(inputs), model.d_in)
    check_inputs(model, inputs)
    return inputs


def outputs_on(model: Model, inputs: Any) -> Float[Array, "points *positions out"]:
    """The outputs of a model in plain floats, on inputs in the form that data has.

    Args:
        model: Model.
        inputs: Vectors, sequences, token ids, or images; see `as_read`.

    Raises:
        ModelError: Inputs have another shape, or ids that are not among the tokens.

    Example:
        >>> from tnsim.models.layers import Linear
        >>> outputs_on(Model([Linear(np.ones((1, 4)))]), np.ones((5, 2, 2))).shape
        (5, 1)
    """
    return plain_forward(model, as_read(model, inputs))


def _batch_shape(shape: tuple[int, ...]) -> str:
    """The shape of a batch of inputs in words, with n for the number of inputs."""
    return f"({', '.join(('n', *map(str, shape)))})"


def directions(model: Model, most: int) -> Float[np.ndarray, "rows in"] | None:
    """Rows that span the directions of the input that a model reads, at a single position.

    Linear layers at the start are multiplied out. The first other layer reads its state through the
    rows of its factors, and reads the whole state where it has a skip. Only the span counts, so the
    rows come from the model in scientific notation, near 1 for weights of any size.

    Args:
        model: A polynomial model.
        most: Largest number of directions that is useful to the caller.

    Returns:
        The rows; None where they span more than `most` directions.

    Example:
        >>> directions(Model([Linear([[1e200, 0.0]]), Linear([[1e200]])]), most=2)[0] > 0
        array([ True, False])
    """
    reading = reading_layers(model)
    if not reading:
        return np.eye(model.d_in) if model.d_in <= most else None
    if min(model.d_in, sum(factor.shape[0] for factor in _factors_of(reading[-1]))) > most:
        return None
    matrices = [
        np.concatenate([np.asarray(factor, np.float64) for factor in _factors_of(layer)])
        for layer in scaled(Model(reading)).value.layers
    ]
    # Rows of the reading layer times the linear layers before it span the same directions as the
    # composed map reads.
    return functools.reduce(lambda rows, matrix: matrix @ rows, matrices)


def reading_layers(model: Model) -> tuple[Layer, ...]:
    """The layers that decide which directions of the input a model reads; none where it reads all.

    Linear layers without a skip at the start, and the layer behind them unless it has a skip, which
    reads every output of the layers before.

    Example:
        >>> model = Model([Linear([[1.0, 0.0]]), Residual(Linear([[1.0]]))])
        >>> reading_layers(model) == model.layers[:1]
        True
    """
    linear = tuple(itertools.takewhile(lambda layer: isinstance(layer, Linear), model.layers))
    following = model.layers[len(linear) : len(linear) + 1]
    if any(isinstance(layer, Residual) for layer in following):
        return linear
    return (*linear, *following)


def _factors_of(layer: Layer) -> list[Any]:
    """The matrices through which a layer without a skip reads its input."""
    factors, output = affine_maps(layer)
    return [getattr(layer, name) for name in factors or (output,)]
