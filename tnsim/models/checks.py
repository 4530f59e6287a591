"""Checks of models and numbers that every verb makes before it begins, and drawn inputs."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tnsim.errors import ModelError, TooLarge
from tnsim.models.arrays import is_count, is_traced, requires_grad

Seed: TypeAlias = int | np.random.Generator | Array
"""What random numbers are drawn from: a number, a NumPy generator or a JAX key."""


def check_numbers(*models: Any) -> None:
    """Refuse weights that require grad in a computation that has no gradients to give.

    Raises:
        ModelError: A weight of a model, or of a model in a combination, requires grad.

    Example:
        >>> import tnsim
        >>> check_numbers(tnsim.Model([tnsim.Linear([[1.0]])]))
    """
    if any(map(requires_grad, jax.tree.leaves(models))):
        raise ModelError(
            "weights of a model are PyTorch tensors that require grad, and the gradient would be "
            "lost here: use tnsim.torch.similarity, or build the model of tensor.detach() where "
            "none is wanted"
        )


def check_untraced(verb: str, *arguments: Any, instead: str = "") -> None:
    """Refuse what JAX traces where a computation reads numbers.

    Args:
        verb: Name of the function that was called.
        arguments: Models, metric and arrays.
        instead: Further advice, the end of a sentence.

    Raises:
        ModelError: An array is traced.

    Example:
        >>> check_untraced("paths", np.ones(2))
    """
    if is_traced(arguments):
        raise ModelError(
            f"{verb} reads numbers, which a JAX trace does not have: call it outside of jax.jit, "
            "jax.vmap and jax.grad; similarity, inner, log_inner and slices, of "
            f"switched(model, z) as well, can be traced{instead}"
        )


def check_comparable(a: Any, b: Any) -> None:
    """Refuse models that cannot be compared.

    Raises:
        ModelError: The models read different inputs, give different outputs, or differ in `n_ctx`.

    Example:
        >>> import tnsim
        >>> a = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[1.0, 2.0]])])
        >>> check_comparable(a, b)
        Traceback (most recent call last):
        tnsim.errors.ModelError: the models read different inputs: 1 and 2 coordinates
    """
    if a.d_in != b.d_in:
        raise ModelError(f"the models read different inputs: {a.d_in} and {b.d_in} coordinates")
    if a.d_out != b.d_out:
        raise ModelError(f"the models have different outputs: {a.d_out} and {b.d_out}")
    if a.n_ctx != b.n_ctx:
        raise ModelError(
            f"the models read sequences of different length: n_ctx={a.n_ctx} and n_ctx={b.n_ctx}"
        )


def seed_number(seed: Seed, what: str = "the seed") -> int:
    """A seed as a number, from which the same inputs can be drawn again.

    Args:
        seed: Number of 0 or more; a NumPy generator, from which a number is drawn, so that its
            next use gives other inputs; or a JAX key, whose words are the digits of the number.
        what: Words for the seed in messages.

    Returns:
        A number of 0 or more; a number that is given is returned as it is.

    Raises:
        ModelError: The seed is none of these, a negative number or a key that is traced.

    Example:
        >>> seed_number(7), seed_number(jax.random.key(5)), seed_number(np.random.default_rng(0))
        (7, 5, 5874934615388537135)
    """
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(2**63))
    if is_traced(seed):
        raise ModelError(f"{what} is traced, and inputs are drawn outside the JAX trace")
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    try:
        words: Any = np.asarray(seed)
    except ValueError:  # rows of unequal length, which are refused below
        words = np.empty(0)
    if words.dtype == np.uint32 and words.ndim == 1 and len(words):  # a key of the older kind
        # The words of a key are digits in base 2^32, the first the highest.
        return int.from_bytes(words.astype(">u4").tobytes(), "big")
    try:
        number = operator.index(words.item() if words.ndim == 0 else seed)
    except TypeError:
        # Negative numbers are refused below, so a value that is no number joins them.
        number = -1
    # True would be seed 1 by accident.
    if number < 0 or isinstance(seed, bool):
        raise ModelError(
            f"{what} must be 0 or more, a NumPy generator or a JAX key, found {seed!r}"
        )
    return number


def normal_inputs(count: int, model: Any, seed: Seed) -> Float[np.ndarray, "n *positions in"]:
    """Standard normal inputs in the shape that a model reads.

    Args:
        count: Number of inputs.
        model: Model, or sum of models, that reads them.
        seed: Seed of the draws.

    Raises:
        TooLarge: Memory does not hold so many.

    Example:
        >>> import tnsim
        >>> normal_inputs(5, tnsim.Model([tnsim.Linear([[1.0, 2.0]])]), seed=0).shape
        (5, 2)
    """
    each = (model.d_in,) if model.n_ctx is None else (model.n_ctx, model.d_in)
    rng = np.random.default_rng(seed_number(seed))
    try:
        return rng.normal(size=(count, *each))
    except (MemoryError, ValueError, OverflowError):
        raise TooLarge(
            f"memory does not hold {count:,} inputs of shape {each}: draw fewer"
        ) from None


def check_length(n_ctx: Any) -> None:
    """Refuse a value that is no length of sequences.

    Raises:
        ModelError: The value is neither None nor a positive integer.

    Example:
        >>> check_length(-1)
        Traceback (most recent call last):
        tnsim.errors.ModelError: n_ctx must be a positive integer or None, found -1
    """
    if n_ctx is not None and not is_count(n_ctx):
        raise ModelError(f"n_ctx must be a positive integer or None, found {n_ctx!r}")
