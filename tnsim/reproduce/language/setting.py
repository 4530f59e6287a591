"""Sizes of the language model and of what is compared. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass

SERIES = "language-model"
"""The folder of the checkpoints."""
PHASES = 4
"""As the paper's figure is read."""


@dataclass(frozen=True)
class Setting:
    """The model, its training, and on what its checkpoints are compared.

    Args:
        vocabulary: Tokens, END and OTHER among them.
        width: Of the residual stream.
        heads: Of every layer.
        layers: Of bilinear attention.
        biases: Whether queries and keys have them, as the paper's do. Without, hidden states have
            no means under centred inputs, and a comparison takes half as many programs.
        scale: Of what a layer adds to the stream.
        context: Tokens of a training sequence.
        batch: Sequences of a step.
        steps: Of training.
        checkpoints: About so many, at log-spaced steps, with step 0.
        rate: Of AdamW at its highest; it rises for a tenth of the steps, 200 at most, and falls to
            a fifth along a cosine.
        weight_decay: Of AdamW.
        positions: On which functions are compared; n-grams of up to `positions + 1` tokens.
        sequences: Of held-out text on which outputs are compared.
        grams: The commonest n-grams that make a score.
        windows: Of held-out text beside them.
    """

    vocabulary: int = 384
    width: int = 32
    heads: int = 4
    layers: int = 2
    biases: bool = False
    scale: float = 0.35
    context: int = 32
    batch: int = 32
    steps: int = 3000
    checkpoints: int = 25
    rate: float = 5e-3
    weight_decay: float = 0.1
    positions: int = 3
    sequences: int = 1000
    grams: int = 1000
    windows: int = 4000


PAPER = Setting(
    vocabulary=4096,
    width=256,
    heads=8,
    biases=True,
    context=512,
    batch=384,
    steps=20_000,
    checkpoints=101,
    rate=2e-3,
)
"""The paper's sizes and steps; its optimiser, norm and text are others, and it takes a GPU."""
