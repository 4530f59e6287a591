"""What similarity is compared with. In: a sequence of models, for most also inputs. Out: labelled K x K matrices.

None of these is a property of the function alone: `weight_cosine` sees the parametrisation, the others see the
function on one set of inputs only. Each matrix says in `attrs` to what it is blind (`invariant_to`) and on
which inputs it was taken, and lies on the same axes as a pairwise result: `result["cka"] = cka(series, 2000)`.

`inputs` is an array (n, d_in), for sequences (n, positions, d_in), or a number n of standard normal inputs (n, d_in)
drawn with `seed`. Every model runs once, in batches. `names` label the models, by default the labels of a series.

Raises `ModelError` for models that cannot be compared, for inputs that do not fit, and where a forward pass or a
measure is not finite; never is a NaN returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.analysis.matrices import labelled, labels_of
from tnsim.errors import ModelError
from tnsim.models.model import Combination, Model, check_comparable, terms

if TYPE_CHECKING:
    import xarray as xr

BATCH = 4096

AnyModel = Model | Combination
Inputs = Float[np.ndarray, "n *positions in"] | int
Names = Sequence[int | str] | None


def weight_cosine(models: Sequence[AnyModel], *, names: Names = None) -> xr.DataArray:
    """Cosine of all weights and biases, flattened into one vector (the paper's matrix similarity, figure 2).

    Needs no data, but models of equal structure; a permutation of hidden units changes it. Blind to
    the skip and scale of residuals, numbers beside the weights; `attrs["invariant_to"]` says so.
    """
    first, rows = None, []
    for n, model in enumerate(models):
        if not isinstance(model, Model):
            raise ModelError(
                f"model {n} is a {type(model).__name__}: the cosine of weights is for models, not for combinations of them"
            )
        first = first or model
        if _structure(model) != _structure(first):
            raise ModelError(
                f"model {n} has other layers than model 0, so their weights do not match one to one: {model}, {first}"
            )
        rows.append(np.concatenate([np.asarray(x, np.float64).ravel() for x in _weights(model)]))
    cosines = _cosines(rows, "has zero weights only")
    about = {
        "formula": "<w_a, w_b> / |w_a||w_b|",
        "invariant_to": "a factor on all weights; skip and scale of residuals",
    }
    return _matrix(models, names, "weight_cosine", cosines, about)


def output_cosine(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """`sum_x <A(x), B(x)>` over its two norms: what `Gaussian` gives in closed form, estimated on the inputs given."""
    outputs, about = _forward(models, inputs, seed, np.ravel)
    cosines = _cosines(outputs, "gives zero on all inputs")
    about |= {
        "formula": "sum <A(x), B(x)> / sqrt(sum |A(x)|^2 sum |B(x)|^2)",
        "invariant_to": "a factor on the outputs",
    }
    return _matrix(models, names, "output_cosine", cosines, about)


def cka(
    models: Sequence[AnyModel],
    inputs: Inputs,
    *,
    seed: int = 0,
    debiased: bool = True,
    names: Names = None,
) -> xr.DataArray:
    """Linear centred kernel alignment of the outputs: `HSIC(A, B) / sqrt(HSIC(A, A) HSIC(B, B))` (Kornblith et al. 2019).

    Debiased, HSIC is the unbiased estimator of Song et al. (2012), which needs n >= 4; with `debiased=False` it is
    `|A' B|^2` of the centred outputs, which nears 1 for anything once outputs outnumber samples.
    """
    outputs, about = _forward(models, inputs, seed, _centred)
    n = about["samples"]
    if n < 4:
        raise ModelError(
            f"CKA needs at least 4 inputs (the unbiased HSIC divides by n - 3), found {n}"
        )
    norms = np.array([np.square(x).sum(1) for x in outputs])
    if (norms.max(1) == 0).any():
        raise ModelError(
            f"model {np.argmin(norms.max(1))} gives the same output for all inputs: its CKA with anything is undefined"
        )
    outputs = [x / np.sqrt(k.sum()) for x, k in zip(outputs, norms, strict=True)]
    hsic = _symmetric(len(outputs), lambda i, j: float(np.square(outputs[i].T @ outputs[j]).sum()))
    if debiased:
        # Song et al., equation 5, in which centred features leave K1 = L1 = 0; diagonals k, l enter as -k, -l
        norms /= norms.sum(1, keepdims=True)
        hsic += 1 / ((n - 1) * (n - 2)) - n / (n - 2) * norms @ norms.T
    own = np.diag(hsic).copy()
    if (own <= n * np.finfo(np.float64).eps).any():
        raise ModelError(
            f"the debiased HSIC of model {np.argmin(own)} with itself vanishes on these inputs; give more of them"
        )
    about |= {
        "formula": "HSIC(A, B) / sqrt(HSIC(A, A) HSIC(B, B)), linear kernel",
        "debiased": int(debiased),
    }
    about["invariant_to"] = "orthogonal maps, a factor and a constant on the outputs"
    return _matrix(models, names, "cka", hsic / np.sqrt(np.outer(own, own)), about)


def js_divergence(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Jensen-Shannon divergence of the softmax predictions, mean over inputs, in nats: 0 where equal, at most ln 2."""
    outputs, about = _forward(models, inputs, seed, _softmax)
    entropies = [_entropy(p) for p in outputs]

    def divergence(i: int, j: int) -> float:
        mixed = _entropy((outputs[i] + outputs[j]) / 2)
        return float(np.clip(mixed - (entropies[i] + entropies[j]) / 2, 0, np.log(2)).mean())

    about |= {"formula": "H((p + q) / 2) - (H(p) + H(q)) / 2, p = softmax A(x)", "units": "nats"}
    about["invariant_to"] = "a constant added to all outputs of an input"
    return _matrix(models, names, "js_divergence", _symmetric(len(outputs), divergence), about)


def agreement(
    models: Sequence[AnyModel], inputs: Inputs, *, seed: int = 0, names: Names = None
) -> xr.DataArray:
    """Share of the inputs for which both models have their largest output in the same place (of equal ones the first)."""
    outputs, about = _forward(models, inputs, seed, _choice)
    about |= {
        "formula": "mean of argmax A(x) = argmax B(x)",
        "invariant_to": "anything that keeps the largest output of every input",
    }
    return _matrix(
        models,
        names,
        "agreement",
        _symmetric(len(outputs), lambda i, j: float((outputs[i] == outputs[j]).mean())),
        about,
    )


def _forward(
    models: Sequence[AnyModel], inputs: Inputs, seed: int, keep: Callable
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """`keep` of every model's outputs (n, d_out), and what the attributes say about the inputs."""
    kept: list[np.ndarray] = []
    first, x, about = None, np.empty(0), {}
    for n, model in enumerate(models):
        terms(model)
        if first is None:
            first = model
            x, about = _inputs(inputs, model, seed)
        check_comparable(first, model)
        outputs = np.concatenate(list(_batches(model, x)))
        if not np.isfinite(outputs).all():
            where = tuple(np.argwhere(~np.isfinite(outputs))[0])
            raise ModelError(
                f"model {n} gives {outputs[where]} in output {where[-1]} of input {where[0]}: a float range was exceeded"
            )
        kept.append(keep(outputs))
    return kept, about


def _inputs(
    inputs: Inputs, model: AnyModel, seed: int
) -> tuple[Float[np.ndarray, "n *positions in"], dict[str, Any]]:
    if isinstance(inputs, (int, np.integer)) and not isinstance(inputs, bool):
        if inputs < 1:
            raise ModelError(f"at least one input is needed, found n = {inputs}")
        shape = (inputs, model.d_in) if model.n_ctx is None else (inputs, model.n_ctx, model.d_in)
        drawn = np.random.default_rng(seed).normal(size=shape)
        return drawn, {"inputs": "standard normal", "samples": int(inputs), "seed": seed}
    x, d_in = np.asarray(inputs, np.float64), model.d_in
    if x.ndim < 2 or x.shape[-1] != d_in or not x.size:
        raise ModelError(
            f"inputs must be a number, or an array of shape (n, {d_in}); found shape {x.shape}"
        )
    if not np.isfinite(x).all():
        raise ModelError(
            f"the inputs are not finite, first in row {np.argwhere(~np.isfinite(x))[0][0]}"
        )
    return x, {"inputs": "given", "samples": len(x)}


def _batches(
    model: AnyModel, x: Float[np.ndarray, "n *positions in"]
) -> Iterator[Float[np.ndarray, "batch *positions out"]]:
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name
        for start in range(0, len(x), BATCH):
            yield np.asarray(model(x[start : start + BATCH]), np.float64)


def _matrix(
    models: Sequence[Any], names: Names, name: str, values: np.ndarray, about: dict[str, Any]
) -> xr.DataArray:
    if np.isnan(values).any():
        raise ModelError(f"{name} gave NaN for finite outputs: a float range was exceeded")
    labels = labels_of(models) if names is None else names
    if len(labels) != len(values):
        raise ModelError(f"{len(labels)} names were given for {len(values)} models")
    return labelled(values, labels, {"needs_data": int("samples" in about), **about}, name)


def _cosines(rows: Sequence[Float[np.ndarray, " size"]], zero: str) -> Float[np.ndarray, "K K"]:
    """Pairwise cosines of vectors, each divided by its largest entry first so that no square overflows."""
    sizes = [np.abs(row).max() for row in rows]
    if 0 in sizes:
        raise ModelError(f"model {sizes.index(0)} {zero}: its cosine with anything is undefined")
    stacked = np.array([row / size for row, size in zip(rows, sizes, strict=True)])
    stacked /= np.linalg.norm(stacked, axis=1, keepdims=True)
    return np.clip(stacked @ stacked.T, -1.0, 1.0)


def _symmetric(count: int, entry: Callable[[int, int], float]) -> Float[np.ndarray, "K K"]:
    found = np.empty((count, count))
    for i in range(count):
        for j in range(i + 1):
            found[i, j] = found[j, i] = entry(i, j)
    return found


def _weights(model: Model) -> list[Any]:
    return [x for x in jax.tree.leaves(model) if np.ndim(x)]


def _structure(model: Model) -> tuple[Any, ...]:
    return jax.tree.structure(model), *(np.shape(x) for x in _weights(model))


def _centred(outputs: Float[np.ndarray, "n *positions out"]) -> Float[np.ndarray, "n rank"]:
    """Centred features with the same inner products between inputs, in no more dimensions than there are inputs."""
    outputs = outputs.reshape(len(outputs), -1)
    size = np.abs(outputs).max() or 1.0
    outputs = outputs / size - (outputs / size).mean(0)
    spread = np.abs(outputs).max()
    if spread < len(outputs) * np.finfo(np.float64).eps:
        return np.zeros_like(outputs)  # a constant, of which rounding has left something
    outputs /= spread
    if outputs.shape[1] <= outputs.shape[0]:
        return outputs
    return np.asarray(np.linalg.qr(outputs.T, mode="r")).T


def _softmax(outputs: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n out"]:
    weights = np.exp(outputs - outputs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _entropy(p: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n"]:
    """In nats, with 0 log 0 = 0."""
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def _choice(outputs: Float[np.ndarray, "*n out"]) -> Int[np.ndarray, "*n"]:
    return outputs.argmax(-1)
