"""Similarities and frequencies along training. In: a run. Out: `Measured`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

import tnsim
from tnsim.reproduce.grokking.setting import Setting
from tnsim.reproduce.grokking.train import names
from tnsim.reproduce.run import Run

STRONGEST = 5
"""Frequencies that are drawn."""
KNOWN = 0.99
"""Accuracy from which something counts as learned."""
CURVES = ("train_accuracy", "validation_accuracy", "train_loss", "validation_loss")
"""Along training, from the logs."""


@dataclass(frozen=True)
class Measured:
    """What the claims and the figure read.

    Args:
        runs: One for each seed: the matrices `similarity`, `symmetric`, `weight_cosine` and
            `frequency_cosine`; along training accuracies, losses and `frequency_N`, the share of
            the strongest frequencies.
        at_text: At the settings of the paper's text, validation accuracy when training reaches
            `KNOWN`, for each seed; empty where it was left out.
    """

    runs: tuple[tnsim.Pairwise, ...]
    at_text: tuple[float, ...]


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints of every seed.

    Args:
        run: After `train`.

    Returns:
        A result for each seed.
    """
    at_text = names(run, "text-")
    runs = [of_series(run, name) for name in names(run) if name not in at_text]
    return Measured(tuple(runs), tuple(held_when_known(run.log(name, *CURVES)) for name in at_text))


def of_series(run: Run[Setting], name: str) -> tnsim.Pairwise:
    """All pairs of one series, and what happened along it."""
    series = run.series(name)
    result = tnsim.pairwise(series, store=run.store(name), progress=run.progress)
    other = tnsim.pairwise(series, tnsim.Symmetric(), store=run.store(f"{name}-symmetric"))
    result["symmetric"] = other.similarity
    result["weight_cosine"] = tnsim.baselines.weight_cosine(series)
    shares = np.array([frequency_shares(model) for model in series])
    lengths = np.linalg.norm(shares, axis=1)
    result["frequency_cosine"] = (("a", "b"), shares @ shares.T / np.outer(lengths, lengths))
    log = run.log(name, *CURVES)
    for curve in ("train", "validation"):
        result[f"{curve}_accuracy"] = ("a", [entry[f"{curve}_accuracy"] for entry in log])
        losses = [entry[f"{curve}_loss"] for entry in log]
        result[f"log10_{curve}_loss"] = ("a", np.log10(losses))
    for frequency in np.argsort(-shares[-1])[:STRONGEST]:
        result[f"frequency_{frequency + 1}"] = ("a", shares[:, frequency])
    return result


def frequency_shares(model: tnsim.Model) -> Float[np.ndarray, " frequencies"]:
    """How the power of the embeddings is spread over frequencies.

    A row of `left` or `right` embeds the numbers 0 to p - 1, first as a and then as b. The squared
    modulus of its Fourier transform is added up over all rows, and the constant is left out.

    Args:
        model: One bilinear layer on two one-hots.

    Returns:
        Shares of the frequencies 1 to (p - 1) / 2, which add up to 1.

    Example:
        A wave of frequency 2 over five numbers.

        >>> row = np.tile(np.cos(2 * np.pi * 2 * np.arange(5) / 5), 2)[None]
        >>> layer = tnsim.Bilinear(row, row, np.ones((5, 1)))
        >>> frequency_shares(tnsim.Model([layer])).round(3).tolist()
        [0.0, 1.0]
    """
    layer = model.layers[0]
    if not isinstance(layer, tnsim.Bilinear):
        raise tnsim.ResultError(
            f"frequencies are those of a bilinear layer's rows, found {layer!r}"
        )
    rows = np.concatenate([layer.left, layer.right]).astype(float)
    embeddings = rows.reshape(-1, rows.shape[1] // 2)
    power = np.square(np.abs(np.fft.rfft(embeddings, axis=1))).sum(0)[1:]
    return power / power.sum()


def held_when_known(log: list[dict[str, float]]) -> float:
    """Validation accuracy at the first checkpoint that knows what it was trained on."""
    row = first_row([entry["train_accuracy"] for entry in log], KNOWN)
    return log[row]["validation_accuracy"]


def first_row(curve: Sequence[float] | Float[np.ndarray, " K"], level: float) -> int:
    """The first row at which a curve is at a level or above it.

    Raises:
        ResultError: It never is.

    Example:
        >>> first_row([0.1, 0.5, 0.9], 0.5)
        1
    """
    reached = np.asarray(curve) >= level
    if not reached.any():
        raise tnsim.ResultError(f"a curve never reaches {level:g}: it ends at {curve[-1]:.3g}")
    return int(reached.argmax())
