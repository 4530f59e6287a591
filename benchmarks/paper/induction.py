"""Induction: two layers of attention learn to continue repetitions; which measure sees when?

Nothing is trained: the series is shipped. `scripts/train_induction.py` made it, deterministic by
its seed, and trains others; a folder of its output is read with `--checkpoints`.

Inputs are sequences whose continuation only induction finds. The behaviour of a model is its
accuracy on them, and the induction score as a whole and through each part of the last layer. The
claims are about phases: whether the phases of similarity matrices start where curves of behaviour
turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

import tnsim
from benchmarks.paper.claims import Claim, Summary, at_least, at_most
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.phases import Seen, claims_of, seen, squared_distances, summary
from benchmarks.paper.run import ExperimentRun

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

MEASURES = {
    "similarity": "tensor, layer by layer",
    "repeated_outputs": "outputs on repeated tokens",
    "weight_cosine": "weights",
}
"""Titles of the matrices by the names of their variables."""
WHERE = "beyond the paper"


@dataclass(frozen=True)
class InductionSetting:
    """Sizes of the measurements.

    Args:
        positions: Number of positions on which functions are compared.
        context: Number of tokens of a sequence.
        shortest, longest: Range of the number of tokens of the segment that a sequence repeats.
        sequences: Number of sequences on which behaviour is measured.
    """

    positions: int = 4
    context: int = 16
    shortest: int = 4
    longest: int = 8
    sequences: int = 2000


class Repeated(NamedTuple):
    """Sequences that repeat a segment of different tokens.

    Attributes:
        tokens: Token ids of the sequences.
        periods: Length of the segment of each sequence.
    """

    tokens: Int[np.ndarray, "n context"]
    periods: Int[np.ndarray, " n"]

    @property
    def determined(self) -> Bool[np.ndarray, "n predicted"]:
        """Whether an earlier occurrence of its predecessor tells a token, from the second token."""
        places = np.arange(1, self.tokens.shape[1])
        return places > self.periods[:, None]


def drawn(
    count: int, vocabulary: int, context: int, shortest: int, longest: int, seed: int
) -> Repeated:
    """Random sequences.

    Args:
        count: Number of sequences.
        vocabulary: Number of tokens to choose from, none twice in a segment.
        context: Number of tokens of a sequence.
        shortest, longest: Range of the number of tokens of a segment.
        seed: Seed of the draws.

    Returns:
        The sequences.

    Example:
        >>> repeated = drawn(1, 6, 6, 3, 3, seed=0)
        >>> repeated.tokens.tolist(), repeated.determined.tolist()
        ([[3, 2, 5, 3, 2, 5]], [[False, False, False, True, True]])
    """
    rng = np.random.default_rng(seed)
    # Different tokens in a segment, so that the predecessor determines the next token.
    segments = rng.permuted(np.tile(np.arange(vocabulary), (count, 1)), axis=1)
    periods = rng.integers(shortest, longest + 1, size=count)
    places = np.arange(context) % periods[:, None]
    return Repeated(np.take_along_axis(segments, places, axis=1), periods)


def train(run: ExperimentRun[InductionSetting]) -> None:
    """Do nothing, as the series is shipped.

    Args:
        run: A run whose checkpoints `series_of` gives.
    """


def series_of(run: ExperimentRun[InductionSetting]) -> tnsim.Series:
    """The checkpoints of a run: the given checkpoints, or the shipped series."""
    return tnsim.Series(run.given or Path(tnsim.__file__).parent / "data" / "induction")


def behaviour(model: tnsim.Model, repeated: Repeated) -> dict[str, float]:
    """Accuracies, and the induction score as a whole and part by part.

    The score is the logit of the right token less the mean of all logits, averaged over predictions
    that an earlier occurrence determines. It is linear in the outputs, so the scores of the parts
    add up to the score of the model.

    Args:
        model: A model whose last layers are attention, added to its input, and a linear layer.
        repeated: Sequences with repeated segments.

    Returns:
        Numbers by name: `repeated accuracy` and `fresh accuracy`, on tokens that are determined and
        tokens that are not; `induction score`; and `through PART`, the score of every part.
    """
    outputs = outputs_of(model, repeated)
    right = outputs.argmax(axis=-1) == repeated.tokens[:, 1:]
    measures = {
        "repeated accuracy": float(right[repeated.determined].mean()),
        "fresh accuracy": float(right[~repeated.determined].mean()),
        "induction score": advantage(outputs, repeated),
    }
    for name, part in parts(model).items():
        measures[f"through {name}"] = advantage(outputs_of(part, repeated), repeated)
    return measures


def parts(model: tnsim.Model) -> Mapping[str, tnsim.Combination]:
    """The summands of a model as models: each head of the last attention layer, and the stream.

    Args:
        model: A model whose last layers are attention, added to its input, and a linear layer.

    Returns:
        Functions by name that add up to the model.

    Raises:
        ModelError: When the layer before the last is no residual.
    """
    *before, residual, logits = model.layers
    if not isinstance(residual, tnsim.Residual):
        raise tnsim.ModelError(f"attention is to be added to its input, found {residual}")
    attention: Any = residual.layer
    skip: Any = residual.skip
    scale: Any = residual.scale
    functions = {"stream": skip * tnsim.Model([*before, logits], n_ctx=model.n_ctx)}
    # Columns of the output map belong to heads.
    rows = np.arange(attention.o.shape[1]) // attention.d_value
    for head in range(attention.n_heads):
        alone = tnsim.Attention(
            attention.q1,
            attention.k1,
            attention.q2,
            attention.k2,
            attention.v,
            np.where(rows == head, attention.o, 0.0),
            attention.n_heads,
            mask=attention.mask,
            rope_base=attention.rope_base,
        )
        added = tnsim.Model([*before, alone, logits], n_ctx=model.n_ctx)
        functions[f"head {head}"] = scale * added
    return functions


def outputs_of(
    model: tnsim.Model | tnsim.Combination, repeated: Repeated
) -> Float[np.ndarray, "n predicted words"]:
    """The logits that predict every token but the first."""
    one_hot = np.eye(model.d_in, dtype=np.float32)[repeated.tokens]
    return np.asarray(model(one_hot))[:, :-1]


def advantage(outputs: Float[np.ndarray, "n predicted words"], repeated: Repeated) -> float:
    """The logit of the right token less the mean of all, averaged over determined predictions."""
    right = np.take_along_axis(outputs, repeated.tokens[:, 1:, None], axis=-1)[..., 0]
    above = right - outputs.mean(axis=-1)
    return float(above[repeated.determined].mean())


@dataclass(frozen=True)
class Measured:
    """Measured values, for claims and figures.

    Args:
        table: The matrices of `MEASURES`, and curves of behaviour over the checkpoints.
        behaviour: Squared distances of checkpoints in accuracy and in the logarithm of the score.
        turns: Rows at which the accuracy on repeated tokens leaves chance, and arrives.
    """

    table: xr.Dataset
    behaviour: xr.DataArray
    turns: tuple[int, int]


def measure(run: ExperimentRun[InductionSetting]) -> Measured:
    """Compare all checkpoints, and measure the behaviour of each.

    Args:
        run: A run of the shipped series, or of a given series.

    Returns:
        Matrices and curves.
    """
    setting, series = run.setting, series_of(run)
    steps = list(map(int, series.labels))
    models = [tnsim.Model(model.layers, n_ctx=setting.positions) for model in series]
    repeated = drawn(
        setting.sequences,
        models[0].d_in,
        setting.context,
        setting.shortest,
        setting.longest,
        run.seed,
    )
    table: xr.Dataset = tnsim.pairwise(
        models,
        tnsim.GaussianClosure(),
        names=steps,
        dtype="float32",
        store=run.store("closure"),
        progress=run.progress,
    )
    table["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=steps)
    whole = [tnsim.Model(model.layers, n_ctx=setting.context) for model in series]
    outputs = tnsim.pairwise(whole, tnsim.Empirical(repeated.tokens), names=steps, dtype="float32")
    table["repeated_outputs"] = outputs.similarity

    with run.bar(len(whole), "behaviour", "model") as bar:
        curves = []
        for model in whole:
            curves.append(behaviour(model, repeated))
            bar.update()
    for name in curves[0]:
        table[name] = ("a", [curve[name] for curve in curves])
    accuracy = table["repeated accuracy"].values
    # A score grows without bound, and the logarithm brings it to the range of the accuracy.
    score = np.log1p(np.maximum(table["induction score"].values, 0.0))
    apart = squared_distances(np.stack([accuracy, score], axis=1))
    behaved = table["similarity"].copy(data=apart)
    return Measured(table, behaved, turns_of(accuracy, 1 / models[0].d_in))


def turns_of(accuracy: Float[np.ndarray, " K"], chance: float) -> tuple[int, int]:
    """The first rows at which an accuracy is twice chance, and nine tenths of its last value.

    Args:
        accuracy: Accuracies along a run.
        chance: The accuracy of guessing.

    Returns:
        Two rows.

    Raises:
        ResultError: When the accuracy is never twice chance, or arrives at once.

    Example:
        >>> turns_of(np.array([0.1, 0.3, 0.8, 0.95, 1.0]), 0.1)
        (1, 3)
    """
    begins = int((accuracy > 2 * chance).argmax())
    arrives = int((accuracy > 0.9 * accuracy[-1]).argmax())
    if not 0 < begins < arrives:
        raise tnsim.errors.ResultError(
            f"the accuracy does not rise in three phases: {accuracy.round(2).tolist()}; "
            "give checkpoints from before, within and after learning"
        )
    return begins, arrives


def claims(run: ExperimentRun[InductionSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on the curves, the heads, and the phases of each matrix.

    Args:
        run: The run that was measured.
        measured: Measured matrices and curves of the run.

    Returns:
        The claims.
    """
    of_phases = claims_of(phases_seen(measured), MEASURES, WHERE, "the accuracy turns")
    return (*_of_heads(measured), *of_phases)


def _of_heads(measured: Measured) -> list[Claim]:
    table = measured.table
    steps = table["a"].values
    begins, arrives = measured.turns
    heads = [name for name in table.data_vars if str(name).startswith("through head")]
    through = np.stack([table[name].values for name in heads])
    score = table["induction score"].values
    shares = through / score
    # The head with the largest share between the two turns.
    first = int(shares[:, begins:arrives].mean(axis=1).argmax())
    return [
        Claim(
            name="learned",
            text="Repeated tokens are predicted at the end.",
            where=WHERE,
            ours=(float(table["repeated accuracy"].values[-1]),),
            expected=at_least(0.99),
            why="accuracy on tokens that an earlier occurrence determines",
            note=f"it leaves chance at step {steps[begins]} and arrives at step {steps[arrives]}",
        ),
        Claim(
            name="through-the-last-layer",
            text="Induction goes through heads of the last layer, not past it.",
            where=WHERE,
            ours=(float(shares[:, -1].sum()),),
            expected=at_least(0.9),
            why="share of the right token's logit above the mean",
        ),
        Claim(
            name="one-head-first",
            text="One head carries it while it forms; others join when it has arrived.",
            where=WHERE,
            ours=(float(shares[first, begins + 1 : arrives].max() - shares[first, -1]),),
            expected=at_least(0.1),
            why="largest share of this head while it forms, less its share at the end",
            note=f"the head is number {first}",
        ),
        Claim(
            name="nothing-in-common",
            text="Before induction begins a model has nothing in common with the last.",
            where=WHERE,
            ours=(float(np.abs(table["similarity"].values[:begins, -1]).max()),),
            expected=at_most(0.1),
            why="largest similarity, layer by layer",
        ),
    ]


def phases_seen(measured: Measured) -> dict[str, Seen]:
    """The phases of each matrix, compared with the phases of the accuracy."""
    table = measured.table
    return {name: seen(table[name], measured.behaviour, measured.turns) for name in MEASURES}


def summaries(measured: Measured) -> tuple[Summary, ...]:
    """A table of all measures side by side."""
    turns = measured.table["a"].values[list(measured.turns)].tolist()
    return (summary(phases_seen(measured), MEASURES, turns),)


def figures(run: ExperimentRun[InductionSetting], measured: Measured) -> dict[str, Figure]:
    """A figure of three measures below accuracies and the scores of parts.

    Args:
        run: The run that was measured.
        measured: Measured matrices and curves of the run.

    Returns:
        A figure; its lines stand where the accuracy on repeated tokens turns.
    """
    table = measured.table
    parts = [str(name) for name in table.data_vars if str(name).startswith("through ")]
    curves = [["repeated accuracy", "fresh accuracy"], parts]
    figure = tnsim.figures.pairwise(table, "heatmap", list(MEASURES), measured.turns, curves)
    return {"induction": figure}


EXPERIMENT = Experiment(
    name="induction",
    title="Induction",
    where="beyond the paper; its section 5 asks for it",
    default=InductionSetting(),
    full={"longer": InductionSetting(positions=8, sequences=10_000)},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"induction": measured.table},
    summaries=summaries,
    checkpoints="what scripts/train_induction.py writes",
)
