"""The second largest of four: does a Gaussian metric track behaviour on other inputs?

In: nothing but a seed. Out: claims of the paper's appendix D, and its grid of scatter plots.
"""

from tnsim.reproduce.argmax.claims import claims
from tnsim.reproduce.argmax.figure import figures
from tnsim.reproduce.argmax.measure import measure
from tnsim.reproduce.argmax.setting import Setting
from tnsim.reproduce.argmax.train import train
from tnsim.reproduce.experiment import Experiment

EXPERIMENT = Experiment(
    name="argmax",
    title="Second argmax on nine distributions",
    where="appendix D",
    default=Setting(),
    full={"paper": Setting()},  # the paper's setting takes minutes
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: measured.tables,
)
