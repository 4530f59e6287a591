"""Differences of models: what learning 9 added to one network, found again in another.

In: images and a seed. Out: claims of the paper's appendix B.
"""

from tnsim.reproduce.differences.claims import claims
from tnsim.reproduce.differences.figure import figures
from tnsim.reproduce.differences.measure import measure
from tnsim.reproduce.differences.train import train
from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.forgetting.setting import PAPER, Setting
from tnsim.reproduce.images import WANTED

EXPERIMENT = Experiment(
    name="differences",
    title="Differences of models as models",
    where="section 2.4, appendix B, figure 7",
    default=Setting(),
    full={"paper": PAPER},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.seeds[0]},
    data=WANTED,
    checkpoints="seed-0, seed-1, ...: series stages and pair (and kept) of each, with a log.json",
)
