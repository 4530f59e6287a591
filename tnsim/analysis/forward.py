"""What many models give on the same inputs. In: models or functions, inputs. Out: arrays.

Forward passes run in batches, in the precision of the weights; what they give is read in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models import functions
from tnsim.models.arrays import host_array
from tnsim.models.checks import check_comparable, check_numbers
from tnsim.models.forward import check_inputs, is_tokens, plain_forward
from tnsim.models.functions import Function
from tnsim.models.model import AnyModel, terms

BATCH = 4096
"""Inputs per forward pass."""

Inputs: TypeAlias = Float[np.ndarray, "n *positions in"] | int


class Outputs(NamedTuple):
    """What is kept of the outputs of several models on n inputs.

    Attributes:
        features: One array per model.
        about: Of the inputs `inputs`, `samples` and, where they were drawn, `seed`.

    Example:
        >>> import numpy as np
        >>> Outputs([np.zeros(2)], {"inputs": "given", "samples": 2}).about["samples"]
        2
    """

    features: list[np.ndarray]
    about: dict[str, Any]


def outputs_of(
    models: Sequence[AnyModel | Function],
    inputs: Inputs,
    seed: int,
    feature: Callable[[np.ndarray], np.ndarray],
) -> Outputs:
    """Run every model once, and keep of its outputs what a measure compares.

    Args:
        models: Models with the same inputs and outputs, or plain functions and PyTorch modules,
            which are called as under `Empirical`.
        inputs: An array (n, d_in), for sequences (n, positions, d_in), or a number n of standard
            normal inputs. Integers (n, positions) are token ids unless a model reads vectors.
        seed: Of the inputs, where they are drawn.
        feature: From the outputs of one model, float64 (n, d_out) or (n, positions, d_out), to what
            is kept of them.

    Returns:
        The features of every model, and what is known of the inputs: `inputs`, `samples`, `seed`.

    Raises:
        ModelError: The models cannot be compared, the inputs do not fit or are not finite, or a
            forward pass leaves the range of its floats.

    Example:
        >>> import numpy as np, tnsim
        >>> double = tnsim.Model([tnsim.Linear(2.0 * np.eye(2))])
        >>> features, about = outputs_of([double], np.array([[1.0, 3.0]]), 0, np.ravel)
        >>> features[0].tolist(), about
        ([2.0, 6.0], {'inputs': 'given', 'samples': 1})
    """
    features: list[np.ndarray] = []
    x, about = _inputs(inputs, _reader(models), seed)
    shape: tuple[int, ...] = ()
    for n, model in enumerate(models):
        outputs = np.concatenate(list(_batches(model, x)))
        shape = shape or outputs.shape
        if outputs.shape != shape:
            raise ModelError(
                f"model {n} gives outputs of shape {outputs.shape} for {len(x)} inputs, "
                f"model 0 of shape {shape}"
            )
        _check_finite(outputs, n)
        features.append(feature(outputs))
    return Outputs(features, about)


def _reader(models: Sequence[AnyModel | Function]) -> AnyModel | None:
    """The first that is no function, None where all are. Raises `ModelError` where they differ."""
    first: AnyModel | None = None
    for model in models:
        if isinstance(model, AnyModel):
            check_numbers(model)
            first = first or model
            check_comparable(first, model)
        elif not callable(model):
            terms(model)  # refuses what is neither model nor function
    return first


def _check_finite(outputs: Float[np.ndarray, "n *positions out"], n: int) -> None:
    finite = np.isfinite(outputs)
    if finite.all():
        return
    where = tuple(np.argwhere(~finite)[0])
    raise ModelError(
        f"model {n} gives {outputs[where]} in output {where[-1]} of input {where[0]}: "
        "a float range was exceeded"
    )


def _inputs(inputs: Inputs, model: AnyModel | None, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The inputs, in float64 or token ids, and what is said about them.

    model: the first one that is no function, None where all are.
    """
    if isinstance(inputs, (int, np.integer)) and not isinstance(inputs, bool):
        return _drawn(int(inputs), model, seed)
    x = host_array(inputs)
    given = {"inputs": "given", "samples": len(x) if x.ndim else 0}
    if is_tokens(x) and x.ndim == 2 and x.size and (model is None or model.n_ctx is not None):
        return x, given
    x = x.astype(np.float64)
    d_in: int | str = "d_in"  # of functions alone nothing is known
    fits = x.ndim >= 2 and x.size > 0
    if model is not None:
        d_in = model.d_in
        fits = fits and x.shape[-1] == d_in
    if not fits:
        raise ModelError(
            f"inputs must be a number, or an array of shape (n, {d_in}); found shape {x.shape}"
        )
    finite = np.isfinite(x)
    if not finite.all():
        row = np.argwhere(~finite)[0][0]
        raise ModelError(f"the inputs are not finite, first in row {row}")
    return x, given


def _drawn(
    count: int, model: AnyModel | None, seed: int
) -> tuple[Float[np.ndarray, "n *positions in"], dict[str, Any]]:
    """Standard normal inputs in the shape that the model reads."""
    if model is None:
        raise ModelError(
            "nothing says what inputs plain functions read: give inputs as an array, (n, d_in), "
            "(n, positions, d_in) or token ids (n, positions)"
        )
    if count < 1:
        raise ModelError(f"at least one input is needed, found n = {count}")
    shape = (count, model.d_in)
    if model.n_ctx is not None:
        shape = (count, model.n_ctx, model.d_in)
    x = np.random.default_rng(seed).normal(size=shape)
    return x, {"inputs": "standard normal", "samples": count, "seed": seed}


def _batches(
    model: AnyModel | Function, x: np.ndarray
) -> Iterator[Float[np.ndarray, "batch *positions out"]]:
    # an overflow is no warning here: `_check_finite` refuses it with the model, input and output
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(x), BATCH):
            batch = x[start : start + BATCH]
            if isinstance(model, AnyModel):
                outputs = _of_model(model, batch)
            else:
                outputs = functions.outputs_of(model, batch)
            yield np.asarray(outputs, np.float64)


def _of_model(model: AnyModel, batch: np.ndarray) -> Any:
    """The outputs of a model; token ids stand for one-hot vectors, which are not made."""
    if not is_tokens(batch):
        return model(batch)
    total: Any = 0
    for coefficient, part in terms(model):
        check_inputs(part, batch)
        total = total + coefficient * plain_forward(part, batch)
    return total
