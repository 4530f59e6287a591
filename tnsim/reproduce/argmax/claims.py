"""What the paper's appendix D says. In: measured values. Out: claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tnsim.reproduce.argmax.measure import Measured
from tnsim.reproduce.argmax.setting import Setting
from tnsim.reproduce.claims import Claim, at_least, at_most, near
from tnsim.reproduce.run import Run

PUBLISHED = {
    "gaussian": 0.997,
    "half-gaussian": 0.920,
    "bimodal": 0.987,
    "uniform": 0.994,
    "laplace": 0.992,
    "spikes": 0.977,
    "permutations": 0.964,
    "correlated": 0.954,
    "last-is-minus-10": 0.606,
}
EXCEPTION = "last-is-minus-10"
WHERE = "appendix D, figure 8"
DECIDABLE = ("half-gaussian", "permutations", EXCEPTION)
"""Not symmetric about zero, so that a quadratic form can decide."""
UNKNOWN = "covariance of the inputs and start of the training are ours, the authors' are not known"
"""Of "correlated". Both matter: with weights that start uniform within 1 / sqrt(columns), as those
of PyTorch's linear layers, eight repetitions have r from 0.924 to 0.963 there, and "half-gaussian"
and "permutations" are further from the published values than with the normal ones of `train.py`."""
HALF = ("gaussian", "bimodal", "uniform", "laplace", "correlated")


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about correlations and about accuracies.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        The claims.
    """
    return (*_published(measured), *_metrics(measured), *_accuracies(measured))


def _published(measured: Measured) -> list[Claim]:
    """The correlation of every panel, under the metric of the authors' code."""
    rows = []
    for name in _among(measured, PUBLISHED):
        value, ours = PUBLISHED[name], measured.r[name]["symmetric"]
        tolerance, why = 0.02, "two units of the second digit"
        if name == EXCEPTION:
            tolerance, why = 0.1, "far from 1, r moves more"
        rows.append(
            Claim(
                name=f"r-{name}",
                text=f"r of tensor similarity and output similarity, {name}.",
                where=WHERE,
                paper=value,
                ours=ours,
                expected=near(value, tolerance),
                why=f"{why}; the published value is one repetition, ours the mean of several",
                differs=UNKNOWN if name == "correlated" else "",
            )
        )
    return rows


def _metrics(measured: Measured) -> list[Claim]:
    """What holds of all distributions, metric by metric."""
    r = measured.r
    nine = _among(measured, PUBLISHED)
    eight = [name for name in nine if name != EXCEPTION]
    table = measured.tables["gaussian"]
    sampling = float(abs(table.gaussian - table.output_cosine).max())
    return [
        Claim(
            name="eight-of-nine",
            text="r exceeds 0.9 for eight of nine distributions (the least of them).",
            where=WHERE,
            paper="> 0.9",
            ours=_least(r, "symmetric", eight),
            expected=at_least(0.9),
            why="the text's own bound",
        ),
        Claim(
            name="eight-of-nine-gaussian",
            text="The same under the Gaussian metric, which the text names.",
            where=WHERE,
            paper="> 0.9",
            ours=_least(r, "gaussian", eight),
            expected=at_least(0.9),
            why="the text's own bound",
        ),
        Claim(
            name="gaussian-is-behaviour",
            text="Under Gaussian inputs tensor similarity is the cosine of outputs.",
            where="section 2.2",
            paper="equal",
            ours=(sampling,),
            expected=at_most(0.05),
            why="the largest difference over all pairs, of 50,000 sampled inputs",
        ),
        Claim(
            name="exception",
            text="Weights that do not matter are why 'Gaussian and -10' is an exception.",
            where="appendix D",
            paper="r = 0.61",
            ours=r[EXCEPTION]["fitted"],
            expected=at_most(0.9),
            why="the same weights stay an exception under every metric, if they are the reason",
            note="with mean and covariance of the inputs in the metric there is no exception: it "
            "was the standard normal, which these inputs are not",
        ),
        Claim(
            name="fitted",
            text="Fitted to the inputs (`Gaussian.fit`), r exceeds 0.97 on all nine (the least).",
            where="beyond the paper",
            authors=0.498,
            ours=_least(r, "fitted", nine),
            expected=at_least(0.97),
            why="what is left are moments beyond the second",
            note="the authors' stored value has the covariance without the mean, for "
            "'Gaussian and -10'",
        ),
        Claim(
            name="weight-cosine",
            text="Cosine of weights does not track behaviour (r, on Gaussian inputs).",
            where="figure 2",
            ours=r["gaussian"]["weight_cosine"],
            expected=at_most(0.3),
            why="networks from different seeds share no basis",
        ),
    ]


def _accuracies(measured: Measured) -> list[Claim]:
    accuracy = measured.accuracy
    rows = [
        Claim(
            name="accuracy-decidable",
            text="Accuracy above 90 % on the three distributions not symmetric about zero (the "
            "least of them).",
            where="appendix D",
            paper="> 0.9",
            ours=_chosen(measured, DECIDABLE, min),
            expected=at_least(0.9),
            why="the text's own bound",
        ),
        Claim(
            name="accuracy-half",
            text="Accuracy of about 50 % on the five symmetric ones (the largest of them).",
            where="appendix D",
            paper="~ 0.5",
            ours=_chosen(measured, HALF, max),
            expected=near(0.5, 0.05),
            why="a quadratic form cannot tell x from -x",
        ),
        Claim(
            name="accuracy-spikes",
            text="Accuracy of about 39 % on sparse spikes of mean 0, as in the authors' code.",
            where="appendix D",
            paper=0.39,
            ours=accuracy["spikes"],
            expected=near(0.39, 0.02),
            why="two digits are published",
        ),
    ]
    rows.append(
        Claim(
            name="accuracy-spikes-text",
            text="Accuracy of about 39 % on sparse spikes of mean 1, as in the text.",
            where="appendix D",
            paper=0.39,
            ours=accuracy["spikes-text"],
            expected=near(0.39, 0.02),
            why="two digits are published",
            note="the published value belongs to spikes of mean 0",
        )
    )
    return rows


def _among(measured: Measured, names: Iterable[str]) -> list[str]:
    """Those of some distributions that were run."""
    return [name for name in names if name in measured.r]


def _least(
    r: dict[str, dict[str, tuple[float, ...]]], measure: str, names: Iterable[str]
) -> tuple[float, ...]:
    """The least correlation of some distributions, for each repetition."""
    by_name = [r[name][measure] for name in names]
    return tuple(map(min, zip(*by_name, strict=True)))


def _chosen(
    measured: Measured, names: Iterable[str], chosen: Callable[[tuple[float, ...]], float]
) -> tuple[float, ...]:
    """The least or the largest accuracy of some distributions, training by training."""
    by_name = [measured.accuracy[name] for name in _among(measured, names)]
    return tuple(map(chosen, zip(*by_name, strict=True)))
