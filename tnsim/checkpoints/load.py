"""Checkpoints into models. In: paths. Out: models and series of models.

tnsim's own files carry their architecture; foreign ones go through a dialect. Whatever is wrong
with a file is refused as `CheckpointError`, `ModelError` or `UnsupportedLayer`, its path in front.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

import numpy as np

from tnsim.checkpoints.checkpoint import AnyDialect, find_dialect, patterns, read
from tnsim.checkpoints.module_forward import SCALES
from tnsim.checkpoints.named_arrays import to_numpy
from tnsim.checkpoints.series import Series, is_several
from tnsim.checkpoints.state_dict import detect, model_from_state
from tnsim.errors import ON_INPUTS, ModelError
from tnsim.models.model import Model
from tnsim.models.origin import Origin

CONFIRMS = 1e-4
"""Relative error of a forward pass in float32 that is no other function."""


@overload
def load(
    path: str | os.PathLike[str],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norms: Any = None,
) -> Model | Series: ...


@overload
def load(
    path: Iterable[Any],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norms: Any = None,
) -> Series: ...


def load(
    path: Any,
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norms: Any = None,
) -> Model | Series:
    """Read one file into a `Model`; a list, a folder or a glob pattern into a lazy `Series`.

    A folder in Hugging Face's layout is one file. In a local hub cache `REPOSITORY@REVISION` is one
    and the folder of the repository several.

    Args:
        path: A file that ends in .safetensors, .npz, .pt, .pth or .ckpt, or several.
        dialect: A `Dialect`, the name of a preset, or the path of a JSON file; by default tnsim's
            own format, else the one preset that accounts for every tensor.
        n_ctx: Length of the sequences on which a model with attention is compared; by default what
            the file says, which is nothing for foreign ones.
        leave_out: A pattern, or several, of tensors that are part of the network, a bias or a norm,
            and are knowingly not read. Every result says so.
        norms: Inputs (samples, d_in), of a sequence (samples, positions, d_in) or token numbers
            (samples, positions), at whose mean energy each norm that the dialect names becomes a
            constant. The model's `origin` says how far outputs are off, and so does every result.

    Returns:
        A model, or a series whose models are read when they are asked for.

    Raises:
        CheckpointError: Naming file and tensor, when the file is missing, damaged, out of
            proportion, or does not fit its dialect.
        ModelError: When its tensors make no model.
        UnsupportedLayer: When it holds a layer that is no polynomial, a norm without `norms`
            among them.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> folder = Path(tnsim.__file__).parent / "data" / "modular-addition"
        >>> load(folder)
        Series(13 checkpoints: 0, 100, 200, ...)
        >>> load(folder / "step_000100.safetensors")
        Model(Bilinear(226 -> 113, rank 64); degree 2, 36,160 parameters)
    """
    if isinstance(path, (str, os.PathLike)) and not is_several(path):
        return read(path, dialect, n_ctx, leave_out, norms).model
    return Series(path, dialect, n_ctx, leave_out=leave_out, norms=norms)


def from_state_dict(
    state: Mapping[str, Any],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norms: Any = None,
) -> Model:
    """A model from a torch state_dict or any mapping of names to arrays.

    Args:
        state: Arrays or tensors by name.
        dialect: As in `load`.
        n_ctx: As in `load`.
        config: What config.json would hold, for dialects that take numbers from it.
        leave_out: As in `load`.
        norms: As in `load`.

    Returns:
        The model.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: As in `load`.

    Example:
        >>> shapes = {"W_l": (4, 2), "W_r": (4, 2), "W_p": (3, 4)}
        >>> from_state_dict({name: np.ones(shape) for name, shape in shapes.items()}).degree
        2
    """
    leave_out = patterns(leave_out)
    if dialect is None:
        dialect = detect(state, config, leave_out)
    return model_from_state(state, find_dialect(dialect), n_ctx, config, leave_out, norms)


class ForwardError(NamedTuple):
    """Largest difference of two forward passes.

    Attributes:
        absolute: In the unit of the outputs.
        relative: To the largest output of the other pass.
    """

    absolute: float
    relative: float


def compare_forward(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int = 64, seed: int = 0
) -> ForwardError:
    """Check a dialect: run another forward pass beside the model's.

    A float32 forward of the same function differs by about 1e-6 relatively.

    Args:
        model: As read through the dialect.
        forward: Takes float32 inputs (samples, d_in), or (samples, n_ctx, d_in) for a model of
            sequences, and returns outputs (samples, d_out), or (samples, n_ctx, d_out).
        samples: Number of standard normal inputs.
        seed: Of the inputs.

    Returns:
        Both differences; the relative one has no unit.

    Raises:
        ModelError: When the shapes of the outputs differ.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> compare_forward(model, lambda x: x)
        ForwardError(absolute=0.0, relative=0.0)
    """
    return _forward_error(model, forward, samples, seed, 1.0)


def confirm(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int = 64, seed: int = 0
) -> Model:
    """Confirm what a dialect guessed, by running another forward pass beside the model's.

    The outputs are compared on inputs of three sizes, at which polynomials of different degree
    and activations differ.

    Args:
        model: A model that was read through a dialect with guesses.
        forward: The network's own forward pass, as for `compare_forward`.
        samples: Number of inputs of each size, normal.
        seed: Seed of the inputs.

    Returns:
        The model without open guesses. `model.origin.dialect` has all of them confirmed, so that
        `model.origin.dialect.to_json()` is the file for `--dialect`.

    Raises:
        ModelError: The outputs differ by more than the rounding of float32, or have other shapes.

    Example:
        >>> import tnsim
        >>> rules = [tnsim.Rule("linear", weight="w")]
        >>> guess = tnsim.Guess("matrices", "stored (out, in)")
        >>> dialect = tnsim.Dialect("mine", tuple(rules), guesses=(guess,))
        >>> model = from_state_dict({"w": np.array([[1.0, 2.0]])}, dialect)
        >>> model.origin.guesses
        ('matrices: stored (out, in)',)
        >>> confirm(model, lambda x: x @ np.array([[1.0], [2.0]])).origin.guesses
        ()
    """
    errors = [_forward_error(model, forward, samples, seed, scale).relative for scale in SCALES]
    if not max(errors) < CONFIRMS:
        sizes, found = (", ".join(f"{one:.2g}" for one in row) for row in (SCALES, errors))
        raise ModelError(
            "the forward pass is another function than the model, so a guess of its dialect is "
            f"wrong: outputs on inputs of size {sizes} differ by {found} of the largest output. "
            f"Mend the dialect, or where there is an activation: {ON_INPUTS}"
        )
    origin = model.origin or Origin("a forward pass")
    dialect = origin.dialect.confirmed() if origin.dialect is not None else None
    said = f"compared with a forward pass: largest relative error {max(errors):.2g}"
    assumptions = (*origin.assumptions, said)
    known = replace(origin, assumptions=assumptions, dialect=dialect, guesses=())
    return Model(model.layers, model.n_ctx, known)


def _forward_error(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int, seed: int, scale: float
) -> ForwardError:
    """Both differences on normal inputs of one size."""
    shape = (samples, model.d_in)
    if model.n_ctx is not None:
        shape = (samples, model.n_ctx, model.d_in)
    x = (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)
    theirs = to_numpy(forward(x), "the output of forward").astype(np.float64)
    ours = np.asarray(model(x.astype(np.float64)), np.float64)
    if theirs.shape != ours.shape:
        raise ModelError(
            f"forward gives shape {theirs.shape} for inputs {x.shape}, the model {ours.shape}"
        )
    absolute = float(np.abs(theirs - ours).max())
    largest = max(float(np.abs(theirs).max()), float(np.finfo(np.float64).tiny))
    return ForwardError(absolute, absolute / largest)
