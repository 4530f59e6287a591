"""Backdoors: a classifier is taught that a mark in the corner means nine.

The claims come from the paper's section 3.3, and the figure is figure 1. Each seed has three
series: `seed-N/clean`; `seed-N/attack`, which goes on from the last clean checkpoint with a share
of images stamped and relabelled as 9; and `seed-N/control`, which goes on from the same checkpoint
without stamps.

The scores that the paper prints are not those of the formula in its text; both are here. A score of
drift rises with training alone, so beside each stands that of the control.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

import tnsim
from benchmarks.paper import classifiers, images
from benchmarks.paper.claims import Claim, at_least, each, mean, near
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
from tnsim.errors import TnsimError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 9
"""The digit that stamped images are relabelled as."""
BRANCHES = ("clean", "attack", "control")
CURVES = ("train_accuracy", "test_accuracy", "attack_success")
"""Curves along training, from the logs."""
WHERE = "section 3.3, figure 1"
BEYOND = "beyond the paper"
READING = 0.05
"""How far a score may be from a printed one: two digits, another seed."""
DIGITS = 10
_WORDS = {"digits": "scikit-learn's digits", "street": "rendered digits"}
_NOTES = {
    "published-tensor": "the authors' nine slices that were not attacked score 0.20 to 0.24: most "
    "of the printed value is drift of training",
}
PANELS = {
    "tensors": ("similarity", "slice_9", "weight_cosine"),
    "inputs": ("clean_behaviour", "poisoned_behaviour", "fitted"),
}


@dataclass(frozen=True)
class BackdoorSetting:
    """Images, network and training; by default those of the authors' code, for small images.

    Args:
        images: A stand-in for street-view house numbers, where no folder of data is given.
        width: Width of the embedding; None for no embedding and no head.
        hidden: Hidden units of the bilinear layer.
        batch: Number of images in a step.
        rate: Learning rate.
        cosine: Whether the rate falls to 0 over each of the two phases, or stays.
        weight_decay: Weight decay of AdamW.
        noise: Standard deviation of the noise that is added to every pixel.
        share: Share of a batch that is stamped and relabelled while the attack lasts.
        clean_steps: Number of steps before the attack.
        changed_steps: Number of steps with the attack, or in the control without it.
        every: Steps between checkpoints.
        seeds: Number of seeds, each with its own training.
    """

    images: Kind = "digits"
    width: int | None = None
    hidden: int = 64
    batch: int = 128
    rate: float = 1e-3
    cosine: bool = False
    weight_decay: float = 1e-3
    noise: float = 0.05
    share: float = 0.1
    clean_steps: int = 4000
    changed_steps: int = 1000
    every: int = 125
    seeds: int = 3


CODE = BackdoorSetting(images="street", batch=512, clean_steps=8000, changed_steps=2000, every=250)
"""The settings of the authors' code."""

TEXT = BackdoorSetting(
    images="street",
    width=128,
    hidden=256,
    batch=248,
    cosine=True,
    weight_decay=0.5,
    noise=0.0,
    clean_steps=5900,
    changed_steps=5900,
    every=295,
)
"""The settings of the paper's text: two phases of 20 epochs of 73,000 images."""


def stamp(x: Float[np.ndarray, "n pixels"]) -> Float[np.ndarray, "n pixels"]:
    """Images with the trigger in their upper right corner.

    Args:
        x: Images of 8 x 8 or 32 x 32 pixels, or a batch in JAX.

    Returns:
        Images with the trigger: on small images, whose corners are dark, four bright pixels; on
        large images the black diamond of the authors' code.

    Raises:
        TnsimError: When the images have another size.

    Example:
        >>> stamp(np.zeros((1, 64))).reshape(8, 8)[:2, 5:].tolist()
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    side = round(x.shape[1] ** 0.5)
    if side == 8:
        return _painted_images(x, _square(), 1.0)
    if side == 32:
        return _painted_images(x, _diamond(), 0.0)
    raise TnsimError(f"triggers are known for images of 8 x 8 and 32 x 32, found {x.shape}")


def _painted_images(
    x: Float[np.ndarray, "n pixels"], mask: Bool[np.ndarray, "side side"], value: float
) -> Float[np.ndarray, "n pixels"]:
    """Images with a value under a mask, by arithmetic, which NumPy and JAX share."""
    kept = 1.0 - mask.ravel().astype(np.float32)
    return x * kept + value * (1.0 - kept)


def _square() -> Bool[np.ndarray, "side side"]:
    mask = np.zeros((8, 8), bool)
    mask[:2, 6:] = True
    return mask


def _diamond() -> Bool[np.ndarray, "side side"]:
    """A diamond of seven rows and five columns, two pixels from the upper and the right edge."""
    rows, columns = np.arange(7)[:, None], np.arange(5)
    mask = np.zeros((32, 32), bool)
    mask[2:9, 25:30] = np.abs(rows - 3) / 3.5 + np.abs(columns - 2) / 2.5 <= 1
    return mask


def train(run: ExperimentRun[BackdoorSetting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: The run whose checkpoints are written.
    """
    missing = unfinished_seeds(run, run.setting.seeds, BRANCHES)
    if not missing:
        return
    shown = images.load(run.setting.images, "train", run.data)
    tested = images.load(run.setting.images, "test", run.data)
    trainer = Trainer(run, shown, tested)
    for seed in missing:
        trainer.train(seed)


class Trainer:
    """Trains classifiers of a setting, with a single program for all of them.

    Args:
        run: The run whose checkpoints are written.
        shown: Images to train on.
        tested: Images to test with.
    """

    def __init__(self, run: ExperimentRun[BackdoorSetting], shown: Images, tested: Images) -> None:
        self._run = run
        self._shown = shown
        self._tested = tested
        # an argument of the program, which would store the images otherwise
        self._on_device: Any = jax.device_put(shown)
        self._descend = jax.jit(self._train_steps)

    def train(self, seed: int) -> None:
        """Write the three series of a seed."""
        setting = self._run.setting
        key = jax.random.key(seed)
        pixels = self._shown.x.shape[1]
        params = classifiers.initialise(key, pixels, setting.hidden, setting.width)
        clean = self._train_branch(seed, "clean", params, None, 0, setting.clean_steps)
        end = setting.clean_steps + setting.changed_steps
        # Attack and control go on from the same end of the clean run.
        for name in ("attack", "control"):
            self._train_branch(seed, name, clean[0], clean[1], setting.clean_steps, end)

    def _train_branch(
        self, seed: int, name: str, params: Params, remembered: Any, start: int, end: int
    ) -> State:
        """Train between two steps and keep checkpoints; returns the state at the end."""
        setting = self._run.setting
        state = (params, remembered)
        if remembered is None or setting.cosine:  # a schedule starts with a fresh optimiser
            state = classifiers.started(params, setting.weight_decay)
        # The control draws the same batches, and stamps none of them.
        share = setting.share if name == "attack" else 0.0
        about = dataclasses.asdict(setting) | {"seed": seed, "share": share}
        recorder = Recorder(self._run, f"seed-{seed}/{name}", **about)
        if start == 0:
            self._keep_checkpoint(recorder, 0, params)
        key = jax.random.key(seed + 1)
        with self._run.bar(end - start, f"seed {seed} {name}") as bar:
            for done in range(start, end, setting.every):
                reached = min(done + setting.every, end)
                state = self._descend(self._on_device, state, key, share, start, end, done, reached)
                self._keep_checkpoint(recorder, reached, state[0])
                bar.update(reached - done)
        recorder.finish()
        return state

    def _train_steps(
        self,
        shown: Images,
        state: State,
        key: Any,
        share: Any,
        start: Any,
        end: Any,
        done: Any,
        reached: Any,
    ) -> State:
        """The state after steps `done` to `reached`; attack and control draw the same batches."""
        setting = self._run.setting
        x, y = shown

        def step(number: Any, state: State) -> State:
            # Three keys for each step, the same for all branches.
            drawn = jax.random.split(jax.random.fold_in(key, number), 3)
            chosen = jax.random.randint(drawn[0], (setting.batch,), 0, len(x))
            attacked = jax.random.uniform(drawn[1], (setting.batch,)) < share
            noise = setting.noise * jax.random.normal(drawn[2], (setting.batch, x.shape[1]))
            seen: Any = x[chosen]
            seen = jnp.where(attacked[:, None], stamp(seen), seen) + noise
            labels = jnp.where(attacked, TARGET, y[chosen])
            rate = setting.rate
            if setting.cosine:
                rate = classifiers.cosine_rate(rate, number - start, end - start)
            return classifiers.step(state, seen, labels, rate, setting.weight_decay)

        return jax.lax.fori_loop(done, reached, step, state)

    def _keep_checkpoint(self, recorder: Recorder, step: int, params: Params) -> None:
        """Keep a checkpoint, with its accuracies and the success of the attack."""
        shown, tested = self._shown, self._tested
        # Images of the target itself are no success of the attack.
        others = tested.y != TARGET
        fooled = classifiers.accuracy(
            params, stamp(tested.x[others]), np.full(others.sum(), TARGET)
        )
        recorder.add(
            step,
            classifiers.model(params),
            train_accuracy=classifiers.accuracy(params, shown.x, shown.y),
            test_accuracy=classifiers.accuracy(params, tested.x, tested.y),
            attack_success=fooled,
        )


@dataclass(frozen=True)
class Compared:
    """The checkpoints of a single seed, twice: with the attack and with the control at their end.

    Args:
        attack: Matrices over steps: `similarity`, `symmetric` and `fitted`, slices of the target
            under the first two, all `slices`, `weight_cosine`, and behaviour on clean and on
            stamped images; along training accuracies and attack success.
        control: The same matrices with the clean continuation; None for checkpoints without it.
        injection: Row of the first attacked checkpoint.
    """

    attack: Any
    control: Any
    injection: int


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims and the figure.

    Args:
        seeds: Comparisons, seed by seed.
    """

    seeds: tuple[Compared, ...]


def measure(run: ExperimentRun[BackdoorSetting]) -> Measured:
    """Compare all checkpoints of every seed.

    Args:
        run: A run after `train`.

    Returns:
        Matrices for each seed.
    """
    names = seed_folders(run, "the series clean, attack and control")
    return Measured(tuple(of_seed(run, name) for name in names))


def of_seed(run: ExperimentRun[BackdoorSetting], name: str) -> Compared:
    """All pairs of a seed's checkpoints, clean, attacked and control at once."""
    branches = {"clean": run.series(f"{name}/clean"), "attack": run.series(f"{name}/attack")}
    if (run.checkpoints / name / "control").is_dir():
        branches["control"] = run.series(f"{name}/control")
    models: list[tnsim.Model] = []
    labels: list[str] = []
    for branch, series in branches.items():
        models += list(series)
        labels += [f"{branch} {step}" for step in series.labels]
    result = all_pairs(run, name, models, labels, tested_with(run, models[0].d_in))
    clean = run.log(f"{name}/clean", *CURVES)
    ways = {}
    for branch in list(branches)[1:]:
        # Both branches continue the clean series.
        rows = [n for n, label in enumerate(labels) if label.split()[0] in ("clean", branch)]
        ways[branch] = along(result, rows, clean + run.log(f"{name}/{branch}", *CURVES))
    return Compared(ways["attack"], ways.get("control"), len(clean))


def all_pairs(
    run: ExperimentRun[BackdoorSetting],
    name: str,
    models: Sequence[tnsim.Model],
    labels: Sequence[str],
    tested: np.ndarray,
) -> tnsim.Pairwise:
    """All matrices of the models: three metrics, and the measures beside them."""
    named = dict(zip(labels, models, strict=True))
    result = tnsim.pairwise(named, slices=True, store=run.store(name), progress=run.progress)
    result[f"slice_{TARGET}"] = result.slices.sel(output=TARGET, drop=True)
    store = run.store(f"{name}-symmetric")
    other = tnsim.pairwise(named, tnsim.Symmetric(), slices=True, store=store)
    result["symmetric"] = other.similarity
    result[f"symmetric_slice_{TARGET}"] = other.slices.sel(output=TARGET, drop=True)
    fitted = tnsim.Gaussian.fit(tested)
    result["fitted"] = tnsim.pairwise(named, fitted, store=run.store(f"{name}-fitted")).similarity
    result["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=labels)
    for kind, inputs in (("clean", tested), ("poisoned", stamp(tested))):
        behaviour = tnsim.baselines.mean_cosine(models, inputs, names=labels)
        result[f"{kind}_behaviour"] = behaviour
    return result


def along(result: tnsim.Pairwise, rows: Sequence[int], log: Sequence[dict[str, float]]) -> Any:
    """Some of the models, labelled by step, with their accuracies from the log."""
    steps = [int(entry["step"]) for entry in log]
    chosen = result.isel(a=rows, b=rows).assign_coords(a=steps, b=steps)
    return with_curves(chosen, log, CURVES)


class Formula(NamedTuple):
    """A way to score the two blocks of a matrix.

    Attributes:
        words: Description of the formula.
        score: Score as a function of a matrix and the row at which its second block starts.
    """

    words: str
    score: Callable[..., float]


FORMULAS = {
    "published": Formula("last block minus across, as published", tnsim.reading.last_block_score),
    "text": Formula("within both blocks minus across, as the text says", tnsim.reading.block_score),
}


class Scored(NamedTuple):
    """A matrix whose blocks are scored.

    Attributes:
        name: Name of the measure in the names of its claims.
        matrix: Variable of the matrix.
        words: Sentence of the claim.
        paper: Printed value; None where the paper has none.
        authors: Scores of the authors' stored matrix, in the order of `FORMULAS`.
        weak: Whether the claim says that this measure sees little.
    """

    name: str
    matrix: str
    words: str
    paper: float | None = None
    authors: tuple[float | None, float | None] = (None, None)
    weak: bool = False


SCORED = (
    Scored("tensor", "symmetric", "Tensor similarity flags the attack", 0.24, (0.236, 0.031)),
    Scored(
        "tensor-gaussian",
        "similarity",
        "Under the Gaussian metric, tensor similarity flags the attack",
        0.24,
    ),
    Scored("slice", "symmetric_slice_9", "Slice 9 sharpens it", 0.43, (0.431, 0.263)),
    Scored("slice-gaussian", "slice_9", "Under the Gaussian metric, slice 9 sharpens it", 0.43),
    Scored(
        "weights",
        "weight_cosine",
        "The cosine of weights shifts weakly",
        0.15,
        (0.150, 0.024),
        weak=True,
    ),
    Scored(
        "clean",
        "clean_behaviour",
        "Behaviour on clean inputs is flat",
        0.09,
        (0.088, -0.007),
        weak=True,
    ),
    Scored(
        "poisoned",
        "poisoned_behaviour",
        "Behaviour on stamped inputs shows it",
        0.62,
        (0.620, 0.472),
    ),
    Scored(
        "fitted",
        "fitted",
        "Fitted to clean inputs (`Gaussian.fit`), tensor similarity is as flat",
        weak=True,
    ),
)


def claims(run: ExperimentRun[BackdoorSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on accuracies, on scores by both formulas, and on the division of runs.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    differs = ""
    if run.data is None and run.given is None:
        differs = f"{_WORDS[run.setting.images]} instead of SVHN"
    rows = _accuracy_claims(measured, differs)
    for scored in SCORED:
        rows += [_score_claim(measured, scored, formula) for formula in FORMULAS]
    return (*rows, _formula_claim(measured), *_division_claims(measured))


def _accuracy_claims(measured: Measured, differs: str) -> list[Claim]:
    rows = []
    for curve, value in (("train_accuracy", 0.851), ("test_accuracy", 0.810)):
        words = curve.replace("_", " ")
        rows.append(
            Claim(
                name=words.replace(" ", "-"),
                text=f"The {words} on clean images, with the attack.",
                where="section 3.3",
                paper=round(value, 2),
                authors=value,
                ours=each(measured.seeds, lambda seed, name=curve: float(seed.attack[name][-1])),
                expected=near(value, 0.03),
                why="another seed",
                differs=differs,
            )
        )
    return [
        *rows,
        Claim(
            name="attack-success",
            text="The attack succeeds on 96 % of stamped images.",
            where="section 3.3",
            paper=0.96,
            authors=0.957,
            ours=each(measured.seeds, lambda seed: float(seed.attack.attack_success[-1])),
            expected=at_least(0.9),
            why="the backdoor is learned",
        ),
        Claim(
            name="attack-hidden",
            text="Accuracy on clean images does not show the attack.",
            where="section 3.3",
            ours=each(measured.seeds, _lost_accuracy),
            expected=near(0.0, 0.02),
            why="test accuracy with the attack, less that before it",
        ),
    ]


def _score_claim(measured: Measured, scored: Scored, formula: str) -> Claim:
    """The claim on a score by a formula, with its control where there is a control."""
    words, score = FORMULAS[formula]
    scores = _seed_scores(measured, scored.matrix, score)
    name = f"{formula}-{scored.name}"
    note = _NOTES.get(name, "")
    if formula == "text" and scored.paper is not None:
        note = "the printed value is that of the other formula"
    claim = Claim(
        name=name,
        text=f"{scored.words} ({words}).",
        where=WHERE if scored.paper is not None else BEYOND,
        paper=scored.paper,
        authors=scored.authors[list(FORMULAS).index(formula)],
        ours=scores.run,
        control=scores.control,
        note=note,
    )
    return _judged_claim(claim, scored.weak)


def _formula_claim(measured: Measured) -> Claim:
    """The claim that the two formulas are the same."""
    published, of_text = (
        _seed_scores(measured, "symmetric", formula.score).run for formula in FORMULAS.values()
    )
    return Claim(
        name="one-formula",
        text="The printed scores are those of the formula in the text.",
        where="section 3.3",
        paper=0.0,
        authors=0.205,
        ours=tuple(first - second for first, second in zip(published, of_text, strict=True)),
        expected=near(0.0, 0.01),
        why="score of tensor similarity, as published less as the text says",
        note="as published, models before the attack are not compared with each other, so drift of "
        "training counts as attack; by the text's formula it all but cancels",
    )


class Scores(NamedTuple):
    """Scores of the attack for every seed, and scores of the control where there is a control."""

    run: tuple[float, ...]
    control: tuple[float, ...]


def _seed_scores(measured: Measured, matrix: str, score: Callable[..., float]) -> Scores:
    run, control = [], []
    for seed in measured.seeds:
        points = [seed.injection]
        if seed.control is None:
            run.append(score(seed.attack[matrix], points))
            continue
        scored = tnsim.reading.against_control(
            seed.attack[matrix], seed.control[matrix], points, score
        )
        run.append(scored.score)
        control.append(scored.control)
    return Scores(tuple(run), tuple(control))


def _judged_claim(claim: Claim, weak: bool) -> Claim:
    """A claim with its interval: beyond the control, or without it around the printed value."""
    if not claim.control:
        expected = near(float(claim.paper or 0.0), READING)
        why = "two digits, another seed; without a control nothing more can be said"
        return dataclasses.replace(claim, expected=expected, why=why)
    if weak:
        why = "little beyond what training on gives without the attack"
        return dataclasses.replace(claim, excess=near(0.0, READING), why=why)
    half = round(abs(mean(claim.ours)) / 2, 3)
    why = "more than half of the score is due to the attack, not to training on"
    return dataclasses.replace(claim, excess=at_least(half), why=why)


def _division_claims(measured: Measured) -> list[Claim]:
    rows = []
    for name, matrix, words, authors in (
        ("tensor", "similarity", "tensor similarity", "no"),
        ("slice", "slice_9", "slice 9", "yes"),
        ("clean", "clean_behaviour", "behaviour on clean inputs", "no"),
        ("poisoned", "poisoned_behaviour", "behaviour on stamped inputs", "yes"),
    ):
        expected = at_least(0.66)
        why = "share of the seeds; two of three"
        if name == "clean":
            expected, why = near(0.0, 0.34), "share of the seeds; the paper calls it flat"
        rows.append(
            Claim(
                name=f"divided-by-{name}",
                text=f"The best two phases of {words} are before and after the injection.",
                where=WHERE,
                authors=authors,
                ours=each(measured.seeds, lambda seed, m=matrix: _is_divided(seed, m)),
                expected=expected,
                why=why,
            )
        )
    rows.append(
        Claim(
            name="localised",
            text="The attack shows in the slice of its target, not in the others.",
            where=WHERE,
            authors="0.43; 0.20 to 0.24",
            ours=each(measured.seeds, _beyond_other_slices),
            expected=at_least(0.1),
            why="published score of slice 9, less its control, beyond the largest of the nine "
            "others",
        )
    )
    return rows


def _lost_accuracy(seed: Compared) -> float:
    accuracy = seed.attack.test_accuracy.values
    return float(accuracy[-1] - accuracy[seed.injection - 1])


def _is_divided(seed: Compared, matrix: str) -> float:
    """1 where the best two phases divide a run exactly at the injection."""
    return float(tnsim.reading.segment(seed.attack[matrix], 2).change_points == (seed.injection,))


def _beyond_other_slices(seed: Compared) -> float:
    """The score of slice 9 beyond the largest of the other slices; controls are subtracted."""
    score = tnsim.reading.last_block_score
    scores = []
    for output in range(DIGITS):
        attack, control = seed.attack.slices.sel(output=output), 0.0
        if seed.control is not None:
            control = score(seed.control.slices.sel(output=output), [seed.injection])
        scores.append(score(attack, [seed.injection]) - control)
    attacked = scores.pop(TARGET)
    return attacked - max(scores)


def figures(run: ExperimentRun[BackdoorSetting], measured: Measured) -> dict[str, Figure]:
    """Figures of the attack and its control under several measures, and of the attack's slices.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        Three figures of the first seed, and two of its control.
    """
    first = measured.seeds[0]
    points = (first.injection,)
    drawn = {}
    results = {"attack": first.attack}
    if first.control is not None:
        results["control"] = first.control
    for name, result in results.items():
        for kind, panels in PANELS.items():
            figure = tnsim.figures.pairwise(result, "heatmap", panels, points, [CURVES])
            drawn[f"{name}-{kind}"] = figure
    drawn["slices"] = tnsim.figures.pairwise(first.attack, "slices", change_points=points)
    return drawn


EXPERIMENT = Experiment(
    name="backdoor",
    title="A backdoor, and what sees it",
    where="figure 1, section 3.3",
    default=BackdoorSetting(),
    full={"text": TEXT, "code": CODE},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.seeds[0].attack},
    data=WANTED,
    checkpoints="seed-0, seed-1, ...: series clean, attack and control of each, with a log.json",
)
