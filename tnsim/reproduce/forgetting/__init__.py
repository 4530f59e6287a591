"""Forgetting: digits are added one by one, then 9 is taken away and given back.

In: images and a seed. Out: claims of the paper's section 3.1.
"""

from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.forgetting.claims import claims
from tnsim.reproduce.forgetting.figure import figures
from tnsim.reproduce.forgetting.measure import measure
from tnsim.reproduce.forgetting.setting import PAPER, Setting
from tnsim.reproduce.forgetting.train import train
from tnsim.reproduce.images import WANTED

EXPERIMENT = Experiment(
    name="forgetting",
    title="Catastrophic forgetting, output by output",
    where="section 3.1, figures 3 and 6, appendix B",
    default=Setting(),
    full={"paper": PAPER},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.seeds[0].stages.drop_vars("weight_slices")},
    data=WANTED,
    checkpoints="seed-0, seed-1, ...: series stages (and kept) of each, whose log.json gives the "
    "stage of every checkpoint",
)
