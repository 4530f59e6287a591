"""Forgetting: digits are added one by one, then 9 is taken away and given back.

The claims come from the paper's section 3.1, and the figures are figures 3 and 6.
`seed-N/stages` goes through the stages of the paper. `seed-N/kept` is a control: training goes on
from the end of the stage before 9 is removed, for as many steps, with all digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tnsim
from benchmarks.paper import classifiers, images
from benchmarks.paper.claims import Claim, Interval, at_least, at_most, each, near
from benchmarks.paper.classifiers import Params, State
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.images import WANTED, Images, Kind, tested_with
from benchmarks.paper.run import (
    ExperimentRun,
    Recorder,
    seed_folders,
    unfinished_seeds,
    with_curves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = ("similarity", "cka", "weight_cosine")
"""Measures of whole models, as opposed to slices."""
CURVES = ("stage", "validation_accuracy", "accuracy_of_9")
"""Curves along training, from the logs."""
WHERE = "section 3.1, figure 3"
PROGRESS = "appendix B, figure 6"
WORDS = {"similarity": "tensor similarity", "cka": "CKA", "weight_cosine": "cosine of weights"}
ACCURACIES = ("validation_accuracy", "accuracy_of_9")


class TrainingStage(NamedTuple):
    """A part of training.

    Attributes:
        name: Name of the stage in the paper.
        digits: Number of digits that are shown, from 0 up.
    """

    name: str
    digits: int


STAGES = (
    TrainingStage("base", 5),
    TrainingStage("add 5", 6),
    TrainingStage("add 6", 7),
    TrainingStage("add 7", 8),
    TrainingStage("add 8", 9),
    TrainingStage("add 9", 10),
    TrainingStage("control", 10),
    TrainingStage("remove 9", 9),
    TrainingStage("re-add 9", 10),
)


@dataclass(frozen=True)
class ForgettingSetting:
    """Images, network and training: the paper's, with smaller batches for fewer images.

    Args:
        images: A stand-in for street-view house numbers, where no folder of data is given.
        width: Width of the embedding.
        hidden: Hidden units of the bilinear layer.
        batch: Number of images in a step.
        rate: Learning rate, falling to 0 along a cosine in every stage.
        weight_decay: Weight decay of AdamW.
        epochs: Number of epochs of a stage.
        kept: Number of checkpoints of a stage.
        seeds: Number of seeds, each with its own training.
    """

    images: Kind = "digits"
    width: int = 128
    hidden: int = 256
    batch: int = 64
    rate: float = 1e-3
    weight_decay: float = 0.5
    epochs: int = 40
    kept: int = 5
    seeds: int = 3


PAPER = ForgettingSetting(images="street", batch=248, epochs=20)  # the paper's setting
REMOVED = [stage.name for stage in STAGES].index("remove 9")  # number of the stage


def train(run: ExperimentRun[ForgettingSetting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: The run whose checkpoints are written.
    """
    missing = unfinished_seeds(run, run.setting.seeds, ("stages", "kept"))
    if missing:
        trainer = Trainer(run)
        for seed in missing:
            trainer.stages(seed)


class Trainer:
    """Trains classifiers of a setting, with a single program for all stages and seeds.

    Args:
        run: The run whose checkpoints are written.
    """

    def __init__(self, run: ExperimentRun[ForgettingSetting]) -> None:
        self._run = run
        self._shown = images.load(run.setting.images, "train", run.data)
        self._tested = images.load(run.setting.images, "test", run.data)
        # an argument of the program, which would store the images otherwise
        self._on_device: Any = jax.device_put(self._shown)
        self._descend = jax.jit(self._train_steps)

    def stages(self, seed: int) -> None:
        """Write the stages of a seed, and its control."""
        recorder = self._recorder(f"seed-{seed}/stages", seed)
        params = self.started(seed)
        self._keep_checkpoint(recorder, 0, params, STAGES[0], number=0)
        done = 0
        for number, stage in enumerate(STAGES):
            # The control starts from the same weights as the removal, and goes on with all digits.
            if number == REMOVED:
                longer = self._recorder(f"seed-{seed}/kept", seed)
                as_before = STAGES[number - 1]
                self._train_stage(longer, params, done, as_before, number, seed)
                longer.finish()
            params, done = self._train_stage(recorder, params, done, stage, number, seed)
        recorder.finish()

    def pair(self, name: str, seed: int) -> None:
        """Write two checkpoints: after the digits 0 to 8, and after learning all of them."""
        recorder = self._recorder(name, seed)
        params, done = self.started(seed), 0
        for number, stage in enumerate(
            (TrainingStage("without 9", 9), TrainingStage("with 9", 10))
        ):
            params, done = self._train_stage(recorder, params, done, stage, number, seed, kept=1)
        recorder.finish()

    def started(self, seed: int) -> Params:
        """The weights from which a seed starts."""
        setting = self._run.setting
        pixels = self._shown.x.shape[1]
        return classifiers.initialise(jax.random.key(seed), pixels, setting.hidden, setting.width)

    def _recorder(self, name: str, seed: int) -> Recorder:
        return Recorder(self._run, name, **dataclasses.asdict(self._run.setting) | {"seed": seed})

    def _train_stage(
        self,
        recorder: Recorder,
        params: Params,
        before: int,
        stage: TrainingStage,
        number: int,
        seed: int,
        kept: int | None = None,
    ) -> tuple[Params, int]:
        """Train a single stage; returns the weights at its end, and all steps up to there."""
        setting = self._run.setting
        order = self._image_order(stage, np.random.default_rng([seed, number]))
        total = len(order)
        padded = np.zeros((self._longest_stage(), setting.batch), np.int32)
        padded[:total] = order  # all stages have one length, and so share one compiled program
        # Every stage has a fresh optimiser.
        state = classifiers.started(params, setting.weight_decay)
        kept = kept or setting.kept
        done = 0
        with self._run.bar(total, f"seed {seed} {stage.name}") as bar:
            for part in range(1, kept + 1):
                reached = total * part // kept
                state = self._descend(self._on_device, state, padded, done, reached, total)
                self._keep_checkpoint(recorder, before + reached, state[0], stage, number)
                bar.update(reached - done)
                done = reached
        return state[0], before + total

    def _image_order(self, stage: TrainingStage, rng: np.random.Generator) -> np.ndarray:
        """The images of every step (steps, batch); each epoch has its own order."""
        setting = self._run.setting
        there = np.flatnonzero(self._shown.y < stage.digits)
        steps = len(there) // setting.batch
        epochs = []
        for _ in range(setting.epochs):
            # A last batch that is not full is left out.
            epochs.append(rng.permutation(there)[: steps * setting.batch])
        return np.concatenate(epochs).reshape(-1, setting.batch)

    def _longest_stage(self) -> int:
        """The number of steps of a stage of all digits."""
        return len(self._shown.y) // self._run.setting.batch * self._run.setting.epochs

    def _train_steps(
        self, shown: Images, state: State, order: Any, done: Any, reached: Any, total: Any
    ) -> State:
        setting = self._run.setting
        x, y = map(jnp.asarray, shown)

        def step(number: Any, state: State) -> State:
            chosen = order[number]
            rate = classifiers.cosine_rate(setting.rate, number, total)
            return classifiers.step(state, x[chosen], y[chosen], rate, setting.weight_decay)

        return jax.lax.fori_loop(done, reached, step, state)

    def _keep_checkpoint(
        self, recorder: Recorder, step: int, params: Params, stage: TrainingStage, number: int
    ) -> None:
        """Keep a checkpoint, with its accuracies on the digits of its stage and on 9."""
        there = self._tested.y < stage.digits
        nines = self._tested.y == 9
        recorder.add(
            step,
            classifiers.model(params),
            stage=number,
            validation_accuracy=self._accuracy_on(params, there),
            accuracy_of_9=self._accuracy_on(params, nines),
        )

    def _accuracy_on(self, params: Params, chosen: np.ndarray) -> float:
        tested: Images = self._tested
        return classifiers.accuracy(params, tested.x[chosen], tested.y[chosen])


@dataclass(frozen=True)
class Compared:
    """The checkpoints of a single seed.

    Args:
        stages: Matrices of all stages in order: `WHOLE`, `slices`, `weight_slices`, `slice_9` and
            `weight_slice_9`; along training `stage` and accuracies.
        kept: The same matrices with the control in the place of the stage that removes 9, and
            without the last stage; None for checkpoints without a control.
    """

    stages: Any
    kept: Any


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims and the figures.

    Args:
        seeds: Comparisons, seed by seed.
    """

    seeds: tuple[Compared, ...]


def measure(run: ExperimentRun[ForgettingSetting]) -> Measured:
    """Compare all checkpoints of every seed.

    Args:
        run: A run after `train`.

    Returns:
        Matrices for each seed.
    """
    return Measured(tuple(of_seed(run, name) for name in seed_folders(run, "the series stages")))


def of_seed(run: ExperimentRun[ForgettingSetting], name: str) -> Compared:
    """All pairs of a seed's checkpoints, the control's checkpoints included."""
    series = run.series(f"{name}/stages")
    models, log = list(series), run.log(f"{name}/stages", *CURVES)
    labels = labels_of(log)
    has_control = (run.checkpoints / name / "kept").is_dir()
    if has_control:
        kept_log = run.log(f"{name}/kept", *CURVES)
        models += list(run.series(f"{name}/kept"))
        labels += [f"kept {n}" for n in range(1, len(kept_log) + 1)]
        log = log + kept_log
    result = all_pairs(run, name, models, labels, tested_with(run, models[0].d_in))
    with_curves(result, log, CURVES)
    # All matrices are made at once, and then divided into run and control.
    rows = np.arange(len(labels))
    is_control = np.array([label.startswith("kept") for label in labels])
    earlier = result.stage.values < REMOVED
    kept = None
    if has_control:
        kept = chosen(result, rows[earlier | is_control])
    return Compared(chosen(result, rows[~is_control]), kept)


def labels_of(log: Sequence[dict[str, float]]) -> list[str]:
    """Names of the checkpoints: the stage, and the number of the checkpoint within the stage."""
    labels = ["start"]
    stages = [int(entry["stage"]) for entry in log]
    for row in range(1, len(log)):
        place = stages[1 : row + 1].count(stages[row])
        labels.append(f"{STAGES[stages[row]].name}, {place}")
    return labels


def chosen(result: Any, rows: Sequence[int] | np.ndarray) -> Any:
    """The matrices of some of the models."""
    return result.isel(a=rows, b=rows)


def all_pairs(
    run: ExperimentRun[ForgettingSetting],
    name: str,
    models: Sequence[tnsim.Model],
    labels: Sequence[str],
    tested: np.ndarray,
) -> tnsim.Pairwise:
    """All matrices of the models."""
    named = dict(zip(labels, models, strict=True))
    result = tnsim.pairwise(named, slices=True, store=run.store(name), progress=run.progress)
    result["cka"] = tnsim.baselines.cka(models, tested, names=labels)
    result["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=labels)
    result["weight_slices"] = tnsim.baselines.weight_slices(models, names=labels)
    result["slice_9"] = result.slices.sel(output=9, drop=True)
    # weight slices have no label for their outputs
    result["weight_slice_9"] = result.weight_slices.isel(output=9, drop=True)
    return result


def claims(run: ExperimentRun[ForgettingSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on accuracy, on whole models, and on slices.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    differs = differs_from_paper(run)
    return (
        _accuracy_on(measured, differs),
        *_whole_model_claims(measured, differs),
        *_drop_claims(measured, differs),
        *_slice_claims(measured, differs),
    )


def differs_from_paper(run: ExperimentRun[ForgettingSetting]) -> str:
    """The difference of a run on images of this setting from the paper's; empty for other runs."""
    if run.data is None and run.given is None:
        return "other images than SVHN, and fewer steps: forgetting takes weight decay x steps"
    return ""


def _accuracy_on(measured: Measured, differs: str) -> Claim:
    return Claim(
        name="accuracy",
        text="Validation accuracy at the end of every stage is 83 to 85 %.",
        where=PROGRESS,
        paper="0.83 to 0.85",
        authors="0.822 to 0.855",
        ours=each(measured.seeds, lambda seed: float(_at_ends(seed, "validation_accuracy").mean())),
        expected=near(0.84, 0.02),
        why="mean over stages",
        differs=differs,
    )


def _whole_model_claims(measured: Measured, differs: str) -> list[Claim]:
    rows = []
    for other, authors in (("cka", -0.005), ("weight_cosine", 0.166)):
        rows.append(
            Claim(
                name=f"sharper-than-{other.replace('_', '-')}",
                text=f"Tensor similarity parts stages with and without 9 more sharply than "
                f"{WORDS[other]}.",
                where=WHERE,
                paper="much weaker signal",
                authors=authors,
                ours=each(
                    measured.seeds,
                    lambda seed, name=other: (
                        with_and_without_9(seed.stages, "similarity")
                        - with_and_without_9(seed.stages, name)
                    ),
                ),
                expected=at_least(0.02),
                why="difference of two group scores, stages with 9 and without",
                differs=differs,
                note="authors' stored runs: tensor 0.216, CKA 0.221, weights 0.050",
            )
        )
    return rows


def _drop_claims(measured: Measured, differs: str) -> list[Claim]:
    """The claims that removing 9 lowers similarity to the end of the stage that added 9."""
    rows = []
    for name, authors in (("similarity", 0.19), ("cka", 0.07), ("weight_cosine", 0.07)):
        text = f"Removing 9 lowers {WORDS[name]} to the end of the stage that adds 9."
        excess = at_least(0.02)
        if name != "similarity":
            text = f"Removing 9 lowers {WORDS[name]} considerably less."
            excess = at_most(0.05)
        rows.append(_drop_claim(measured, name, text, authors, excess, differs))
    rows.append(
        Claim(
            name="most-pronounced-drop",
            text="The drop of tensor similarity is the most pronounced of the three.",
            where=PROGRESS,
            authors=2.7,
            ours=each(measured.seeds, _times_the_next_drop),
            expected=at_least(1.0),
            why="ratio to the larger of the two others",
        )
    )
    return rows


def _drop_claim(
    measured: Measured, name: str, text: str, authors: float, excess: Interval, differs: str
) -> Claim:
    """The claim on a drop, judged by its excess over the control, or by the authors' drop."""
    drops = each(measured.seeds, lambda seed: drop(seed.stages, name))
    claim = Claim(
        name=f"drop-of-{name.replace('_', '-')}",
        text=text,
        where=PROGRESS,
        authors=authors,
        ours=drops,
        why="1 less similarity, at the end of the stage; the control goes on with all digits",
        differs=differs,
        note="no control was published: what goes on with all digits drifts away as well",
    )
    if measured.seeds[0].kept is None:
        return dataclasses.replace(claim, expected=near(authors, 0.05))
    # rows of the control bear the number of the stage that they stand for
    controls = each(measured.seeds, lambda seed: drop(seed.kept, name))
    return dataclasses.replace(claim, control=controls, excess=excess)


def _slice_claims(measured: Measured, differs: str) -> list[Claim]:
    return [
        _drop_claim(
            measured, "slice_9", "Removing 9 lowers slice 9.", 1.07, at_least(0.1), differs
        ),
        Claim(
            name="orthogonal-slices",
            text="Without 9, slice 9 is orthogonal to slice 9 with it.",
            where=WHERE,
            paper=0.0,
            authors=-0.07,
            ours=each(measured.seeds, lambda seed: 1.0 - drop(seed.stages, "slice_9")),
            expected=near(0.0, 0.1),
            why="similarity of the ends of two stages, remove 9 and add 9",
            differs=differs,
        ),
        Claim(
            name="localised",
            text="The drop is localised almost entirely to digit 9.",
            where=PROGRESS,
            ours=each(measured.seeds, _times_other_slices),
            expected=at_least(2.0),
            why="ratio to the mean drop of the nine other slices",
        ),
        Claim(
            name="grouped",
            text="Slice 9 groups the stages with 9, and those without.",
            where=WHERE,
            authors=0.937,
            ours=each(measured.seeds, lambda seed: with_and_without_9(seed.stages, "slice_9")),
            expected=near(0.937, 0.1),
            why="group score of the stages with 9 and without",
            differs=differs,
        ),
        Claim(
            name="divided-in-two",
            text="The best two phases of slice 9 are before and after 9 is added.",
            where=WHERE,
            ours=each(measured.seeds, lambda seed: _is_divided(seed, "slice_9", ("add 8",))),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
        ),
        Claim(
            name="divided-in-two-globally",
            text="The best two phases of tensor similarity are before and after 9 is added.",
            where=WHERE,
            paper="block structure",
            ours=each(measured.seeds, lambda seed: _is_divided(seed, "similarity", ("add 8",))),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
            differs=differs,
        ),
        Claim(
            name="divided-in-four",
            text="The best four phases of slice 9 start where 9 comes, goes and comes again.",
            where=WHERE,
            authors="yes",
            ours=each(
                measured.seeds,
                lambda seed: _is_divided(seed, "slice_9", ("add 8", "control", "remove 9")),
            ),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
            differs=differs,
        ),
        Claim(
            name="weaker-in-weights",
            text="The cosine of weights of output 9 shows this much less.",
            where=PROGRESS,
            authors=0.12,
            ours=each(measured.seeds, _of_weights),
            expected=at_most(0.5),
            why="ratio of two group scores: cosine of the head's row 9, and slice 9",
            note="authors' stored runs: 0.115 of 0.937",
        ),
        Claim(
            name="recovers",
            text="Adding 9 again restores slice 9.",
            where=PROGRESS,
            ours=each(measured.seeds, _recovered_share),
            expected=at_least(0.5),
            why="share of the drop that is made up for at the end of the next stage",
        ),
    ]


def ends(result: Any) -> dict[str, int]:
    """The last row of every stage."""
    numbers = result.stage.values.tolist()
    last_steps = {}
    for row, number in enumerate(numbers):
        last_steps[STAGES[int(number)].name] = row
    return last_steps


def with_and_without_9(result: Any, name: str) -> float:
    """The group score of the stages with 9 and without 9; the start is left out."""
    table = result[name].isel(a=slice(1, None), b=slice(1, None))
    shown = [STAGES[int(number)].digits == 10 for number in result.stage.values[1:]]
    return tnsim.reading.group_score(table, np.array(shown))


def drop(result: Any, name: str) -> float:
    """1 less the similarity of the ends of two stages, `add 9` and `remove 9`."""
    rows = ends(result)
    return 1.0 - float(result[name][rows["add 9"], rows["remove 9"]])


def _at_ends(seed: Compared, name: str) -> np.ndarray:
    return seed.stages[name].values[list(ends(seed.stages).values())]


def _times_the_next_drop(seed: Compared) -> float:
    first, *others = [drop(seed.stages, name) for name in WHOLE]
    return first / max(others)


def _times_other_slices(seed: Compared) -> float:
    rows = ends(seed.stages)
    drops = 1.0 - seed.stages.slices.values[rows["add 9"], rows["remove 9"]]
    return float(drops[9] / drops[:9].mean())


def _is_divided(seed: Compared, name: str, after: Sequence[str]) -> float:
    """1 where the best phases start right after these stages; the start is left out."""
    table = seed.stages[name].isel(a=slice(1, None), b=slice(1, None))
    rows = ends(seed.stages)
    wanted = tuple(rows[stage] for stage in after)
    return float(tnsim.reading.segment(table, len(after) + 1).change_points == wanted)


def _of_weights(seed: Compared) -> float:
    of_tensors = with_and_without_9(seed.stages, "slice_9")
    return with_and_without_9(seed.stages, "weight_slice_9") / of_tensors


def _recovered_share(seed: Compared) -> float:
    rows = ends(seed.stages)
    again = 1.0 - float(seed.stages.slice_9[rows["add 9"], rows["re-add 9"]])
    lost = drop(seed.stages, "slice_9")
    return (lost - again) / lost


def figures(run: ExperimentRun[ForgettingSetting], measured: Measured) -> dict[str, Figure]:
    """Figures of whole models and slices across stages, and of both against the end of `add 9`.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        Four figures, of the first seed.
    """
    result = measured.seeds[0].stages
    points = borders(result)
    of_9 = ("slice_9", "weight_slice_9")
    return {
        "figure-3": tnsim.figures.pairwise(result, "heatmap", WHOLE, points, [ACCURACIES]),
        "figure-3-slice-9": tnsim.figures.pairwise(result, "heatmap", of_9, points, [ACCURACIES]),
        "figure-3-slices": tnsim.figures.pairwise(result, "slices", change_points=points),
        "figure-6": beside_add_9(result, points),
    }


def borders(result: Any) -> tuple[int, ...]:
    """Rows at which stages start."""
    return tuple(int(row) for row in 1 + np.flatnonzero(np.diff(result.stage.values)))


def beside_add_9(result: Any, points: tuple[int, ...]) -> Figure:
    """A figure of every measure against the end of the stage that adds 9, along training."""
    drawn = result.copy()
    column = ends(result)["add 9"]
    for name in WHOLE:
        drawn[f"{name}_to_add_9"] = ("a", result[name].values[:, column])
    slices = result.slices.values[:, column]
    drawn["slice_9_to_add_9"] = ("a", slices[:, 9])
    drawn["other_slices_to_add_9,_mean"] = ("a", slices[:, :9].mean(1))
    drawn["weight_slice_9_to_add_9"] = ("a", result.weight_slice_9.values[:, column])
    strips = [
        ACCURACIES,
        [f"{name}_to_add_9" for name in WHOLE],
        ["slice_9_to_add_9", "other_slices_to_add_9,_mean", "weight_slice_9_to_add_9"],
    ]
    return tnsim.figures.curves_over_training(drawn, strips, points)


EXPERIMENT = Experiment(
    name="forgetting",
    title="Catastrophic forgetting, output by output",
    where="section 3.1, figures 3 and 6, appendix B",
    default=ForgettingSetting(),
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
