"""Adapters of low rank over a base: the weights of both together, as a file of the base has them.

A folder of PEFT holds `adapter_model.safetensors` and `adapter_config.json`. The configuration
names the base; where no such base is on this machine, it is the model that lies beside the adapter.
A layer of weights W computes W + s B A, in float64, with the scale s = alpha / r, or
alpha / sqrt(r) for rslora, and of DoRA each output has the norm that the adapter says. Every
setting is known to change nothing, or is applied, or refused by name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.checkpoints.folders import base_file, located, names_revision
from tnsim.checkpoints.formats import (
    ADAPTER_SETTINGS,
    ADAPTERS,
    Contents,
    Stored,
    configuration,
    contents,
    is_adapter,
)
from tnsim.checkpoints.layer_rules import to_numpy
from tnsim.checkpoints.module_calls import copy_of
from tnsim.errors import CheckpointError, naming, printable, refusing

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))(?:\.(\w+))?")
_INERT = {  # settings of training, of places that the tensors say, and of the library
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
_APPLIED = {
    "alpha_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "lora_bias",
    "peft_type",
    "r",
    "rank_pattern",
    "use_dora",
    "use_rslora",
}
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # that leave the base as it is
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
OUTSIDE_OF_ADAPTED = (
    "with its adapters within its weights the module is another function: its code reads weights "
    "of adapted layers outside of these layers"
)
"""Said of a module whose adapters count in calls of their layers alone."""


@dataclass(frozen=True)
class Adapted(Stored):
    """A tensor of a base with what an adapter makes of it in one layer.

    Other layers that share the tensor keep that of the base.

    Attributes:
        outside: What code reads that asks the layer for the tensor by its name, which is the tensor
            of the base; None where the adapter has a layer of its own, as PEFT saves it.
    """

    outside: Stored | None = None


def read_file(file: Path) -> tuple[Contents, Path]:
    """The inventory of a model, and the file beside which its configuration lies.

    Args:
        file: A checkpoint, or an adapter, in the place of which its base with the adapter is read.

    Returns:
        Names and unread tensors, and the checkpoint or the base.

    Raises:
        CheckpointError, MissingExtra: Raised as by `contents` and `adapted`.
    """
    if not is_adapter(file):
        return contents(file), file
    base = base_of(file)
    return adapted(file, base), base


def merged_module(module: Any) -> Any:
    """The module that a `PeftModel` computes, in float64, its adapters within its weights.

    Args:
        module: Any module; modules without adapters are returned as they are.

    Returns:
        A copy of the base with the weights of both.

    Raises:
        CheckpointError: Where an adapter has no place in the weights, as prompts and prefixes.
    """
    if not (hasattr(module, "peft_config") and hasattr(module, "get_base_model")):
        return with_adapted_weights(module)
    if not hasattr(module, "merge_and_unload"):
        kinds = ", ".join(str(one.peft_type) for one in module.peft_config.values())
        raise CheckpointError(
            f"adapters of kind {kinds} are no part of the weights of the base: compare outputs, "
            "metric tnsim.Empirical(inputs)"
        )
    # Models of transformers have a method of this name.
    said = (getattr(one, "disable_adapters", None) for one in module.modules())
    off = {one for one in said if isinstance(one, bool)}
    if len(off) > 1:
        raise CheckpointError("some adapters are disabled and others not: disable all or none")
    copied = copy_of(module).double()
    if off == {True}:
        return copied.unload()
    # What is merged into weights that other layers share would be in all of them.
    names = Counter(id(one) for _, one in copied.named_parameters(remove_duplicate=False))
    for layer in copied.modules():
        under = None if getattr(layer, "merged", False) else getattr(layer, "base_layer", None)
        if under is not None and any(names[id(one)] > 1 for one in under.parameters()):
            layer.base_layer = copy_of(under)
    return copied.merge_and_unload()


def put_adapter(layer: Any, weights: Mapping[str, Any]) -> None:
    """Let a layer compute with other weights, and keep its own for code that reads them by name.

    This is what PEFT does, whose layers stand around those of the base.

    Args:
        layer: A layer of PyTorch, which is changed.
        weights: Tensors of an adapter and its base together, by the names of the layer.
    """
    layer.adapted = copy_of(layer)
    layer.adapted.load_state_dict(weights, strict=False)
    layer.forward = layer.adapted.forward


def with_adapted_weights(module: Any) -> Any:
    """A module in which weights of `put_adapter` are those of the layers themselves.

    Args:
        module: Any module; one without such layers is returned as it is.
    """
    if not any(map(_is_adapted, getattr(module, "modules", tuple)())):
        return module
    copied = copy_of(module)
    for layer in filter(_is_adapted, list(copied.modules())):
        for own in ("_parameters", "_buffers"):
            getattr(layer, own).update(getattr(layer.adapted, own))
        del layer.forward, layer.adapted
    return copied


def _is_adapted(layer: Any) -> bool:
    return "forward" in vars(layer) and "adapted" in layer._modules


def base_of(adapter: Path) -> Path:
    """The file of the base of an adapter.

    Args:
        adapter: File of an adapter, its configuration beside it.

    Returns:
        The file or the index of the base.

    Raises:
        CheckpointError: The configuration is damaged, or the base is not on this machine.
    """
    settings = _settings(adapter)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(
            f"{ADAPTER_SETTINGS} names no base, found {printable(repr(name), 80)}"
        )
    if name:
        for folder in (Path(name), adapter.parent / name):
            if folder.exists() and folder.resolve() != adapter.parent.resolve():
                with naming(folder):
                    return _no_adapter(located(folder))
        cached = f"{name}@{revision or 'main'}"
        if names_revision(cached):
            try:
                return _no_adapter(located(cached))
            except CheckpointError:
                pass  # the hub cache has it not, and the folder may
    if (beside := base_file(adapter.parent)) is not None:
        return beside
    raise CheckpointError(
        f"is an adapter of {printable(name or 'no named base', 200)}, which is no folder "
        "and not in the hub cache, and no model lies beside the adapter: copy the base "
        f"into its folder, or write its path as base_model_name_or_path in {ADAPTER_SETTINGS}"
    )


def _no_adapter(file: Path) -> Path:
    if file.name in ADAPTERS:
        raise CheckpointError("the base of an adapter is an adapter: merge that one first")
    return file


def adapted(adapter: Path, file: Path, base: Contents | None = None) -> Contents:
    """The inventory of a base with an adapter applied.

    Args:
        adapter: File of the adapter, its configuration beside it.
        file: File of the base.
        base: Tensors of the base where they have other names than in its file; None for those of
            the file.

    Returns:
        Tensors by the names of the base; numbers are read and computed when asked for.

    Raises:
        CheckpointError: A file is damaged, the base is not found, or a tensor or a setting of the
            adapter has no known meaning.
    """
    settings = _settings(adapter)
    _check_settings(settings)
    with naming(file):
        base = contents(file) if base is None else base
        if not all(isinstance(tensor, Stored) for tensor in base.state.values()):
            raise CheckpointError("the base of an adapter is a file of named tensors alone")
        config = configuration(file) or {}
    # Families differ in what they do where the configuration is silent; tied heads are not stored.
    has_head = any(name.endswith("lm_head.weight") for name in base.state)
    tied = "model_type" in config and config.get("tie_word_embeddings", not has_head)

    def check_apart(place: str, name: str, is_table: bool) -> None:
        """Refuse what an adapter changes on one side of a tie alone."""
        if tied and name not in base.state and place.startswith("lm_head"):
            raise CheckpointError(
                "the adapter has an lm_head of its own, and the base shares that of its "
                "embedding: save the merged model"
            )
        if tied and is_table:
            raise CheckpointError(
                f"the adapter changes {place}, whose weights the base shares with its lm_head: "
                "save the merged model"
            )

    def is_table(name: str) -> bool:
        """Whether a tensor of the base has a row for each token."""
        rows = config.get("vocab_size")
        return name in base.state and np.shape(base.state[name].read())[:1] == (rows,)

    state: dict[str, Stored] = dict(base.state)
    layers: dict[str, dict[str, Any]] = {}
    for stored in contents(adapter).tensors:
        if not stored.name.startswith(_PREFIX):
            raise CheckpointError(f"tensor {stored.name!r} is no part of a LoRA adapter")
        place = stored.name.removeprefix(_PREFIX)
        if part := _PART.fullmatch(place):
            ending = part[3] if part[3] not in (None, "weight") else ""
            layers.setdefault(part[1], {})[part[2] + ending] = stored
        elif "lora_" in place or "token_adapter" in place or "modules_to_save." in place:
            raise CheckpointError(f"tensor {stored.name!r} of the adapter has no known meaning")
        else:
            place = place.replace(".base_layer.", ".")
            name = _name_in(state, place) or place
            # PEFT trains a copy of what is saved as a module, which is tied to nothing.
            copied = place.rpartition(".")[0].endswith(tuple(settings.get("modules_to_save") or ()))
            check_apart(place, name, copied and is_table(name))
            state[name] = (Adapted if copied else Stored)(
                name, stored.dtype, stored.nbytes, partial(getattr, stored, "tensor")
            )
    for place, parts in layers.items():
        turned = bool(settings.get("fan_in_fan_out"))
        if config.get("model_type") in _CONV1D:  # whose layers PEFT tells by their class
            turned = place.rpartition(".")[2] in ("c_attn", "c_fc", "c_proj", "q_attn")
        embeds = bool({"lora_embedding_A", "lora_embedding_B"} & set(parts))
        check_apart(place, f"{place}.weight", embeds)
        _apply(place, parts, state, settings, turned)
    return Contents(state, tuple(state.values()), base.metadata)


def _settings(adapter: Path) -> Mapping[str, Any]:
    return configuration(adapter, (ADAPTER_SETTINGS,)) or {}


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings by which the tensors would mean something else."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"is an adapter of kind {printable(repr(kind), 80)}; LORA is known")
    if settings.get("init_lora_weights", True) not in _STARTS:
        raise CheckpointError(
            f"init_lora_weights {printable(repr(settings['init_lora_weights']), 80)} changes the "
            "base before training: save the merged model, or convert the adapter as PEFT says"
        )
    for name, value in settings.items():
        if name not in _INERT | _APPLIED and value:
            raise CheckpointError(
                f"{printable(str(name), 80)} = {printable(repr(value), 80)} of the adapter is not "
                "known here: save the merged model"
            )


def _name_in(state: Mapping[str, Any], place: str) -> str | None:
    """The tensor of the base at a place, whose names may lack or have the name of a whole model."""
    if place in state:
        return place
    found = [x for x in state if x.endswith(f".{place}") or place.endswith(f".{x}")]
    return found[0] if len(found) == 1 else None


def _apply(
    place: str,
    parts: Mapping[str, Stored],
    state: dict[str, Stored],
    settings: Mapping[str, Any],
    turned: bool,
) -> None:
    """Put a layer with its adapter in the place of the layer."""
    embedding = "lora_embedding_A" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    extra = set(parts) - {*names, "lora_magnitude_vector", "lora_Bbias"}
    name = _name_in(state, f"{place}.weight")
    if extra or not set(names) <= set(parts) or name is None:
        what = f"tensors {', '.join(sorted(parts))}"
        base = "the base has no layer there" if name is None else "which are no LoRA"
        raise CheckpointError(f"{place} has {what} in the adapter: {base}")
    if ("lora_magnitude_vector" in parts) != bool(settings.get("use_dora")):
        raise CheckpointError(f"use_dora and the tensors of the adapter differ for {place}")
    if "lora_magnitude_vector" in parts and (embedding or parts["lora_A"].tensor.ndim != 2):
        raise CheckpointError(f"DoRA of {place}, no linear layer: save the merged model")
    rank = _by_pattern(settings, "rank_pattern", "r", place)
    alpha = _by_pattern(settings, "alpha_pattern", "lora_alpha", place)
    if rank != parts[names[0]].tensor.shape[0]:
        raise CheckpointError(
            f"rank {rank:g} of {place} by {ADAPTER_SETTINGS}, and "
            f"{parts[names[0]].tensor.shape[0]} by its tensor"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    before = state[name]
    for stored in (before, *parts.values()):
        if stored.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {stored.name!r} is of type {stored.dtype}, to which no adapter is added: "
                "dequantise the base first"
            )
    first, second = (parts[x] for x in names)
    magnitude = parts.get("lora_magnitude_vector")
    read = partial(_sum, before, first, second, scale, embedding or turned, magnitude)
    size = before.nbytes * 8 // np.dtype(before.dtype).itemsize
    state[name] = Adapted(name, "float64", size, read, before)
    if (bias := parts.get("lora_Bbias")) is not None:
        at = _name_in(state, f"{place}.bias")
        if at is None:
            raise CheckpointError(f"the adapter has a bias for {place}, and the base has none")
        there = state[at]
        total = lambda: _numbers(there) + scale * _numbers(bias)  # noqa: E731
        state[at] = Adapted(at, "float64", there.nbytes * 8, total, there)


def _by_pattern(settings: Mapping[str, Any], patterns: str, default: str, place: str) -> float:
    """A number for a layer: that of the first pattern at the end of its name, else the common."""
    number = settings.get(default, 8)
    by_pattern = settings.get(patterns) or {}
    if not isinstance(by_pattern, Mapping):
        raise CheckpointError(f"{patterns} must hold names and numbers")
    for pattern, value in by_pattern.items():
        # A few repetitions take little time, whatever the name.
        if len(pattern) > 200 or sum(map(pattern.count, "*+{?")) > 2:
            raise CheckpointError(f"{patterns} {printable(pattern, 80)!r} is too involved")
        with refusing(f"{patterns} {printable(pattern, 80)!r} is no pattern"):
            fits = re.match(rf"(.*\.)?({pattern})$", place)
        if fits:
            number = value
            break
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 2**31:
        raise CheckpointError(f"{default} of {place} is {printable(repr(number), 80)}")
    return number


def _numbers(stored: Stored) -> np.ndarray:
    return np.asarray(to_numpy(stored, stored.name), dtype=np.float64)


def _sum(
    before: Stored,
    first: Stored,
    second: Stored,
    scale: float,
    turned: bool,
    magnitude: Stored | None,
) -> np.ndarray:
    """W + scale B A, with the norm of each output that DoRA says."""
    weight, a, b = map(_numbers, (before, first, second))
    # Of a convolution to few channels, and one of width one behind it, the axes of width come last.
    change = np.tensordot(b.reshape(b.shape[:2]), a, 1)
    change = scale * (change.T if turned else change)
    if change.shape != weight.shape:
        raise CheckpointError(f"the adapter of {before.name!r} has another shape")
    total = weight + change
    if magnitude is not None:
        axis = 0 if turned else 1
        norms = np.linalg.norm(total, axis=axis, keepdims=True)
        total = total * _numbers(magnitude).reshape(norms.shape) / norms
    return total
