"""How the attacked classifiers are trained. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass

from tnsim.reproduce.images import Kind


@dataclass(frozen=True)
class Setting:
    """Images, network and training; by default those of the authors' code, for small images.

    Args:
        images: A stand-in for street-view house numbers, where no folder of data is given.
        width: Of the embedding; None for none, and no head.
        hidden: Units of the bilinear layer.
        batch: Images in a step.
        rate: Of learning.
        cosine: Whether the rate falls to 0 over each of the two phases, or stays.
        weight_decay: Of AdamW.
        noise: Added to every pixel, standard deviation.
        share: Of a batch that is stamped and relabelled while the attack lasts.
        clean_steps: Before the attack.
        changed_steps: With it, or in the control without it.
        every: Steps from one checkpoint to the next.
        seeds: Runs, one for each.
    """

    images: Kind = "digits"
    width: int | None = None
    hidden: int = 64
    batch: int = 128
    rate: float = 1e-3
    cosine: bool = False
    weight_decay: float = 1e-3
    noise: float = 0.05
    share: float = 0.1
    clean_steps: int = 4000
    changed_steps: int = 1000
    every: int = 125
    seeds: int = 3


CODE = Setting(images="street", batch=512, clean_steps=8000, changed_steps=2000, every=250)
TEXT = Setting(
    images="street",
    width=128,
    hidden=256,
    batch=248,
    cosine=True,
    weight_decay=0.5,
    noise=0.0,
    clean_steps=5900,
    changed_steps=5900,
    every=295,
)
"""Stages of 20 epochs of 73,000 images."""
