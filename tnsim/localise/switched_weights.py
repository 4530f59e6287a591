"""Networks with weights between those of two: modules of PyTorch, and functions that are pytrees.

With a switch s for every weight tensor, a network has the weights `(1 - s) A + s B`: at 0 and 1 it
is the first and the second network, with single switches apart it is one of them with some weights
of the other. Both kinds of networks answer four questions: outputs on inputs, a score of the
caller's, and the derivatives of either along `B - A`, one number for every weight tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.adapters import (
    OUTSIDE_OF_ADAPTED,
    merged_module,
    with_adapted_weights,
)
from tnsim.checkpoints.module_calls import as_precise_as
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.errors import ModelError, TnsimError
from tnsim.models.functions import (
    WithOutput,
    array_at,
    check_has_weights,
    in_rows,
    is_module,
    is_narrow,
    outputs_of,
    with_output,
)

P = ParamSpec("P")
T = TypeVar("T")
Switches = Float[np.ndarray, " weights"]
"""A number for every weight tensor: 0 for that of the first network, 1 for that of the second."""
_ALIKE = 1e-3
"""Relative difference of outputs in float64 from those in the precision of the network itself."""
_BUFFER_STEP = {"float64": 1e-4, "float32": 1e-2}
"""Step of central differences along buffers that have no derivatives."""
_ROW_COPIES = 8
"""Times that the outputs for an input are taken to be alive in a function of unknown memory."""


def switched_network(a: Any, b: Any, output: str | int | None, dtype: str) -> SwitchedNetwork:
    """The network that has the weights of two networks, or weights between them.

    Args:
        a, b: Modules of PyTorch with equal names and shapes of weights, or functions of JAX that
            are pytrees of equal structure.
        output: Name or place of the output that counts, where there are several.
        dtype: Precision of the computation.

    Returns:
        The network, which is a copy: neither of the two is changed.

    Raises:
        ModelError: The two do not correspond.

    Example:
        >>> import torch
        >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> switched_network(a, b, None, "float64").names
        ('weight', 'bias')
    """
    if is_module(a) and is_module(b):
        return _SwitchedModule(a, b, output, dtype)
    if is_module(a) or is_module(b):
        raise ModelError("a change is between two networks of one kind: one is no PyTorch module")
    return _SwitchedPytree(a, b, output, dtype)


def check_is_whole(
    network: SwitchedNetwork,
    given: Any,
    output: str | int | None,
    switch: int,
    runs: Iterable[tuple[Any, np.ndarray]],
    apart: bool,
) -> None:
    """Refuse networks that differ in more than weights, such as settings or code.

    Args:
        network: The network with switches.
        given: The network that it should be.
        output: Name or place of the output that counts.
        switch: Value of all switches, 0 or 1.
        runs: Batches of inputs, each with the outputs of the network with switches.
        apart: Whether inputs of a batch run apart as well, see `outputs_of`.

    Raises:
        ModelError: With these weights the outputs are others than those of the network itself.
    """
    asked = _outside_modes(outputs_of) if is_module(given) else outputs_of
    same, missed, size = True, 0.0, float(np.finfo(float).tiny)
    alike = _ALIKE
    for inputs, found in runs:
        wanted = asked(with_output(given, output), inputs, apart)
        alike = 0.1 if is_narrow(given, wanted) else _ALIKE
        wanted = wanted.astype(np.float64)
        same = same and found.shape == wanted.shape
        if same:
            missed = max(missed, float(abs(found - wanted).max()))
            size = max(size, float(abs(wanted).max()))
    if not same or missed > alike * size:
        raise more_than_weights(switch, network.merged[switch])


def more_than_weights(switch: int, merged: bool = False) -> ModelError:
    """The refusal of networks that differ in more than weights.

    Args:
        switch: Value of all switches at which they do, 0 or 1.
        merged: Whether adapters of the network given count as its weights.

    Example:
        >>> str(more_than_weights(1))[:30]
        'the second network computes so'
    """
    which = "second" if switch else "first"
    if merged:
        return ModelError(
            f"the {which} network: {OUTSIDE_OF_ADAPTED}; compare both by tnsim.similarity on inputs"
        )
    return ModelError(
        f"the {which} network computes something else than the other one does with its "
        "weights: the two differ in more than weights, such as settings, integer buffers, code "
        "or random numbers. A change of weights is between checkpoints of one network"
    )


def _outside_modes(function: Callable[P, T]) -> Callable[P, T]:
    """The function, outside of the caller's inference mode and autocast."""

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        import torch

        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        with torch.inference_mode(False), contextlib.ExitStack() as modes:
            for device in devices:
                modes.enter_context(torch.autocast(device, enabled=False))
            return function(*given, **named)

    return called


class _SwitchedModule:
    """A copy of a PyTorch module with switches.

    It computes in its own precision and is differentiated, whatever the caller does: an autocast
    would round its weights, and tensors that are made in inference mode have no derivatives.

    Attributes:
        names: Dotted names of the weight tensors.
        merged: Whether adapters of the first and of the second network count as its weights.
    """

    @_outside_modes
    def __init__(self, a: Any, b: Any, output: str | int | None, dtype: str) -> None:
        import torch

        from tnsim.checkpoints.modules import double_of, unwrapped_module

        first, second = own = unwrapped_module(a), unwrapped_module(b)
        for end in own:
            check_has_weights(end)
        if first is not second:  # else the layers are those of the network itself
            first, second = with_adapted_weights(first), with_adapted_weights(second)
        if _floats(first).keys() != _floats(second).keys():
            # An adapter beside its base has moved the weights of the base.
            first, second = merged_module(first), merged_module(second)
        self.merged = first is not own[0], second is not own[1]
        # A tensor of the base is two where an adapter changes one of the layers that share it.
        names = {*_floats(first), *_floats(second)}
        self.network = double_of(max(second, first, key=lambda module: len(_floats(module))))
        if dtype == "float32":
            self.network = self.network.float()
        elif not isinstance(self.network, torch.jit.ScriptModule):  # whose code is compiled
            _AsPrecisely(self.network, {weight.dtype for weight in second.parameters()})
        self.function = with_output(self.network, output)
        self.step = _BUFFER_STEP[dtype]
        values = [*(_floats(end, names) for end in (first, second)), _floats(self.network)]
        check_same_weights(*values[:2])
        self.names = tuple(values[2])
        self.places = tuple(values[2].values())
        parameters = {id(parameter) for parameter in self.network.parameters()}
        self.is_buffer = np.array([id(place) not in parameters for place in self.places], bool)
        # Copies, as both modules may be trained on before the last question; weights that do not
        # move stay in their places.
        self.ends: dict[int, list[Any]] = {}
        for n, name in enumerate(self.names):
            one, two = (end[name].detach() for end in values[:2])
            if (one != two.to(one.device)).any():
                self.ends[n] = [one.clone(), two.clone()]
        self.moved = np.array([n in self.ends for n in range(len(self.names))], bool)
        statistics = _statistics(self.network)
        read = {id(tensor) for tensor in statistics}
        for place, is_buffer in zip(self.places, self.is_buffer, strict=True):
            place.requires_grad_(not is_buffer or id(place) in read)
        self.recorded = _recording_statistics if statistics else torch.enable_grad
        self.switches: Switches = np.full(len(self.names), np.nan)

    @_outside_modes
    def switch(self, switches: Switches) -> None:
        """Take the weights `(1 - s) A + s B`."""
        import torch

        with torch.no_grad():
            for n in np.flatnonzero(self.moved & (switches != self.switches)).tolist():
                place = self.places[n]
                one, two = (end.to(place) for end in self.ends[n])
                # Exact at both ends, as `one + s (two - one)` is not, and where both have one
                # infinity, as in a mask.
                between = torch.lerp(one, two, float(switches[n]))
                place.copy_(torch.where(one == two, one, between))
        self.switches = np.array(switches)

    @_outside_modes
    def outputs(self, inputs: Any) -> np.ndarray:
        """The outputs on inputs, (rows, ..., out), float64."""
        try:
            made = in_rows(array_at(self.function, inputs), len(inputs))
        except ModelError as error:
            # As the grouped products of mixtures of experts.
            if "Double" not in str(error):
                raise
            raise ModelError(
                f"{error}. The network runs in float64 here: where its code knows narrower types "
                "alone, give dtype='float32'"
            ) from error
        # Code that differentiates within a forward pass gives tensors with a history.
        return _finite(made.detach().double().cpu().numpy())

    @_outside_modes
    def slopes(self, inputs: Any, cotangent: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The derivatives of `<v, outputs>` along B - A, by weight tensor.

        Args:
            inputs: Batch of inputs.
            cotangent: The array v, a function of the outputs whose derivative is not taken.
        """
        import torch

        with self.recorded():
            made = in_rows(array_at(self.function, inputs, gradients=True), len(inputs))
        v = cotangent(made.detach().double().cpu().numpy())
        outer = torch.from_numpy(np.ascontiguousarray(v)).to(made)
        return self._along(made, outer, lambda: float((v * self.outputs(inputs)).sum()))

    def _along(self, made: Any, outer: Any, value: Callable[[], float]) -> np.ndarray:
        """The derivatives of `<outer, made>` along B - A, of buffers that none reaches differences.

        Args:
            made: Tensor of an autograd graph.
            outer: Tensor of its shape.
            value: Function without arguments that computes `<outer, made>` at the switches.
        """
        import torch

        # Weights that do not move have no share, so no derivatives by them are computed.
        at = [n for n in self.ends if self.places[n].requires_grad]
        places = [self.places[n] for n in at]
        # Where no weight that moves is read, there is no graph.
        slopes = [None] * len(at)
        if at and made.requires_grad:
            slopes = torch.autograd.grad(made, places, grad_outputs=outer, allow_unused=True)
        here, found = self.switches, np.zeros(len(self.names))
        unreached = self.is_buffer & self.moved
        for n, slope in zip(at, slopes, strict=True):
            if slope is not None:
                one, two = (end.to(slope.device).double() for end in self.ends[n])
                along = torch.where(one == two, 0.0, two - one)  # also of two infinities
                found[n] = float(torch.dot(slope.double().flatten(), along.flatten()))
                unreached[n] = False
        for n in np.flatnonzero(unreached):
            sides = []
            for sign in (1, -1):
                moved = np.array(here)
                moved[n] += sign * self.step
                self.switch(moved)
                sides.append(value())
            found[n] = (sides[0] - sides[1]) / (2 * self.step)
        self.switch(here)
        return found

    @_outside_modes
    def score(self, of: Callable[[Any], Any]) -> float:
        """A score of the network with the present weights."""
        import torch

        with torch.no_grad():
            return _scalar(self._scored(of))

    def _scored(self, of: Callable[[Any], Any]) -> Any:
        """What a score returns, which may hold inputs in the type that the network had before."""
        try:
            return of(self.network)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            if not any(word in said for word in ("dtype", "scalar type", "Double")):
                raise
            wanted = str(self.places[0].dtype).removeprefix("torch.")
            raise ModelError(
                f"the network of a score runs in {wanted}, and the score mixes types ({said[:200]})"
                ": give its inputs the type of the network, x.to(next(net.parameters()).dtype), or "
                "dtype='float32' where the network knows narrower types alone"
            ) from error

    @_outside_modes
    def slopes_of_score(self, of: Callable[[Any], Any]) -> np.ndarray:
        """The derivatives of a score along B - A, by weight tensor."""
        import torch

        with self.recorded():
            value = self._scored(of)
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                raise ModelError(
                    "a score is split by its derivatives: give a function of the network that "
                    "returns a tensor of one number, without .item(), .detach() or torch.no_grad()"
                )
            _scalar(value)
        return self._along(value, torch.ones_like(value), lambda: self.score(of))

    @_outside_modes
    def bytes_of_row(self, inputs: Any) -> float:
        """Bytes that are kept for a way back, for each of some inputs."""
        import torch

        weights = {place.data_ptr() for place in self.places}
        kept: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            if tensor.data_ptr() not in weights:
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with self.recorded(), hooks:
            made = array_at(self.function, inputs, gradients=True)
        return (sum(kept.values()) + 3 * made.numel() * 8) / len(inputs)


class _SwitchedPytree:
    """A function of JAX whose leaves are weights, with switches.

    Attributes:
        names: Dotted names of the weight tensors.
        merged: None of the two has adapters.
    """

    merged = False, False

    def __init__(self, a: Any, b: Any, output: str | int | None, dtype: str) -> None:
        self.output, self.dtype = output, dtype
        self.between = Between.of(a, b)
        self.names = self.between.names
        if not self.names:
            raise ModelError(
                f"{b!r} holds no weights: give a module of PyTorch itself, or a function that is a "
                "pytree of its weights, as jax.tree_util.Partial(function, weights) or a module of "
                "Equinox, called with a batch of inputs"
            )
        every, self.form = jax.tree.flatten(b)
        self.places = [n for n, leaf in enumerate(every) if _is_weight(leaf)]
        self.fixed = every
        self.weights: Sequence[Any] = self.between.second
        # An integral takes hundreds of ways back, each of which would be traced anew: 2.4 times the
        # time for six layers of width 64.
        self.programs: dict[Callable[..., Any], Any] = {}
        self.step_by_step = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "programs": {}}  # no program of XLA goes to another process

    def switch(self, switches: Switches) -> None:
        """Take the weights `(1 - s) A + s B`."""
        self.weights = self.between.at(switches)

    def _function(self, weights: Sequence[Any]) -> Any:
        leaves = list(self.fixed)
        for n, weight in zip(self.places, weights, strict=True):
            leaves[n] = jnp.asarray(weight, self.dtype)
        return jax.tree.unflatten(self.form, leaves)

    def _run(self, weights: Sequence[Any], inputs: Any) -> Any:
        function = self._function(weights)
        if np.issubdtype(inputs.dtype, np.floating):
            inputs = jnp.asarray(inputs, self.dtype)
        given = WithOutput(function, self.output) if self.output is not None else function
        return in_rows(jnp.asarray(array_at(given, inputs)), len(inputs))

    def outputs(self, inputs: Any) -> np.ndarray:
        """The outputs on inputs, (rows, ..., out), float64."""
        with execution.precision():
            made = self._at_once(self._run, self.weights, inputs)
            return _finite(np.asarray(made, np.float64))

    def _at_once(self, function: Callable[..., Any], *args: Any) -> Any:
        """The values of a function as one compiled program, where the network allows one."""
        if self.step_by_step:
            return function(*args)
        if function not in self.programs:
            self.programs[function] = jax.jit(function, compiler_options=compiler_options())
        try:
            return self.programs[function](*args)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            # Code that asks for values, as in `if x.max() > 0`.
            self.step_by_step = True
            return function(*args)

    def slopes(self, inputs: Any, cotangent: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The derivatives of `<v, outputs>` along B - A, by weight tensor.

        Args:
            inputs: Batch of inputs.
            cotangent: The array v, a function of the outputs whose derivative is not taken.
        """
        with execution.precision():
            made, pullback = self._at_once(self._forth, self.weights, inputs)
            v = jnp.asarray(cotangent(np.asarray(made, np.float64)), made.dtype)
            return self._along(self._at_once(_pulled_back, pullback, v))

    def _forth(self, weights: Sequence[Any], inputs: Any) -> tuple[Any, Any]:
        """The outputs, and the function from derivatives by them to those by weights."""
        return jax.vjp(lambda weights: self._run(weights, inputs), weights)

    def _along(self, slopes: Sequence[Any]) -> np.ndarray:
        found = []
        for slope, one, two in zip(slopes, *self.between[1:], strict=True):
            along = np.subtract(two, one, where=one != two, out=np.zeros_like(one))
            found.append(float((np.asarray(slope, np.float64) * along).sum()))
        return np.array(found)

    def score(self, of: Callable[[Any], Any]) -> float:
        """A score of the network with the present weights."""
        with execution.precision():
            return _scalar(of(self._function(self.weights)))

    def slopes_of_score(self, of: Callable[[Any], Any]) -> np.ndarray:
        """The derivatives of a score along B - A, by weight tensor."""
        with execution.precision():
            slopes = jax.grad(lambda weights: of(self._function(weights)))(list(self.weights))
            return self._along(slopes)

    def bytes_of_row(self, inputs: Any) -> float:
        """Bytes that are kept for a way back, for each of some inputs."""
        return _ROW_COPIES * self.outputs(inputs).nbytes / len(inputs)


SwitchedNetwork: TypeAlias = _SwitchedModule | _SwitchedPytree
"""A network whose weights are switched between those of two networks."""


def _pulled_back(pullback: Callable[[Any], Any], v: Any) -> Any:
    return pullback(v)[0]


class _AsPrecisely:
    """Lets a copy of a module in float64 run as precisely as the module, and its copies with it.

    Hooks are methods, as functions within a function cannot be sent to another process.

    Args:
        network: The copy.
        dtypes: Types of the parameters of the module.
    """

    def __init__(self, network: Any, dtypes: Collection[Any]) -> None:
        self.dtypes = dtypes
        self.runs: list[Any] = []
        network.register_forward_pre_hook(self.begin)
        network.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        """Called before each forward pass."""
        self.runs.append(as_precise_as(self.dtypes))
        self.runs[-1].__enter__()

    def end(self, *_: Any) -> None:
        """Called after each forward pass."""
        self.runs.pop().__exit__(None, None, None)


def _statistics(module: Any) -> list[Any]:
    """The running statistics that batch norms of a module read."""
    import torch

    # The common class of all batch norms.
    norms = (
        each for each in module.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm)
    )
    several = [(each.running_mean, each.running_var) for each in norms if not each.training]
    return [one for pair in several for one in pair if one is not None]


@contextlib.contextmanager
def _recording_statistics() -> Iterator[None]:
    """Record gradients, also by running statistics, by which PyTorch's batch norm has none."""
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    def batch_norm(
        x: Any,
        mean: Any,
        variance: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if training:
            return functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
        scale = (variance + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        of_channels = (-1, *[1] * (x.ndim - 2))
        return x * scale.view(of_channels) + shift.view(of_channels)

    class Derived(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called = batch_norm if function is functional.batch_norm else function
            return called(*args, **(kwargs or {}))

    with torch.enable_grad(), Derived():
        yield


def _floats(module: Any, apart: Collection[str] = ()) -> dict[str, Any]:
    """Floating-point parameters and buffers by name, tied ones once but for names `apart`."""
    found, seen = {}, set()
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point() and (name in apart or id(tensor) not in seen):
            seen.add(id(tensor))
            found[name] = tensor
    return found


def leaves_of(function: Any) -> dict[str, Any]:
    """Floating-point leaves of a pytree by dotted names.

    Args:
        function: Any pytree; of a `Partial` the leaves of its arguments.

    Raises:
        ModelError: Two leaves have one name.

    Example:
        >>> list(leaves_of(jax.tree_util.Partial(print, {"w": np.ones(2), "n": 1})))
        ['w']
        >>> list(leaves_of({"w": {"value": np.ones(2)}}))
        ['w']
    """
    tree, above = function, 0
    if isinstance(function, jax.tree_util.Partial):
        # Names begin inside the arguments, and inside a single argument.
        tree, above = (function.args, function.keywords), 1
        above += len(function.args) + len(function.keywords) == 1
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Any] = {}
    for path, leaf in paths:
        if _is_weight(leaf):
            name = jax.tree_util.keystr(path[above:], simple=True, separator=".") or "weights"
            if name in named:
                raise ModelError(
                    f"two weights are called {name!r}, as a key of a pytree has a dot: give keys "
                    "without dots"
                )
            named[name] = leaf
    # Variables of `flax.nnx` are pytrees of one leaf, whose name says nothing.
    nothing = ".value" if all(name.endswith(".value") for name in named) else ""
    return {name.removesuffix(nothing): leaf for name, leaf in named.items()}


class Between(NamedTuple):
    """The weights of two pytrees, and those between them.

    Args:
        names: Names of the weights, in the order of the second pytree.
        first, second: Weights of both, float64.
    """

    names: tuple[str, ...]
    first: list[np.ndarray]
    second: list[np.ndarray]

    @classmethod
    def of(cls, a: Any, b: Any) -> Between:
        """The weights of two pytrees. Raises `ModelError` where they do not correspond."""
        both = leaves_of(a), leaves_of(b)
        check_same_weights(*both)
        names = tuple(both[1])
        # By name, as two classes may have the same weights in different orders; copies, as arrays
        # of NumPy may change before the last question.
        first, second = ([np.array(x[name], np.float64) for name in names] for x in both)
        return cls(names, first, second)

    def at(self, switches: Any) -> list[Any]:
        """The weights `(1 - s) A + s B`, also where both have one infinity, as in a mask."""
        found = []
        for s, one, two in zip(switches, self.first, self.second, strict=True):
            same = one == two
            first, second = (np.where(same, 0.0, end) for end in (one, two))
            found.append(np.where(same, one, 0.0) + (1 - s) * first + s * second)
        return found


def _is_weight(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def check_same_weights(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Refuse two networks whose weights do not correspond.

    Args:
        first, second: Weight tensors by name.

    Raises:
        ModelError: A name is in one network alone, or shapes differ.

    Example:
        >>> check_same_weights({"bias": np.ones(2)}, {"bias": np.zeros(2)})
    """
    for one, other, which in ((first, second, "first"), (second, first, "second")):
        for name in one:
            if name not in other:
                raise ModelError(
                    f"only the {which} network has a weight {name!r}: a change of weights is "
                    "between checkpoints of one network, with equal names of weights"
                )
    for name, weight in first.items():
        shapes = np.shape(weight), np.shape(second[name])
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"the weight {name!r} has shape {tuple(shapes[0])} in the first network and "
                f"{tuple(shapes[1])} in the second: a change of weights is between checkpoints of "
                "one network"
            )


def _finite(outputs: np.ndarray) -> np.ndarray:
    if not np.isfinite(outputs).all():
        raise TnsimError(
            "a network gives outputs that are NaN or infinite, with its own weights or with some "
            "exchanged"
        )
    return outputs


def _scalar(value: Any) -> float:
    """A score as a number; raise `ModelError` where it is none."""
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(
            f"a score is a single number for a network, found {type(value).__name__} of shape "
            f"{tuple(np.shape(value))}"
        ) from None
    if not np.isfinite(number):
        raise ModelError(f"a score is a finite number, found {number}")
    return number
