"""The layer-wise recursions with unlimited exponents and 60 digits: inner products of deep models.

Every layer is a dense tensor over lifted inputs, from `rational_oracle`, and numbers are
those of mpmath, so that nothing leaves a range and no unit is needed. Nothing here knows of plans,
joinings, units or logarithms.
"""

import jax
import mpmath
import numpy as np
from rational_oracle import layer_tensor

import tnsim

DIGITS = 60
CHANGE = 2.0**-26
"""Relative change of the weights: far above the digits of a weight, far below one."""


def real(array):
    """Fractions or floats as an object array of mpmath's numbers."""
    flat = [
        mpmath.mpf(getattr(x, "numerator", x)) / getattr(x, "denominator", 1)
        for x in np.ravel(array)
    ]
    return np.array(flat, object).reshape(np.shape(array))


def inner(a, b, metric):
    """`<a|b>` under `Frobenius`, `TreeSymmetric` or `GaussianClosure`, as a number of mpmath."""
    return products(a, b, metric)["AB"]


def cosine(a, b, metric):
    """The cosine as a float, from 60 digits."""
    with mpmath.workdps(DIGITS):
        return float(_cosine(products(a, b, metric)))


def condition(a, b, metric, rng, draws=3):
    """The change of the cosine under relative changes of all weights and moments, per change, as a float.

    Each weight, and each moment of the states after each layer, is off by CHANGE of itself, as if each were rounded
    once. Moments of a Gaussian are rounded about the mean. The root mean square over draws: about the number of
    roundings that the recursion cannot avoid, where hidden units cancel by chance more than the degree.
    """
    squares = []
    with mpmath.workdps(DIGITS):
        true = _cosine(products(a, b, metric))
        for _ in range(draws):
            off = _cosine(products(_changed(a, rng), _changed(b, rng), metric, rng)) - true
            squares.append(float((off / mpmath.mpf(CHANGE)) ** 2))
    return np.sqrt(np.mean(squares))


def _cosine(found):
    return found["AB"] / mpmath.sqrt(found["AA"] * found["BB"])


def _changed(tree, rng):
    """Every number of the arrays off by CHANGE of itself, up or down; single numbers, such as skips, as they are."""

    def change(x):
        return x * (1 + CHANGE * rng.choice([-1.0, 1.0], np.shape(x))) if np.ndim(x) else x

    return jax.tree.map(change, tree)


def products(a, b, metric, rng=None):
    """The inner products AA, AB and BB of two models, as numbers of mpmath.

    Args:
        a, b: Models of equal depth.
        metric: `Frobenius`, `TreeSymmetric` or `GaussianClosure`.
        rng: Generator of changes of the moments, see `condition`; None for exact moments.
    """
    with mpmath.workdps(DIGITS):
        moments = {
            (0, 0): _first(metric, a.d_in),
            (0, 1): _first(metric, a.d_in),
            (1, 1): _first(metric, a.d_in),
        }
        means = [moments[0, 0][:, 0]] * 2  # column of the constant
        gaussian = isinstance(metric, tnsim.GaussianClosure)
        symmetric = not isinstance(metric, tnsim.Frobenius)
        for layers in zip(a.layers, b.layers, strict=True):
            tensors = [real(layer_tensor(layer, symmetric)) for layer in layers]
            moments, means = _step(moments, means, tensors, gaussian)
            if rng is not None:
                for (i, j), moment in moments.items():
                    known = np.outer(means[i], means[j]) if gaussian else 0 * moment
                    moments[i, j] = known + _changed([moment - known], rng)[0]
        return {
            "AB"[i] + "AB"[j]: sum(moment[k, k] for k in range(1, len(moment)))
            for (i, j), moment in moments.items()
        }


def _first(metric, d):
    """E[x~ x~^T] of the input."""
    mean = getattr(metric, "mean", None)
    cov = getattr(metric, "cov", None)
    mean = np.concatenate([[1.0], np.zeros(d) if mean is None else mean])
    cov = np.eye(d) if cov is None else np.diag(cov) if np.ndim(cov) == 1 else cov
    return real(np.pad(cov, ((1, 0), (1, 0)))) + real(mean)[:, None] * real(mean)[None, :]


def _step(moments, means, tensors, gaussian):
    """Second moments and means of two layers' outputs."""
    above = {}
    for i, j in moments:
        bra, ket = tensors[i], tensors[j]
        cross = moments[i, j]
        if bra.ndim == 2 or not gaussian:
            above[i, j] = _leg_by_leg(bra, cross, ket)
            continue
        # Sum over legs p, q of the bra and r, s of the ket: S_pr S_qs + S_ps S_qr, which are equal
        # for symmetric tensors, + S_pq S_rs - 2 m_p m_q m_r m_s.
        read = np.tensordot(bra, cross, (1, 0))  # [k, q, r]
        read = np.tensordot(read, cross, (1, 0))  # [k, r, s]
        value = np.tensordot(read, ket, ((1, 2), (1, 2)))
        within = np.multiply.outer(
            np.tensordot(bra, moments[i, i], 2), np.tensordot(ket, moments[j, j], 2)
        )
        at_mean = np.multiply.outer(_at(bra, means[i]), _at(ket, means[j]))
        above[i, j] = 2 * value + within - 2 * at_mean
    new = []
    for n, tensor in enumerate(tensors):
        if gaussian and tensor.ndim > 2:
            new.append(np.tensordot(tensor, moments[n, n], 2))
        else:
            new.append(_at(tensor, means[n]))
    return above, new


def _leg_by_leg(bra, cross, ket):
    """Leg i of the bra with leg i of the ket."""
    for _ in range(bra.ndim - 1):
        bra = np.tensordot(bra, cross, (1, 0))  # the leg moves to the end, so all keep their order
    legs = tuple(range(1, bra.ndim))
    return np.tensordot(bra, ket, (legs, legs))


def _at(tensor, vector):
    for _ in range(tensor.ndim - 1):
        tensor = tensor @ vector
    return tensor
