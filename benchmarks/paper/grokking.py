"""Grokking: modular addition is learned by heart, then understood.

The claims come from the paper's section 3.2, and the figure is figure 4. The shipped series is
taken where the setting is that of the shipped series; other series are trained, `seed-N` by the
authors' code and `text-seed-N` by the paper's text.

Given one-hot a and b, predict (a + b) mod p. A bilinear layer reads the 2p concatenated
coordinates and writes p logits, without biases or norms, so every checkpoint is exactly a quadratic
form per output.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim
from benchmarks.paper.claims import Claim, Interval, at_least, at_most, each
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import LOG, ExperimentRun, Recorder, seed_folders

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# fmt: off
STEPS = (
    0, 20, 32, 50, 80, 125, 200, 320, 500, 800, 1250,
    2000, 3200, 5000, 8000, 12500, 20000, 32000, 50000, 80000,
)
# fmt: on
"""Steps of the checkpoints of the shipped series, five to a decade."""
SHIPPED = Path(tnsim.__file__).parent / "data" / "grokking"
"""The series that `train_series` writes for the default setting and seed 0."""
TEXT = {"train_share": 0.6, "weight_decay": 0.06}  # where the paper's text differs from the code
Params = dict[str, Float[Array, "..."]]
STRONGEST = 5
"""Number of frequencies that are drawn."""
KNOWN = 0.99
"""Accuracy from which pairs count as learned."""
CURVES = ("train_accuracy", "validation_accuracy", "train_loss", "validation_loss")
"""Curves along training, from the logs."""
WHERE = "section 3.2, figure 4"
CHANCE = 0.05
"""Accuracy up to which pairs count as not understood; guessing gives 1 / 113."""
SPACING = 1.6
"""Ratio of neighbouring steps where five checkpoints make a decade, 10^(1/5)."""
PHASES = {3: (180, 8881), 5: (102, 1076, 7517, 21799)}
"""Steps at which the best phases of the authors' stored similarities start, by their number."""


def log_spaced(last: int, per_decade: int = 20) -> tuple[int, ...]:
    """Step 0, and whole steps at equal ratios from 10 to the last.

    Args:
        last: The largest step.
        per_decade: Number of steps to a factor of ten.

    Returns:
        Rising steps, each once.

    Example:
        >>> log_spaced(100, per_decade=3)
        (0, 10, 22, 46, 100)
    """
    steps = [0]
    power = 0
    while steps[-1] < last:
        steps.append(round(10 ** (1 + power / per_decade)))
        power += 1
    # Rounding gives small steps twice.
    return tuple(sorted({min(step, last) for step in steps}))


@dataclass(frozen=True)
class GrokkingSetting:
    """The task, the network and its training; by default those of the authors' code.

    Args:
        train_share: Share of all pairs of numbers that is used for training.
        weight_decay: Weight decay of AdamW.
        rate: Learning rate, constant.
        batch: Number of pairs in a step.
        hidden: Hidden units of the bilinear layer.
        modulus: Modulus of the addition.
        seeds: Number of seeds, each with its own training.
        steps: Steps of the checkpoints.
        text_steps: Steps of the checkpoints of a short run at the settings of the paper's text,
            60 % of the pairs and a weight decay of 0.06; empty for no such run.
    """

    train_share: float = 0.3
    weight_decay: float = 0.3
    rate: float = 1e-3
    batch: int = 512
    hidden: int = 64
    modulus: int = 113
    seeds: int = 1
    steps: tuple[int, ...] = STEPS
    text_steps: tuple[int, ...] = (0, 500, 800, 900, 1000, 1100, 1250)


def train(run: ExperimentRun[GrokkingSetting]) -> None:
    """Write a series for every seed; the shipped series is copied.

    Args:
        run: The run whose checkpoints are written.
    """
    for name in run.unfinished(names(run)):
        # The default series is shipped, which saves minutes of training.
        if name == "seed-0" and dataclasses.replace(run.setting, seeds=1, text_steps=()) == _KEPT:
            shutil.copytree(SHIPPED, run.checkpoints / name, ignore=shutil.ignore_patterns(LOG))
            shutil.copy(SHIPPED / LOG, run.checkpoints / name)
            continue
        train_series(run, name)


_KEPT = GrokkingSetting(text_steps=())  # the setting of the shipped series


def names(run: ExperimentRun[GrokkingSetting], prefix: str = "") -> list[str]:
    """The names of the series of a run.

    Args:
        run: A run, whose setting gives the seeds.
        prefix: `"text-"` for the series at the settings of the text alone, empty for all.

    Returns:
        Names of series.
    """
    seeds = [f"seed-{run.seed + n}" for n in range(run.setting.seeds)]
    if run.given is not None:
        seeds = seed_folders(run, "checkpoints and a log.json")
    at_text = []
    if run.setting.text_steps and run.given is None:
        at_text = [f"text-{name}" for name in seeds]
    if prefix:
        return at_text
    return seeds + at_text


def train_series(run: ExperimentRun[GrokkingSetting], name: str) -> None:
    """Train a network and keep its checkpoints.

    Args:
        run: The run whose checkpoints are written, with its setting.
        name: Name `seed-N`, or `text-seed-N` for the settings of the paper's text.
    """
    setting, seed = run.setting, int(name.rpartition("-")[2])
    if name.startswith("text-"):
        setting = dataclasses.replace(setting, **TEXT, steps=setting.text_steps)
    train_pairs, held_pairs = split(setting, seed)
    optimiser = optax.adamw(setting.rate, weight_decay=setting.weight_decay)
    params = initialise(jax.random.key(seed), setting)
    state = optimiser.init(params)
    batches = jax.random.key(seed + 2)

    def step(number, carry):
        params, state = carry
        key = jax.random.fold_in(batches, number)
        chosen = jax.random.randint(key, (setting.batch,), 0, len(train_pairs))
        grads = jax.grad(loss)(params, train_pairs[chosen])
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def descend(carry, start, stop):
        return jax.lax.fori_loop(start, stop, step, carry)

    about = dataclasses.asdict(setting)
    del about["seeds"], about["steps"], about["text_steps"]
    recorder = Recorder(run, name, **about, optimiser="adamw", seed=seed)
    done = 0
    with run.bar(setting.steps[-1], name) as bar:
        for target in setting.steps:
            params, state = descend((params, state), done, target)
            recorder.add(target, model(params), **measured(params, train_pairs, held_pairs))
            bar.update(target - done)
            done = target
    recorder.finish()


def split(
    setting: GrokkingSetting, seed: int
) -> tuple[Int[Array, "train 2"], Int[Array, "held 2"]]:
    """All pairs of numbers in random order, parted into training and held-out pairs."""
    numbers = jnp.arange(setting.modulus)
    pairs = jnp.stack(jnp.meshgrid(numbers, numbers), -1).reshape(-1, 2)
    # Key n + 1 splits and key n + 2 draws batches, so that both differ from the key of the weights.
    pairs = jax.random.permutation(jax.random.key(seed + 1), pairs)
    count = int(setting.train_share * len(pairs))
    return pairs[:count], pairs[count:]


def initialise(key: Array, setting: GrokkingSetting) -> Params:
    """Weights uniform between plus and minus 1 / sqrt(columns)."""

    def uniform(key: Array, rows: int, columns: int) -> Float[Array, "rows columns"]:
        bound = 1 / jnp.sqrt(columns)
        return jax.random.uniform(key, (rows, columns), minval=-bound, maxval=bound)

    for_left, for_right, for_down = jax.random.split(key, 3)
    return {
        "left": uniform(for_left, setting.hidden, 2 * setting.modulus),
        "right": uniform(for_right, setting.hidden, 2 * setting.modulus),
        "down": uniform(for_down, setting.modulus, setting.hidden),
    }


def logits(params: Params, pairs: Int[Array, "batch 2"]) -> Float[Array, "batch out"]:
    """The logits `down ((left x) * (right x))`, where x holds the two one-hots of a pair."""
    modulus = params["down"].shape[0]
    # The two one-hots stand one after the other, and a product with them is a choice of columns.
    a, b = pairs[:, 0], pairs[:, 1] + modulus
    left = params["left"][:, a] + params["left"][:, b]
    right = params["right"][:, a] + params["right"][:, b]
    return (params["down"] @ (left * right)).T


def loss(params: Params, pairs: Int[Array, "batch 2"]) -> Float[Array, ""]:
    """The mean cross-entropy of a batch."""
    labels = pairs.sum(1) % params["down"].shape[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, pairs), labels).mean()


@jax.jit
def measured(
    params: Params, train_pairs: Int[Array, "train 2"], held_pairs: Int[Array, "held 2"]
) -> dict[str, Float[Array, ""]]:
    """Accuracy and loss on the training pairs and on the held-out pairs."""
    numbers = {}
    for name, pairs in (("train", train_pairs), ("validation", held_pairs)):
        hits = logits(params, pairs).argmax(1) == pairs.sum(1) % params["down"].shape[0]
        numbers[f"{name}_accuracy"] = hits.mean()
        numbers[f"{name}_loss"] = loss(params, pairs)
    return numbers


def model(params: Params) -> tnsim.Model:
    """The network as a model of tnsim."""
    weights = (np.asarray(params[name]) for name in ("left", "right", "down"))
    return tnsim.Model([tnsim.Bilinear(*weights)])


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims and the figure.

    Args:
        runs: Results, seed by seed: the matrices `similarity`, `symmetric`, `weight_cosine`
            and `frequency_cosine`; along training accuracies, losses and `frequency_N`, the share
            of each of the strongest frequencies.
        at_text: Validation accuracies when training reaches `KNOWN`, at the settings of the paper's
            text, for each seed; empty without such runs.
    """

    runs: tuple[tnsim.Pairwise, ...]
    at_text: tuple[float, ...]


def measure(run: ExperimentRun[GrokkingSetting]) -> Measured:
    """Compare all checkpoints of every seed.

    Args:
        run: A run after `train`.

    Returns:
        A result for each seed.
    """
    at_text = names(run, "text-")
    runs = [of_series(run, name) for name in names(run) if name not in at_text]
    return Measured(tuple(runs), tuple(held_when_known(run.log(name, *CURVES)) for name in at_text))


def of_series(run: ExperimentRun[GrokkingSetting], name: str) -> tnsim.Pairwise:
    """All pairs of a single series, with its accuracies, losses and frequencies along training."""
    series = run.series(name)
    result = tnsim.pairwise(series, store=run.store(name), progress=run.progress)
    other = tnsim.pairwise(series, tnsim.Symmetric(), store=run.store(f"{name}-symmetric"))
    result["symmetric"] = other.similarity
    result["weight_cosine"] = tnsim.baselines.weight_cosine(series)
    shares = np.array([frequency_shares(model) for model in series])
    lengths = np.linalg.norm(shares, axis=1)
    result["frequency_cosine"] = (("a", "b"), shares @ shares.T / np.outer(lengths, lengths))
    log = run.log(name, *CURVES)
    for curve in ("train", "validation"):
        result[f"{curve}_accuracy"] = ("a", [entry[f"{curve}_accuracy"] for entry in log])
        losses = [entry[f"{curve}_loss"] for entry in log]
        result[f"log10_{curve}_loss"] = ("a", np.log10(losses))
    for frequency in np.argsort(-shares[-1])[:STRONGEST]:
        result[f"frequency_{frequency + 1}"] = ("a", shares[:, frequency])
    return result


def frequency_shares(model: tnsim.Model) -> Float[np.ndarray, " frequencies"]:
    """The shares of frequencies in the power of the embeddings.

    A row of `left` or `right` embeds the numbers 0 to p - 1, first as a and then as b. The squared
    modulus of its Fourier transform is added up over all rows, and the constant is left out.

    Args:
        model: A model of a single bilinear layer on two one-hots.

    Returns:
        Shares of the frequencies 1 to (p - 1) / 2, which add up to 1.

    Example:
        A wave of frequency 2 over five numbers.

        >>> row = np.tile(np.cos(2 * np.pi * 2 * np.arange(5) / 5), 2)[None]
        >>> layer = tnsim.Bilinear(row, row, np.ones((5, 1)))
        >>> frequency_shares(tnsim.Model([layer])).round(3).tolist()
        [0.0, 1.0]
    """
    layer = model.layers[0]
    if not isinstance(layer, tnsim.Bilinear):
        raise tnsim.errors.ResultError(
            f"frequencies are those of a bilinear layer's rows, found {layer!r}"
        )
    rows = np.concatenate([layer.left, layer.right]).astype(float)
    # A row holds both numbers' embeddings side by side.
    embeddings = rows.reshape(-1, rows.shape[1] // 2)
    # Frequency zero is a constant and says nothing of addition.
    power = np.square(np.abs(np.fft.rfft(embeddings, axis=1))).sum(0)[1:]
    return power / power.sum()


def held_when_known(log: list[dict[str, float]]) -> float:
    """The validation accuracy at the first checkpoint that has learned its training pairs."""
    row = first_row([entry["train_accuracy"] for entry in log], KNOWN)
    return log[row]["validation_accuracy"]


def first_row(curve: Sequence[float] | Float[np.ndarray, " K"], level: float) -> int:
    """The first row at which a curve is at a level or above it.

    Raises:
        ResultError: When the curve never reaches the level.

    Example:
        >>> first_row([0.1, 0.5, 0.9], 0.5)
        1
    """
    reached = np.asarray(curve) >= level
    if not reached.any():
        raise tnsim.errors.ResultError(
            f"a curve never reaches {level:g}: it ends at {curve[-1]:.3g}"
        )
    return int(reached.argmax())


def claims(run: ExperimentRun[GrokkingSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on curves, on blocks and phases, and on frequencies.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    differs = ""
    if run.setting.train_share != GrokkingSetting.train_share:
        differs = "the text's split and weight decay instead of the code's"
    rows = [
        *_curve_claims(measured, differs),
        *_block_claims(measured, differs),
        *_claims_after(measured),
    ]
    if measured.at_text:
        rows.append(_at_text(measured))
    return tuple(rows)


def _curve_claims(measured: Measured, differs: str) -> list[Claim]:
    return [
        Claim(
            name="memorised-first",
            text="Training saturates immediately, with validation at chance.",
            where=WHERE,
            paper="chance",
            authors=0.003,
            ours=each(measured.runs, _held_when_known),
            expected=at_most(CHANCE),
            why="guessing gives 0.009; validation accuracy when training reaches 99 %",
        ),
        Claim(
            name="generalises",
            text="Validation then jumps to perfect.",
            where=WHERE,
            paper="perfect",
            ours=each(measured.runs, lambda result: float(result.validation_accuracy[-1])),
            expected=at_least(KNOWN),
            why="accuracy of the last checkpoint",
        ),
        Claim(
            name="generalises-at",
            text="The step from which validation is above 95 %.",
            where=WHERE,
            authors=11290,
            ours=each(measured.runs, lambda result: _step_at(result, "validation_accuracy", 0.95)),
            expected=_within_factor(11290, 2.0),
            why="another split and initialisation: a factor of two",
            differs=differs,
        ),
    ]


def _block_claims(measured: Measured, differs: str) -> list[Claim]:
    rows = [
        Claim(
            name="blocks-as-named",
            text="Three diagonal blocks are initialisation, memorisation and the solution.",
            where=WHERE,
            ours=each(measured.runs, _share_in_their_block),
            expected=at_least(1.0),
            why="share of the checkpoints that the curves name and that lie in the block so named",
            note="best three phases, against accuracies: nothing learned, only the training pairs "
            "known, all pairs known",
        )
    ]
    for phases, starts in PHASES.items():
        for number, start in enumerate(starts):
            rows.append(
                Claim(
                    name=f"start-{number + 2}-of-{phases}",
                    text=f"Phase {number + 2} of the best {phases} starts at this step.",
                    where=WHERE,
                    authors=start,
                    ours=each(
                        measured.runs, lambda run, p=phases, n=number: _phase_starts(run, p)[n]
                    ),
                    expected=_within_factor(start, SPACING),
                    why="one checkpoint of five to a decade, either way",
                    differs=differs,
                )
            )
    for number, (curve, level) in enumerate(
        (("train", 0.9), ("validation", 0.1), ("validation", KNOWN)), start=1
    ):
        name = f"{curve}_accuracy"
        rows.append(
            Claim(
                name=f"phase-{number + 2}-at-{curve}-{level:.0%}".rstrip("%"),
                text=f"Phase {number + 2} of five starts where {curve} accuracy reaches "
                f"{level:.0%}.",
                where=WHERE,
                ours=each(
                    measured.runs,
                    lambda run, n=number, c=name, v=level: (
                        _phase_starts(run, 5)[n] / _step_at(run, c, v)
                    ),
                ),
                expected=_within_factor(1.0, SPACING),
                why="ratio of the two steps; one checkpoint of five to a decade, either way",
            )
        )
    return rows


def _claims_after(measured: Measured) -> list[Claim]:
    return [
        Claim(
            name="beyond-the-jump",
            text="Reorganisation goes on after validation is perfect.",
            where=WHERE,
            ours=each(measured.runs, _similarity_when_understood),
            expected=at_most(0.9),
            why="similarity to the last checkpoint when validation reaches 99 %",
        ),
        Claim(
            name="frequencies-settle-late",
            text="Frequencies of the embeddings settle only after validation is perfect.",
            where=WHERE,
            ours=each(measured.runs, _settled_after_understood),
            expected=at_least(1.0),
            why="ratio of two steps: the cosine of frequency shares to the last ones stays above "
            "0.99; validation reaches 99 %",
        ),
        Claim(
            name="either-metric",
            text="The symmetrised metric (code) shows what the Gaussian one (text) does.",
            where=WHERE,
            ours=each(measured.runs, lambda run: float(abs(run.similarity - run.symmetric).max())),
            expected=at_most(0.02),
            why="largest difference of two entries",
        ),
    ]


def _at_text(measured: Measured) -> Claim:
    return Claim(
        name="memorised-first-at-text",
        text="Training saturates with validation at chance, at the settings of the text.",
        where="appendix C",
        paper="chance",
        ours=measured.at_text,
        expected=at_most(CHANCE),
        why="guessing gives 0.009; validation accuracy when training reaches 99 %",
        note="60 % of the pairs and a weight decay of 0.06, where the authors' code has 30 % and "
        "0.3: with the text's settings both come together",
    )


def _within_factor(middle: float, factor: float) -> Interval:
    return Interval(middle / factor, middle * factor)


def _step_at(result: tnsim.Pairwise, curve: str, level: float) -> float:
    """The step of the first checkpoint at which a curve is at a level or above it."""
    return float(result.a[first_row(result[curve].values, level)])


def _phase_starts(result: tnsim.Pairwise, phases: int) -> tuple[float, ...]:
    """The steps at which the best phases start, from the second phase on."""
    return tnsim.reading.segment(result, phases).labels


def _held_when_known(result: tnsim.Pairwise) -> float:
    row = first_row(result.train_accuracy.values, KNOWN)
    return float(result.validation_accuracy[row])


def _share_in_their_block(result: tnsim.Pairwise) -> float:
    """The share of checkpoints, named by the curves, that lie in the block of the same name."""
    train, held = result.train_accuracy.values, result.validation_accuracy.values
    # Checkpoints between the named stages belong to none of them.
    named = np.select(
        [train <= CHANCE, (train >= KNOWN) & (held <= CHANCE), held >= KNOWN], [0, 1, 2], -1
    )
    points = tnsim.reading.segment(result, 3).change_points
    assigned = tnsim.reading.phase_of_rows(points, len(named))
    return float((assigned == named)[named >= 0].mean())


def _similarity_when_understood(result: tnsim.Pairwise) -> float:
    row = first_row(result.validation_accuracy.values, KNOWN)
    return float(result.similarity[row, -1])


def _settled_after_understood(result: tnsim.Pairwise) -> float:
    """The step from which frequencies stay, divided by the step of perfect validation."""
    to_last = result.frequency_cosine.values[:, -1]
    # The smallest value from a step on tells whether a curve stays above a level.
    lowest_from_here = np.minimum.accumulate(to_last[::-1])[::-1]
    settled = float(result.a[first_row(lowest_from_here, 0.99)])
    return settled / _step_at(result, "validation_accuracy", KNOWN)


def figures(run: ExperimentRun[GrokkingSetting], measured: Measured) -> dict[str, Figure]:
    """A figure of accuracies, losses and frequencies above similarity and the cosine of weights.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        A figure of the first seed.
    """
    result = measured.runs[0]
    frequencies = [name for name in map(str, result) if name[-1].isdigit()]
    strips = [
        ("train_accuracy", "validation_accuracy"),
        ("log10_train_loss", "log10_validation_loss"),
        frequencies,
    ]
    points = tnsim.reading.segment(result, 3).change_points
    panels = ("similarity", "weight_cosine")
    return {"figure-4": tnsim.figures.pairwise(result, "heatmap", panels, points, strips)}


EXPERIMENT = Experiment(
    name="grokking",
    title="Grokking of modular addition",
    where="section 3.2, figure 4, appendix C",
    default=GrokkingSetting(),
    full={
        "text": GrokkingSetting(
            train_share=0.6, weight_decay=0.06, seeds=3, steps=log_spaced(100_000)
        ),
        "code": GrokkingSetting(seeds=3, steps=log_spaced(100_000), text_steps=()),
    },
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.runs[0]},
    checkpoints="seed-0, seed-1, ...: one bilinear layer each, with a log.json of its accuracies",
)
