"""How digits are learned stage by stage. In: nothing. Out: `Setting`, `STAGES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tnsim.reproduce.images import Kind


class Stage(NamedTuple):
    """A part of training.

    Attributes:
        name: Of the paper.
        digits: That are shown, those below this number.
    """

    name: str
    digits: int


STAGES = (
    Stage("base", 5),
    Stage("add 5", 6),
    Stage("add 6", 7),
    Stage("add 7", 8),
    Stage("add 8", 9),
    Stage("add 9", 10),
    Stage("control", 10),
    Stage("remove 9", 9),
    Stage("re-add 9", 10),
)


@dataclass(frozen=True)
class Setting:
    """Images, network and training: the paper's, with smaller batches for fewer images.

    Args:
        images: A stand-in for street-view house numbers, where no folder of data is given.
        width: Of the embedding.
        hidden: Units of the bilinear layer.
        batch: Images in a step.
        rate: Of learning, falling to 0 along a cosine in every stage.
        weight_decay: Of AdamW.
        epochs: Of a stage.
        kept: Checkpoints of a stage.
        seeds: Runs, one for each.
    """

    images: Kind = "digits"
    width: int = 128
    hidden: int = 256
    batch: int = 64
    rate: float = 1e-3
    weight_decay: float = 0.5
    epochs: int = 40
    kept: int = 5
    seeds: int = 3


PAPER = Setting(images="street", batch=248, epochs=20)
