"""tnsim's own format: safetensors with the architecture in the metadata, written and read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tnsim.activations.activation import Activation, activation
from tnsim.checkpoints.layer_rules import to_numpy
from tnsim.errors import (
    CheckpointError,
    ModelError,
    TnsimError,
    UnsupportedLayer,
    printable,
    refusing,
)
from tnsim.files import Kind, replacing
from tnsim.models.arrays import Columns, SparseMatrix, bias_name, host_array, rename_errors
from tnsim.models.layers import (
    Attention,
    Bilinear,
    Elementwise,
    Gated,
    Layer,
    Linear,
    Multilinear,
    Residual,
    map_names,
)
from tnsim.models.model import Model, Origin, check_numbers, check_untraced
from tnsim.options import checked

FORMAT = 1
SPARSE = "sparse"  # the key of the widths of sparse matrices, in the description of a layer
METADATA = "tnsim"  # the key of the architecture in the metadata
SETTINGS: dict[type, tuple[str, ...]] = {  # fields of a layer that are no arrays
    Linear: (),
    Bilinear: (),
    Multilinear: ("n_legs",),
    Attention: ("n_heads", "mask", "rope_base"),
    Elementwise: ("activation", "width"),
    Gated: ("activation", "multiplies"),
}
KINDS = {cls.__name__: cls for cls in SETTINGS}


@checked
def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model as safetensors, architecture in the metadata.

    Args:
        model: A single model; the models of a combination are saved one by one.
        path: A file that ends in .safetensors; folders are made.

    Raises:
        ModelError: For anything but a `Model`.
        CheckpointError: For another suffix, or when the file cannot be written, for instance where
            the path is a file in another format.

    Example:
        >>> import tempfile
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> file = Path(tempfile.mkdtemp(), "step_100.safetensors")
        >>> tnsim.save(model, file)
        >>> tnsim.load(file)
        Model(Linear(2 -> 2); degree 1, 4 parameters)
    """
    path = Path(path)
    if not isinstance(model, Model):
        raise ModelError("only a Model can be saved; save the models of a combination one by one")
    check_numbers(model)
    check_untraced("save", model)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: models are saved as .safetensors")
    from safetensors.numpy import save as serialise

    tensors: dict[str, np.ndarray] = {}
    layers = [_layer_spec(layer, f"layers.{n}", tensors) for n, layer in enumerate(model.layers)]
    architecture = {"format": FORMAT, "layers": layers, "n_ctx": model.n_ctx}
    # What a reader has to know goes with the model into its file.
    if model.origin is not None and model.origin.caveats:
        architecture["caveats"] = model.origin.caveats
    data = serialise(tensors, {METADATA: json.dumps(architecture)})
    try:
        with replacing(path, OWN) as temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
    except OSError as error:
        raise CheckpointError(
            printable(f"{path}: cannot be written: {error.strerror or error}")
        ) from None


def _is_own(file: BinaryIO) -> bool:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return METADATA in header["__metadata__"]


OWN = Kind("a model in tnsim's format", _is_own, endings=(".safetensors",))


def own_model(state: Mapping[str, Any], text: str, n_ctx: int | None = None) -> Model:
    """The model in a file of tnsim's own format.

    Args:
        state: Tensors of the file by name.
        text: Architecture as JSON, from the metadata of the file.
        n_ctx: Length of the sequences; by default the length that the file states.

    Returns:
        The model.

    Raises:
        CheckpointError: When the metadata are damaged, of another version, or do not account for
            every tensor.
        UnsupportedLayer: When the metadata name an unknown layer.
        ModelError: When the tensors make no model.

    Example:
        >>> text = '{"format": 1, "layers": [{"kind": "Linear"}]}'
        >>> own_model({"layers.0.weight": np.ones((2, 3))}, text).d_in
        3
    """
    used: set[str] = set()
    with refusing("its tnsim metadata is damaged"):
        architecture = json.loads(text)
        if architecture["format"] != FORMAT:
            raise CheckpointError(
                f"written in tnsim format {architecture['format']}; this version reads {FORMAT}"
            )
        layers = [_own_layer(n, spec, state, used) for n, spec in enumerate(architecture["layers"])]
        if n_ctx is None:
            n_ctx = architecture.get("n_ctx")
        # Files of earlier versions tell what was guessed as they were read.
        doubts = [f"not confirmed: {guess}" for guess in architecture.get("guesses", ())]
    if surplus := sorted(set(state) - used):
        raise CheckpointError(
            f"holds tensors that its architecture does not mention: {', '.join(surplus[:8])}"
        )
    origin = Origin(
        "a file of tnsim's own",
        ("tnsim's own format: nothing assumed",),
        tuple(map(str, [*architecture.get("caveats", ()), *doubts])),
    )
    return Model(layers, n_ctx, origin)


def _own_layer(n: int, spec: Any, state: Mapping[str, Any], used: set[str]) -> Layer:
    return rename_errors(f"layer {n}", lambda: _build_layer(spec, f"layers.{n}", state, used))


def _layer_spec(layer: Layer, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The description of a layer for JSON; the arrays of the layer go to `tensors`."""
    if isinstance(layer, Residual):
        return {
            "kind": "Residual",
            "skip": float(layer.skip),
            "scale": float(layer.scale),
            "layer": _layer_spec(layer.layer, prefix, tensors),
        }
    widths: dict[str, int] = {}
    # Absent biases leave no tensor and no name.
    for field in (one for name in map_names(layer) for one in (name, bias_name(name))):
        array = getattr(layer, field)
        if isinstance(array, SparseMatrix):
            tensors[f"{prefix}.{field}.values"] = np.ascontiguousarray(array.values)
            tensors[f"{prefix}.{field}.columns"] = array.columns.array
            widths[field] = array.shape[1]
        elif array is not None:
            tensors[f"{prefix}.{field}"] = np.ascontiguousarray(host_array(array))
    settings = {field: getattr(layer, field) for field in SETTINGS[type(layer)]}
    if "activation" in settings:
        settings["activation"] = _name_of(settings["activation"])
    if widths:
        settings[SPARSE] = widths
    return {"kind": type(layer).__name__, **settings}


def _name_of(own: Activation) -> str:
    """The name by which a file tells an activation.

    Raises:
        ModelError: The name stands for another activation, or for none.
    """
    with contextlib.suppress(TnsimError):
        # A function of the user may carry a name of the registry.
        if activation(own.name) == own:
            return own.name
    raise ModelError(
        f"the activation {own.name!r} is a function of your own, which no file holds: save models "
        "with activations that tnsim knows by name"
    )


def _build_layer(
    spec: Mapping[str, Any], prefix: str, state: Mapping[str, Any], used: set[str]
) -> Layer:
    if spec["kind"] == "Residual":
        return Residual(
            _build_layer(spec["layer"], prefix, state, used), spec["skip"], spec["scale"]
        )
    if spec["kind"] not in KINDS:
        raise UnsupportedLayer(
            f"layer kind {spec['kind']!r} is not one of {', '.join(KINDS)}, Residual"
        )
    cls: Any = KINDS[spec["kind"]]
    settings = {setting: spec[setting] for setting in SETTINGS[cls]}

    def tensor(field: str) -> Any:
        if field in spec.get(SPARSE, {}):
            return _sparse_matrix(f"{prefix}.{field}", spec[SPARSE][field], state, used)
        return _layer_tensor(field, prefix, state, used)

    if cls is Multilinear:
        return _build_multilinear(settings["n_legs"], prefix, len(state), tensor)
    arrays = {}
    # Without a second factor there is no matrix `up` in the file.
    if cls is Gated and settings.pop("multiplies") is not True:
        settings["up"] = None
    for field in dataclasses.fields(cls):
        if field.name not in settings:
            arrays[field.name] = tensor(field.name)
    return cls(**arrays, **settings)


def _build_multilinear(
    n_legs: Any, prefix: str, tensors: int, tensor: Callable[[str], Any]
) -> Multilinear:
    # The number comes from a text: a loop over it must be bounded by the file.
    if type(n_legs) is not int or not 0 < n_legs <= tensors:
        raise CheckpointError(f"{prefix} has {n_legs!r} legs, of which no file has that many")
    legs = [tensor(f"leg{n}") for n in range(n_legs)]
    biases = [tensor(f"leg{n}_bias") for n in range(n_legs)]
    return Multilinear(legs, tensor("down"), biases, tensor("down_bias"))


def _sparse_matrix(name: str, width: Any, state: Mapping[str, Any], used: set[str]) -> SparseMatrix:
    """A matrix of rows with few entries."""
    places = _layer_tensor("columns", name, state, used)
    if type(width) is not int or places.ndim != 2 or places.dtype.kind != "i":
        raise CheckpointError(f"{name} is sparse, but its columns are no whole numbers in rows")
    return SparseMatrix(_layer_tensor("values", name, state, used), Columns(places, width))


def _layer_tensor(field: str, prefix: str, state: Mapping[str, Any], used: set[str]) -> Any:
    """An array of a layer; None for an absent bias."""
    name = f"{prefix}.{field}"
    if name in state:
        used.add(name)
        return to_numpy(state[name], name)
    if not field.endswith("bias"):
        raise CheckpointError(f"tensor {name!r} is missing")
    return None
