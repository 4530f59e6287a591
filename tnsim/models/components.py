"""Components of a model: names, switches, and exchanges of components between two models.

A component is a function that a layer adds to the stream: the whole layer, a head, or a hidden
unit. With z_c in front of each component c,

    x_l = skip_l x_(l-1) + sum_(c in layer l) z_c F_c(x_(l-1)),

the outputs of a model are a polynomial in the switches z. A switch multiplies columns of the output
matrix of a layer, so a switched model has the shapes of the model for every z. Linear layers
without a skip have no component: everything passes through them.

An activation that reads a component makes them another function of z, in which sets of components
that are on or off can still be told apart. An elementwise layer is written as the gated layer
`I f(I x)`, whose output matrix a switch multiplies.

Between two models a component *function* is interpolated, `(1 - s_c) F_c^a + s_c F_c^b`: hidden
units or heads of both models stand side by side, with their output weights times `1 - s_c` and
`s_c`. Unlike a straight line in weights this depends on the functions alone: an exchange of hidden
units, of factors or of bases inside a head changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.models.arrays import (
    Array,
    affine,
    as_array,
    bias_name,
    in_float64,
    is_traced,
    written_out,
)
from tnsim.models.forward import Prefixes, embedded, hidden_values, outputs_of_layer
from tnsim.models.layers import (
    Attention,
    Elementwise,
    Gated,
    Layer,
    Linear,
    Residual,
    activation_of,
    affine_maps,
    innermost,
    residual_rule,
)
from tnsim.models.model import AnyModel, Model, check_comparable, check_numbers
from tnsim.models.scaling import replaced
from tnsim.options import checked, shown
from tnsim.scaled import library

GRANULARITIES = ("layer", "head", "unit")
"""Values of `by`."""
_SHOWN = 12
"""Most labels that an error message lists."""
_LEGS = {"q1": "Q", "q2": "Q", "k1": "K", "k2": "K", "v": "V"}
"""Classes of legs that no gauge of a layer mixes; the legs of other layers are of class `in`."""
EMBED = -1
"""Number of the source that is no component: the stream below all of them, and the biases of linear
layers that it passes through. Where no skip has kept this stream, no edge leads to it."""
_CLOSED, _OPEN = 0, 1
"""Places of the gates of what is never read, and of what is read through no edge."""


@dataclass(frozen=True)
class Component:
    """A part of a layer's output.

    Args:
        label: Name, such as `layer 1 head 0`.
        layer: Number of the layer.
        part: Number of the part among equal parts of the layer's hidden units; None for a bias
            alone.
        parts: Number of such parts of the layer.
        bias: Whether the output bias of the layer belongs to the component.
    """

    label: str
    layer: int
    part: int | None
    parts: int
    bias: bool

    def places(self, width: int) -> slice:
        """The places of the component among `width` rows or columns; a bias alone has none."""
        assert self.part is not None
        step = width // self.parts
        return slice(self.part * step, (self.part + 1) * step)


@checked
def components(model: Model, by: str = "layer") -> tuple[str, ...]:
    """The names of the components of a model, from the input up.

    Args:
        model: Any model.
        by: `"layer"` for layers; `"head"` for the heads of attention, and other layers whole;
            `"unit"` for hidden units, and the heads of attention. Heads and units have the output
            bias of their layer beside them, as a component `layer 1 bias`.

    Returns:
        Labels such as `layer 1 head 0`. Linear layers without a skip have none.

    Raises:
        ModelError: The model has no component, or no heads to tell apart.

    Example:
        >>> import numpy as np, tnsim
        >>> layer = tnsim.Residual(tnsim.Bilinear(*[np.eye(2)] * 3))
        >>> model = tnsim.Model([layer, layer])
        >>> components(model)
        ('layer 0', 'layer 1')
        >>> components(model, by="unit")
        ('layer 0 unit 0', 'layer 0 unit 1', 'layer 1 unit 0', 'layer 1 unit 1')
    """
    return tuple(component.label for component in components_of([model], by))


def components_of(models: Sequence[Any], by: str, linear: bool = False) -> tuple[Component, ...]:
    """The components of models of equal layers; a bias counts where any of the models has it.

    Args:
        models: Models with the same components.
        by: Granularity, as for `components`.
        linear: Whether linear layers without a skip are components as well.

    Raises:
        ModelError: There is no component, or there are no heads to tell apart.

    Example:
        >>> line = Model([Linear([[1.0]])])
        >>> [component.label for component in components_of([line], "layer", linear=True)]
        ['layer 0']
    """
    if by not in GRANULARITIES:
        raise ModelError(f"by must be one of {', '.join(GRANULARITIES)}, found {by!r}")
    for model in models:
        if not isinstance(model, Model):
            way = "take the models of a combination one by one"
            if not isinstance(model, AnyModel):
                way = (
                    "of any other network tnsim.change(a, b, metric, by='module'), by='block' and "
                    "by='parameter' tell the weights apart"
                )
            raise ModelError(
                f"components are those of a tnsim Model, found {type(model).__name__}; {way}"
            )
    if by == "head" and not models[0].attends:
        raise ModelError(
            "by='head' needs an attention layer, and the model has none; use by='layer' or "
            "by='unit'"
        )
    components: list[Component] = []
    for n, layer in enumerate(models[0].layers):
        if isinstance(layer, Linear) and not linear:
            continue
        name, parts = _division_of(core_with_output(layer), by)
        if name is None:
            components.append(Component(f"layer {n}", n, 0, 1, True))
            continue
        components += [Component(f"layer {n} {name} {k}", n, k, parts, False) for k in range(parts)]
        # A bias belongs to no head and no unit, so that the bias of a layer with parts is a
        # component of its own.
        if any(_output_bias(core_with_output(model.layers[n])) is not None for model in models):
            components.append(Component(f"layer {n} bias", n, None, parts, True))
    if not components:
        raise ModelError(
            "the model has no components: all of its layers are linear and have no skip"
        )
    return tuple(components)


def _division_of(core: Layer, by: str) -> tuple[str | None, int]:
    """The name and number of the parts of a layer; no name for a whole layer."""
    if by == "layer" or isinstance(core, Linear):
        return None, 1
    if isinstance(core, Attention):
        return "head", core.n_heads
    if by == "unit":
        return "unit", getattr(core, affine_maps(core)[1]).shape[1]
    # By heads, a layer without heads counts as a whole.
    return None, 1


def core_with_output(layer: Layer) -> Any:
    """The layer inside residuals, an elementwise layer as the equal gated layer `I f(I x)`.

    Example:
        >>> core_with_output(Residual(Elementwise("relu", 1))).down
        array([[1.]])
    """
    core = innermost(layer)
    if isinstance(core, Elementwise):
        # Identities on either side leave the function as it is and give a switch the columns it
        # multiplies.
        return Gated(np.eye(core.d_in), None, np.eye(core.d_in), core.activation)
    return core


def check_polynomial(*models: Model) -> None:
    """Refuse models with an activation where outputs must be polynomials in switches.

    Raises:
        UnsupportedLayer: A layer has an activation.

    Example:
        >>> check_polynomial(Model([Linear([[1.0]])]))
    """
    for model in models:
        for n, layer in enumerate(model.layers):
            function = activation_of(layer)
            if function is not None:
                raise UnsupportedLayer(
                    f"layer {n} has the activation {function.name}, behind which outputs are no "
                    "polynomial in switches: split each model by tnsim.paths, or a change by the "
                    "weights that made it, tnsim.change(a, b, by='layer')"
                )


def _output_bias(core: Layer) -> Any:
    return getattr(core, bias_name(affine_maps(core)[1]))


def switched(
    model: Model,
    z: Sequence[float] | Float[Array, " components"] | Mapping[str, float],
    by: str = "layer",
) -> Model:
    """The model with every component multiplied by a number.

    The outputs are a polynomial in z unless an activation reads a component. All z give models of
    equal shape, so a plan serves them all, and z may be traced by JAX or be an axis of `jax.vmap`.

    Args:
        model: Any model.
        z: A number for each of `components(model, by)`, or numbers by label, 1 for the others; the
            label of a layer stands for all of its components.
        by: Granularity, as for `components`.

    Returns:
        A model whose layers without a switch, and layers with all switches at 1, are the objects
        of `model`: forward passes of several switched models run such layers once.

    Raises:
        ModelError: A label is unknown, or there is another number of switches than components.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]]))
        >>> model = tnsim.Model([square, square])
        >>> switched(model, [1.0, 0.0])(np.array([2.0])), model(np.array([2.0]))
        (array([6.]), array([42.]))
        >>> switched(model, {"layer 0": 0.0})(np.array([2.0]))
        array([6.])
    """
    check_numbers(model)
    parts = components_of([model], by)
    return with_switches(model, switches(parts, z), parts)


def switches(parts: Sequence[Component], z: Any) -> Any:
    """Switches in the order of components, checked.

    Raises:
        ModelError: A label is unknown, or the number of switches is another.

    Example:
        >>> switches([Component("layer 0", 0, 0, 1, True)], {"layer 0": 0.5})
        array([0.5])
    """
    if isinstance(z, Mapping):
        each: list[Any] = [1.0] * len(parts)
        for (label, value), numbers in zip(z.items(), _numbers_of(parts, z), strict=True):
            if np.ndim(value):
                raise ModelError(f"a switch is one number, found {shown(value)} for {label!r}")
            for n in numbers:
                each[n] = value
        z = library(*each).stack(each) if is_traced(each) else each
    array = as_array(z, "the switches z", 1)  # which stays in JAX where it is traced
    if array.shape != (len(parts),):
        raise ModelError(
            f"the model has {len(parts)} components and z has shape {tuple(array.shape)}; give a "
            f"number for each of {listed(parts)}"
        )
    return array


def chosen(parts: Sequence[Component], labels: Iterable[str]) -> list[int]:
    """The numbers of components by label; the label of a layer stands for all of its components.

    Raises:
        ModelError: No component has the label.

    Example:
        >>> heads = [Component(f"layer 1 head {k}", 1, k, 2, False) for k in range(2)]
        >>> chosen(heads, ["layer 1 head 1"])
        [1]
        >>> chosen(heads, ["layer 1"])
        [0, 1]
    """
    return sorted(set().union(*_numbers_of(parts, labels)))


def _numbers_of(parts: Sequence[Component], labels: Iterable[str]) -> list[list[int]]:
    """As `chosen`, the numbers under each label."""
    known: dict[str, list[int]] = {}
    for n, part in enumerate(parts):
        # A layer's label chooses all of its parts, and a part's label that part alone.
        for label in {part.label, f"layer {part.layer}"}:
            known.setdefault(label, []).append(n)
    found = []
    for label in labels:
        if label not in known:
            raise ModelError(f"there is no component {label!r}, only {listed(parts)}")
        found.append(known[label])
    return found


def listed(parts: Sequence[Component]) -> str:
    """Labels of components for a message.

    Example:
        >>> listed([Component("layer 0", 0, 0, 1, True)])
        'layer 0'
    """
    labels = [part.label for part in parts[:_SHOWN]]
    if len(parts) > _SHOWN:
        labels.append(f"and {len(parts) - _SHOWN} more up to {parts[-1].label}")
    return ", ".join(labels)


def with_switches(model: Model, z: Any, parts: Sequence[Component]) -> Model:
    """The model with component n multiplied by z[n].

    Example:
        >>> double = Model([Residual(Linear([[1.0]]))])
        >>> with_switches(double, np.array([0.0]), components_of([double], "layer"))(np.ones(1))
        array([1.])
    """
    layers = []
    for n, layer in enumerate(model.layers):
        own = _of_layer(parts, n)
        # A layer with all switches at 1 comes back itself, so that its forward pass is shared.
        layers.append(switched_layer(layer, [parts[k] for k in own], z[np.array(own, int)]))
    return Model(layers, model.n_ctx, model.origin)


def _of_layer(parts: Sequence[Component], layer: int) -> list[int]:
    """Numbers of the components of a layer."""
    return [k for k, part in enumerate(parts) if part.layer == layer]


def switched_layer(layer: Layer, own: Sequence[Component], z: Any) -> Layer:
    """A layer with its components multiplied by numbers; the layer itself where all are 1.

    Args:
        layer: Layer of a model.
        own: Components of the layer; columns of other components stay.
        z: Switches of these components, (components,).

    Example:
        >>> whole = Component("layer 0", 0, 0, 1, True)
        >>> switched_layer(Linear([[2.0]]), [whole], np.array([0.5])).weight
        array([[1.]])
    """
    # The values of tracers are unknown, so a traced layer is always switched.
    if not isinstance(z, Tracer) and np.all(z == 1):
        return layer
    # Inside a trace the layer stays in its own precision, as the trace does.
    layer = written_out(layer)
    core = core_with_output(layer if is_traced(z) else in_float64(layer))
    _, output = affine_maps(core)
    weight, bias = getattr(core, output), _output_bias(core)
    values = {output: weight * _column_factors(own, z, weight.shape[1])}
    for k, part in enumerate(own):
        if part.bias and bias is not None:
            values[bias_name(output)] = bias * z[k]
    return with_core(layer, replaced(core, values))


def _column_factors(own: Sequence[Component], z: Any, width: int) -> Any:
    """The factors of the columns of an output matrix; 1 for columns without a switch."""
    columns = [part for part in own if part.part is not None]
    if columns and [part.part for part in columns] == list(range(columns[0].parts)):
        # Every column has a switch, in order: no look-up, whose derivative adds entry by entry.
        step = width // len(columns)
        return library(z).broadcast_to(z[: len(columns), None], (len(columns), step)).reshape(width)
    # Place 0 is the constant 1, for columns without a switch; switch k stands at place k + 1.
    place = np.zeros(width, int)
    for k, part in enumerate(own):
        if part.part is not None:
            place[part.places(width)] = k + 1
    return library(z).concatenate([np.ones(1), z])[place]


def with_core(layer: Layer, core: Any) -> Any:
    """The residuals of a layer around another core.

    Example:
        >>> with_core(Residual(Linear([[1.0]]), skip=0.5), Linear([[2.0]]))(np.ones(1))
        array([2.5])
    """
    if isinstance(layer, Residual):
        return replaced(layer, {"layer": with_core(layer.layer, core)})
    return core


def check_exchangeable(a: Any, b: Any, by: str) -> tuple[Model, Model]:
    """Two models whose components correspond to each other; others are refused.

    Raises:
        ModelError: The models differ in depth, in kinds or settings of layers, in widths of the
            stream, in skips, or in the numbers of heads or units that are told apart.

    Example:
        >>> one, two = Model([Linear([[1.0]])]), Model([Linear([[1.0]]), Linear([[1.0]])])
        >>> check_exchangeable(one, two, "layer")
        Traceback (most recent call last):
        tnsim.errors.ModelError: the models have 1 and 2 layers; a change is taken layer by layer
    """
    check_numbers(a, b)
    if len(a.layers) != len(b.layers):
        raise ModelError(
            f"the models have {len(a.layers)} and {len(b.layers)} layers; a change is taken layer "
            "by layer"
        )
    for n, (first, second) in enumerate(zip(a.layers, b.layers, strict=True)):
        _check_settings(n, first, second)
        _check_parts(n, innermost(first), innermost(second), by)
    check_comparable(a, b)
    return a, b


def _check_settings(n: int, first: Layer, second: Layer) -> None:
    # Everything that has to agree before a function of one model can stand in the other.
    one, two = innermost(first), innermost(second)
    facts: list[tuple[str, Any, Any]] = [
        ("kinds", type(one).__name__, type(two).__name__),
        ("orders", one.order, two.order),
        ("widths of the input", first.d_in, second.d_in),
        ("widths of the output", first.d_out, second.d_out),
        ("skips", float(residual_rule(first)[0]), float(residual_rule(second)[0])),
    ]
    if isinstance(one, Attention) and isinstance(two, Attention):
        facts += [
            (name, getattr(one, name), getattr(two, name))
            for name in ("d_head", "d_value", "mask", "rope_base")
        ]
    for what, x, y in facts:
        if x != y:
            advice = ""
            if what.startswith("widths"):
                advice = ": the streams have different bases, and no square matrix aligns them"
            raise ModelError(f"layer {n} of the models differs in its {what}, {x} and {y}{advice}")


def _check_parts(n: int, one: Layer, two: Layer, by: str) -> None:
    name, parts = _division_of(one, by)
    _, others = _division_of(two, by)
    # Parts are matched by number, which needs equally many of them.
    if parts != others:
        raise ModelError(
            f"layer {n} has {parts} and {others} {name}s, which are matched by number; "
            "use by='layer'"
        )


def interpolated(a: Model, b: Model, s: Any, parts: Sequence[Component]) -> Model:
    """The model with component function `(1 - s[n]) F_n^a + s[n] F_n^b` for every component n.

    Args:
        a, b: Models that `check_exchangeable` accepts.
        s: Numbers of the components, traced or not.
        parts: Components, from `components_of([a, b], ...)`.

    Returns:
        A model with the hidden units (heads) of both models side by side; layers without a
        component are those of b.

    Example:
        >>> a, b = (Model([Residual(Linear([[w]]))]) for w in (1.0, 3.0))
        >>> parts = components_of([a, b], "layer")
        >>> interpolated(a, b, np.array([0.5]), parts)(np.ones(1))
        array([3.])
    """
    layers = []
    for n, (first, second) in enumerate(zip(a.layers, b.layers, strict=True)):
        own = _of_layer(parts, n)
        if own:
            # Layers of b stay where no component was asked for.
            shares = s[np.array(own)]
            second = _interpolated_layer(first, second, [parts[k] for k in own], shares)
        layers.append(second)
    return Model(layers, a.n_ctx, b.origin)


def _interpolated_layer(first: Layer, second: Layer, own: Sequence[Component], s: Any) -> Layer:
    if not is_traced(s):
        first, second = in_float64((first, second))
    cores = innermost(first), innermost(second)
    skip, _ = residual_rule(second)
    rows, output = affine_maps(cores[0])
    # The two cores stand side by side: their rows one below the other, their columns next to each
    # other, each with its share.
    weights, biases = [], []
    for layer, core, share in zip((first, second), cores, (1 - s, s), strict=True):
        # The scale of a residual moves into the output map, as the two cores share a single
        # residual.
        _, scale = residual_rule(layer)
        weight, bias = getattr(core, output) * scale, _output_bias(core)
        weights.append(weight * _column_factors(own, share, weight.shape[1]))
        held = [k for k, part in enumerate(own) if part.bias and bias is not None]
        biases += [bias * scale * share[k] for k in held]
    values: dict[str, Any] = {bias_name(output): sum(biases) if biases else None}
    # A linear layer has no rows: its weights are added, as both read the same state.
    if rows:
        values[output] = library(weights).concatenate(weights, axis=1)
    else:
        values[output] = weights[0] + weights[1]
    for name in rows:
        both = [getattr(core, name) for core in cores]
        values[name] = library(both).concatenate(both)
        biases = _both_biases(cores, name)
        together = None if biases is None else library(biases).concatenate(biases)
        values[bias_name(name)] = together
    if isinstance(cores[0], Attention) and isinstance(cores[1], Attention):
        # Heads stand side by side, so the new layer has those of both.
        values["n_heads"] = cores[0].n_heads + cores[1].n_heads
    core = replaced(cores[0], values)
    return Residual(core, skip) if isinstance(second, Residual) else core


def interpolated_outputs(
    a: Model, b: Model, s: Any, parts: Sequence[Component], inputs: Any
) -> Any:
    """The outputs of `interpolated(a, b, s, parts)` in plain floats.

    The numbers s multiply hidden units, not the columns that read the units: all s share the
    matrices, so a batch of s needs one matrix product of all states.

    Args:
        a, b: Models that `check_exchangeable` accepts.
        s: Numbers of the components, traced or not.
        parts: Components, from `components_of([a, b], ...)`.
        inputs: Inputs, as for `models.forward.plain_forward`.

    Example:
        >>> a, b = (Model([Residual(Linear([[w]]))]) for w in (1.0, 3.0))
        >>> parts = components_of([a, b], "layer")
        >>> interpolated_outputs(a, b, np.array([0.5]), parts, np.ones((1, 1)))
        array([[3.]])
    """
    counts = inputs.counts if isinstance(inputs, Prefixes) else None
    state, done = embedded(b.layers, inputs)
    own = _of_layer(parts, 0)
    if done and own:
        (place,) = own
        share = s[place]
        state = (1 - share) * embedded(a.layers, inputs)[0] + share * state
    for n, pair in enumerate(zip(a.layers[done:], b.layers[done:], strict=True), done):
        own = _of_layer(parts, n)
        if not own:
            state = outputs_of_layer(pair[1], state, counts)
            continue
        held, share = [parts[k] for k in own], s[np.array(own)]
        reached: Any = 0.0
        if isinstance(pair[1], Residual):
            reached = residual_rule(pair[1])[0] * state
        for layer, shares in zip(pair, (1 - share, share), strict=True):
            reached = reached + _shared_output(layer, held, shares, state, counts)
        state = reached
    return state


def _shared_output(
    layer: Layer,
    own: Sequence[Component],
    shares: Any,
    state: Any,
    counts: tuple[int, ...] | None,
) -> Any:
    """The outputs of a layer inside residuals, each component times its share."""
    core = innermost(layer)
    weight, bias = getattr(core, affine_maps(core)[1]), _output_bias(core)
    hidden = hidden_values(core, state, counts)
    outputs = affine(hidden * _column_factors(own, shares, weight.shape[1]), weight, None)
    for k, part in enumerate(own):
        if part.bias and bias is not None:
            outputs = outputs + shares[k] * bias
    return residual_rule(layer)[1] * outputs


def _both_biases(cores: Sequence[Any], name: str) -> list[Any] | None:
    """The biases of a map of two layers; None where neither has a bias."""
    biases = [getattr(core, bias_name(name)) for core in cores]
    if all(bias is None for bias in biases):
        return None
    # A missing bias beside a bias is a row of zeros.
    both = zip(cores, biases, strict=True)
    return [np.zeros(len(getattr(core, name))) if b is None else b for core, b in both]


def exchanged(target: Model, source: Model, part: Component) -> Model:
    """The model `target` with a single component of `source` in the place of its own.

    The result has the shapes of `target` wherever the two components have equal shapes.

    Args:
        target, source: Models that `check_exchangeable` accepts.
        part: Component to be exchanged.

    Example:
        >>> a, b = (Model([Residual(Linear([[w]]))]) for w in (1.0, 3.0))
        >>> (part,) = components_of([a, b], "layer")
        >>> exchanged(a, b, part)(np.ones(1))
        array([4.])
    """
    layers = list(target.layers)
    own, other = layers[part.layer], source.layers[part.layer]
    # A whole layer comes over as it is, in whatever shape.
    if part.part is not None and part.parts == 1 and part.bias:
        layers[part.layer] = other
    else:
        layers[part.layer] = _with_part(own, other, part)
    return Model(layers, target.n_ctx, target.origin)


def _with_part(own: Layer, other: Layer, part: Component) -> Layer:
    # Two scales cannot stand in a single residual, so both move into the weights.
    if residual_rule(own)[1] != residual_rule(other)[1]:
        own, other = _with_unit_scale(own), _with_unit_scale(other)
    cores = innermost(own), innermost(other)
    rows, output = affine_maps(cores[0])
    values: dict[str, Any] = {}
    if part.bias and (biases := _both_biases(cores, output)) is not None:
        values[bias_name(output)] = biases[1]
    if part.part is not None:
        # A part is its rows of every factor and its columns of the output map.
        for name in rows:
            values[name] = _with_rows([getattr(core, name) for core in cores], part)
            if (biases := _both_biases(cores, name)) is not None:
                values[bias_name(name)] = _with_rows(biases, part)
        values[output] = _with_rows([getattr(core, output).T for core in cores], part).T
    return with_core(own, replaced(cores[0], values))


def _with_unit_scale(layer: Layer) -> Residual:
    """The same layer with its scale inside the output map."""
    layer = in_float64(layer)
    core = innermost(layer)
    skip, scale = residual_rule(layer)
    output = affine_maps(core)[1]
    values = {output: scale * getattr(core, output)}
    if _output_bias(core) is not None:
        values[bias_name(output)] = scale * _output_bias(core)
    return Residual(replaced(core, values), skip)


def _with_rows(arrays: Sequence[Any], part: Component) -> np.ndarray:
    """The rows of the first array, those of a component from the second."""
    array, other = map(np.asarray, arrays)
    rows = part.places(len(array))
    # A copy, as weights of models are shared and read-only.
    result = np.array(array, np.result_type(array, other))
    result[rows] = other[rows]
    return result


def in_basis(model: Model, basis: Float[np.ndarray, "width width"]) -> Model:
    """The same function with the stream x between the first and the last layer as `basis @ x`.

    Args:
        model: Model whose layers between the first and the last have the same width.
        basis: Invertible matrix.

    Raises:
        ModelError: The stream has another width than the matrix, or the matrix is singular.

    Example:
        >>> model = Model([Linear([[2.0]]), Residual(Linear([[1.0]])), Linear([[1.0]])])
        >>> turned = in_basis(model, np.array([[-1.0]]))
        >>> turned.layers[0].weight.tolist(), turned(np.ones(1))
        ([[-2.0]], array([4.]))
    """
    widths = sorted({layer.d_out for layer in model.layers[:-1]})
    if basis.ndim != 2 or widths != [len(basis)] or basis.shape[0] != basis.shape[1]:
        raise ModelError(
            f"align is a square matrix over the stream, whose widths are {widths}; found shape "
            f"{tuple(basis.shape)}"
        )
    # A direction that the matrix removes cannot be put back by an inverse.
    if np.linalg.matrix_rank(basis) < len(basis):
        raise ModelError("align is a singular matrix, which is no change of basis")
    inverse, last = np.linalg.inv(basis), len(model.layers) - 1
    # The basis changes between the first and the last layer; a skip would carry the old basis past
    # it.
    for n in (0, last):
        if isinstance(model.layers[n], Residual):
            raise ModelError(
                f"layer {n} has a skip to the {'outputs' if n else 'inputs'}, which fixes the "
                "basis of the stream; there is nothing to align"
            )
    layers = []
    for n, layer in enumerate(model.layers):
        core = innermost(layer)
        rows, output = affine_maps(core)
        values: dict[str, Any] = {}
        if n > 0:
            # Every layer but the first undoes the basis, and every layer but the last puts it on.
            for name in rows or (output,):
                values[name] = np.asarray(getattr(core, name)) @ inverse
        if n < last:
            values[output] = basis @ values.get(output, np.asarray(getattr(core, output)))
            if _output_bias(core) is not None:
                values[bias_name(output)] = basis @ np.asarray(_output_bias(core))
        layers.append(with_core(layer, replaced(core, values)))
    return Model(layers, model.n_ctx, model.origin)


def basis_of_embedding(a: Model, b: Model) -> Float[np.ndarray, "width width"]:
    """The orthogonal matrix that turns the embedding of b nearest to that of a (Procrustes).

    Raises:
        ModelError: A model begins with no linear layer, or the embeddings do not determine the
            matrix.

    Example:
        >>> a, b = (Model([Linear([[w]]), Linear([[1.0]])]) for w in (1.0, -2.0))
        >>> basis_of_embedding(a, b)
        array([[-1.]])

    Source:
        Schönemann 1966, "A generalized solution of the orthogonal Procrustes problem".
    """
    tables = []
    for model in (a, b):
        first = model.layers[0]
        if not isinstance(first, Linear):
            raise ModelError(
                "align='embedding' needs a linear first layer in both models; give align=MATRIX, "
                "which takes the stream of b to the basis of a"
            )
        tables.append(np.asarray(first.weight, np.float64))
    # The orthogonal factor of A B^T is the nearest rotation.
    left, sizes, right = np.linalg.svd(tables[0] @ tables[1].T)
    # A direction of size zero could be turned either way.
    if sizes[-1] <= 1e-10 * sizes[0]:
        raise ModelError(
            f"the embeddings span {np.count_nonzero(sizes > 1e-10 * sizes[0])} of {len(sizes)} "
            "directions of the stream, which leaves its basis open; give align=MATRIX"
        )
    return left @ right


@dataclass(frozen=True)
class Edge:
    """A component that reads another.

    Args:
        source: Number of the component that is read, or `EMBED`.
        target: Number of the component that reads.
        leg: Class of the legs that read, `Q`, `K`, `V` or `in`.
    """

    source: int
    target: int
    leg: str


def edges_of(model: Model, parts: Sequence[Component]) -> tuple[Edge, ...]:
    """The edges between components of a model, from the input up.

    Example:
        >>> layer = Residual(Linear([[1.0]]))
        >>> model = Model([layer, layer])
        >>> [(x.source, x.target) for x in edges_of(model, components_of([model], "layer"))]
        [(-1, 0), (-1, 1), (0, 1)]
    """
    edges, alive = [], [EMBED]
    for n, layer in enumerate(model.layers):
        own = _of_layer(parts, n)
        if not own:
            continue
        # Query, key and value of a head read the stream apart; legs of equal class share an edge.
        legs = dict.fromkeys(_LEGS.get(name, "in") for name in affine_maps(innermost(layer))[0])
        for target in own:
            # A bias reads nothing.
            if parts[target].part is not None:
                for leg in legs or ("in",):
                    edges += [Edge(source, target, leg) for source in alive]
        # Without a skip the stream forgets everything below this layer.
        alive = [*(alive if residual_rule(layer)[0] != 0 else ()), *own]
    return tuple(edges)


def wired(model: Model, gates: Any, parts: Sequence[Component], edges: Sequence[Edge]) -> Model:
    """The model with a gate on every edge, the same function where all gates are 1.

    The stream becomes a block for each component that is read, and block 0 for what belongs to
    none: the layers below all of them and the biases of linear layers between them. The rows of a
    leg read each block through the gate of their edge. Where the layers below are forgotten, block
    0 holds constants alone, which are read through no edge. The last block is read by no component.

    Args:
        model: Any model.
        gates: Numbers of the edges, traced or not.
        parts: Components, from `components_of`.
        edges: Edges, from `edges_of`.

    Example:
        >>> layer = Residual(Linear([[1.0]]))
        >>> model = Model([layer, layer])
        >>> parts = components_of([model], "layer")
        >>> wired(model, np.array([1.0, 1.0, 0.0]), parts, edges_of(model, parts))(np.ones(1))
        array([3.])
    """
    place = {edge: n + 2 for n, edge in enumerate(edges)}
    known = library(gates).concatenate([np.array([0.0, 1.0]), gates])
    sources = sorted({EMBED, *(edge.source for edge in edges)})
    blocks, first, last = len(sources) + 1, parts[0].layer, parts[-1].layer
    layers: list[Layer] = []
    for n, layer in enumerate(model.layers):
        own = _of_layer(parts, n)
        # The stream is laid into block 0, and empty blocks follow.
        if n == first:
            layers.append(Linear(np.eye(blocks * layer.d_in, layer.d_in)))
        if own:
            layers.append(_wired_layer(layer, own, parts, sources, place, known))
        elif first < n < last:  # a linear layer between components maps each block
            weight, bias = getattr(layer, affine_maps(layer)[1]), _output_bias(layer)
            values = {
                "weight": library(weight).kron(np.eye(blocks), weight),
                "bias": _in_block(bias, 0, blocks),
            }
            layers.append(replaced(layer, values))
        else:
            layers.append(layer)
        # The blocks are added up again, as the skip would have done.
        if n == last:
            layers.append(Linear(np.tile(np.eye(layer.d_out), (1, blocks))))
    return Model(layers, model.n_ctx, model.origin)


def _in_block(vector: Any, block: int, blocks: int) -> Any:
    """A vector in a single block of the stream, zeros in the others; None stays None."""
    if vector is None:
        return None
    return library(vector).kron(np.eye(blocks)[block], vector)


def _wired_layer(
    layer: Layer,
    own: Sequence[int],
    parts: Sequence[Component],
    sources: Sequence[int],
    place: Mapping[Edge, int],
    known: Any,
) -> Layer:
    """A layer of components that read blocks of the stream through gates."""
    blocks, core = len(sources) + 1, innermost(layer)
    block = {part: sources.index(part) if part in sources else blocks - 1 for part in own}
    rows, output = affine_maps(core)
    weight, bias = getattr(core, output), _output_bias(core)
    values: dict[str, Any] = {bias_name(output): None}
    for name in rows:
        # Every leg has a column for each block, multiplied by the gate of its edge.
        matrix = getattr(core, name)
        gate = np.zeros((len(matrix), blocks), int)
        for target in own:
            if parts[target].part is not None:
                leg = _LEGS.get(name, "in")
                rows_of_part = parts[target].places(len(matrix))
                gate[rows_of_part] = _gate_numbers(place, target, leg, sources)
        # The matrix stands once for each block, with the rows of a component gated apart.
        wide = matrix[:, None, :] * known[gate][:, :, None]
        values[name] = wide.reshape(len(matrix), -1)
    # A component writes into a single block, its own where it is read.
    columns = np.zeros((blocks, weight.shape[1]))
    for target in own:
        if parts[target].part is not None:
            columns[block[target], parts[target].places(weight.shape[1])] = 1.0
        if parts[target].bias:
            values[bias_name(output)] = _in_block(bias, block[target], blocks)
    if rows:
        wide = columns[:, None, :] * weight[None, :, :]
        values[output] = wide.reshape(-1, weight.shape[1])
    else:
        # A linear layer has no rows to gate: its whole matrix reads every block through the gates
        # of its only component.
        (target,) = own
        row = known[np.array(_gate_numbers(place, target, "in", sources))]
        only = np.eye(blocks)[block[target]][:, None] * row[None, :]
        values[output] = library(only, weight).kron(only, weight)
    return with_core(layer, replaced(core, values))


def _gate_numbers(
    place: Mapping[Edge, int], target: int, leg: str, sources: Sequence[int]
) -> list[int]:
    """Places of the gates through which a target reads every block."""
    read = [place.get(Edge(source, target, leg), _CLOSED) for source in sources]
    # Block 0 is read by everyone, and the last one by nobody.
    return [place.get(Edge(EMBED, target, leg), _OPEN), *read[1:], _CLOSED]
