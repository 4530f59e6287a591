"""Baselines: measures with which similarity is compared, as labelled K x K matrices.

None of these is a property of the function alone: `weight_cosine` and `weight_slices` see the
parametrisation, the others see the function on a single set of inputs only. Each matrix says in
`attrs` to what it is blind (`invariant_to`) and on which inputs it was taken, and lies on the same
axes as a pairwise result: `result["cka"] = cka(series, 2000)`.

*Outputs on inputs.* `inputs` is an array (n, d_in), for sequences (n, positions, d_in) or integers
(n, positions), token ids, or a number n of standard normal inputs (n, d_in) drawn with `seed`.
`names` label the models, by default the labels of a series. Forward passes run in batches, in the
precision of the weights; their outputs are read in float64. A forward pass or a measure that is not
finite is refused; a NaN is never returned.

*Weights.* The cosines of weights need no data, but models of equal structure; a permutation of
hidden units changes them.

*Mathematics.* First stand the functions from outputs or weights as plain arrays to K x K arrays,
which know neither models nor labels: a model is the number of its array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.analysis.matrices import of_models
from tnsim.checkpoints.given import check_chooses, given_models
from tnsim.errors import ModelError, TooLarge, UnsupportedLayer
from tnsim.models import functions
from tnsim.models.arrays import bias_name, detached, host_array
from tnsim.models.forward import as_read, is_tokens, plain_forward
from tnsim.models.functions import Function, is_module
from tnsim.models.layers import innermost, map_names
from tnsim.models.model import (
    AnyModel,
    Model,
    Seed,
    check_comparable,
    check_numbers,
    check_untraced,
    normal_inputs,
    seed_number,
    terms,
)
from tnsim.options import checked, is_list, shown

if TYPE_CHECKING:
    import xarray as xr


EPS = float(np.finfo(np.float64).eps)
_COORDINATES = 4096
"""Coordinates that are multiplied at once."""


BATCH = 4096
"""Inputs per forward pass."""
Inputs: TypeAlias = Float[np.ndarray, "n *positions in"] | int
"""Inputs as an array, or the number of standard normal inputs to draw."""
Models: TypeAlias = Any
"""Models as `pairwise` takes them: a sequence, a mapping from labels to models, a series or paths;
modules of PyTorch in their place, and plain functions where inputs are given."""


def row_cosines(rows: Sequence[Float[np.ndarray, " size"]], zero: str) -> Float[np.ndarray, "K K"]:
    """Cosines of all pairs of vectors.

    Args:
        rows: K vectors of equal size.
        zero: Words of the error about a vector of zeros, after "model 3".

    Returns:
        (K, K), float64 from -1 to 1.

    Raises:
        ModelError: A vector is zero.

    Example:
        >>> import numpy as np
        >>> row_cosines([np.array([3.0, 0.0]), np.array([3.0, 4.0])], "is zero").round(3).tolist()
        [[1.0, 0.6], [0.6, 1.0]]
    """
    units = np.concatenate([directions_of(row[None]) for row in rows])
    is_zero = ~units.any(1)
    if is_zero.any():
        raise ModelError(f"model {is_zero.argmax()} {zero}: its cosine with anything is undefined")
    return np.clip(units @ units.T, -1.0, 1.0)


def directions_of(outputs: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "rows out"]:
    """Outputs as unit vectors, a row for every input and position; zeros stay zeros.

    Args:
        outputs: Outputs (..., d_out).

    Returns:
        (rows, d_out), float64.

    Example:
        >>> import numpy as np
        >>> directions_of(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6, 0.8], [0.0, 0.0]]
    """
    rows = outputs.reshape(-1, outputs.shape[-1])
    sizes = np.abs(rows).max(1, keepdims=True)
    rows = rows / np.where(sizes > 0, sizes, 1.0)  # the largest entry is 1: no square overflows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1.0)


def mean_cosines(models: Sequence[Float[np.ndarray, "rows out"]]) -> Float[np.ndarray, "K K"]:
    """Mean over rows of the cosines of all pairs of models.

    Args:
        models: `directions_of` of K models on the same inputs.

    Returns:
        (K, K), float64 from -1 to 1.

    Raises:
        ModelError: A row is zero.

    Example:
        >>> import numpy as np
        >>> mean_cosines([np.eye(2), -np.eye(2)]).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    for n, rows in enumerate(models):
        is_zero = ~rows.any(1)
        if is_zero.any():
            raise ModelError(
                f"model {n} gives zero in row {is_zero.argmax()} of its outputs: "
                "its cosine there is undefined; leave that input out"
            )
    flat = np.array([rows.ravel() for rows in models])
    return np.clip(flat @ flat.T / len(models[0]), -1.0, 1.0)


def symmetric(count: int, entry: Callable[[int, int], float]) -> Float[np.ndarray, "K K"]:
    """A symmetric matrix from the entries of its lower triangle.

    Args:
        count: The number of rows, K.
        entry: The value at row i and column j <= i.

    Returns:
        (K, K), float64.

    Example:
        >>> symmetric(2, lambda i, j: 10.0 * i + j).tolist()
        [[0.0, 10.0], [10.0, 11.0]]
    """
    values = np.empty((count, count))
    for i in range(count):
        for j in range(i + 1):
            values[i, j] = values[j, i] = entry(i, j)
    return values


def centred_outputs(outputs: Float[np.ndarray, "n *positions out"]) -> Float[np.ndarray, "n rank"]:
    """Centred outputs A, a row for each input, or their kernel A A' where that is no larger.

    Args:
        outputs: Outputs for n inputs; positions are further coordinates.

    Returns:
        A, (n, coordinates), of fewer than n coordinates; A A', (n, n), of more. Float64, A in units
        of the largest deviation from the mean; zeros where outputs are constant up to rounding.

    Example:
        >>> import numpy as np
        >>> centred_outputs(np.array([[1.0], [2.0]])).tolist()
        [[-1.0], [1.0]]
        >>> centred_outputs(np.array([[1.0, 1.0], [2.0, 2.0]])).tolist()
        [[2.0, -2.0], [-2.0, 2.0]]
    """
    outputs = outputs.reshape(len(outputs), -1)
    count, coordinates = outputs.shape
    size, spread = _size(outputs) or 1.0, 0.0
    kernel = np.zeros((count, count))
    # Outputs of language models are large, so some coordinates come after others:
    # with A = (A1 A2), A A' = A1 A1' + A2 A2'.
    step = coordinates if coordinates < count else max(count, _COORDINATES)
    rows = np.empty((count, 0))
    for start in range(0, coordinates, step):
        rows = outputs[:, start : start + step] / size
        rows -= rows.mean(0)
        spread = max(spread, _size(rows))
        if coordinates >= count:
            kernel += rows @ rows.T
    if spread < count * EPS:  # a constant: the deviations are rounding errors
        spread = math.inf
    return rows / spread if coordinates < count else kernel / spread**2


def _size(outputs: Float[np.ndarray, "n out"]) -> float:
    """Largest absolute value."""
    return max(float(outputs.max()), -float(outputs.min()))


def hsic_of(
    centred_outputs: Sequence[Float[np.ndarray, "n rank"]], debiased: bool
) -> Float[np.ndarray, "K K"]:
    """Hilbert-Schmidt independence criterion of all pairs, for linear kernels.

    Args:
        centred_outputs: Outputs of K models on the same n inputs, see the function of this name;
            n is at least 4 if debiased.
        debiased: Whether to give the unbiased estimator, which may be negative.

    Returns:
        (K, K), float64, up to a factor per model and a common factor, which CKA divides out.

    Raises:
        ModelError: The outputs of a model are constant.

    Example:
        >>> import numpy as np
        >>> x = np.array([[-1.0], [-1.0], [1.0], [1.0]])
        >>> y = np.array([[-1.0], [1.0], [-1.0], [1.0]])
        >>> hsic_of([x, y], debiased=False).round(3).tolist()
        [[1.0, 0.0], [0.0, 1.0]]

    Source:
        Song et al. 2012, "Feature selection via dependence maximization", equation 5.
    """
    are_kernels = [x.shape[1] == len(x) for x in centred_outputs]
    each = list(zip(centred_outputs, are_kernels, strict=True))
    diagonals = np.array([x.diagonal() if whole else np.square(x).sum(1) for x, whole in each])
    largest_entries = diagonals.max(1)
    if (largest_entries == 0).any():
        raise ModelError(
            f"model {np.argmin(largest_entries)} gives the same output for all inputs: "
            "its CKA with anything is undefined"
        )
    traces = diagonals.sum(1, keepdims=True)
    # With K = A A' and L = B B', tr K L = |A' B|^2. Kernels take n^2 multiplications for a pair.
    if any(are_kernels):
        kernels = [x if whole else x @ x.T for x, whole in each]
        biased = symmetric(len(kernels), lambda i, j: float(np.vdot(kernels[i], kernels[j])))
    else:
        biased = symmetric(
            len(each), lambda i, j: float(np.square(each[i][0].T @ each[j][0]).sum())
        )
    # Divided by the traces afterwards, as scaled outputs would be in memory a second time.
    biased = biased / traces / traces.T
    if not debiased:
        return biased
    # The unbiased estimator leaves out the diagonals k and l. With K~ = K - diag k and L~ =
    # L - diag l it is, times n (n - 3),
    #
    #     tr K~ L~  +  1'K~1 1'L~1 / ((n-1)(n-2))  -  2 1'K~ L~1 / (n-2).
    #
    # A constant added to the outputs adds u 1' + 1 u' to the kernel, and the estimator maps such a
    # term to zero; so the outputs may be centred, and K 1 = 0. Then K~1 = -k, 1'K~1 = -tr K and
    # tr K~ L~ = tr K L - k.l, and the estimator becomes
    #
    #     tr K L  +  tr K tr L / ((n-1)(n-2))  -  n k.l / (n-2).
    #
    # The outputs are scaled so that tr K = tr L = 1.
    n = diagonals.shape[1]
    diagonals = diagonals / traces
    return biased + (1 / ((n - 1) * (n - 2)) - n / (n - 2) * diagonals @ diagonals.T)


def softmax(outputs: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n out"]:
    """Probabilities `exp(y_i) / sum_j exp(y_j)`, over the last axis.

    Args:
        outputs: Logits (..., d_out).

    Returns:
        Probabilities (..., d_out), float64.

    Example:
        >>> import numpy as np
        >>> softmax(np.array([1000.0, 1000.0])).tolist()
        [0.5, 0.5]
    """
    # The largest exponent is 0, so that nothing overflows.
    weights = np.exp(outputs - outputs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def entropy(p: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n"]:
    """Shannon entropy `-sum_i p_i log p_i`, with 0 log 0 = 0.

    Args:
        p: Probabilities (..., d_out).

    Returns:
        (...), float64 in nats.

    Example:
        >>> import numpy as np
        >>> entropy(np.array([0.5, 0.5, 0.0])).round(3).item()
        0.693
    """
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def largest(outputs: Float[np.ndarray, "*n out"]) -> Int[np.ndarray, "*n"]:
    """Place of the largest output; of equal outputs, the first.

    Args:
        outputs: Outputs (..., d_out).

    Returns:
        (...), integers from 0.

    Example:
        >>> import numpy as np
        >>> largest(np.array([0.0, 2.0, 2.0])).item()
        1
    """
    return outputs.argmax(-1)


__all__ = [
    "agreement",
    "cka",
    "js_divergence",
    "mean_cosine",
    "output_cosine",
    "weight_cosine",
    "weight_slices",
]


def outputs_of(
    models: Models,
    inputs: Inputs,
    seed: Seed,
    feature: Callable[[np.ndarray], np.ndarray],
    output: str | int | None = None,
    one_width: bool = True,
) -> tuple[Models, list[np.ndarray], dict[str, Any]]:
    """Run every model once, and keep the features of its outputs that a measure compares.

    Args:
        models: Models with the same inputs and outputs, or plain functions and PyTorch modules,
            which are called as under `Empirical` where inputs are an array.
        inputs: An array (n, d_in), for sequences (n, positions, d_in), or a number n of standard
            normal inputs. Integers (n, positions) are token ids unless a model reads vectors.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        feature: Function from the outputs of a model, float64 (n, d_out) or (n, positions,
            d_out), to its features.
        output: Output of functions with several, as for `Empirical`.
        one_width: Whether all outputs need the same shape.

    Returns:
        The models, read where they were given as files; the features of each; and the description
        of the inputs: `inputs`, `samples` and, where they were drawn, `seed`.

    Raises:
        ModelError: The models cannot be compared, the inputs do not fit or are not finite, or a
            forward pass leaves the range of its floats.

    Example:
        >>> import numpy as np, tnsim
        >>> double = tnsim.Model([tnsim.Linear(2.0 * np.eye(2))])
        >>> _, features, about = outputs_of([double], np.array([[1.0, 3.0]]), 0, np.ravel)
        >>> features[0].tolist(), about
        ([2.0, 6.0], {'inputs': 'given', 'samples': 1})
    """
    features: list[np.ndarray] = []
    if isinstance(inputs, (int, np.integer)) and not isinstance(inputs, bool):
        models = given_models(models, output=output)
        x, about = drawn_inputs(int(inputs), _first_reader(models), seed)
    else:
        # Loaders and mappings become arrays once, as the array says how long sequences are.
        x = functions.batch_of_inputs(inputs)
        models = given_models(models, inputs=x, output=output)
        x, about = _checked_inputs(x, _first_reader(models))
    if isinstance(models, list | Mapping):  # files choose as they are read
        check_chooses(output, _each_model(models))
    shape: tuple[int, ...] = ()
    for n, model in enumerate(_each_model(models)):
        outputs, *others = _output_batches(model, x)
        if others:
            outputs = np.concatenate([outputs, *others])
        # The first model tells the shape that all others need.
        shape = shape or outputs.shape
        if one_width and outputs.shape != shape:
            raise ModelError(
                f"model {n} gives outputs of shape {outputs.shape} for {len(x)} inputs, "
                f"model 0 of shape {shape}"
            )
        _check_finite(outputs, n)
        # Only features are kept, as outputs of all models may not fit into memory.
        features.append(feature(outputs))
    return models, features, about


def _first_reader(models: Models) -> AnyModel | None:
    """The first model that is no plain function; None where all are plain functions.

    Raises `ModelError` where models cannot be compared.
    """
    first: AnyModel | None = None
    for model in _each_model(models):
        if isinstance(model, AnyModel):
            check_numbers(model)
            check_untraced("a baseline", model)
            first = first or model
            check_comparable(first, model)
        elif not callable(model):
            terms(model)  # refuses anything but a model or a function
    return first


def _check_finite(outputs: Float[np.ndarray, "n *positions out"], n: int) -> None:
    finite = np.isfinite(outputs)
    if finite.all():
        return
    # The first such entry, by which it can be found again.
    where = tuple(np.argwhere(~finite)[0])
    raise ModelError(
        f"model {n} gives {outputs[where]} in output {where[-1]} of input {where[0]}: "
        "a float range was exceeded"
    )


def _each_model(models: Models) -> Iterable[Any]:
    """The models of a sequence, or those of a mapping without their labels."""
    each: Any = models.values() if isinstance(models, Mapping) else models
    if not isinstance(models, Mapping) and not is_list(models):
        raise ModelError(f"baselines compare a list of models or functions, found {shown(models)}")
    if not len(each):
        raise ModelError("baselines compare models or functions, found none")
    return each


def _checked_inputs(x: np.ndarray, model: AnyModel | None) -> tuple[np.ndarray, dict[str, Any]]:
    """The inputs, in float64 or as token ids, and their description.

    Args:
        x: Inputs.
        model: First model that is no plain function; None where all are plain functions.
    """
    given = {"inputs": "given", "samples": len(x) if x.ndim else 0}
    # Integers are token ids for sequences, and numbers for models of vectors.
    if is_tokens(x) and x.ndim == 2 and x.size and (model is None or model.n_ctx is not None):
        return x, given
    x = x.astype(np.float64)
    d_in: int | str = "d_in"  # the width of plain functions is unknown
    fits = x.ndim >= 2 and x.size > 0
    if model is not None:
        d_in = model.d_in
        # Images have as many numbers as the model reads, in another shape.
        fits = fits and d_in in (x.shape[-1], math.prod(x.shape[1:]))
    if not fits:
        raise ModelError(
            f"inputs must be a number, or an array of shape (n, {d_in}); found shape {x.shape}"
        )
    finite = np.isfinite(x)
    if not finite.all():
        row = np.argwhere(~finite)[0][0]
        raise ModelError(f"the inputs are not finite, first in row {row}")
    return x, given


def drawn_inputs(
    count: int, model: AnyModel | None, seed: Seed
) -> tuple[Float[np.ndarray, "n *positions in"], dict[str, Any]]:
    """Standard normal inputs in the shape that the model reads, and their description.

    Args:
        count: Number of inputs.
        model: Model that reads them; None where all are plain functions.
        seed: A number, a NumPy generator or a JAX key.

    Raises:
        ModelError: There is no model, or no input.
        TooLarge: Memory does not hold so many inputs.

    Example:
        >>> import tnsim
        >>> drawn_inputs(5, tnsim.Model([tnsim.Linear([[1.0, 2.0]])]), 0)[0].shape
        (5, 2)
    """
    if model is None:
        raise ModelError(
            "nothing says what inputs plain functions read: give inputs as an array, (n, d_in), "
            "(n, positions, d_in) or token ids (n, positions)"
        )
    if count < 1:
        raise ModelError(f"at least one input is needed, found n = {count}")
    number = seed_number(seed)
    x = normal_inputs(count, model, number)
    return x, {"inputs": "standard normal", "samples": count, "seed": number}


def _output_batches(
    model: AnyModel | Function, x: np.ndarray
) -> Iterator[Float[np.ndarray, "batch *positions out"]]:
    # NumPy's overflow warning is silenced: `_check_finite` names the model, input and output.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(x), BATCH):
            batch, outputs = x[start : start + BATCH], np.zeros(())
            if isinstance(model, AnyModel):
                for coefficient, part in terms(model):
                    outputs = outputs + coefficient * plain_forward(part, read_by(part, batch))
            else:
                outputs = functions.outputs_of(model, batch)
            yield np.asarray(outputs, np.float64)


def read_by(model: Model, x: np.ndarray) -> np.ndarray:
    """Inputs as a model reads them, for measures that compare any outputs.

    Args:
        model: Model; one of vectors also reads whole numbers, and sequences of any length.
        x: Inputs (n, ...), or token ids.

    Raises:
        ModelError: The model reads inputs of another shape.

    Example:
        >>> import tnsim
        >>> read_by(tnsim.Model([tnsim.Linear([[1.0, 2.0]])]), np.ones((5, 3, 2))).shape
        (5, 3, 2)
    """
    if model.n_ctx is None and is_tokens(x):
        x = x.astype(np.float64)
    if model.n_ctx is not None or x.ndim < 3 or x.shape[-1] != model.d_in:
        x = as_read(model, x)
    return x


@checked
def weight_cosine(models: Models, *, names: Sequence[int | str] | None = None) -> xr.DataArray:
    """Cosine of all weights and biases, flattened into a vector for each model.

    Needs no data, but models of equal structure; a permutation of hidden units changes it. It is
    blind to the skip and scale of residuals, which are no weights; `attrs["invariant_to"]` says so.

    Args:
        models: K models with the same layers, of the same shapes, as `pairwise` takes them; modules
            that are no models, such as GPT-2, by all of their parameters.
        names: K labels.

    Returns:
        `<w_a, w_b> / |w_a||w_b|` over (a, b): float64 from -1 to 1.

    Raises:
        ModelError: A combination of models, layers that do not match in pairs, a model with zero
            weights only, or another number of names than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import tnsim
        >>> a = tnsim.Model([tnsim.Linear([[3.0, 0.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[3.0, 4.0]])])
        >>> weight_cosine([a, b]).values.round(3).tolist()
        [[1.0, 0.6], [0.6, 1.0]]

    Source:
        The paper's matrix similarity, figure 2.
    """
    each = list(_each_model(models)) if isinstance(models, list | tuple | Mapping) else []
    read: Any = models
    try:
        read = given_models(models)
    except (UnsupportedLayer, ModelError, TooLarge):
        if not each or not all(map(is_module, each)):
            raise
        rows = _parameters(each)
    else:
        rows = list(map(_flat_weights, _of_one_structure(read)))
    about = {
        "formula": "<w_a, w_b> / |w_a||w_b|",
        "invariant_to": "a factor on all weights; skip and scale of residuals",
    }
    cosines = row_cosines(rows, "has zero weights only")
    return of_models(read, names, "weight_cosine", cosines, about)


@checked
def weight_slices(models: Models, *, names: Sequence[int | str] | None = None) -> xr.DataArray:
    """Cosine of the weights that write a single output: a row of the last layer, and its bias.

    It relates to `weight_cosine` as `slices` to `similarity`. It is blind to all layers below;
    `attrs["invariant_to"]` says so.

    Args:
        models: K models with the same layers, of the same shapes, as `pairwise` takes them.
        names: K labels.

    Returns:
        `<w_a, w_b> / |w_a||w_b|` over (a, b, output), w the row of that output: float64 from -1
        to 1.

    Raises:
        ModelError: A combination of models, layers that do not match in pairs, a row of zeros, or
            another number of names than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import tnsim
        >>> a = tnsim.Model([tnsim.Linear([[3.0, 0.0], [1.0, 0.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[3.0, 4.0], [1.0, 0.0]])])
        >>> weight_slices([a, b]).sel(a=0, b=1).values.round(3).tolist()
        [0.6, 1.0]

    Source:
        The paper's weight cosine slice similarity, appendix B, figure 6.
    """
    models = given_models(models)
    last = list(map(_output_rows, _of_one_structure(models)))
    slices = [
        row_cosines(rows, f"writes output {output} with zero weights only")
        for output, rows in enumerate(zip(*last, strict=True))
    ]
    about = {
        "formula": "<w_a, w_b> / |w_a||w_b|, w the row of the last layer that writes the output",
        "invariant_to": "a factor on the row; all layers below; skip and scale of residuals",
    }
    return of_models(models, names, "weight_slices", np.stack(slices, -1), about)


def _of_one_structure(models: Models) -> Iterator[Model]:
    """The models, each after a check that its weights match those of the first model in pairs."""
    first = None
    for n, model in enumerate(_each_model(models)):
        if not isinstance(model, Model):
            raise ModelError(
                f"model {n} is a {type(model).__name__}: the cosine of weights is for models, "
                "not for combinations of them"
            )
        check_numbers(model)
        check_untraced("a baseline", model)
        first = first or model
        # Weights are compared entry by entry, so they must be of one shape throughout.
        if _structure(model) != _structure(first):
            raise ModelError(
                f"model {n} has other layers than model 0, so their weights do not match "
                f"one to one: {model}, {first}"
            )
        yield model


def _weight_arrays(model: Model) -> list[Any]:
    """All arrays of a model; the numbers of a residual rule are no weights."""
    return list(filter(np.ndim, jax.tree.leaves(model)))


def _flat_weights(model: Model) -> Float[np.ndarray, " size"]:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in _weight_arrays(model)])


def _parameters(modules: Sequence[Any]) -> list[Float[np.ndarray, " size"]]:
    """The parameters of PyTorch modules, flattened into a vector for each module."""
    rows: list[np.ndarray] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for n, module in enumerate(modules):
        tensors = {name: host_array(detached(x)) for name, x in module.named_parameters()}
        found = {name: x.shape for name, x in tensors.items()}
        shapes = shapes or found
        if found != shapes:
            raise ModelError(
                f"module {n} has other parameters than module 0, so their weights do not match one "
                f"to one: {_differing(found, shapes)}"
            )
        if not found:
            raise ModelError(f"module {n} has no parameters")
        rows.append(np.concatenate([x.astype(np.float64).ravel() for x in tensors.values()]))
    return rows


def _differing(found: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> str:
    """The first parameter in which two modules differ, with both shapes."""
    name = next(name for name in {**found, **shapes} if found.get(name) != shapes.get(name))
    return f"{name} of shape {found.get(name, 'none')} and {shapes.get(name, 'none')}"


def _structure(model: Model) -> tuple[Any, ...]:
    """Tree structure and shapes of weights, equal where the weights match in pairs."""
    return jax.tree.structure(model), *map(np.shape, _weight_arrays(model))


def _output_rows(model: Model) -> Float[np.ndarray, "out in"]:
    """The last weights of the last layer: a row per output, with the bias, if any, at its end."""
    last = innermost(model.layers[-1])
    if not map_names(last):
        raise ModelError("the last layer of a model has no weights, so its outputs have no rows")
    # The output map is the last of the names.
    name = map_names(last)[-1]
    weights = np.asarray(getattr(last, name), np.float64)
    bias = getattr(last, bias_name(name))
    if bias is None:
        return weights
    return np.column_stack([weights, np.asarray(bias, np.float64)])


@checked
def output_cosine(
    models: Models,
    inputs: Inputs,
    *,
    seed: Seed = 0,
    names: Sequence[int | str] | None = None,
    output: str | int | None = None,
) -> xr.DataArray:
    """Cosine of the outputs on given inputs: a sample of the closed form of `Gaussian`.

    Args:
        models: K models with the same inputs and outputs, as `pairwise` takes them.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        names: K labels.
        output: Output of functions with several, as for `Empirical`.

    Returns:
        `sum <A(x), B(x)> / sqrt(sum |A(x)|^2 sum |B(x)|^2)` over (a, b): float64 from -1 to 1.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit, a forward pass that is
            not finite, a model that gives zero on all inputs, or another number of names than of
            models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear([[1.0, 0.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[1.0, 1.0]])])
        >>> inputs = np.array([[1.0, 0.0], [0.0, 1.0]])  # a gives 1 and 0, b gives 1 and 1
        >>> output_cosine([a, b], inputs).values.round(3)[0, 1].item()
        0.707
    """
    models, outputs, about = outputs_of(models, inputs, seed, np.ravel, output)
    about |= {
        "formula": "sum <A(x), B(x)> / sqrt(sum |A(x)|^2 sum |B(x)|^2)",
        "invariant_to": "a factor on the outputs",
    }
    cosines = row_cosines(outputs, "gives zero on all inputs")
    return of_models(models, names, "output_cosine", cosines, about)


@checked
def mean_cosine(
    models: Models,
    inputs: Inputs,
    *,
    seed: Seed = 0,
    names: Sequence[int | str] | None = None,
    output: str | int | None = None,
) -> xr.DataArray:
    """Mean over inputs, and positions, of the cosine of the two outputs there.

    Every input counts the same; in `output_cosine`, inputs with large outputs count more.

    Args:
        models: K models with the same inputs and outputs, as `pairwise` takes them.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        names: K labels.
        output: Output of functions with several, as for `Empirical`.

    Returns:
        `mean <A(x), B(x)> / |A(x)||B(x)|` over (a, b): float64 from -1 to 1.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit, a forward pass that is
            not finite, a model that gives zero on any of the inputs, or another number of names
            than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear([[1.0, 1.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[9.0, -1.0]])])
        >>> inputs = np.array([[1.0, 0.0], [0.0, 1.0]])  # a gives 1 and 1, b gives 9 and -1
        >>> mean_cosine([a, b], inputs).values[0, 1].item()
        0.0

    Source:
        The paper's behavioural similarity, section 3.3, as its published code computes it.
    """
    models, directions, about = outputs_of(models, inputs, seed, directions_of, output)
    about |= {
        "formula": "mean of <A(x), B(x)> / |A(x)||B(x)|",
        "invariant_to": "a factor on the output of every input",
    }
    cosines = mean_cosines(directions)
    return of_models(models, names, "mean_cosine", cosines, about)


@checked
def cka(
    models: Models,
    inputs: Inputs,
    *,
    seed: Seed = 0,
    debiased: bool = True,
    names: Sequence[int | str] | None = None,
    output: str | int | None = None,
) -> xr.DataArray:
    """Linear centred kernel alignment of the outputs, which may differ in width.

    Positions of a sequence are further features of the same sample. Without debiasing the value
    nears 1 for anything once outputs outnumber samples.

    Args:
        models: K models with the same inputs and outputs, as `pairwise` takes them.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs; n is at least 4.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        debiased: Whether HSIC is the unbiased estimator, or `|A' B|^2` of the centred outputs.
        names: K labels.
        output: Output of functions with several, as for `Empirical`.

    Returns:
        `HSIC(A, B) / sqrt(HSIC(A, A) HSIC(B, B))` over (a, b): float64, from 0 to 1 if biased,
        around 0 for unrelated outputs if debiased.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit or are too few, a forward
            pass that is not finite, a model with the same output for all inputs, a debiased HSIC
            that vanishes, or another number of names than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.diag([1.0, 1.0]))])
        >>> turned = tnsim.Model([tnsim.Linear(np.array([[0.0, -2.0], [2.0, 0.0]]))])
        >>> cka([a, turned], 100).values.round(3)[0, 1].item()
        1.0

    Source:
        Kornblith et al. 2019, "Similarity of neural network representations revisited"; Song et al.
        2012, "Feature selection via dependence maximization", equation 5.
    """
    models, centred, about = outputs_of(
        models, inputs, seed, centred_outputs, output, one_width=False
    )
    if about["samples"] < 4:
        raise ModelError(
            "CKA needs at least 4 inputs (the unbiased HSIC divides by n - 3), "
            f"found {about['samples']}"
        )
    hsic = hsic_of(centred, debiased)
    own = np.diag(hsic).copy()
    # The unbiased estimator may be zero or below for few inputs, and a root of it is no norm.
    if (own <= about["samples"] * EPS).any():
        raise ModelError(
            f"the debiased HSIC of model {np.argmin(own)} with itself vanishes on these inputs; "
            "give more of them"
        )
    about |= {
        "formula": "HSIC(A, B) / sqrt(HSIC(A, A) HSIC(B, B)), linear kernel",
        "debiased": int(debiased),
        "invariant_to": "orthogonal maps, a factor and a constant on the outputs",
    }
    return of_models(models, names, "cka", hsic / np.sqrt(np.outer(own, own)), about)


@checked
def js_divergence(
    models: Models,
    inputs: Inputs,
    *,
    seed: Seed = 0,
    names: Sequence[int | str] | None = None,
    output: str | int | None = None,
) -> xr.DataArray:
    """Jensen-Shannon divergence of the softmax predictions, mean over inputs and positions.

    Args:
        models: K models with the same inputs and outputs, as `pairwise` takes them.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        names: K labels.
        output: Output of functions with several, as for `Empirical`.

    Returns:
        `H((p + q) / 2) - (H(p) + H(q)) / 2` for p = softmax A(x) and q = softmax B(x), over (a, b):
        float64 in nats, 0 where predictions are equal, at most ln 2.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit, a forward pass that is
            not finite, or another number of names than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> heads = tnsim.Model([tnsim.Linear(np.zeros((2, 1)), np.array([1000.0, 0.0]))])
        >>> tails = tnsim.Model([tnsim.Linear(np.zeros((2, 1)), np.array([0.0, 1000.0]))])
        >>> js_divergence([heads, tails], 10).values.round(3).tolist()
        [[0.0, 0.693], [0.693, 0.0]]

    Source:
        Lin 1991, "Divergence measures based on the Shannon entropy".
    """
    models, predictions, about = outputs_of(models, inputs, seed, softmax, output)
    entropies = list(map(entropy, predictions))

    def divergence(i: int, j: int) -> float:
        mixed = entropy((predictions[i] + predictions[j]) / 2)
        per_input = mixed - (entropies[i] + entropies[j]) / 2
        # Rounding may leave the range from 0 to ln 2.
        return float(np.clip(per_input, 0, np.log(2)).mean())

    about |= {
        "formula": "H((p + q) / 2) - (H(p) + H(q)) / 2, p = softmax A(x)",
        "units": "nats",
        "invariant_to": "a constant added to all outputs of an input",
    }
    values = symmetric(len(predictions), divergence)
    return of_models(models, names, "js_divergence", values, about)


@checked
def agreement(
    models: Models,
    inputs: Inputs,
    *,
    seed: Seed = 0,
    names: Sequence[int | str] | None = None,
    output: str | int | None = None,
) -> xr.DataArray:
    """Share of the inputs, and positions, for which two models have the same largest output.

    Where outputs are equally large, the first counts.

    Args:
        models: K models with the same inputs and outputs, as `pairwise` takes them.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Seed of drawn inputs: a number, a NumPy generator or a JAX key.
        names: K labels.
        output: Output of functions with several, as for `Empirical`.

    Returns:
        `mean of argmax A(x) = argmax B(x)` over (a, b): float64 from 0 to 1.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit, a forward pass that is
            not finite, or another number of names than of models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> b = tnsim.Model([tnsim.Linear(np.diag([1.0, -1.0]))])
        >>> agreement([a, b], np.array([[1.0, 0.0], [0.0, 1.0]])).values.tolist()
        [[1.0, 0.5], [0.5, 1.0]]
    """
    models, choices, about = outputs_of(models, inputs, seed, largest, output)
    about |= {
        "formula": "mean of argmax A(x) = argmax B(x)",
        "invariant_to": "anything that keeps the largest output of every input",
    }

    def share(i: int, j: int) -> float:
        return float((choices[i] == choices[j]).mean())

    return of_models(models, names, "agreement", symmetric(len(choices), share), about)
