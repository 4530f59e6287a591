"""Forward passes of a PyTorch module. In: a module, layers. Out: inputs that it takes, an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tnsim.checkpoints.module_calls import array, kind, leaves_of
from tnsim.checkpoints.norms import Normed
from tnsim.errors import ON_INPUTS, MissingExtra, ModelError

SCALES = (1.0, 0.25, 4.0)  # of inputs: polynomials that agree at one need not at another
TOLERANCE = 1e-5  # relative; in float64 all that may differ are tables of a rotation in float32
SAMPLES, POSITIONS = 8, 5


def require_torch() -> Any:
    """PyTorch.

    Returns:
        The package.

    Raises:
        MissingExtra: When it is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", "reading a module") from None
    return torch


@contextlib.contextmanager
def in_float64(torch: Any) -> Iterator[None]:
    """What a forward pass makes itself, such as a mask, is float64 too.

    Args:
        torch: The package.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def example_inputs(module: Any, inputs: Any, n_ctx: int | None) -> Any:
    """Inputs that the module takes: those given, else the first of a few kinds that it runs on.

    Args:
        module: In float64.
        inputs: Of the user's, or None.
        n_ctx: Length of sequences, or None.

    Returns:
        A tensor of vectors, float64, or of token numbers.

    Raises:
        ModelError: Where it runs on none.
    """
    torch = require_torch()
    if inputs is not None:
        example = torch.as_tensor(inputs)
        return example.double() if example.is_floating_point() else example
    error: Exception | None = None
    for example in _guesses(module, n_ctx):
        try:
            module(example)
            return example
        except Exception as failed:  # whatever a forward pass raises on inputs that it cannot take
            error = failed
    raise ModelError(
        "no inputs were found that the module takes; give inputs=, an example of them "
        f"(the last try: {error})"
    ) from error


def _guesses(module: Any, n_ctx: int | None) -> Iterable[Any]:
    torch = require_torch()
    rng = torch.Generator().manual_seed(0)
    for _, leaf in leaves_of(module, ()):
        shape = (SAMPLES, n_ctx or POSITIONS)
        if kind(leaf) == "Embedding":
            yield torch.randint(leaf.num_embeddings, shape, generator=rng)
        elif kind(leaf) == "Linear":
            if n_ctx is None:
                vectors = (SAMPLES, leaf.in_features)
                yield torch.randn(vectors, generator=rng, dtype=torch.float64)
            yield torch.randn((*shape, leaf.in_features), generator=rng, dtype=torch.float64)
        else:
            continue
        return


def forward_error(module: Any, layers: Sequence[Normed], example: Any) -> float:
    """The largest relative error of layers over several batches.

    Args:
        module: In float64.
        layers: What it is taken for.
        example: Inputs that it takes.

    Returns:
        Root mean square of the differences of outputs, relative to the outputs.

    Raises:
        ModelError: Where that is no rounding error.
    """
    torch = require_torch()
    rng = torch.Generator().manual_seed(2)
    errors: list[float] = []
    for scale in SCALES:
        if example.is_floating_point():
            inputs = scale * torch.randn(example.shape, generator=rng)
            x = array(inputs).reshape(_shape(example, layers[0].layer.d_in))
            expected = array(module(inputs))
        else:
            inputs = torch.randint(layers[0].layer.d_in, example.shape, generator=rng)
            x = scale * np.eye(layers[0].layer.d_in)[array(inputs)]
            with _scaled_embeddings(module, scale):
                expected = array(module(inputs))
        for one in layers:
            x = one(x)
        errors.append(_error(x, expected))
    if not max(errors) < TOLERANCE:
        each = ", ".join(f"{error:.2g}" for error in errors)
        raise ModelError(
            "what was recognised is another function than the module: outputs on random inputs of "
            f"size {', '.join(map(str, SCALES))} differ by {each} of their size. Declare the "
            "classes that do more than was seen: layers={Class: Rule(...) or a function}. "
            f"{ON_INPUTS}"
        )
    return max(errors)


def _shape(example: Any, d_in: int) -> tuple[int, ...]:
    """Of a batch as tnsim reads it: what a module flattens is flat."""
    if example.shape[-1] == d_in:
        return tuple(example.shape)
    return (len(example), d_in)


@contextlib.contextmanager
def _scaled_embeddings(module: Any, scale: float) -> Iterator[None]:
    """Token numbers of another size: the module's first layer gives so many times its vector."""
    leaves = [leaf for _, leaf in leaves_of(module, ()) if kind(leaf) == "Embedding"]
    handle = leaves[0].register_forward_hook(lambda leaf, given, result: scale * result)
    try:
        yield
    finally:
        handle.remove()


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    if found.size != expected.size:
        return float("inf")
    difference = np.linalg.norm(found.ravel() - expected.ravel())
    return float(difference / max(float(np.linalg.norm(expected)), 1e-300))
