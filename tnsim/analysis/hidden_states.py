"""Hidden states of networks, and where two networks differ: layer against layer.

The hidden states of a module are the outputs of its parts, seen by hooks in a forward pass; those
of a model are the outputs after each of its layers. States of every part are outputs of a function
of the inputs, so each baseline of `analysis.baselines` compares them: CKA takes parts of any width,
the others parts of equal width.

The states of all parts of a language model are far larger than its weights. A first forward pass
tells which parts there are; a comparison then holds the states of as many as fit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tnsim.analysis.baselines import (
    BATCH,
    Inputs,
    cka,
    drawn_inputs,
    read_by,
    weight_cosine,
    weight_slices,
)
from tnsim.analysis.matrices import over_layers
from tnsim.checkpoints.given import given_model
from tnsim.engine.planner import Budget
from tnsim.errors import ModelError, TooLarge
from tnsim.models.arrays import detached, host_array
from tnsim.models.forward import plain_states
from tnsim.models.functions import array_of, batch_of_inputs, run_module
from tnsim.models.model import AnyModel, Model, Seed, check_untraced, seed_number
from tnsim.options import checked, is_list, shown

if TYPE_CHECKING:
    import xarray as xr


States: TypeAlias = dict[str, np.ndarray]
"""Outputs of parts by name, a row for every input."""
_HELD_BYTES = 2**30
"""Bytes of states of a network that are held at once, in a forward pass and in a comparison."""
_IN_MEASURES = 5
"""Bytes in a measure for a byte of states in float32: the states, and two arrays in float64."""


@checked(own="layers")
def hidden_states(
    model: Any, inputs: Any, layers: str | Sequence[str] = "*"
) -> dict[str, np.ndarray]:
    """Outputs of every part of a network on given inputs.

    Args:
        model: A module of PyTorch; a model, or the path of its file.
        inputs: Inputs (n, ...), as the network reads them, or token ids.
        layers: Patterns of the names of parts. Parts of a module have the names of
            `named_modules`, layers of a model the names "layer 0", "layer 1" and so on.

    Returns:
        Arrays (n, ...) by name, float64, in the order of the computation. Left out are parts that
        are never called, that are TorchScript, and that give no floats with a row for every input.
        Containers that hand on the output of a part inside go by the name that a pattern chooses,
        by "*" that of the part. The second call of a part is called "name (2)".

    Raises:
        ModelError: No part has such a name, or nothing has hidden states.
        TooLarge: The arrays do not fit into memory.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(2.0 * np.eye(2)), tnsim.Linear(np.ones((1, 2)))])
        >>> {name: states.shape for name, states in hidden_states(model, np.ones((3, 2))).items()}
        {'layer 0': (3, 2), 'layer 1': (3, 1)}
    """
    if hasattr(inputs, "named_modules") or isinstance(inputs, AnyModel):
        raise ModelError(
            "hidden_states takes one network and its inputs, found another network for inputs; two "
            "networks are compared by layer_similarity(a, b, inputs)"
        )
    network = _Network.of(model, batch_of_inputs(inputs), layers)
    in_float64 = 2 * sum(network.bytes_of[part] for part in network.parts.values())
    _check_fits(in_float64, "the hidden states that are asked for")
    states = network.states_of(network.parts.values())
    # A part is given up as it is copied, so that not all are in memory twice.
    return {name: states.pop(part).astype(np.float64) for name, part in network.parts.items()}


@checked
def layer_similarity(
    a: Any,
    b: Any,
    inputs: Inputs,
    measure: Callable[..., xr.DataArray] = cka,
    *,
    layers: str | Sequence[str] = "*",
    seed: Seed = 0,
    **settings: Any,
) -> xr.DataArray:
    """A measure between every part of a network and every part of another.

    Args:
        a, b: Modules of PyTorch, models, or paths of files.
        inputs: An array of inputs as both networks read them, or a number n of standard normal
            inputs where either is a model.
        measure: A baseline, such as `tnsim.baselines.cka`.
        layers: Patterns of the names of parts, as for `hidden_states`.
        seed: Seed of drawn inputs.
        settings: Settings of the measure, such as `debiased=False`.

    Returns:
        The measure over (a, b), labelled by the names of parts: float64, in the units of the
        measure. `tnsim.figures.layer_by_layer` draws it. Parts that give the same for every input,
        such as embeddings of positions, have no CKA and are left out of it.

    Raises:
        ModelError: The networks have no such parts, the measure needs parts of equal width or
            compares weights, or the inputs do not fit.
        TooLarge: The states of the parts do not fit into memory.
        MissingExtra: xarray is not installed.

    Example:
        >>> import torch, tnsim
        >>> nets = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()) for _ in range(2)]
        >>> found = layer_similarity(*nets, torch.randn(50, 3))
        >>> found.dims, found.a.values.tolist()
        (('a', 'b'), ['0', '1'])

    Source:
        Kornblith et al. 2019, "Similarity of neural network representations revisited", figures of
        layers against layers.
    """
    if measure in (weight_cosine, weight_slices):
        raise ModelError(
            "layers are compared by their outputs, and this measure compares weights: give one of "
            "outputs, such as tnsim.baselines.cka"
        )
    first, second, seed = a, b, seed_number(seed)
    if isinstance(inputs, (int, np.integer)):
        # Only models of tnsim tell the width of their inputs.
        if hasattr(a, "named_modules") or hasattr(b, "named_modules"):
            raise ModelError("nothing says what inputs modules read: give inputs as an array")
        first, second = given_model(a), given_model(b)
        if not isinstance(first, Model):
            raise ModelError(
                f"layers of a module, a model or a file are compared, found {type(first).__name__}"
            )
        x, _ = drawn_inputs(int(inputs), first, seed)
    else:
        x = batch_of_inputs(inputs)
    networks = [_Network.of(model, x, layers) for model in (first, second)]
    names = [
        network.varying_parts() if measure is cka else [*network.parts] for network in networks
    ]
    # A measure keeps all parts of both networks, in float64, beside those that are held; CKA a
    # kernel where that is smaller.
    most = 8 * len(x) ** 2 if measure is cka else math.inf
    needed = 0.0
    for network, chosen in zip(networks, names, strict=True):
        sizes = [network.bytes_of[network.parts[name]] for name in chosen]
        needed += min(sum(sizes), _HELD_BYTES) + sum(min(2 * size, most) for size in sizes)
    _check_fits(needed, f"the states of {sum(map(len, names))} parts in a measure")
    # A baseline runs functions on batches of inputs. These functions look rows up.
    rows = np.arange(len(x), dtype=float)[:, None]
    functions = [
        partial(network.rows_of, network.parts[name])
        for network, chosen in zip(networks, names, strict=True)
        for name in chosen
    ]
    matrix = measure(functions, rows, seed=seed, **settings)
    return over_layers(matrix, len(names[0]), names)


class _Seen(NamedTuple):
    """What a forward pass on a batch shows.

    Args:
        states: States of parts.
        handed: Names of parts that hand on the states of another part, and its name.
    """

    states: States
    handed: dict[str, str]


Run: TypeAlias = Callable[[np.ndarray, Collection[str] | None], _Seen]
"""A forward pass on a batch that keeps the states of all parts, or of those named."""


@dataclass(eq=False)
class _Network:
    """A network on inputs, with the parts that are asked for.

    Args:
        run: Its forward pass.
        batches: The inputs.
        parts: The parts, by the names under which they are asked for.
        bytes_of: Bytes of the states of each part on all inputs.
        varying: Parts whose states differ between inputs.
        held: States of some parts on all inputs.
    """

    run: Run
    batches: list[np.ndarray]
    parts: dict[str, str]
    bytes_of: dict[str, int]
    varying: set[str]
    held: States = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, x: np.ndarray, layers: str | Sequence[str]) -> _Network:
        """A network on inputs, after a forward pass that shows its parts.

        Which parts have a row for every input, and which hand on what they are given, is asked of
        all batches: experts may be given a whole batch by chance, and a ReLU in place changes
        nothing where a batch has positive numbers alone.
        """
        patterns = [layers] if isinstance(layers, str) else layers
        if not is_list(patterns) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ModelError(
                f"layers are names of parts, or patterns of them, found {shown(layers)}"
            )
        # Inputs keep modules as they are: hooks need the module itself.
        model = given_model(given, inputs=x)
        if isinstance(model, Model):
            check_untraced("hidden_states", model)
            x, run = read_by(model, x), partial(_states_of_model, model)
        elif hasattr(model, "named_modules"):
            run = partial(_states_of_module, model)
        else:
            raise ModelError(
                "hidden states are those of a module, a model or a file of one, found "
                f"{type(model).__name__}"
            )
        each = sum(states.nbytes for states in run(x[:1], None).states.values())
        size = max(1, min(BATCH, _HELD_BYTES // max(1, each)))
        batches = [x[at : at + size] for at in range(0, len(x), size)]
        seen = run(batches[0], None)
        starts = {part: states[:1].copy() for part, states in seen.states.items()}
        bytes_of, handed = dict.fromkeys(starts, 0), seen.handed
        varying: set[str] = set()
        for n, batch in enumerate(batches):
            if n:
                seen = run(batch, None)
            bytes_of = {
                part: size + seen.states[part].nbytes
                for part, size in bytes_of.items()
                if part in seen.states
            }
            handed = {name: part for name, part in handed.items() if seen.handed.get(name) == part}
            varying |= {part for part in bytes_of if (seen.states[part] != starts[part]).any()}
        if not bytes_of:
            raise _without_parts(model)
        inner = [part for part in bytes_of if part not in handed]
        parts: dict[str, str] = {}
        for part in inner:
            names = (part, *(name for name, its in handed.items() if its == part))
            fitting = [name for name in names if any(fnmatchcase(name, one) for one in patterns)]
            if fitting:
                parts[fitting[0]] = part
        if not parts:
            raise ModelError(
                f"no part is called {', '.join(patterns)}; there are {', '.join(inner[:8])}"
                + (" and more" if len(inner) > 8 else "")
            )
        held = seen.states if len(batches) == 1 else {}
        return cls(run, batches, parts, bytes_of, varying, held)

    def varying_parts(self) -> list[str]:
        """Names of the parts whose states differ between inputs."""
        names = [name for name, part in self.parts.items() if part in self.varying]
        if not names:
            raise ModelError(
                f"{', '.join(list(self.parts)[:4])} give the same for all inputs, where CKA is "
                "undefined: choose other layers, or give inputs that differ"
            )
        return names

    def states_of(self, parts: Collection[str]) -> States:
        """States of some parts on all inputs."""
        if not all(part in self.held for part in parts):
            self.held = {}  # before others take their place
            batches = [self.run(batch, parts).states for batch in self.batches]
            self.held = {part: np.concatenate([one.pop(part) for one in batches]) for part in parts}
        return self.held

    def rows_of(self, part: str, numbers: np.ndarray) -> np.ndarray:
        """States of a part for the inputs of some numbers.

        A measure asks for one part after another, so the parts that follow are computed with it.
        """
        if part not in self.held:
            _check_fits(_IN_MEASURES * self.bytes_of[part], f"the states of {part} in a measure")
            order = list(self.parts.values())
            following = order[order.index(part) :]
            sizes = itertools.accumulate(self.bytes_of[one] for one in following)
            count = sum(size <= _HELD_BYTES for size in sizes)
            self.states_of(following[: max(1, count)])
        rows = numbers[:, 0].astype(int)
        # Rows in a row are a view, which takes no memory of its own.
        if len(rows) and (np.diff(rows) == 1).all():
            return self.held[part][rows[0] : rows[-1] + 1]
        return self.held[part][rows]


def _check_fits(needed: float, what: str) -> None:
    room = Budget().room(0, needed)
    if needed > room:
        raise TooLarge(
            f"{what} take {needed / 2**30:.3g} GiB on these inputs, and there is room for "
            f"{room / 2**30:.3g} GiB: choose other parts by layers=, or give fewer inputs"
        )


def _without_parts(model: Any) -> ModelError:
    if any(map(_is_program, model.modules())):
        return ModelError(
            "a TorchScript program keeps the outputs of its parts to itself: load its state_dict() "
            "into the nn.Module that it was made from, and give that one"
        )
    return ModelError("the module has no parts with outputs; compare it as a whole")


def _states_of_model(model: Model, x: np.ndarray, parts: Collection[str] | None) -> _Seen:
    """Outputs after the layers of a model, on a batch."""
    # State n stands behind the layer of the number before it.
    states = {f"layer {n - 1}": state for n, state in plain_states(model.layers, x) if n}
    kept = states if parts is None else parts
    return _Seen({part: _flat_states(np.asarray(states[part])) for part in kept}, {})


def _states_of_module(module: Any, x: np.ndarray, parts: Collection[str] | None) -> _Seen:
    """Outputs of the parts of a module on a batch, seen by hooks, in the order of computation."""
    states: States = {}
    handed: dict[str, str] = {}
    calls: Counter[str] = Counter()
    known: list[tuple[Any, str]] = []  # outputs are kept alive, so that none has the id of another

    def keep(name: str, part: Any, inputs: Any, outputs: Any) -> None:
        try:
            array = array_of(outputs)
        except ModelError:
            return
        # Masks and caches have no row for each input.
        found = host_array(detached(array))
        if found.dtype.kind != "f" or found.ndim < 2 or len(found) != len(x):
            return
        # A part may be called several times, as in shared layers.
        calls[name] += 1
        label = f"{name} ({calls[name]})" if calls[name] > 1 else name
        if parts is not None and label not in parts:
            return
        found = _flat_states(found)  # a copy, which operations in place leave alone
        # A container hands on the output of a part, as dropout does that is off.
        for other, its_name in known:
            if other is array and np.array_equal(found, states[its_name]):
                handed[label], found = its_name, states[its_name]
                break
        else:
            known.append((array, label))
        states[label] = found

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if name and not _is_program(part):
                hooks.enter_context(part.register_forward_hook(partial(keep, name)))
        run_module(module, x)
    return _Seen(states, handed)


def _is_program(part: Any) -> bool:
    """Whether a module is a scripted or traced program, which calls no hooks."""
    return any(cls.__name__ == "ScriptModule" for cls in type(part).__mro__)


def _flat_states(states: np.ndarray) -> np.ndarray:
    """A copy of states with an axis of features, or with positions and features."""
    states = np.array(states)
    return states if states.ndim <= 3 else states.reshape(len(states), -1)
