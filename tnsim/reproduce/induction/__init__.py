"""Two layers of attention learn induction, and which measure sees when.

In: the shipped series. Out: claims about phases, where curves of behaviour turn.
"""

from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.induction.claims import claims, summaries
from tnsim.reproduce.induction.figure import figures
from tnsim.reproduce.induction.measure import measure
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.induction.train import train

EXPERIMENT = Experiment(
    name="induction",
    title="Induction",
    where="beyond the paper; its section 5 asks for it",
    default=Setting(),
    full={"longer": Setting(positions=8, sequences=10_000)},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"induction": measured.table},
    summaries=summaries,
    checkpoints="what scripts/train_induction.py writes",
)
