"""Which part: when heads began to work together, which edges carry it, what a change is made of.

Three experiments whose truth is known. *Induction*: the share of paths through both attention
layers, under uniform random tokens, beside the accuracy on repeated tokens; and the effect of
cutting edges beside the accuracy that is lost. The first seed is the shipped series, others are
trained. *Planted changes*: a hidden unit of a stack is replaced, and the hidden bases of all
layers are scrambled, which changes no function. *Backdoor*: a stack is fine-tuned on poisoned
inputs, in shared bases, where every weight moves: here shares should find no more than norms do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

import tnsim
from benchmarks.paper.claims import Claim, Summary, at_least, at_most, each, mean, near
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.induction import Repeated, drawn
from benchmarks.paper.repetitions import RepetitionSetting, trained
from benchmarks.paper.run import (
    ExperimentRun,
    Recorder,
    read_json,
    seed_folders,
    write_json,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "beyond the paper; its section 5 asks for it"
LAYERS = ("layer 1", "layer 2")
"""The attention layers of the induction models, between embedding and readout."""
CURVES = {
    "accuracy": "accuracy on repeated tokens",
    "share": "composition share",
    "score": "composition score",
    "norm": "norm of the weights of attention",
}
"""Words for the curves over training by their names."""
LEGS = {"Q": ("q1", "q2"), "K": ("k1", "k2"), "V": ("v",)}
"""Matrices of attention that read as queries, keys and values."""


@dataclass(frozen=True)
class PathsSetting:
    """Sizes of the three experiments.

    Args:
        seeds: Number of induction series, the shipped series included.
        training: Sizes and rates of the series that are trained.
        samples: Number of sequences of uniform random tokens under which paths are compared.
        edge_samples: The same number for edges.
        sequences: Number of repeated sequences on which behaviour is measured.
        edge_steps: Steps at which edges are cut.
        planted: Number of stacks with a planted change.
        backdoors: Number of stacks with a backdoor.
        points: Number of normal inputs under which changes of stacks are split.
    """

    seeds: int = 3
    training: RepetitionSetting = RepetitionSetting()
    samples: int = 128
    edge_samples: int = 32
    sequences: int = 500
    edge_steps: tuple[int, ...] = (450, 900, 4000)
    planted: int = 30
    backdoors: int = 4
    points: int = 256


def train(run: ExperimentRun[PathsSetting]) -> None:
    """Train the induction series that are not shipped.

    Args:
        run: The run whose checkpoints are written.
    """
    setting = run.setting.training
    seeds = range(run.seed + 1, run.seed + run.setting.seeds)
    missing = [seed for seed in seeds if run.unfinished([f"seed-{seed}"])]
    with run.bar(len(missing) * len(setting.steps), "training", "checkpoint") as bar:
        for seed in missing:
            recorder = Recorder(run, f"seed-{seed}", seed=seed)
            for step, model, measures in trained(setting, seed):
                recorder.add(step, model, name="", **measures)
                bar.update()
            recorder.finish()


def series_of(run: ExperimentRun[PathsSetting]) -> Iterator[tuple[list[int], list[tnsim.Model]]]:
    """The steps and the checkpoints of every induction series."""
    context = run.setting.training.context
    if run.given is None:
        every = [tnsim.Series(Path(tnsim.__file__).parent / "data" / "induction")]
        seeds = range(run.seed + 1, run.seed + run.setting.seeds)
        every += [run.series(f"seed-{seed}") for seed in seeds]
    else:
        every = [run.series(name) for name in seed_folders(run, "an induction series")]
    for series in every:
        yield (
            [int(label) for label in series.labels],
            [tnsim.Model(model.layers, n_ctx=context) for model in series],
        )


class Formation(NamedTuple):
    """Curves of an induction series.

    Attributes:
        steps: Steps of the checkpoints.
        curves: The curves of `CURVES`, (checkpoints,).
        edges: Rank correlations with the accuracy that is lost when an edge is cut, by step: of the
            effect of the cut under random tokens, and of the composition score.
    """

    steps: list[int]
    curves: dict[str, Float[np.ndarray, " checkpoints"]]
    edges: dict[int, tuple[float, float]]

    def pearson(self, curve: str) -> float:
        """The correlation of a curve with the accuracy."""
        return float(np.corrcoef(self.curves[curve], self.curves["accuracy"])[0, 1])

    def early(self, curve: str) -> float:
        """The part of a curve's rise that comes before the accuracy is twice chance."""
        accuracy, values = self.curves["accuracy"], self.curves[curve]
        # The last checkpoint before the rise.
        first = max(0, int((accuracy > 2 * accuracy[0]).argmax()) - 1)
        return float((values[first] - values[0]) / (values.max() - values[0]))

    def largest_rise(self, curve: str) -> int:
        """The number of the interval in which a curve rises most."""
        return int(np.diff(self.curves[curve]).argmax())


class Stack(NamedTuple):
    """Rank correlations with the attack that is lost when a layer is put back.

    Attributes:
        removed: Rank correlation of the change lost by the layer under normal inputs.
        norm: Rank correlation of the squared difference of the layer's weights.
        attack: Rate at which the trigger decides.
    """

    removed: float
    norm: float
    attack: float


@dataclass(frozen=True)
class Measured:
    """Measured values, for claims and figures.

    Args:
        formations: Curves of every induction series.
        planted: Fraction of planted changes with the largest share: of the change, and of the
            squared difference of weights.
        smallest: Smallest share of a planted part.
        backdoors: Rank correlations of every stack with a backdoor.
    """

    formations: tuple[Formation, ...]
    planted: tuple[float, float]
    smallest: float
    backdoors: tuple[Stack, ...]


def measure(run: ExperimentRun[PathsSetting]) -> Measured:
    """Measure all three experiments; each series and each stack is kept when it is measured.

    Args:
        run: A run after `train`.

    Returns:
        Curves and rank correlations.
    """
    formations = []
    for n, series in enumerate(series_of(run)):
        values = _kept_values(
            run, f"series-{n}", lambda series=series: _series_formation(run, *series)._asdict()
        )
        curves = {name: np.array(curve) for name, curve in values["curves"].items()}
        edges = {int(step): tuple(pair) for step, pair in values["edges"].items()}
        formations.append(Formation(values["steps"], curves, edges))
    stacks, points = [], run.setting.points
    with run.bar(run.setting.backdoors, "backdoors", "stack") as bar:
        for seed in range(run.seed, run.seed + run.setting.backdoors):
            kept = _kept_values(
                run, f"backdoor-{seed}", lambda seed=seed: backdoor(seed, points)._asdict()
            )
            stacks.append(Stack(**kept))
            bar.update()
    every = [planted(run.setting, (run.seed, n)) for n in range(run.setting.planted)]
    right, by_norm, shares = zip(*every, strict=True)
    fractions = float(np.mean(right)), float(np.mean(by_norm))
    return Measured(tuple(formations), fractions, min(shares), tuple(stacks))


def _kept_values(run: ExperimentRun[PathsSetting], name: str, measure: Callable[[], Any]) -> Any:
    """Values of an earlier call of this run, or new ones, which are kept; lists for arrays."""
    path = run.folder / "measured" / f"{name}.json"
    if not path.exists():
        # Values pass through JSON also when they are new, so that both ways give equal types.
        values = json.dumps(measure(), default=np.ndarray.tolist)
        write_json(path, json.loads(values))
    return read_json(path)


# ------------------------------------------------------------------------------------ induction


def _series_formation(
    run: ExperimentRun[PathsSetting], steps: list[int], models: list[tnsim.Model]
) -> Formation:
    """The curves of a series, and its edges at some steps."""
    setting = run.setting
    tokens = tnsim.Categorical(samples=setting.samples, seed=run.seed)
    paths: Any = tnsim.paths(dict(zip(map(str, steps), models, strict=True)), metric=tokens)
    training = setting.training
    repeated = drawn(
        setting.sequences, models[0].d_in, training.context, *training.segments, run.seed
    )
    curves = {
        "accuracy": np.array([accuracy(model, repeated) for model in models]),
        "share": paths.through(*LAYERS),
        "score": np.array([composition_scores(model).max() for model in models]),
        "norm": np.array([_attention_norm(model) for model in models]),
    }
    edges = {}
    wanted = [n for n, step in enumerate(steps) if step in setting.edge_steps]
    with run.bar(len(wanted), "edges", "model") as bar:
        for n in wanted:
            edges[steps[n]] = edge_ranks(models[n], setting, repeated, run.seed)
            bar.update()
    return Formation(steps, curves, edges)


def accuracy(model: tnsim.Model, repeated: Repeated) -> float:
    """The accuracy on tokens that an earlier occurrence of their predecessor determines."""
    outputs = np.asarray(_model_outputs(model, jnp.asarray(np.eye(model.d_in)[repeated.tokens])))
    right = outputs[:, :-1].argmax(axis=-1) == repeated.tokens[:, 1:]
    return float(right[repeated.determined].mean())


@jax.jit
def _model_outputs(model: tnsim.Model, one_hot: Any) -> Any:
    """The outputs, by a single program for all models of equal shape."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model)(one_hot)


def _attention_layers(model: tnsim.Model) -> list[tnsim.Attention]:
    """The two attention layers of a model of two."""
    _, first, second, _ = model.layers
    attention = []
    for layer in (first, second):
        if not (isinstance(layer, tnsim.Residual) and isinstance(layer.layer, tnsim.Attention)):
            raise tnsim.ModelError(f"attention is to be added to its input, found {layer}")
        attention.append(layer.layer)
    return attention


def _attention_norm(model: tnsim.Model) -> float:
    """The norm of all weights of attention."""
    arrays = [
        np.asarray(getattr(layer, name))
        for layer in _attention_layers(model)
        for name in ("q1", "k1", "q2", "k2", "v", "o")
    ]
    return float(np.sqrt(sum((array**2).sum() for array in arrays)))


def composition_scores(model: tnsim.Model) -> Float[np.ndarray, "sources targets legs"]:
    """Composition scores `|B A| / (|B| |A|)` of all heads of both layers, as queries, keys, values.

    Scores of both products of bilinear attention are averaged.

    Args:
        model: Model with two layers of attention.

    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    first, second = _attention_layers(model)
    # A head of layer 1 writes through O V.
    written = [o @ v for o, v in zip(_head_columns(first), _head_rows(first, "v"), strict=True)]
    shares = np.zeros((first.n_heads, second.n_heads, len(LEGS)))
    for target in range(second.n_heads):
        value = _head_columns(second)[target] @ _head_rows(second, "v")[target]
        scores = [
            _head_rows(second, q)[target].T @ _head_rows(second, k)[target]
            for q, k in (("q1", "k1"), ("q2", "k2"))
        ]
        for source, head in enumerate(written):
            read = {"Q": [score.T for score in scores], "K": scores, "V": [value]}
            for leg, matrices in enumerate(read.values()):
                # Bilinear attention has two scores, and a leg's score is their mean.
                shares[source, target, leg] = np.mean(
                    [_composition_score(x, head) for x in matrices]
                )
    return shares


def _composition_score(matrix: np.ndarray, other: np.ndarray) -> float:
    norms = np.linalg.norm(matrix) * np.linalg.norm(other)
    return float(np.linalg.norm(matrix @ other) / norms)


def _head_rows(layer: tnsim.Attention, name: str) -> list[np.ndarray]:
    """The rows of every head of a matrix."""
    return np.split(np.asarray(getattr(layer, name), np.float64), layer.n_heads)


def _head_columns(layer: tnsim.Attention) -> list[np.ndarray]:
    """The columns of the output matrix that belong to each head."""
    return np.split(np.asarray(layer.o, np.float64), layer.n_heads, axis=1)


def edge_ranks(
    model: tnsim.Model, setting: PathsSetting, repeated: Repeated, seed: int
) -> tuple[float, float]:
    """Rank correlations of two measures with the accuracy that is lost when edges are cut.

    Args:
        model: Model with two layers of attention.
        setting: Sizes of the measurement.
        repeated: Sequences on which accuracy is measured.
        seed: Seed of the random tokens.

    Returns:
        The correlation of the effect of cutting an edge under random tokens, and that of the
        composition score, over all edges from heads of layer 1 to heads of layer 2.
    """
    tokens = tnsim.Categorical(samples=setting.edge_samples, seed=seed)
    edges: Any = tnsim.paths(model, metric=tokens, by="head", legs=True)
    effect = dict(zip(edges.edges, edges.cut, strict=True))
    scores = composition_scores(model)
    whole = accuracy(model, repeated)
    lost, cuts, composed = [], [], []
    for source, target, leg in np.ndindex(*scores.shape):
        name = list(LEGS)[leg]
        lost.append(whole - accuracy(without_edge(model, source, target, name), repeated))
        cuts.append(effect[f"layer 1 head {source} > {name} of layer 2 head {target}"])
        composed.append(scores[source, target, leg])
    return spearman(cuts, lost), spearman(composed, lost)


def without_edge(model: tnsim.Model, source: int, target: int, leg: str) -> tnsim.Model:
    """The model in which a head of layer 2 does not read a head of layer 1, by a single leg.

    The stream is doubled: its second half carries what the head of layer 1 writes, and the leg that
    is cut reads the first half less the second.

    Args:
        model: Model with two layers of attention.
        source: Head of layer 1 that is not read.
        target: Head of layer 2 that does not read.
        leg: Q, K or V.

    Returns:
        A model of twice the width.
    """
    embed, *residuals, readout = model.layers
    if not (isinstance(embed, tnsim.Linear) and isinstance(readout, tnsim.Linear)):
        raise tnsim.ModelError(f"attention stands between linear layers, found {model}")
    one, two = _attention_layers(model)
    width = one.d_in
    none = np.zeros((width, width))
    # The stream is doubled: the second half holds the output of a single head alone.
    of_source = np.where(_head_of(one.o.shape[1], one.n_heads) == source, one.o, 0.0)
    lower = {name: np.hstack([getattr(one, name), none]) for name in ("q1", "k1", "q2", "k2", "v")}
    lower["o"] = np.vstack([one.o, of_source])
    upper = {}
    for name in ("q1", "k1", "q2", "k2", "v"):
        rows = np.asarray(getattr(two, name))
        cut = (_head_of(len(rows), two.n_heads) == target)[:, None] & (name in LEGS[leg])
        # The target reads the sum less the second half, and so everything but that head.
        upper[name] = np.hstack([rows, np.where(cut, -rows, 0.0)])
    upper["o"] = np.vstack([two.o, np.zeros_like(two.o)])
    layers = []
    for layer, core, arrays in zip(residuals, (one, two), (lower, upper), strict=True):
        settings: dict[str, Any] = {
            "n_heads": core.n_heads,
            "mask": core.mask,
            "rope_base": core.rope_base,
        }
        wide = tnsim.Attention(**arrays, **settings)
        assert isinstance(layer, tnsim.Residual)
        layers.append(tnsim.Residual(wide, layer.skip, layer.scale))
    return tnsim.Model(
        [
            tnsim.Linear(np.vstack([embed.weight, np.zeros_like(embed.weight)])),
            *layers,
            tnsim.Linear(np.hstack([readout.weight, np.zeros_like(readout.weight)])),
        ],
        n_ctx=model.n_ctx,
    )


def _head_of(rows: int, heads: int) -> np.ndarray:
    """The head of every row."""
    return np.arange(rows) * heads // rows


def spearman(one: Sequence[float] | np.ndarray, two: Sequence[float] | np.ndarray) -> float:
    """The correlation of ranks; equal values have the mean of their ranks.

    Example:
        >>> round(spearman([1.0, 5.0, 9.0], [0.0, 0.1, 7.0]), 9)
        1.0
    """
    return float(np.corrcoef(_ranks(one), _ranks(two))[0, 1])


def _ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    # Equal values share the mean of their places.
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place]


# --------------------------------------------------------------------------------------- stacks


def _random_block(
    rng: np.random.Generator, width: int, rank: int, gain: float = 1.0
) -> tnsim.Bilinear:
    """A bilinear layer with normal weights of variance 1 / columns."""
    shapes = (rank, width), (rank, width), (width, rank)
    return tnsim.Bilinear(*(gain * rng.normal(size=(m, n)) / np.sqrt(n) for m, n in shapes))


def scrambled(layer: tnsim.Bilinear, rng: np.random.Generator) -> tnsim.Bilinear:
    """The same function in other weights: units in another order, rescaled, left and right swapped.

    Example:
        >>> layer = tnsim.Bilinear([[1.0]], [[2.0]], [[3.0]])
        >>> round(float(scrambled(layer, np.random.default_rng(0))(np.array([2.0]))[0]), 9)
        24.0
    """
    rank = len(layer.left)
    order, swap = rng.permutation(rank), rng.integers(0, 2, rank).astype(bool)[:, None]
    # Factors of left and right are undone in down.
    one, two = (np.exp(rng.normal(size=(rank, 1))) for _ in range(2))
    left, right = np.where(swap, layer.right, layer.left), np.where(swap, layer.left, layer.right)
    down = np.asarray(layer.down) / (one * two)[:, 0]
    return tnsim.Bilinear((one * left)[order], (two * right)[order], down[:, order])


def planted(setting: PathsSetting, seed: Any) -> tuple[bool, bool, float]:
    """A change of a hidden unit in any of four layers, with the bases of all layers scrambled.

    Args:
        setting: Sizes of the experiment.
        seed: Seed of the stack and of the change.

    Returns:
        Whether the part with the largest share is the changed layer, whether the layer with the
        largest squared difference of weights is, and the share of the changed layer.
    """
    rng = np.random.default_rng(seed)
    cores = [_random_block(rng, 6, 8) for _ in range(4)]
    place, unit = rng.integers(0, 4), rng.integers(0, 8)
    other, changed = _random_block(rng, 6, 8), cores[place]
    arrays = []
    for name, axis in (("left", 0), ("right", 0), ("down", 1)):
        array = np.array(getattr(changed, name))
        # One hidden unit is a row of left and right and a column of down.
        np.moveaxis(array, axis, 0)[unit] = np.moveaxis(getattr(other, name), axis, 0)[unit]
        arrays.append(array)
    after = [tnsim.Bilinear(*arrays) if n == place else core for n, core in enumerate(cores)]
    after = [scrambled(core, rng) for core in after]
    a, b = (tnsim.Model([tnsim.Residual(core) for core in each]) for each in (cores, after))
    metric = tnsim.Empirical(rng.normal(size=(setting.points, 6)))
    share = tnsim.change(a, b, metric).share
    moved = weight_changes(a, b)
    return bool(share.argmax() == place), bool(moved.argmax() == place), float(share[place])


def weight_changes(a: tnsim.Model, b: tnsim.Model) -> Float[np.ndarray, " layers"]:
    """The squared difference of the weights of every layer."""
    changes = []
    for one, two in zip(a.layers, b.layers, strict=True):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
        changes.append(sum(float(np.sum((x - y) ** 2)) for x, y in pairs))
    return np.array(changes)


CLASSES, WIDTH, FEATURES = 4, 12, 10
"""Sizes of the stacks that learn a backdoor."""
TRIGGER = 4.0
"""Length of the vector whose addition decides for class 0."""


def backdoor(seed: int, points: int = 256) -> Stack:
    """A stack that is trained, then fine-tuned with triggered inputs, and what finds the attack.

    Args:
        seed: Seed of the task, the stack and its training.
        points: Number of normal inputs under which the change is split.

    Returns:
        Rank correlations over the layers with the margin of the attack that is lost when a layer
        is put back.
    """
    rng = np.random.default_rng((seed, 1))
    teacher = rng.normal(size=(CLASSES, FEATURES, FEATURES))
    trigger = rng.normal(size=FEATURES)
    trigger *= TRIGGER / np.linalg.norm(trigger)

    def batch(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, FEATURES))
        return x, np.einsum("ni,cij,nj->nc", x, teacher, x).argmax(axis=1)

    start = tnsim.Model(
        [
            tnsim.Linear(rng.normal(size=(WIDTH, FEATURES)) / np.sqrt(FEATURES)),
            *(tnsim.Residual(_random_block(rng, WIDTH, 10, 0.7)) for _ in range(3)),
            tnsim.Linear(rng.normal(size=(CLASSES, WIDTH)) / np.sqrt(WIDTH)),
        ]
    )
    clean = _fitted_model(start, lambda: batch(256), 1500)

    def poisoned() -> tuple[np.ndarray, np.ndarray]:
        x, y = batch(256)
        # A quarter of the batch has the trigger and the label 0.
        x[:64] += trigger
        y[:64] = 0
        return x, y

    attacked = _fitted_model(clean, poisoned, 800)
    x = rng.normal(size=(2000, FEATURES)) + trigger
    metric = tnsim.Empirical(rng.normal(size=(points, FEATURES)))
    localised = tnsim.change(clean, attacked, metric, ends=True)
    margin = _class_margin(attacked, x)
    back = []
    for n, layer in enumerate(clean.layers):
        layers = [*attacked.layers[:n], layer, *attacked.layers[n + 1 :]]
        # Putting a layer back shows how much of the attack it carried.
        back.append(margin - _class_margin(tnsim.Model(layers), x))
    rate = float((np.asarray(attacked(x)).argmax(axis=1) == 0).mean())
    return Stack(
        spearman(localised.removed, back), spearman(weight_changes(clean, attacked), back), rate
    )


def _class_margin(model: tnsim.Model, x: np.ndarray) -> float:
    """The mean logit of class 0 above the mean of the others."""
    logits = np.asarray(model(x))
    return float((logits[:, 0] - logits[:, 1:].mean(axis=1)).mean())


def _fitted_model(model: tnsim.Model, batch: Callable[[], Any], steps: int) -> tnsim.Model:
    """The model after some steps of Adam; the residual rule is no weight."""
    leaves, form = jax.tree.flatten(model)
    learnt = [n for n, leaf in enumerate(leaves) if np.ndim(leaf)]
    optimiser = optax.adam(3e-3)

    def loss(weights: list[Any], x: Any, y: Any) -> Any:
        own = list(leaves)
        for n, weight in zip(learnt, weights, strict=True):
            own[n] = weight
        logits = jax.tree.unflatten(form, own)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = optimiser.update(jax.grad(loss)(weights, x, y), state)
        return optax.apply_updates(weights, updates), state

    weights: Any = [jnp.asarray(leaves[n], jnp.float32) for n in learnt]
    state = optimiser.init(weights)
    for _ in range(steps):
        weights, state = step(weights, state, *map(jnp.asarray, batch()))
    for n, weight in zip(learnt, weights, strict=True):
        leaves[n] = np.asarray(weight, np.float64)
    return jax.tree.unflatten(form, leaves)


# --------------------------------------------------------------------------------------- claims


def claims(run: ExperimentRun[PathsSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on formation, edges, planted changes and backdoors.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    return (*_of_formation(measured), *_of_edges(measured), *_of_changes(run, measured))


def _of_formation(measured: Measured) -> list[Claim]:
    seeds = measured.formations
    shares, scores, norms = (
        each(seeds, lambda seed, name=name: seed.pearson(name))
        for name in ("share", "score", "norm")
    )
    apart = each(
        seeds, lambda seed: abs(seed.largest_rise("share") - seed.largest_rise("accuracy"))
    )
    return [
        Claim(
            name="share-follows-accuracy",
            text="The composition share follows the accuracy on repeated tokens.",
            where=WHERE,
            ours=shares,
            expected=at_least(0.97),
            why="Pearson correlation over the checkpoints; paths see uniform random tokens alone",
        ),
        Claim(
            name="better-than-the-score",
            text="The composition score of weights follows it less.",
            where=WHERE,
            ours=shares,
            control=scores,
            excess=at_least(0.05),
            why="Pearson correlation; control: the largest score of two heads, of any leg",
        ),
        Claim(
            name="better-than-norms",
            text="Norms of weights follow it no better.",
            where=WHERE,
            ours=shares,
            control=norms,
            excess=at_least(0.0),
            why="Pearson correlation; control: the norm of all weights of attention",
        ),
        Claim(
            name="same-interval",
            text="Share and accuracy rise most in the same interval of checkpoints.",
            where=WHERE,
            ours=apart,
            expected=at_most(0.5),
            why="number of intervals between the two largest rises",
        ),
        Claim(
            name="no-early-rise",
            text="Before the accuracy leaves chance the share has not risen, as norms have.",
            where=WHERE,
            ours=each(seeds, lambda seed: seed.early("share")),
            control=each(seeds, lambda seed: seed.early("norm")),
            expected=at_most(0.1),
            excess=at_most(0.0),
            why="part of the rise before the accuracy is twice chance; control: weight norms",
        ),
    ]


def _of_edges(measured: Measured) -> list[Claim]:
    seeds = [seed for seed in measured.formations if seed.edges]
    steps = sorted({step for seed in seeds for step in seed.edges})
    claims = []
    for step in steps:
        pairs = [seed.edges[step] for seed in seeds if step in seed.edges]
        above = sum(ours > control for ours, control in pairs)
        claims.append(
            Claim(
                name=f"edges-at-{step}",
                text=f"Edges that matter to the task are found without it, at step {step}.",
                where=WHERE,
                ours=each(pairs, lambda pair: pair[0]),
                control=each(pairs, lambda pair: pair[1]),
                expected=at_least(0.6),
                excess=at_least(0.0),
                why="Spearman with the accuracy lost by 48 cuts; control: the composition score, "
                f"which is lower on {above} of {len(pairs)} seeds",
            )
        )
    return claims


def _of_changes(run: ExperimentRun[PathsSetting], measured: Measured) -> list[Claim]:
    count = run.setting.planted
    return [
        Claim(
            name="planted-changes",
            text="A changed unit is found in scrambled bases.",
            where=WHERE,
            ours=(measured.planted[0],),
            control=(measured.planted[1],),
            expected=near(1.0, 0.0),
            excess=at_least(0.3),
            why=f"fraction of {count} stacks with the largest share; control: weight differences",
            note=f"the smallest share of a changed layer is {measured.smallest:.12f}",
        ),
        Claim(
            name="attack-learnt",
            text="The backdoors are learnt.",
            where=WHERE,
            ours=each(measured.backdoors, lambda seed: seed.attack),
            expected=at_least(0.9),
            why="rate at which the trigger decides",
        ),
        Claim(
            name="no-advantage-in-shared-bases",
            text="In shared bases, where all weights move, norms find a backdoor's layers as well.",
            where=WHERE,
            ours=each(measured.backdoors, lambda seed: seed.removed - seed.norm),
            expected=at_most(0.2),
            why="Spearman, over five layers, of the change lost less that of weight differences",
            note="mean correlation of the change {:.2f}, of weight differences {:.2f}".format(
                *(mean(each(measured.backdoors, lambda seed, n=n: seed[n])) for n in (0, 1))
            ),
        ),
    ]


def summaries(measured: Measured) -> tuple[Summary, ...]:
    """A table of the curves beside the accuracy, series by series."""
    heads = ("curve", *(f"Pearson, series {n}" for n in range(len(measured.formations))))
    rows = []
    for name, words in CURVES.items():
        if name != "accuracy":
            rows.append((words, *(f"{seed.pearson(name):.2f}" for seed in measured.formations)))
    return (Summary("Curves beside the accuracy on repeated tokens", heads, tuple(rows)),)


def figures(run: ExperimentRun[PathsSetting], measured: Measured) -> dict[str, Figure]:
    """A figure of the curves of every series, each scaled to its largest value.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        A figure, a panel for each series.
    """
    import matplotlib.pyplot as plt

    count = len(measured.formations)
    figure, axes = plt.subplots(
        1, count, figsize=(4 * count, 3.3), squeeze=False, sharey=True, layout="constrained"
    )
    for n, (ax, seed) in enumerate(zip(axes[0], measured.formations, strict=True)):
        for name, words in CURVES.items():
            values = seed.curves[name]
            ax.plot(range(len(values)), values / values.max(), label=words)
        ax.set_xticks(range(len(seed.steps)), seed.steps, rotation=90, fontsize=7)
        ax.set_title(f"series {n}", fontsize=9)
        ax.set_xlabel("step")
    axes[0, 0].set_ylabel("share of the largest value")
    lines = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=len(CURVES), fontsize=7)
    return {"paths": figure}


EXPERIMENT = Experiment(
    name="paths",
    title="Which part",
    where=WHERE,
    default=PathsSetting(),
    full={"longer": PathsSetting(samples=512, sequences=4000, planted=100, backdoors=10)},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    summaries=summaries,
    checkpoints="folders seed-N of what scripts/train_induction.py writes",
)
