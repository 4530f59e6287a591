"""Cosines of two models, and of the outputs of two functions, in PyTorch's autograd.

*The points of a finite metric.* Reverse mode keeps the outputs of every layer at every point, so
all points are in memory at once. They are arguments of the compiled programs: another sample of the
same size needs no new program.

*The function of autograd.* `compared` takes for moving weights those leaves of (a, b, metric) that
are tensors of PyTorch (`compare.gradients`), hands them to JAX and the gradients back.

*Modules* become models that keep the parameters, so that PyTorch records all operations on them.

*Outputs on inputs.* With `F_a = sqrt(w_i) a(x_i)` over all inputs, positions and outputs, the
cosine is `F_a . F_b / (|F_a| |F_b|)`, see `problems.at_points`. Modules and functions of PyTorch
run in their own precision and on their own device, as a part of the autograd graph. Models run in
JAX; models with moving weights run once more on the way back. Inputs pass in batches, of which
autograd keeps the values inside of modules that have a gradient, and the outputs of the other side
beside them.

Without means the outputs of both sides are less their means as numbers, of which autograd records
nothing. The means `r` of what is left are 0, but their derivatives are not: with P positions
`<a|b> - P r_a . r_b` has all derivatives of the inner product without means, and loses no digits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Float

from tnsim.checkpoints.given import given_model, length_and_width
from tnsim.checkpoints.graphs import graph_of, state_of
from tnsim.checkpoints.module_calls import READING, copy_of, require_torch
from tnsim.checkpoints.modules import Declared, graph_layers, recognised
from tnsim.checkpoints.operations import Graph
from tnsim.compare import numbers as numbers_of
from tnsim.compare import similarity as without_gradients
from tnsim.compare.by_points import AtPoints, points_of
from tnsim.compare.centred import Mean, mean_of, without
from tnsim.compare.gradients import comparison_of, number_and_pullback
from tnsim.compare.request import (
    InnerProducts,
    Question,
    Request,
    Two,
    check_comparison,
    shape_of,
    summands,
)
from tnsim.compare.routes import inner_products
from tnsim.engine import precision
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import backend
from tnsim.errors import TnsimError, TooLarge, UnsupportedLayer
from tnsim.metrics.protocol import Metric, WeightedPoints, adds_up
from tnsim.models.arrays import host_array, numbers, requires_grad
from tnsim.models.forward import as_read
from tnsim.models.functions import (
    ALONE,
    array_at,
    array_of,
    check_rows_alone,
    in_rows,
    is_function,
    outputs_of,
    refused_under,
)
from tnsim.models.model import (
    Model,
    caveats,
    check_comparable,
    check_untraced,
    terms,
    warn_of_caveats,
    with_dense_matrices,
)
from tnsim.problems.at_points import (
    Sums,
    batch_size,
    check_shapes,
    needs,
    traced_vector,
    vectors_of,
    with_cancellation,
)
from tnsim.scaled import ScaledSum, taken
from tnsim.sessions import session

_TORCH_DEVICES = {"cpu": "cpu", "gpu": "cuda"}
"""PyTorch's names for the platforms of JAX; PyTorch calls ROCm "cuda" as well."""

Vector: TypeAlias = Float[torch.Tensor, "out features"]
"""Outputs of a function on a batch, float64, a part of the autograd graph."""
Run: TypeAlias = Callable[[WeightedPoints, int], tuple[Vector, float, float]]
"""A function of a batch and of the number of its first input: a vector in a unit, the exponent of
the unit, and the sum of the lengths of the terms of a sum of models by the length of the sum."""


def model_of(
    module: Any,
    layers: Mapping[type, Declared] | None,
    n_ctx: int | None,
    inputs: Any,
    width: int | None = None,
) -> Model:
    """The model of a module, made of the module's own tensors.

    `recognised` reads the layers and compares them with the module, on numbers. The same reading of
    the module's graph then takes the tensors, so PyTorch records their operations.

    Args:
        module: An `nn.Module`.
        layers: Rules for classes of the user's own.
        n_ctx: Length of sequences.
        inputs: Example of the inputs with which the module is called.
        width: Entries of a vector that the module reads, where what it is compared with says so.

    Returns:
        The model. Tensors that require no grad are arrays in it.

    Raises:
        UnsupportedLayer: The module holds a norm, or a layer that `tnsim.from_module` does not
            know.
        ModelError: The recognised layers compute something other than the module.
    """
    # Modules that are compared by their numbers have no place of their own.
    reader = module if type(module).__hash__ is object.__hash__ else None
    reading = recognised(module, layers, n_ctx, inputs, width=width, reader=reader)
    torch = require_torch()
    module, example = reading.module, reading.example
    parameters = [one for one in module.parameters() if one.is_floating_point()]
    if parameters and example.is_floating_point():
        # The graph is that of the module's own type and place.
        example = example.to(parameters[0])
    whole, own = tuple(layers or {}), state_of(module)
    # The caller's autocast would round weights on their way into the layers.
    exact = torch.autocast(example.device.type, enabled=False)
    recording = contextlib.nullcontext() if torch.is_grad_enabled() else torch.no_grad()
    eager = torch.compiler.set_stance("force_eager")
    with READING, eager, exact, recording:
        # The graph of the reading is for float64. One object for as long as the code stays.
        graph = session().belongings.get(
            reading.graph,
            (model_of, example.dtype, example.device),
            lambda: graph_of(copy_of(module).eval(), example[:1], whole),
        )
        live = graph_layers(graph, own, module, layers or {}, example, reading.positions > 1)
        if torch.is_grad_enabled() and not whole:
            _check_gradients(module, graph, own, example[:1])
    normed = [str(n) for n, layer in enumerate(live) if layer.norm is not None]
    if normed:
        raise UnsupportedLayer(
            f"a norm stands before layer {', '.join(normed)}. At a constant energy it is part of "
            "the layer, but the energy changes with the weights, so a gradient would lack a part: "
            "train with tnsim.Empirical(inputs), on which the module runs as it is, and use "
            "tnsim.from_module(module, norm_inputs=inputs) to look at what came of it"
        )
    return Model([layer.layer for layer in live], n_ctx)


def _check_gradients(
    module: Any, graph: Graph, own: Mapping[str, torch.Tensor], example: torch.Tensor
) -> None:
    """Refuse a module of which PyTorch has other gradients than the derivatives of its outputs.

    Code may keep gradients from a part (`detach`, `no_grad`) or write its own
    (`autograd.Function`), of which outputs tell nothing.

    Args:
        module: The module.
        graph: Its operations.
        own: Its parameters and buffers by name.
        example: A single input.

    Raises:
        UnsupportedLayer: The gradients differ.
    """
    trained = {name: one for name, one in own.items() if one.requires_grad}
    if not trained:
        return
    values = graph.arrays(own) | {graph.argument: example}
    for one in graph.operations:
        if one not in values:
            values[one] = one.run(values)
    with torch.device(example.device):  # and not where other code lets tensors be made
        outputs = array_of(module(example)), values[graph.output]
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs[0].shape, generator=rng, device="cpu").to(outputs[0])
    theirs, ours = (
        torch.autograd.grad(
            (one * weights).sum(), list(trained.values()), allow_unused=True, materialize_grads=True
        )
        if one.requires_grad
        else [torch.zeros_like(weight) for weight in trained.values()]
        for one in outputs
    )
    size = max(float(one.abs().max()) for one in ours if one.numel())
    rounding = torch.finfo(outputs[0].dtype).eps ** 0.5
    for name, one, other in zip(trained, theirs, ours, strict=True):
        if not torch.allclose(one, other, 0.0, rounding * size, equal_nan=True):
            raise UnsupportedLayer(
                f"{name} has another gradient in the module than the derivative of its outputs, as "
                "by detach(), torch.no_grad() or an autograd.Function in the forward pass: what is "
                "not to be trained is told by requires_grad_(False); else train with "
                "tnsim.Empirical(inputs), on which the module has its own gradients"
            )


def sample_of(a: Any, b: Any, request: Request) -> WeightedPoints | None:
    """The points at which two models are compared in a loss.

    Args:
        a: A model or a combination of models.
        b: The other model or combination.
        request: Metric, precision and budget of the comparison.

    Returns:
        All points; None where the metric joins legs, or counts tokens along a plan.

    Raises:
        ModelError: The models do not read these inputs.
        TooLarge: The forward passes, or the values that reverse mode keeps, are over the budget.
    """
    metric = request.metric
    if not adds_up(metric):
        return None
    models = [model for number in numbers((a, b)) for _, model in terms(number)]
    points = points_of(models, metric)
    if points is None:
        return None
    question = Question(
        tuple(models), metric, request.pairs, request.slices, request.dtype, traced=True
    )
    passes = AtPoints(question, points)
    passes.within(passes.estimate(), request.budget)
    # Reverse mode keeps the outputs of every layer at every point until the way back.
    layers = max(len(model.layers) for model in models)
    kept = points.count * layers * needs(models, points, request.dtype).each
    if kept > request.budget.room(0, kept):
        raise TooLarge(
            f"{metric.name} runs through {points.count:,} inputs here, of which the way back keeps "
            f"about {kept / 2**30:.3g} GiB; use fewer inputs or a larger tnsim.Budget"
        )
    sample = points.block(0, points.count)
    # Inputs that a model cannot read raise here, with the model's message, and not inside a trace.
    for model in models:
        as_read(model, sample.inputs)
    return sample


def compared(a: Any, b: Any, n_ctx: int | None, request: Request) -> torch.Tensor:
    """The cosine of two models, see `tnsim.torch.similarity`.

    Without means the gradient is that of a constant mean: what is left, `g = a - E a`, has the
    inner product 0 with every constant, so `d <f - E f, g> = <df - E df, g> = <df, g>`.

    Args:
        a: A module, a model, a combination of models or the path of a file.
        b: The other module, model, combination or path.
        n_ctx: Length of the sequences on which models with attention are compared.
        request: Metric, precision and budget, and whether means over the inputs are left out.

    Returns:
        A tensor of no axes, float64.

    Raises:
        ModelError: The models cannot be compared, or a module holds a layer that is not known.
        TooLarge: The computation would exceed the budget.
        TnsimError: The similarity is not a number.
    """
    metric, dtype, budget = request.metric, request.dtype, request.budget
    shape = shape_of(metric, a, b)
    a, b = (_model(one, metric, n_ctx, shape) for one in (a, b))
    check_comparable(a, b)
    check_untraced("tnsim.torch.similarity", a, b, metric)
    if request.centred:
        a, b = (without(one, mean_of(numbers(one), metric, budget)) for one in (a, b))
    sample = sample_of(a, b, request)
    comparison = comparison_of(_unclipped, a, b, request, sample)
    # Tensors among the leaves are the weights that require grad; models hold all other weights as
    # arrays.
    moving = {n: leaf for n, leaf in comparison.leaves.items() if isinstance(leaf, torch.Tensor)}
    if not moving:
        value = without_gradients.similarity(a, b, metric, dtype=dtype, budget=budget)
        return torch.tensor(float(value), dtype=torch.float64)
    arithmetic, gradient = _arithmetic((a, b), dtype), None
    with execution.precision():
        weights = {n: to_jax(tensor) for n, tensor in moving.items()}
        if torch.is_grad_enabled():
            cosines, gradient = number_and_pullback(comparison, weights)
        else:
            one, two, known = comparison.at(weights)
            question = comparison.form.request(known)
            cosines = _unclipped(inner_products(one, two, question), (a, b), question)
        cosines = precision.Cosine(*(np.asarray(x, np.float64) for x in cosines))
    if np.isnan(cosines.value):
        why = numbers((a, b))
        # Without gradients, the same similarity raises the error that explains the NaN.
        without_gradients.similarity(*why, metric, dtype=dtype, budget=budget)
        raise TnsimError(
            "the similarity is not a number, though without gradients it is one: numbers are near "
            "an end of the range of floats; scale the last layers, which changes no similarity"
        )
    precision.report(float(cosines.error), "the cosine", arithmetic)

    def pullback(tensors: Sequence[torch.Tensor], outer: torch.Tensor) -> Iterator[torch.Tensor]:
        # The derivative of the cosine by each weight; the chain rule multiplies by the derivative
        # of the loss by the cosine.
        assert gradient is not None
        slopes = gradient()
        for place, tensor in zip(moving, tensors, strict=True):
            yield of_jax(slopes[place], tensor) * outer.to(tensor.device)

    # Autograd sees only tensors that are arguments of their own.
    tensors = tuple(moving.values())
    value = float(precision.clipped(cosines, dtype))
    plain = torch.tensor(value, dtype=torch.float64, device=tensors[0].device)
    number: Any = WithPullback.apply(plain, pullback, *tensors)
    warn_of_caveats(caveats(a, b))
    return number


def _unclipped(products: InnerProducts, models: Two, request: Request) -> precision.Cosine:
    """The cosine in float64, which rounding may take out of [-1, 1], and its error bound."""
    values = products.values
    arithmetic = _arithmetic(models, request.dtype)
    cosines = precision.cosine(values["AB"], values["AA"], values["BB"], arithmetic)
    return precision.Cosine(cosines.value.astype("float64"), cosines.error)


def _arithmetic(models: Two, dtype: str) -> precision.Arithmetic:
    """Largest degree of the polynomials and the precision, which bound the errors of rounding."""
    several = any(len(terms(one)) > 1 for one in models)
    growth = max(m.growth for one in models for _, m in terms(one))
    return precision.Arithmetic(growth, dtype, several)


def _model(model: Any, metric: Metric, n_ctx: int | None, shape: tuple[int, ...]) -> Any:
    """The model of a module's tensors, else the model that `tnsim.similarity` would compare."""
    if isinstance(model, torch.nn.Module):
        n_ctx, width = length_and_width(n_ctx, shape)
        return model_of(model, None, n_ctx, None, width)
    if is_function(model):
        raise refused_under(metric)
    model = with_dense_matrices(given_model(model, n_ctx))
    terms(model)  # refuses anything but a model or a combination
    return model


class WithPullback(torch.autograd.Function):
    """A number or numbers that were computed outside of autograd, with their pullback."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        pullback: Callable[[Sequence[torch.Tensor], torch.Tensor], Iterable[torch.Tensor]],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """The value itself.

        Args:
            ctx: Keeper of the tensors until the way back.
            value: Value, without a graph.
            pullback: Function of the tensors and of the derivative of a loss by the value, to its
                derivatives by the tensors.
            *tensors: Weights of which the value is a function.
        """
        ctx.save_for_backward(*tensors)
        ctx.pullback = pullback
        return value

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise TnsimError(
            "PyTorch's forward mode does not pass through a similarity: call backward, or "
            "differentiate tnsim.similarity by jax.jvp"
        )

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TnsimError(
                "second derivatives of a similarity are not supported: call backward without "
                "create_graph. jax.hessian differentiates tnsim.similarity twice"
            )
        # Values kept by a pullback may share the memory of the tensors. Reading the saved tensors
        # makes PyTorch raise an error where they were written to since the forward pass.
        tensors = ctx.saved_tensors
        with execution.precision():
            return None, None, *ctx.pullback(tensors, outer[0])


def to_jax(tensor: torch.Tensor) -> Any:
    """A tensor as programs of JAX read it, without a copy where it is on JAX's device already."""
    tensor = tensor.detach()
    if tensor.device.type != _TORCH_DEVICES.get(backend()):
        return jax.device_put(tensor.cpu().numpy())
    # On the host a view of NumPy takes a microsecond, where an array of JAX takes a tenth of a
    # millisecond; types that NumPy lacks have none.
    if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64):
        return tensor.numpy()
    # DLPack shares memory and asks for contiguous tensors. `device_put` copies only where the array
    # lies on another device than JAX's default.
    return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()))


def of_jax(array: jax.Array, beside: torch.Tensor) -> torch.Tensor:
    """A derivative as a tensor on the device of its weight."""
    derivative = torch.from_dlpack(array).to(beside.device)
    if not torch.isfinite(derivative).all():
        raise TnsimError(
            "a gradient is not finite: a float range was exceeded, or a model is near the zero "
            "function; use dtype='float64'"
        )
    return derivative


def compared_on_inputs(a: Any, b: Any, request: Request) -> torch.Tensor:
    """The cosine of two functions, of which a side at least is no model, see
    `tnsim.torch.similarity`.

    Args:
        a: A plain function, a module, a model or a combination of models.
        b: The other function, module, model or combination.
        request: An `Empirical` metric, the precision of the forward passes of models, limits on
            work and memory, and whether means over the inputs are left out.

    Returns:
        A tensor of no axes, float64.

    Raises:
        ModelError: The functions do not read the inputs, differ in the shape of their outputs, or
            are zero.
        TooLarge: The forward passes of models are over the budget.
        TnsimError: Outputs, or sums of their products, are not finite.
    """
    check_untraced("tnsim.torch.similarity", a, b, request.metric)
    one = _numbers(a)
    two = one if b is a else _numbers(b)
    check_comparison(one, two, request.metric)
    first = _Side(a, one, request)
    second = first if b is a else _Side(b, two, request)
    (product, *norms), products = _inner_products(first, second, request)
    # The errors and warnings are those of `tnsim.similarity`, and so is the number.
    value = float(numbers_of.cosine(products, (first.fixed, second.fixed), request))
    cosine = product / (norms[0].sqrt() * norms[1].sqrt())
    return cosine + (value - cosine.detach())


def _inner_products(
    a: _Side, b: _Side, request: Request
) -> tuple[list[torch.Tensor], InnerProducts]:
    """AB, AA and BB in the graph of autograd, in the units of both sides, and as numbers."""
    terms = [summands(one.fixed) for one in (a, b)]
    known = [part for one in terms for _, part in one]
    models = tuple(part for part in known if isinstance(part, Model))
    points = points_of(models, request.metric)
    assert points is not None  # Empirical always has points
    question = Question(models, request.metric, request.pairs, request.slices, request.dtype)
    passes = AtPoints(question, points)
    passes.within(passes.estimate(), request.budget)
    size = batch_size(known, points, points.count, request.dtype, request.budget)
    # Models run first: their messages about inputs that do not fit tell the most.
    sides = sorted(dict.fromkeys((a, b)), key=lambda side: side.is_function)
    products, sizes, means = [], [], []
    for start in range(0, points.count, size):
        batch = points.block(start, min(start + size, points.count))
        rows = {side: side.at(batch, start) for side in sides}
        (one, size_of_one), (two, size_of_two) = rows[a], rows[b]
        check_shapes([one.shape, two.shape], len(batch.log_weights))
        products.append(_products(one, two))
        sizes.append((size_of_one * size_of_two, size_of_one**2, size_of_two**2))
        if request.centred:
            means.append([_mean(values, batch) for values in (one, two)])
    sums = torch.stack(products).sum(dim=0)
    if request.centred:
        sums = sums - _products(
            *(torch.stack(each).sum(dim=0) for each in zip(*means, strict=True))
        )
    sums = list(sums)
    if not all(torch.isfinite(value) for value in sums):
        raise TnsimError(
            "the squared outputs on some inputs are beyond float64, relative to outputs on the "
            "inputs before: a function gives outputs that differ by more than 1e150; divide them"
        )
    shapes = (1, 1, 1), (1, 1), (1, 1)  # groups, rows, columns
    ab, aa, bb = (
        ScaledSum(np.full(shape, value.item()), np.zeros(shape), np.full(shape, count))
        for shape, value, count in zip(shapes, sums, np.sum(sizes, axis=0), strict=True)
    )
    given = Sums(ab, aa, bb, np.ones(1))
    whole = with_cancellation(given, [terms[0]], [terms[1]], points, request.dtype)
    values = {
        "AB": taken(whole.products, (0, 0, 0)),
        "AA": taken(whole.rows, (0, 0)),
        "BB": taken(whole.columns, (0, 0)),
    }
    return sums, InnerProducts(values, 0.0, False, request.dtype, passes.name)


def _numbers(given: Any) -> Any:
    """A model or a sum of models without gradients; anything else itself."""
    if not any(map(requires_grad, jax.tree.leaves(given))):
        return given
    return numbers(with_dense_matrices(given))


def _mean(values: Vector, batch: WeightedPoints) -> Float[torch.Tensor, " out"]:
    """What a batch adds to the mean of outputs, times the root of the number of positions."""
    # sum_ip w_i y_ip / P = sum_i sqrt(w_i) (mean over p of sqrt(w_i) y_ip), of vectors sqrt(w) y
    by_input = values.reshape(len(values), len(batch.log_weights), -1)
    roots = torch.from_numpy(np.exp(batch.log_weights / 2)).to(values.device)
    return by_input.mean(dim=2) @ roots * math.sqrt(by_input.shape[2])


def _products(first: torch.Tensor, second: torch.Tensor) -> Float[torch.Tensor, "3"]:
    """Inner product and squared norms of two vectors, on an accelerator where a vector is there."""
    # The outputs of models and of functions in NumPy go to the device of the module beside them.
    if first.device.type == "cpu":
        first = first.to(second.device)
    second = second.to(first.device)
    pairs = (first, second), (first, first), (second, second)
    return torch.stack([(one * two).sum() for one, two in pairs])


class _Side:
    """One of the two functions, batch by batch in a unit of its own.

    The largest output of the first batch that has one is near 1, so that squares of outputs of any
    size are floats. A factor of its own does not change a cosine.

    Args:
        given: Plain function or module; or a model or a sum of models.
        fixed: The same without gradients.
        request: The comparison, which says whether the function is to lose its mean.
    """

    def __init__(self, given: Any, fixed: Any, request: Request) -> None:
        mean = mean_of(fixed, request.metric, request.budget) if request.centred else None
        self.is_function = is_function(given)
        if mean is not None and not self.is_function:
            given, fixed = without(given, mean), without(fixed, mean)
        self.fixed, self.unit = fixed, None
        if self.is_function:
            self.run = _of_function(given, mean)
        else:
            self.run = _of_model(given, fixed, request.dtype)

    def at(self, batch: WeightedPoints, start: int) -> tuple[Vector, float]:
        """The vector on a batch that begins with the input number `start`, in the unit of the side.

        The number beside it is its length; of sums of models the sum of the lengths of the terms.
        """
        values, exponent, cancelled = self.run(batch, start)
        top = float(values.detach().abs().max())
        if self.unit is None and top > 0:
            # A power of two beyond 2^1000 would be no float.
            self.unit = exponent + max(math.frexp(top)[1], -1000)
        if self.unit is not None:
            with np.errstate(over="ignore"):
                values = values * float(np.exp2(exponent - self.unit))
        return values, cancelled * float(values.detach().norm())


def _of_function(function: Any, mean: Mean | None) -> Run:
    """The vectors of a plain function or module less its mean, with the graph that it makes."""

    def at(batch: WeightedPoints, start: int) -> tuple[torch.Tensor, float, float]:
        given = array_at(function, batch.inputs, gradients=True)
        if not isinstance(given, torch.Tensor):
            given = torch.from_numpy(np.array(host_array(given)))
        host_array(given.detach()[:1])  # refuses what has no numbers, as inside torch.func
        # A copy, as the next call may write into a buffer of the function.
        outputs = in_rows(given, len(batch.inputs)).to(torch.float64, copy=True)
        if not torch.isfinite(outputs).all():
            finite = torch.isfinite(outputs).flatten(1).all(1)
            raise TnsimError(
                "a function gives outputs that are NaN or infinite, first for input "
                f"{start + int(finite.int().argmin())}"
            )
        if len(outputs) > ALONE:
            few = outputs[-ALONE:].detach().cpu().numpy()
            check_rows_alone(function, outputs_of(function, batch.inputs[-ALONE:]), few)
        if mean is not None:
            rest = outputs - torch.from_numpy(mean.values).to(outputs.device)
            outputs = rest * 0.0 if mean.is_all else rest
        roots = torch.from_numpy(np.exp(batch.log_weights / 2)).to(outputs.device)
        weighted = outputs * roots.reshape(-1, *(1,) * (outputs.ndim - 1))
        return weighted.movedim(-1, 0).reshape(outputs.shape[-1], -1), 0.0, 1.0

    return at


def _of_model(model: Any, fixed: Any, dtype: str) -> Run:
    """The vectors of a model or a sum of models, with gradients to weights that are tensors."""
    leaves, form = jax.tree.flatten(model if fixed is model else with_dense_matrices(model))
    moving = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    vector = vectors_of(summands(fixed), dtype)

    def at(batch: WeightedPoints, start: int) -> tuple[torch.Tensor, float, float]:
        with execution.precision():
            values, exponent, lengths, sizes = vector(batch)
        length = np.linalg.norm(lengths)
        cancelled = float(np.linalg.norm(sizes) / length) if length else 1.0

        def traced(weights: dict[int, jax.Array]) -> jax.Array:
            own = [weights.get(n, leaf) for n, leaf in enumerate(leaves)]
            own = [jnp.asarray(x, dtype) if hasattr(x, "dtype") else x for x in own]
            return traced_vector(summands(jax.tree.unflatten(form, own)), batch, exponent, dtype)

        def pullback(
            tensors: Sequence[torch.Tensor], outer: torch.Tensor
        ) -> Iterator[torch.Tensor]:
            # The model runs once more, in JAX.
            own = dict(zip(moving, map(to_jax, tensors), strict=True))
            made, pulled = jax.vjp(traced, own)
            (slopes,) = pulled(jnp.asarray(outer.cpu().numpy(), made.dtype))
            for place, tensor in zip(moving, tensors, strict=True):
                yield of_jax(slopes[place], tensor)

        numbers = torch.from_numpy(np.array(values, np.float64))
        tensor: Any = WithPullback.apply(numbers, pullback, *moving.values())
        return tensor, float(exponent[0]), cancelled

    return at
