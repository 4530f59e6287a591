"""What similarity is compared with. In: models, for most also inputs. Out: labelled K x K matrices.

None of these is a property of the function alone: `weight_cosine` and `weight_slices` see the
parametrisation, the others see the function on one set of inputs only. Each matrix says in `attrs`
to what it is blind (`invariant_to`) and on which inputs it was taken, and lies on the same axes as
a pairwise result: `result["cka"] = cka(series, 2000)`.

`inputs` is an array (n, d_in), for sequences (n, positions, d_in) or integers (n, positions), token
ids, or a number n of standard normal inputs (n, d_in) drawn with `seed`. `names` label the models,
by default the labels of a series.

A forward pass or a measure that is not finite is refused; never is a NaN returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tnsim.analysis import measures
from tnsim.analysis.forward import AnyModel, Inputs, outputs_of
from tnsim.analysis.matrices import Names, of_models
from tnsim.analysis.weights import weight_cosine, weight_slices
from tnsim.errors import ModelError

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "agreement",
    "cka",
    "js_divergence",
    "mean_cosine",
    "output_cosine",
    "weight_cosine",
    "weight_slices",
]


def output_cosine(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Cosine of the outputs on the inputs given: a sample of what `Gaussian` has in closed form.

    Args:
        models: K models with the same inputs and outputs.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Of the inputs, where they are drawn.
        names: K labels.

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
    outputs, about = outputs_of(models, inputs, seed, np.ravel)
    about |= {
        "formula": "sum <A(x), B(x)> / sqrt(sum |A(x)|^2 sum |B(x)|^2)",
        "invariant_to": "a factor on the outputs",
    }
    cosines = measures.cosines(outputs, "gives zero on all inputs")
    return of_models(models, names, "output_cosine", cosines, about)


def mean_cosine(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Mean over inputs, and positions, of the cosine of the two outputs there.

    Every input counts the same; in `output_cosine` those with large outputs count more.

    Args:
        models: K models with the same inputs and outputs.
        inputs: An array (n, d_in) or (n, positions, d_in), or a number n of standard normal inputs.
        seed: Of the inputs, where they are drawn.
        names: K labels.

    Returns:
        `mean <A(x), B(x)> / |A(x)||B(x)|` over (a, b): float64 from -1 to 1.

    Raises:
        ModelError: Models that cannot be compared, inputs that do not fit, a forward pass that is
            not finite, a model that gives zero on one of the inputs, or another number of names
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
    directions, about = outputs_of(models, inputs, seed, measures.directions)
    about |= {
        "formula": "mean of <A(x), B(x)> / |A(x)||B(x)|",
        "invariant_to": "a factor on the output of every input",
    }
    cosines = measures.mean_cosines(directions)
    return of_models(models, names, "mean_cosine", cosines, about)


def cka(
    models: Sequence[AnyModel],
    inputs: Inputs,
    *,
    seed: int = 0,
    debiased: bool = True,
    names: Names = None,
) -> xr.DataArray:
    """Linear centred kernel alignment of the outputs.

    Positions of a sequence are further features of one sample. Without debiasing the value nears 1
    for anything once outputs outnumber samples.

    Args:
        models: K models with the same inputs and outputs.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs; n is at least 4.
        seed: Of the inputs, where they are drawn.
        debiased: Whether HSIC is the unbiased estimator, or `|A' B|^2` of the centred outputs.
        names: K labels.

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
    features, about = outputs_of(models, inputs, seed, measures.centred)
    if about["samples"] < 4:
        raise ModelError(
            "CKA needs at least 4 inputs (the unbiased HSIC divides by n - 3), "
            f"found {about['samples']}"
        )
    hsic = measures.hsic(features, debiased)
    own = np.diag(hsic).copy()
    if (own <= about["samples"] * measures.EPS).any():
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


def js_divergence(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Jensen-Shannon divergence of the softmax predictions, mean over inputs and positions.

    Args:
        models: K models with the same inputs and outputs.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Of the inputs, where they are drawn.
        names: K labels.

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
    predictions, about = outputs_of(models, inputs, seed, measures.softmax)
    entropies = list(map(measures.entropy, predictions))

    def divergence(i: int, j: int) -> float:
        mixed = measures.entropy((predictions[i] + predictions[j]) / 2)
        per_input = mixed - (entropies[i] + entropies[j]) / 2
        return float(np.clip(per_input, 0, np.log(2)).mean())

    about |= {
        "formula": "H((p + q) / 2) - (H(p) + H(q)) / 2, p = softmax A(x)",
        "units": "nats",
        "invariant_to": "a constant added to all outputs of an input",
    }
    values = measures.symmetric(len(predictions), divergence)
    return of_models(models, names, "js_divergence", values, about)


def agreement(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Share of the inputs, and positions, for which two models have the same largest output.

    Of outputs that are equally large the first counts.

    Args:
        models: K models with the same inputs and outputs.
        inputs: An array (n, d_in) or (n, positions, d_in), token ids (n, positions), or a number n
            of standard normal inputs.
        seed: Of the inputs, where they are drawn.
        names: K labels.

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
    choices, about = outputs_of(models, inputs, seed, measures.largest)
    about |= {
        "formula": "mean of argmax A(x) = argmax B(x)",
        "invariant_to": "anything that keeps the largest output of every input",
    }

    def share(i: int, j: int) -> float:
        return float((choices[i] == choices[j]).mean())

    return of_models(models, names, "agreement", measures.symmetric(len(choices), share), about)
