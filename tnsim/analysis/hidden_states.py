"""Hidden states of networks, and where two networks differ: layer against layer.

The hidden states of a module are the outputs of its parts, seen by hooks in a single forward pass;
those of a model are the outputs after each of its layers. States of every part are outputs of a
function of the inputs, so each baseline of `analysis.baselines` compares them: CKA takes parts of
any width, the others parts of equal width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.analysis.baselines import BATCH, Inputs, cka, drawn_inputs
from tnsim.analysis.matrices import over_layers
from tnsim.checkpoints.given import given_model
from tnsim.errors import ModelError
from tnsim.models.arrays import detached, host_array
from tnsim.models.checks import Seed
from tnsim.models.forward import as_read, is_tokens, plain_states
from tnsim.models.functions import array_of, batch_of_inputs, run_module
from tnsim.models.model import AnyModel, Model
from tnsim.options import checked, is_list, shown

if TYPE_CHECKING:
    import xarray as xr


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
        Arrays (n, ...) by name, in the order of the computation. Left out are parts that are never
        called, that are TorchScript, and that give no floats with a row for every input. Containers
        that hand on the output of a part inside go by the name that a pattern chooses, by "*" that
        of the part. The second call of a part is called "name (2)".

    Raises:
        ModelError: No part has such a name, or nothing has hidden states.

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
    patterns = [layers] if isinstance(layers, str) else layers
    if not is_list(patterns) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ModelError(f"layers are names of parts, or patterns of them, found {shown(layers)}")
    x = batch_of_inputs(inputs)
    # Inputs keep modules as they are: hooks need the module itself.
    model = given_model(model, inputs=x)
    containers: dict[str, list[str]] = {}
    if isinstance(model, Model):
        every = _of_model(model, x)
    elif hasattr(model, "named_modules"):
        every, containers = _of_module(model, x)
    else:
        raise ModelError(
            "hidden states are those of a module, a model or a file of one, found "
            f"{type(model).__name__}"
        )
    chosen = {}
    for part, states in every.items():
        names = (part, *containers.get(part, ()))
        fitting = [one for one in names if any(fnmatchcase(one, pattern) for pattern in patterns)]
        if fitting:
            chosen[fitting[0]] = states
    if not chosen:
        raise ModelError(
            f"no part is called {', '.join(patterns)}; there are {', '.join(list(every)[:8])}"
            + (" and more" if len(every) > 8 else "")
        )
    return chosen


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
        ModelError: The networks have no such parts, the measure needs parts of equal width, or the
            inputs do not fit.
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
    first, second = a, b
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
    states = [hidden_states(model, x, layers) for model in (first, second)]
    if measure is cka:
        states = [_varying_states(found) for found in states]
    every = [*states[0].values(), *states[1].values()]
    # A baseline runs functions on batches of inputs. These functions look rows up.
    rows = np.arange(len(x), dtype=float)[:, None]
    functions = [partial(_state_rows, name) for name in every]
    matrix = measure(functions, rows, seed=seed, **settings)
    count = len(states[0])
    return over_layers(matrix, count, [list(state_names) for state_names in states])


def _varying_states(states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The states that differ between inputs."""
    varying = {name: rows for name, rows in states.items() if (rows != rows[:1]).any()}
    if not varying:
        raise ModelError(
            f"{', '.join(list(states)[:4])} give the same for all inputs, where CKA is undefined: "
            "choose other layers, or give inputs that differ"
        )
    return varying


def _state_rows(states: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return states[numbers[:, 0].astype(int)]


def _of_model(model: Model, x: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs after every layer of a model."""
    if model.n_ctx is None and is_tokens(x):
        x = x.astype(np.float64)  # whole numbers of vectors
    # Layers of vectors also take sequences of any length.
    if model.n_ctx is not None or x.ndim < 3 or x.shape[-1] != model.d_in:
        x = as_read(model, x)
    batches = [
        {n: _flat_states(np.asarray(state)) for n, state in plain_states(model.layers, some) if n}
        for some in (x[at : at + BATCH] for at in range(0, len(x), BATCH))
    ]
    # State n stands behind the layer of the number before it.
    return {f"layer {n - 1}": np.concatenate([batch[n] for batch in batches]) for n in batches[0]}


def _of_module(module: Any, x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Outputs of all parts of a module, seen by hooks, and containers that hand them on.

    Which parts have a row for every input, and which hand on what they are given, is asked of all
    batches: experts may be given a whole batch by chance, and a ReLU in place changes nothing where
    a batch has positive numbers alone.
    """
    batches = [_hooked_outputs(module, x[at : at + BATCH]) for at in range(0, len(x), BATCH)]
    (seen, handed), *others = batches
    names = [name for name in seen if all(name in states for states, _ in others)]
    if not names and any(map(_is_program, module.modules())):
        raise ModelError(
            "a TorchScript program keeps the outputs of its parts to itself: load its state_dict() "
            "into the nn.Module that it was made from, and give that one"
        )
    if not names:
        raise ModelError("the module has no parts with outputs; compare it as a whole")
    containers: dict[str, list[str]] = {}
    for name, part in handed.items():
        if name in names and all(known.get(name) == part for _, known in others):
            containers.setdefault(part, []).append(name)
    inner = set(names).difference(*containers.values())
    joined = {
        name: np.concatenate([states[name] for states, _ in batches])
        for name in names
        if name in inner
    }
    return joined, containers


def _hooked_outputs(module: Any, x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Outputs of all parts of a module on a batch, in the order of the computation.

    Beside them are the names of parts that hand on the output of another part, and its name.
    """
    seen: dict[str, np.ndarray] = {}
    handed: dict[str, str] = {}
    known: list[tuple[Any, str]] = []  # outputs are kept alive, so that none has the id of another
    hooks = []

    def keep(name: str, part: Any, inputs: Any, outputs: Any) -> None:
        try:
            array = array_of(outputs)
        except ModelError:
            return
        states = host_array(detached(array))
        # Masks and caches have no row for each input.
        if states.dtype.kind != "f" or states.ndim < 2 or len(states) != len(x):
            return
        # A part may be called several times, as in shared layers.
        calls = sum(call == name or call.startswith(f"{name} (") for call in seen)
        label = f"{name} ({calls + 1})" if calls else name
        states = _flat_states(states)  # a copy, which operations in place leave alone
        # A container hands on the output of a part, as dropout does that is off.
        for other, its_name in known:
            if other is array and np.array_equal(states, seen[its_name]):
                handed[label] = its_name
                states = seen[its_name]
                break
        else:
            known.append((array, label))
        seen[label] = states

    for name, part in module.named_modules():
        if name and not _is_program(part):
            hooks.append(part.register_forward_hook(partial(keep, name)))
    try:
        run_module(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, handed


def _is_program(part: Any) -> bool:
    """Whether a module is a scripted or traced program, which calls no hooks."""
    return any(cls.__name__ == "ScriptModule" for cls in type(part).__mro__)


def _flat_states(states: np.ndarray) -> np.ndarray:
    """States with an axis of features, or with positions and features, float64."""
    states = states.astype(np.float64)
    return states if states.ndim <= 3 else states.reshape(len(states), -1)
