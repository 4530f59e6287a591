"""What models are as arrays of numbers. In: models. Out: labelled matrices of cosines.

Needs no data, but models of equal structure; a permutation of hidden units changes it. Readers find
these among the `baselines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from tnsim.analysis import measures
from tnsim.analysis.forward import AnyModel
from tnsim.analysis.matrices import Names, of_models
from tnsim.errors import ModelError
from tnsim.models.checks import check_numbers
from tnsim.models.layers import affine_maps, bias_name, innermost
from tnsim.models.model import Model

if TYPE_CHECKING:
    import xarray as xr


def weight_cosine(models: Sequence[AnyModel], *, names: Names = None) -> xr.DataArray:
    """Cosine of all weights and biases, flattened into one vector each.

    Needs no data, but models of equal structure; a permutation of hidden units changes it. Blind to
    the skip and scale of residuals, numbers beside the weights; `attrs["invariant_to"]` says so.

    Args:
        models: K models with the same layers, of the same shapes.
        names: K labels.

    Returns:
        `<w_a, w_b> / |w_a||w_b|` over (a, b): float64 from -1 to 1.

    Raises:
        ModelError: A combination of models, layers that do not match one to one, a model with zero
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
    rows = list(map(_flat_weights, _of_one_structure(models)))
    about = {
        "formula": "<w_a, w_b> / |w_a||w_b|",
        "invariant_to": "a factor on all weights; skip and scale of residuals",
    }
    cosines = measures.cosines(rows, "has zero weights only")
    return of_models(models, names, "weight_cosine", cosines, about)


def weight_slices(models: Sequence[AnyModel], *, names: Names = None) -> xr.DataArray:
    """Cosine of the weights that write one output: a row of the last layer, and its bias.

    What `slices` are to `similarity`, this is to `weight_cosine`. All that the layers below do is
    out of its sight; `attrs["invariant_to"]` says so.

    Args:
        models: K models with the same layers, of the same shapes.
        names: K labels.

    Returns:
        `<w_a, w_b> / |w_a||w_b|` over (a, b, output), w the row of that output: float64 from -1
        to 1.

    Raises:
        ModelError: A combination of models, layers that do not match one to one, a row of zeros, or
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
    last = list(map(_output_rows, _of_one_structure(models)))
    slices = []
    for output in range(len(last[0])):
        rows = [weights[output] for weights in last]
        cosines = measures.cosines(rows, f"writes output {output} with zero weights only")
        slices.append(cosines)
    about = {
        "formula": "<w_a, w_b> / |w_a||w_b|, w the row of the last layer that writes the output",
        "invariant_to": "a factor on the row; all layers below; skip and scale of residuals",
    }
    return of_models(models, names, "weight_slices", np.stack(slices, -1), about)


def _of_one_structure(models: Sequence[AnyModel]) -> Iterator[Model]:
    """The models, once it is known that their weights match one to one."""
    first = None
    for n, model in enumerate(models):
        if not isinstance(model, Model):
            raise ModelError(
                f"model {n} is a {type(model).__name__}: the cosine of weights is for models, "
                "not for combinations of them"
            )
        check_numbers(model)
        first = first or model
        if _structure(model) != _structure(first):
            raise ModelError(
                f"model {n} has other layers than model 0, so their weights do not match "
                f"one to one: {model}, {first}"
            )
        yield model


def _weights(model: Model) -> list[Any]:
    """All arrays of a model; the numbers of a residual rule are no weights."""
    return list(filter(np.ndim, jax.tree.leaves(model)))


def _flat_weights(model: Model) -> Float[np.ndarray, " size"]:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in _weights(model)])


def _structure(model: Model) -> tuple[Any, ...]:
    """What two models have in common when their weights match one to one."""
    return jax.tree.structure(model), *map(np.shape, _weights(model))


def _output_rows(model: Model) -> Float[np.ndarray, "out in"]:
    """What the last layer ends with: a row per output, its bias at the end where there is one."""
    last = innermost(model.layers[-1])
    name = affine_maps(last)[1]
    weights = np.asarray(getattr(last, name), np.float64)
    bias = getattr(last, bias_name(name))
    if bias is None:
        return weights
    return np.column_stack([weights, np.asarray(bias, np.float64)])
