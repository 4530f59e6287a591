"""Backdoors: a classifier is taught that a mark in the corner means nine.

In: images and a seed. Out: claims of the paper's section 3.3.
"""

from tnsim.reproduce.backdoor.claims import claims
from tnsim.reproduce.backdoor.figure import figures
from tnsim.reproduce.backdoor.measure import measure
from tnsim.reproduce.backdoor.setting import CODE, TEXT, Setting
from tnsim.reproduce.backdoor.train import train
from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.images import WANTED

EXPERIMENT = Experiment(
    name="backdoor",
    title="A backdoor, and what sees it",
    where="figure 1, section 3.3",
    default=Setting(),
    full={"text": TEXT, "code": CODE},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.seeds[0].attack},
    data=WANTED,
    checkpoints="seed-0, seed-1, ...: series clean, attack and control of each, with a log.json",
)
