"""Invariance and exactness: what tensor similarity does not see, and what it equals.

In: nothing but a seed. Out: claims of the paper's figure 2 and of its theory.
"""

from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.invariance.claims import claims
from tnsim.reproduce.invariance.figure import figures
from tnsim.reproduce.invariance.measure import measure
from tnsim.reproduce.invariance.setting import Setting
from tnsim.reproduce.invariance.train import train

EXPERIMENT = Experiment(
    name="invariance",
    title="Invariance and exactness",
    where="figure 2, sections 2.2 and 2.3",
    default=Setting(),
    full={"paper": Setting()},  # the paper states theorems, and no sizes
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"one-layer": measured.pictured},
)
