"""Checkpoints: the only room that knows file formats. In: paths. Out: models and series of models.

tnsim's own files are safetensors with the architecture in the metadata. Foreign ones (safetensors, npz,
PyTorch) go through a dialect. A PyTorch file is read with `weights_only=True` and nothing else is ever
unpickled. Files are written to a temporary name and renamed, so none is ever half there.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import pickle
import re
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  bfloat16 safetensors need the type registered with NumPy
import numpy as np

from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.state_dict import detect, model_from_state, to_numpy
from tnsim.errors import CheckpointError, MissingExtra, ModelError, TnsimError, UnsupportedLayer
from tnsim.models.layers import Attention, Bilinear, Layer, Linear, Residual, rename_errors
from tnsim.models.model import Model

FORMAT = 1
SUFFIXES = (".safetensors", ".npz", ".pt", ".pth")
_TORCH = (2, 10)
_KINDS = {cls.__name__: cls for cls in (Linear, Bilinear, Attention)}
_CONFIGURATIONS = ("config.json", "config.yaml", "config.yml")


class Checkpoint(NamedTuple):
    """A model with what was assumed in reading it, and the dtypes it was stored in."""

    model: Model
    assumptions: tuple[str, ...]
    dtypes: tuple[str, ...]


def load(
    path: Any, dialect: Dialect | str | os.PathLike | None = None, n_ctx: int | None = None
) -> Model | Series:
    """Read one file into a `Model`; a list, a folder or a glob pattern into a lazy `Series`.

    dialect: a `Dialect`, the name of a preset, or the path of a JSON file; by default tnsim's own format, else
    the one preset that accounts for every tensor. n_ctx: length of the sequences on which a model with attention is
    compared; by default what the file says, which is nothing for foreign ones. Raises `CheckpointError` naming file and tensor.
    """
    if isinstance(path, (str, os.PathLike)) and not _many(path):
        return read(path, dialect, n_ctx).model
    return Series(path, dialect, n_ctx)


def read(
    path: str | os.PathLike,
    dialect: Dialect | str | os.PathLike | None = None,
    n_ctx: int | None = None,
) -> Checkpoint:
    """As `load` for one file, with the assumptions made and the stored dtypes."""
    path = Path(path)
    dialect = None if dialect is None else find_dialect(dialect)
    try:
        state, metadata = _read_state(path)
        dtypes = tuple(sorted(set(_dtypes(state))))
        if dialect is None and "tnsim" in metadata:
            return Checkpoint(
                _own_model(state, metadata["tnsim"], n_ctx),
                ("tnsim's own format: nothing assumed",),
                dtypes,
            )
        config = _configuration(path)
        dialect = dialect or detect(state, config)
        return Checkpoint(
            model_from_state(state, dialect, n_ctx, config), tuple(dialect.assumptions()), dtypes
        )
    except (CheckpointError, ModelError, UnsupportedLayer) as error:
        raise type(error)(f"{path}: {error}") from None


def _dtypes(state: Mapping[str, Any]) -> Iterator[str]:
    for value in state.values():
        if isinstance(value, Mapping):
            yield from _dtypes(value)
        elif hasattr(value, "dtype"):
            yield str(value.dtype).removeprefix("torch.")


def save(model: Model, path: str | os.PathLike) -> None:
    """Write a model as safetensors, architecture in the metadata. Raises `CheckpointError` if that fails."""
    path = Path(path)
    if not isinstance(model, Model):
        raise ModelError("only a Model can be saved; save the models of a combination one by one")
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: models are saved as .safetensors")
    from safetensors.numpy import save as serialise

    tensors: dict[str, np.ndarray] = {}
    layers = [_describe(layer, f"layers.{n}", tensors) for n, layer in enumerate(model.layers)]
    data = serialise(
        tensors, {"tnsim": json.dumps({"format": FORMAT, "layers": layers, "n_ctx": model.n_ctx})}
    )
    temporary = path.with_name(
        f"{path.name}.{uuid.uuid4().hex}.tmp"
    )  # opened plainly: with the permissions that files get here
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def from_state_dict(
    state: Mapping[str, Any],
    dialect: Dialect | str | os.PathLike | None = None,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """A model from a torch state_dict or any mapping of names to arrays; `dialect` and `n_ctx` as in `load`.

    config: what config.json would hold, for dialects that take numbers from it.
    """
    return model_from_state(
        state,
        find_dialect(dialect) if dialect is not None else detect(state, config),
        n_ctx,
        config,
    )


def _configuration(path: Path) -> Mapping[str, Any] | None:
    """The configuration beside a checkpoint, None without one. Raises `MissingExtra` for YAML without PyYAML."""
    for name in _CONFIGURATIONS:
        file = path.parent / name
        if not file.is_file():
            continue
        if file.suffix == ".json":
            try:
                return json.loads(file.read_text())
            except ValueError as error:
                raise CheckpointError(f"{name} beside it is not JSON: {error}") from None
        try:
            import yaml
        except ImportError:
            raise MissingExtra("pyyaml", "yaml", f"reading {file}") from None
        try:
            return yaml.safe_load(file.read_text())
        except yaml.YAMLError as error:
            raise CheckpointError(
                f"{name} beside it is not YAML: {' '.join(str(error).split())}"
            ) from None
    return None


def find_dialect(dialect: Dialect | str | os.PathLike) -> Dialect:
    """A dialect by itself, by preset name or by the path of its JSON file."""
    if isinstance(dialect, Dialect):
        return dialect
    if str(dialect) in PRESETS:
        return PRESETS[str(dialect)]
    path = Path(dialect)
    if path.suffix != ".json" or not path.is_file():
        raise CheckpointError(
            f"no dialect {str(dialect)!r}: neither a preset ({', '.join(PRESETS)}) nor a JSON file"
        )
    try:
        return Dialect.from_json(path.read_text())
    except TnsimError as error:
        raise type(error)(f"{path}: {error}") from None


class ForwardError(NamedTuple):
    """Largest difference between two forward passes: absolute, and relative to the largest output."""

    absolute: float
    relative: float


def compare_forward(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int = 64, seed: int = 0
) -> ForwardError:
    """Check a dialect: run `forward` (float32 inputs (samples, d_in) -> (samples, d_out)) beside the model.

    Inputs are standard normal, (samples, n_ctx, d_in) for a model of sequences. A float32 forward of the same function
    differs by about 1e-6 relatively.
    """
    shape = (samples, model.d_in) if model.n_ctx is None else (samples, model.n_ctx, model.d_in)
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    theirs = to_numpy(forward(x), "the output of forward").astype(np.float64)
    ours = np.asarray(model(x.astype(np.float64)), np.float64)
    if theirs.shape != ours.shape:
        raise ModelError(
            f"forward gives shape {theirs.shape} for inputs {x.shape}, the model {ours.shape}"
        )
    absolute = float(np.abs(theirs - ours).max())
    return ForwardError(
        absolute, absolute / max(float(np.abs(theirs).max()), np.finfo(np.float64).tiny)
    )


class Series(Sequence[Model]):
    """Checkpoints in order, read when indexed. `paths`; `labels`: the step where the names differ by one number.

    A folder or a glob is sorted by the numbers in the names, a list keeps its order. Raises `CheckpointError`
    when nothing matches. `names`: what to take the labels from, where not the paths.
    """

    def __init__(
        self,
        source: Any,
        dialect: Dialect | str | os.PathLike | None = None,
        n_ctx: int | None = None,
        names: Sequence[str] | None = None,
    ):
        self.n_ctx = n_ctx
        self.dialect = None if dialect is None else find_dialect(dialect)
        self.paths = tuple(_expand(source))
        self.names = tuple(map(str, self.paths)) if names is None else tuple(names)
        self.labels = _labels([Path(name) for name in self.names])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Series(self.paths[index], self.dialect, self.n_ctx, self.names[index])
        return read(self.paths[index], self.dialect, self.n_ctx).model

    def __iter__(self) -> Iterator[Model]:
        return (self[n] for n in range(len(self)))

    def __repr__(self) -> str:
        return f"Series({len(self)} checkpoints: {', '.join(self.labels[:3])}{', ...' if len(self) > 3 else ''})"


def _many(path: str | os.PathLike) -> bool:
    return os.path.isdir(path) or (not os.path.exists(path) and glob.has_magic(str(path)))


def _expand(source: Any) -> Iterator[Path]:
    if not isinstance(source, (str, os.PathLike)):
        for one in source:
            yield from _expand(one)
        return
    path = Path(source)
    if path.is_dir():
        found = [p for p in path.iterdir() if p.suffix in SUFFIXES]
    elif _many(source):
        found = [Path(p) for p in glob.glob(str(source))]
    else:
        found = [path]
    if not found:
        raise CheckpointError(f"{source}: no checkpoint matches ({', '.join(SUFFIXES)})")
    yield from sorted(found, key=natural)


def natural(path: Path) -> list:
    """A sort key that takes the digits of a name for numbers."""
    return [
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """The one number that tells the names apart, or the names."""
    stems = [p.stem for p in paths]
    parts = [re.split(r"(\d+)", stem) for stem in stems]
    if len(parts) > 1 and len({len(p) for p in parts}) == 1:
        differing = [n for n in range(len(parts[0])) if len({p[n] for p in parts}) > 1]
        if len(differing) == 1 and all(p[differing[0]].isdigit() for p in parts):
            return tuple(str(int(p[differing[0]])) for p in parts)
    return tuple(stems) if len(set(stems)) == len(stems) else tuple(map(str, paths))


def _read_state(path: Path) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    if not path.is_file():
        raise CheckpointError(
            "is a folder, not a checkpoint file" if path.is_dir() else "no such file"
        )
    readers = {
        ".safetensors": _read_safetensors,
        ".npz": _read_npz,
        ".pt": _read_torch,
        ".pth": _read_torch,
    }
    if path.suffix not in readers:
        raise CheckpointError(
            f"unknown format {path.suffix or 'without suffix'!r}; readable are {', '.join(readers)}"
        )
    return readers[path.suffix](path)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a readable safetensors file, or truncated: {error}") from None


def _read_npz(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError("not a readable npz file, or truncated")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}, {}
    except (OSError, ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        reason = (
            "holds Python objects, which are not read"
            if "allow_pickle" in str(error)
            else f"not a readable npz file: {error}"
        )
        raise CheckpointError(reason) from None


def _read_torch(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", f"reading {path}") from None
    version = tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2])
    if version < _TORCH:
        raise CheckpointError(
            f"torch {torch.__version__} cannot read untrusted files safely (CVE-2026-24747); install torch>=2.10"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of pickle protocols; what cannot be read is an error below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            "not plain weights: it holds Python objects, which are refused because unpickling runs code; "
            "save the state_dict alone, or convert it to safetensors where you trust it"
        ) from None
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(
            f"not a readable PyTorch file, or truncated: {str(error).splitlines()[0]}"
        ) from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state_dict, found {type(state).__name__}")
    return state, {}


def _describe(layer: Layer, prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    if isinstance(layer, Residual):
        inner = _describe(layer.layer, prefix, tensors)
        return {
            "kind": "Residual",
            "skip": float(layer.skip),
            "scale": float(layer.scale),
            "layer": inner,
        }
    arrays, static = _fields(type(layer))
    for field in arrays:
        if getattr(layer, field) is not None:
            tensors[f"{prefix}.{field}"] = np.ascontiguousarray(getattr(layer, field))
    return {"kind": type(layer).__name__, **{field: getattr(layer, field) for field in static}}


def _fields(cls: type) -> tuple[list[str], list[str]]:
    """Names of a layer's arrays and of its other arguments."""
    every = dataclasses.fields(cls)
    return [f.name for f in every if not f.metadata.get("static")], [
        f.name for f in every if f.metadata.get("static")
    ]


def _own_model(state: Mapping[str, Any], text: str, n_ctx: int | None) -> Model:
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CheckpointError(
                f"written in tnsim format {data['format']}; this version reads {FORMAT}"
            )
        used: set[str] = set()
        layers = [
            rename_errors(f"layer {n}", lambda n=n, s=s: _build(s, f"layers.{n}", state, used))
            for n, s in enumerate(data["layers"])
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TnsimError):
            raise
        raise CheckpointError(f"its tnsim metadata is damaged: {error!r}") from None
    if surplus := set(state) - used:
        raise CheckpointError(
            f"holds tensors that its architecture does not mention: {', '.join(sorted(surplus))}"
        )
    return Model(layers, data.get("n_ctx") if n_ctx is None else n_ctx)


def _build(spec: Mapping[str, Any], prefix: str, state: Mapping[str, Any], used: set[str]) -> Layer:
    if spec["kind"] == "Residual":
        return Residual(_build(spec["layer"], prefix, state, used), spec["skip"], spec["scale"])
    if spec["kind"] not in _KINDS:
        raise UnsupportedLayer(
            f"layer kind {spec['kind']!r} is not one of {', '.join(_KINDS)}, Residual"
        )
    cls = _KINDS[spec["kind"]]
    fields, static = _fields(cls)
    names = {field: f"{prefix}.{field}" for field in fields}
    required = [n for f, n in names.items() if not f.endswith("bias")]
    if missing := [n for n in required if n not in state]:
        raise CheckpointError(f"tensor {missing[0]!r} is missing")
    used.update(n for n in names.values() if n in state)
    return cls(
        **{field: state.get(name) for field, name in names.items()},
        **{field: spec[field] for field in static},
    )
