"""A language model learns n-grams, and which measure sees it.

In: text, by default the standard library's own source. Out: claims of the paper's section 3.4.
"""

from tnsim.reproduce.experiment import Experiment
from tnsim.reproduce.language.claims import claims, summaries
from tnsim.reproduce.language.figure import figures
from tnsim.reproduce.language.measure import measure
from tnsim.reproduce.language.setting import PAPER, Setting
from tnsim.reproduce.language.train import train

EXPERIMENT = Experiment(
    name="language",
    title="Language model",
    where="section 3.4, figure 5, appendix on language modelling",
    default=Setting(),
    full={"paper": PAPER},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"language-model": measured.table},
    summaries=summaries,
    data=".txt files of text in UTF-8",
    checkpoints="a folder language-model with the checkpoints, and text.npz with the integer "
    "arrays training and held_out, token ids of the text",
)
