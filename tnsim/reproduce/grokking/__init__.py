"""Grokking: modular addition is learned by heart, then understood.

In: the shipped series, or training. Out: claims of the paper's section 3.2.
"""

from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.grokking.claims import claims
from tnsim.reproduce.grokking.figure import figures
from tnsim.reproduce.grokking.measure import measure
from tnsim.reproduce.grokking.setting import Setting, log_spaced
from tnsim.reproduce.grokking.train import train

EXPERIMENT = Experiment(
    name="grokking",
    title="Grokking of modular addition",
    where="section 3.2, figure 4, appendix C",
    default=Setting(),
    full={
        "text": Setting(train_share=0.6, weight_decay=0.06, seeds=3, steps=log_spaced(100_000)),
        "code": Setting(seeds=3, steps=log_spaced(100_000), text_steps=()),
    },
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.runs[0]},
    checkpoints="seed-0, seed-1, ...: one bilinear layer each, with a log.json of its accuracies",
)
