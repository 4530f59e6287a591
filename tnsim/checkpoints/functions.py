"""Functions of JAX into models: weights in a pytree, a function of them and of inputs.

The function is read by its operations (`jaxprs`), by the algebra that reads modules of PyTorch too
(`read_graphs`), on the numbers of the weights that are given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tnsim.errors import ON_INPUTS, ModelError, TooLarge, UnsupportedLayer, printable
from tnsim.models.arrays import check_kept, host_array, is_traced
from tnsim.models.model import Model, Origin
from tnsim.options import checked

if TYPE_CHECKING:
    from tnsim.checkpoints.operations import Graph

log: logging.Logger = logging.getLogger(__name__)

_TOLERANCE = 1e-9
_BATCHES = ((1.0, 3), (-1.0, 3), (0.25, 1), (4.0, 5), (1e-3, 2), (1e3, 4))
"""Size and number of random inputs."""


@checked
def from_function(function: Callable[[Any, Any], Any], params: Any, x: Any) -> Model:
    """A model that computes a function of JAX.

    The function is read by the operations that JAX writes down for it, with the weights as
    arguments: everything that is affine, products, activations, gates, residual connections,
    convolutions, embeddings and attention without softmax. Every operation is known by name, so the
    model is the function for all inputs of the shape that was read; the two are compared besides,
    on batches of random inputs of different sizes.

    Args:
        function: Function of the weights and a batch of inputs, such as `model.apply` of Flax, or
            `lambda model, x: jax.vmap(model)(x)` for a module of Equinox. It gives one array, of
            which the first axis is the batch.
        params: The weights: a pytree of arrays. Leaves that are no arrays go to the function as
            they are.
        x: An example of the inputs, a batch (n, d), (n, positions, d) for sequences, (n, ...) for
            images, or token numbers (n, positions). Sequences are read at the length of the
            example, which is `n_ctx` of the model.

    Returns:
        The model. `model.origin.error` is the relative error of its forward pass.

    Raises:
        UnsupportedLayer: An operation, which the message names, makes no layer, or inputs of a
            batch depend on one another.
        ModelError: Weights or inputs are not finite numbers, the function gives several arrays, or
            the layers compute another function.
        TooLarge: A layer would be a matrix of which more than 1 GiB is stored.

    Example:
        >>> import jax.numpy as jnp
        >>> draw = np.random.default_rng(0).normal
        >>> params = {"hidden": draw(size=(3, 4)), "out": draw(size=(4, 2))}
        >>> def network(params, x):
        ...     return (x @ params["hidden"]) ** 2 @ params["out"]
        >>> from_function(network, params, np.zeros((1, 3)))
        Model(Bilinear(3 -> 2, rank 4); degree 2, 32 parameters)
    """
    # SciPy knows some activations, and takes longer to import than all of tnsim.
    from tnsim.checkpoints.batches import beside, check_batches, readings
    from tnsim.checkpoints.jaxprs import NumpyLibrary, graph_of
    from tnsim.checkpoints.operations import is_float
    from tnsim.checkpoints.read_graphs import layers_of_graph

    name = getattr(function, "__qualname__", type(function).__name__).replace("<lambda>", "lambda")
    place = f"the function {printable(name, 60)}"
    flat, form = jax.tree_util.tree_flatten_with_path(params)
    arrays, precision = _weights_in(flat)
    weights = list(arrays.values())
    example = host_array(x)
    if example.ndim < 2 or example.dtype.kind not in "fiu" or not len(example):
        raise ModelError(
            "x is a batch of inputs, numbers (n, d) or tokens (n, positions), found an array of "
            f"shape {example.shape} and type {example.dtype}; of a function of single inputs give "
            "lambda params, x: jax.vmap(lambda one: f(params, one))(x)"
        )
    if is_float(example):
        example = example.astype(np.float64)
    leaves = [leaf for _, leaf in flat]

    def plain(several: Sequence[Any], batch: Any) -> Any:
        for n, one in zip(arrays, several, strict=True):
            leaves[n] = one
        return function(jax.tree_util.tree_unflatten(form, leaves), batch)

    def single(several: Sequence[Any], batch: Any) -> Any:
        try:
            found = plain(several, batch)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # of values that are traced
            raise
        except (TypeError, ValueError) as error:
            said = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"{place} does not take this x, a batch {example.shape} of {example.dtype}: "
                f"{type(error).__name__}: {said[:200]}; give an example of its inputs, and of "
                "a function of single inputs lambda params, x: jax.vmap(lambda one: f(params, "
                "one))(x)"
            ) from error
        return _array_of(found, place)

    def written(batch: int) -> Graph:
        shown = np.repeat(example[:1], batch, 0)
        return graph_of(single, weights, shown, place, precision)

    one = written(1)
    library = NumpyLibrary(precision)
    refusals: list[Exception] = []
    for sequence in readings(example):
        positions = example.shape[1] if sequence else 1
        try:
            layers = layers_of_graph(one, one.arrays(weights), example[:1], library, positions)
        except (UnsupportedLayer, TooLarge) as refused:
            refusals.append(refused)
            continue
        check_batches(one, written, weights, np.repeat(example[:1], 2, 0), library, place)
        n_ctx = positions if sequence else None
        tolerance = max(_TOLERANCE, 64 * one.rounding)
        both = beside(lambda x: _numbers(plain, weights, x), layers, example, _BATCHES)
        error = float(np.max([pair.error for pair in both]))
        if not error < tolerance:  # written with `not`, so that NaN is refused
            raise ModelError(
                "the layers that were read compute something else than the function (relative "
                f"difference {error:.2g} on random inputs), which may draw random numbers, or "
                "compute with the number of its inputs"
            )
        log.info("%s: relative error of the forward pass %.2g", name, error)
        at = f" at n_ctx {n_ctx}" if sequence else ""
        said = (
            f"read by the graph of {name}{at} and compared with the function itself: relative "
            f"error {error:.2g}"
        )
        origin = Origin(name, (said,), error=error)
        return Model([layer.layer for layer in layers], n_ctx, origin)
    first = refusals[0]
    if isinstance(first, TooLarge):
        raise first
    raise UnsupportedLayer(f"{first}. {ON_INPUTS}") from first


def _weights_in(
    flat: Sequence[tuple[Any, Any]],
) -> tuple[dict[int, np.ndarray], np.dtype[Any]]:
    """The arrays among leaves with their paths, by place, and the fewest digits that floats had.

    Floats are in float64. Keys of random numbers are no weights.
    """
    from tnsim.checkpoints.jaxprs import is_random_key

    arrays: dict[int, np.ndarray] = {}
    precision = np.dtype(np.float64)
    for n, (path, leaf) in enumerate(flat):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or is_random_key(leaf):
            continue
        if is_traced(leaf):
            raise ModelError(
                "weights that JAX traces have no numbers to read: call tnsim.from_function outside "
                "of jax.jit, jax.grad and jax.vmap"
            )
        check_kept(leaf)
        arrays[n] = found = np.asarray(leaf)
        name = f"params{jax.tree_util.keystr(path)}"
        if found.dtype.kind == "c":
            raise ModelError(f"{name} is complex, and models are real")
        if jax.numpy.issubdtype(found.dtype, np.floating):
            if jax.numpy.finfo(found.dtype).eps > jax.numpy.finfo(precision).eps:
                precision = found.dtype
            arrays[n] = found.astype(np.float64)
            if not np.isfinite(arrays[n]).all():
                raise ModelError(f"{name} holds numbers that are not finite")
    return arrays, precision


def _array_of(found: Any, place: str) -> Any:
    """The single array that a function gives."""
    leaves = jax.tree_util.tree_leaves(found)
    if len(leaves) != 1 or not hasattr(leaves[0], "shape"):
        raise ModelError(
            f"{place} gives {len(leaves)} arrays: give a function of one of them, such as "
            "lambda params, x: f(params, x)[0]"
        )
    if not leaves[0].ndim:
        raise ModelError(f"{place} gives a single number for a batch, not one for each input")
    return leaves[0]


def _numbers(plain: Callable[..., Any], weights: Sequence[np.ndarray], batch: Any) -> np.ndarray:
    """What the function itself computes, in float64."""
    with jax.enable_x64(True):
        found = plain([jax.numpy.asarray(one) for one in weights], jax.numpy.asarray(batch))
        return np.asarray(jax.tree_util.tree_leaves(found)[0], np.float64)
