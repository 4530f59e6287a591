"""tnsim's own format. In: models, or tensors and metadata. Out: files, or models.

It is safetensors with the architecture in the metadata. Files are written to a temporary
name and renamed, so none is ever half there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.checkpoints.guard import refusing
from tnsim.checkpoints.state_dict import to_numpy
from tnsim.errors import CheckpointError, ModelError, UnsupportedLayer
from tnsim.models.arrays import rename_errors
from tnsim.models.attention import Attention
from tnsim.models.layers import Bilinear, Layer, Linear, Residual
from tnsim.models.model import Model

FORMAT = 1
METADATA = "tnsim"  # where the architecture stands
KINDS = {cls.__name__: cls for cls in (Linear, Bilinear, Attention)}


def save(model: Model, path: str | os.PathLike) -> None:
    """Write a model as safetensors, architecture in the metadata.

    Args:
        model: one model; of a combination each is saved by itself.
        path: a file that ends in .safetensors; folders are made.

    Raises:
        ModelError: for anything but a `Model`.
        CheckpointError: for another suffix, or when the file cannot be written.

    Example:
        >>> tnsim.save(model, "runs/step_100.safetensors")
    """
    path = Path(path)
    if not isinstance(model, Model):
        raise ModelError("only a Model can be saved; save the models of a combination one by one")
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: models are saved as .safetensors")
    from safetensors.numpy import save as serialise

    tensors: dict[str, np.ndarray] = {}
    layers = [_describe(layer, f"layers.{n}", tensors) for n, layer in enumerate(model.layers)]
    architecture = {"format": FORMAT, "layers": layers, "n_ctx": model.n_ctx}
    data = serialise(tensors, {METADATA: json.dumps(architecture)})
    # Opened plainly: with the permissions that files get here.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def own_model(state: Mapping[str, Any], text: str, n_ctx: int | None = None) -> Model:
    """The model in a file of tnsim's own.

    Args:
        state: its tensors by name.
        text: what its metadata hold.
        n_ctx: length of the sequences; by default what the file says.

    Raises:
        CheckpointError: when the metadata are damaged, of another version, or do not account for
            every tensor.
        UnsupportedLayer: when they name an unknown layer.
        ModelError: when the tensors make no model.
    """
    used: set[str] = set()
    with refusing("its tnsim metadata is damaged"):
        architecture = json.loads(text)
        if architecture["format"] != FORMAT:
            raise CheckpointError(
                f"written in tnsim format {architecture['format']}; this version reads {FORMAT}"
            )
        layers = []
        for n, layer in enumerate(architecture["layers"]):
            build = lambda n=n, layer=layer: _build(layer, f"layers.{n}", state, used)  # noqa: E731
            layers.append(rename_errors(f"layer {n}", build))
        if n_ctx is None:
            n_ctx = architecture.get("n_ctx")
    if surplus := sorted(set(state) - used):
        raise CheckpointError(
            f"holds tensors that its architecture does not mention: {', '.join(surplus[:8])}"
        )
    return Model(layers, n_ctx)


def _describe(layer: Layer, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """A layer in terms of JSON; its arrays go to `tensors`."""
    if isinstance(layer, Residual):
        return {
            "kind": "Residual",
            "skip": float(layer.skip),
            "scale": float(layer.scale),
            "layer": _describe(layer.layer, prefix, tensors),
        }
    arrays, settings = _fields(type(layer))
    for field in arrays:
        if getattr(layer, field) is not None:
            tensors[f"{prefix}.{field}"] = np.ascontiguousarray(getattr(layer, field))
    return {"kind": type(layer).__name__, **{field: getattr(layer, field) for field in settings}}


def _fields(cls: type) -> tuple[list[str], list[str]]:
    """Names of a layer's arrays and of its other arguments."""
    fields = dataclasses.fields(cls)
    arrays = [field.name for field in fields if not field.metadata.get("static")]
    settings = [field.name for field in fields if field.metadata.get("static")]
    return arrays, settings


def _build(spec: Mapping[str, Any], prefix: str, state: Mapping[str, Any], used: set[str]) -> Layer:
    if spec["kind"] == "Residual":
        return Residual(_build(spec["layer"], prefix, state, used), spec["skip"], spec["scale"])
    if spec["kind"] not in KINDS:
        raise UnsupportedLayer(
            f"layer kind {spec['kind']!r} is not one of {', '.join(KINDS)}, Residual"
        )
    cls = KINDS[spec["kind"]]
    fields, settings = _fields(cls)
    arrays = {}
    for field in fields:
        name = f"{prefix}.{field}"
        if name in state:
            used.add(name)
            arrays[field] = to_numpy(state[name], name)
        elif not field.endswith("bias"):
            raise CheckpointError(f"tensor {name!r} is missing")
    return cls(**arrays, **{setting: spec[setting] for setting in settings})
