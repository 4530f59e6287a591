"""The second largest of four: does a Gaussian metric track behaviour on other inputs?

The claims come from the paper's appendix D, and the figure is its grid of scatter plots. Inputs
are lists of four numbers from ten distributions, and the label is the place of the second largest
number. A bilinear layer learns the task from every distribution and every seed; all seeds of a
distribution are trained side by side, as a single program, into series `DISTRIBUTION/seed-N`. All
checkpoints of a distribution are then compared by weights and by outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim
from benchmarks.paper.claims import Claim, at_least, at_most, near
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import ExperimentRun, Recorder

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
N = 4  # numbers in a list
COVARIANCE = np.array(
    [
        [1.0, 0.8, 0.3, 0.1],
        [0.8, 1.0, 0.5, 0.2],
        [0.3, 0.5, 1.0, 0.7],
        [0.1, 0.2, 0.7, 1.0],
    ]
)
"""The paper has "a fixed positive-definite correlation matrix" and does not print it."""
HELD_OUT = 20_000  # inputs on which accuracy is measured
Weights = dict[str, Array]
State = tuple[Weights, Any]
"""Weights, and the moments of Adam."""
MEASURES = ("symmetric", "gaussian", "fitted", "weight_cosine")
PUBLISHED = {  # coefficients of the paper's panels
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
"""Distributions that are not symmetric about zero, so that a quadratic form can decide."""
UNKNOWN = "covariance of the inputs and start of the training are ours, the authors' are not known"
"""Reason why "correlated" may differ. Covariance and start both matter: with weights that start
uniform within 1 / sqrt(columns), as in PyTorch's linear layers, eight repetitions have r from 0.924
to 0.963 there, and "half-gaussian" and "permutations" are further from the published values than
with the normal weights of `initial`."""
HALF = ("gaussian", "bimodal", "uniform", "laplace", "correlated")  # symmetric about zero
ACROSS = {
    "symmetric": "tensor similarity, symmetrised",
    "fitted": "tensor similarity, Gaussian with mean and covariance of the inputs",
}


@dataclass(frozen=True)
class ArgmaxSetting:
    """The paper's sizes and rates: a single bilinear layer without biases, Adam at a constant rate.

    Args:
        distributions: Names of the distributions of inputs; all but `spikes-text` are the paper's
            nine.
        seeds: Number of trainings on every distribution, whose checkpoints are compared in pairs.
        repetitions: Number of repetitions of the whole, with other seeds; the paper has a single
            repetition.
        steps: Steps at which a checkpoint is kept; the last step ends the training.
        rank: Number of hidden units.
        batch: Number of inputs of a step, all new.
        rate: Learning rate of Adam.
        samples: Number of inputs on which outputs are compared.
    """

    distributions: tuple[str, ...] = (
        "gaussian",
        "half-gaussian",
        "bimodal",
        "uniform",
        "laplace",
        "spikes",
        "permutations",
        "correlated",
        "last-is-minus-10",
        "spikes-text",
    )
    seeds: int = 5
    repetitions: int = 3
    steps: tuple[int, ...] = STEPS
    rank: int = 32
    batch: int = 512
    rate: float = 1e-2
    samples: int = 50_000


def second_argmax(inputs: Float[Array, "count 4"]) -> Int[Array, " count"]:
    """The index of the second largest number; of equal numbers the first counts as larger.

    Example:
        >>> second_argmax(jnp.array([[-0.54, -0.19, 0.17, -10.0]])).tolist()
        [1]
    """
    largest = inputs.argmax(1, keepdims=True)
    # The largest is taken out, so that the largest of the rest is the second.
    others = jnp.where(jnp.arange(N) == largest, -jnp.inf, inputs)
    return others.argmax(1)


def gaussian(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Standard normal numbers."""
    return jax.random.normal(key, (count, N))


def half_gaussian(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Absolute values of standard normal numbers."""
    return jnp.abs(gaussian(key, count))


def bimodal(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Normal numbers around -1 or 1, with a standard deviation of 0.3."""
    for_mode, for_noise = jax.random.split(key)
    mode = jax.random.rademacher(for_mode, (count, N), float)
    return mode + 0.3 * gaussian(for_noise, count)


def uniform(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Uniform numbers between -1 and 1."""
    return jax.random.uniform(key, (count, N), minval=-1.0, maxval=1.0)


def laplace(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Laplace numbers of scale 1 / sqrt 2, so of variance 1."""
    return jax.random.laplace(key, (count, N)) / np.sqrt(2)


def spikes(key: jax.Array, count: int, mean: float = 0.0) -> Float[Array, "count 4"]:
    """Zeros, and a quarter normal numbers of variance 4; mean 0 is the authors' code."""
    for_place, for_size = jax.random.split(key)
    here = jax.random.bernoulli(for_place, 0.25, (count, N))
    return jnp.where(here, mean + 2 * gaussian(for_size, count), 0.0)


def spikes_text(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Sparse spikes of mean 1, as the paper's text has them."""
    return spikes(key, count, mean=1.0)


def permutations(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """The numbers 1 to 4 in any order."""
    ordered = jnp.broadcast_to(jnp.arange(1.0, N + 1), (count, N))
    return jax.random.permutation(key, ordered, axis=1, independent=True)


def correlated(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Normal numbers with covariance `COVARIANCE`."""
    return gaussian(key, count) @ np.linalg.cholesky(COVARIANCE).T


def last_is_minus_10(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Three standard normal numbers and -10."""
    return gaussian(key, count).at[:, -1].set(-10.0)


SAMPLERS: dict[str, Callable[..., Float[Array, "count 4"]]] = {
    "gaussian": gaussian,
    "half-gaussian": half_gaussian,
    "bimodal": bimodal,
    "uniform": uniform,
    "laplace": laplace,
    "spikes": spikes,
    "permutations": permutations,
    "correlated": correlated,
    "last-is-minus-10": last_is_minus_10,
    "spikes-text": spikes_text,
}


def sampled(number: Int[Array, ""] | int, key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Lists from any of `SAMPLERS`, by its number: a compiled program serves all of them.

    Example:
        >>> sampled(list(SAMPLERS).index("permutations"), jax.random.key(0), 3).sum(1).tolist()
        [10.0, 10.0, 10.0]
    """
    # A switch inside the program, since every distribution would be compiled on its own otherwise.
    branches = [partial(sampler, count=count) for sampler in SAMPLERS.values()]
    return jax.lax.switch(number, branches, key)


def train(run: ExperimentRun[ArgmaxSetting]) -> None:
    """Train on every distribution whose series are not all there.

    Args:
        run: The run whose checkpoints are written.
    """
    setting = run.setting
    waiting = [name for name in setting.distributions if run.unfinished(series_of(run, name))]
    advanced = program(setting.rate, setting.batch)
    with run.bar(len(waiting) * setting.steps[-1], "training") as bar:
        for name in waiting:
            bar.set_description(f"training on {name}")
            train_on(run, name, advanced, bar.update)


def series_of(run: ExperimentRun[ArgmaxSetting], distribution: str) -> list[str]:
    """Names of the series of a distribution, training by training."""
    return [f"{distribution}/seed-{seed}" for seed in seeds_of(run)]


def seeds_of(run: ExperimentRun[ArgmaxSetting]) -> range:
    """Seeds of all trainings, repetition after repetition."""
    return range(run.seed, run.seed + run.setting.repetitions * run.setting.seeds)


def program(rate: float, batch: int) -> Callable[..., State]:
    """Steps of Adam as a compiled function, the same for every distribution.

    Args:
        rate: Learning rate of Adam.
        batch: Number of inputs of a step.

    Returns:
        A function of the distribution's number, the first step, the step to stop before, the keys
        of the trainings and their states, that returns the states.
    """
    optimiser = optax.adam(rate)

    def loss(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, ""]:
        guesses, labels = logits(weights, inputs), second_argmax(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(guesses, labels).mean()

    def step(number: Array, n: Array, key: jax.Array, state: State) -> State:
        weights, moments = state
        inputs = sampled(number, jax.random.fold_in(key, n), batch)
        updates, moments = optimiser.update(jax.grad(loss)(weights, inputs), moments)
        return cast(Weights, optax.apply_updates(weights, updates)), moments

    def advanced(number: Array, start: Array, stop: Array, keys: jax.Array, state: State) -> State:
        # Seeds are trained side by side, each with its key.
        every = jax.vmap(step, (None, None, 0, 0))
        return jax.lax.fori_loop(start, stop, lambda n, now: every(number, n, keys, now), state)

    return jax.jit(advanced)


def train_on(
    run: ExperimentRun[ArgmaxSetting],
    distribution: str,
    advanced: Callable[..., State],
    advance: Callable[[int], Any],
) -> None:
    """Train all seeds on a distribution, side by side, and write their series."""
    setting = run.setting
    number = list(SAMPLERS).index(distribution)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds_of(run)))
    for_weights, for_training = jax.vmap(jax.random.split, out_axes=1)(keys)
    weights = jax.vmap(partial(initial, rank=setting.rank))(for_weights)
    state = weights, jax.vmap(optax.adam(setting.rate).init)(weights)
    # A key far from all seeds of training.
    held_out = SAMPLERS[distribution](jax.random.key(10_000 + run.seed), HELD_OUT)
    recorders = [Recorder(run, name) for name in series_of(run, distribution)]
    done = 0
    for target in setting.steps:
        state = advanced(number, done, target, for_training, state)
        accuracies = accuracy(state[0], held_out)
        for n, recorder in enumerate(recorders):
            recorder.add(target, model_of(state[0], n), accuracy=accuracies[n])
        advance(target - done)
        done = target
    for recorder in recorders:
        recorder.finish()


def initial(key: jax.Array, rank: int) -> Weights:
    """Normal weights of standard deviation 0.1."""
    shapes = {"left": (rank, N), "right": (rank, N), "down": (N, rank)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.1 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@jax.jit
def accuracy(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, " seed"]:
    """Share of right guesses, for each seed."""
    guesses = jax.vmap(logits, (0, None))(weights, inputs).argmax(-1)
    return (guesses == second_argmax(inputs)).mean(-1)


def model_of(weights: Weights, seed: int) -> tnsim.Model:
    """The network of a single seed among the seeds that are trained side by side."""
    left, right, down = (np.asarray(weights[name][seed]) for name in ("left", "right", "down"))
    return tnsim.Model([tnsim.Bilinear(left, right, down)])


def logits(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, "batch 4"]:
    """The outputs `D (L x * R x)` of the layer."""
    hidden = (inputs @ weights["left"].T) * (inputs @ weights["right"].T)
    return hidden @ weights["down"].T


@dataclass(frozen=True)
class Measured:
    """Measured values by distribution, for the claims and the figure.

    Args:
        tables: All pairs of checkpoints of the first repetition: `similarity` under the symmetrised
            metric of the authors' code, also as `symmetric`; `gaussian`; `fitted` to the inputs;
            `output_cosine` on the inputs; `weight_cosine`.
        r: Pearson's coefficients of outputs with each of `MEASURES`, for each repetition.
        accuracy: Accuracy at the end of every training.
    """

    tables: dict[str, xr.Dataset]
    r: dict[str, dict[str, tuple[float, ...]]]
    accuracy: dict[str, tuple[float, ...]]


def measure(run: ExperimentRun[ArgmaxSetting]) -> Measured:
    """Compare all checkpoints of every distribution, under several measures.

    Args:
        run: A run after `train`.

    Returns:
        Matrices, correlations and accuracies.
    """
    tables, r, accuracy = {}, {}, {}
    names = run.setting.distributions
    with run.bar(len(names), "comparing", "distribution") as bar:
        for name in names:
            bar.set_description(f"comparing on {name}")
            repetitions = apart(all_pairs(run, name), run.setting.repetitions)
            tables[name] = repetitions[0]
            r[name] = {measure: correlations(repetitions, measure) for measure in MEASURES}
            logs = [run.log(series) for series in series_of(run, name)]
            accuracy[name] = tuple(log[-1]["accuracy"] for log in logs)
            bar.update()
    return Measured(tables, r, accuracy)


def all_pairs(run: ExperimentRun[ArgmaxSetting], distribution: str) -> xr.Dataset:
    """The matrices of a distribution over all trainings, labelled `SEED:STEP`."""
    models, names = [], []
    for seed, name in zip(seeds_of(run), series_of(run, distribution), strict=True):
        series = run.series(name)
        models += list(series)
        names += [f"{seed}:{step}" for step in series.labels]
    inputs = np.asarray(SAMPLERS[distribution](jax.random.key(99), run.setting.samples))
    metrics = {
        "symmetric": tnsim.Symmetric(),
        "gaussian": tnsim.Gaussian(),
        "fitted": tnsim.Gaussian.fit(inputs),
    }
    results = {}
    for name, metric in metrics.items():
        store = run.store(f"{distribution}-{name}")
        results[name] = tnsim.pairwise(models, metric, names=names, store=store)
    table = results["symmetric"]
    for name, result in results.items():
        table[name] = result.similarity
    table["output_cosine"] = tnsim.baselines.output_cosine(models, inputs, names=names)
    table["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=names)
    return table


def apart(table: xr.Dataset, repetitions: int) -> list[xr.Dataset]:
    """The pairs within each repetition."""
    # Models of a repetition stand together.
    count = table.sizes["a"] // repetitions
    rows = [slice(n * count, (n + 1) * count) for n in range(repetitions)]
    return [table.isel(a=own, b=own) for own in rows]


def correlations(tables: list[xr.Dataset], measure: str) -> tuple[float, ...]:
    """Pearson's r of a measure with the cosine of outputs, for each table."""
    correlated = [
        tnsim.reading.correlation(table[measure], table.output_cosine) for table in tables
    ]
    return tuple(relation.pearson for relation in correlated)


def claims(run: ExperimentRun[ArgmaxSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on correlations and on accuracies.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    return (*_published_claims(measured), *_metric_claims(measured), *_accuracy_claims(measured))


def _published_claims(measured: Measured) -> list[Claim]:
    """The claims on the correlation of every panel, under the metric of the authors' code."""
    rows = []
    for name in _names_among(measured, PUBLISHED):
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


def _metric_claims(measured: Measured) -> list[Claim]:
    """The claims on all distributions, metric by metric."""
    r = measured.r
    nine = _names_among(measured, PUBLISHED)
    eight = [name for name in nine if name != EXCEPTION]
    table = measured.tables["gaussian"]
    sampling = float(abs(table.gaussian - table.output_cosine).max())
    return [
        Claim(
            name="eight-of-nine",
            text="r exceeds 0.9 for eight of nine distributions (the least of them).",
            where=WHERE,
            paper="> 0.9",
            ours=_least_correlation(r, "symmetric", eight),
            expected=at_least(0.9),
            why="the text's own bound",
        ),
        Claim(
            name="eight-of-nine-gaussian",
            text="The same under the Gaussian metric, which the text names.",
            where=WHERE,
            paper="> 0.9",
            ours=_least_correlation(r, "gaussian", eight),
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
            ours=_least_correlation(r, "fitted", nine),
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


def _accuracy_claims(measured: Measured) -> list[Claim]:
    accuracy = measured.accuracy
    rows = [
        Claim(
            name="accuracy-decidable",
            text="Accuracy above 90 % on the three distributions not symmetric about zero (the "
            "least of them).",
            where="appendix D",
            paper="> 0.9",
            ours=_chosen_accuracy(measured, DECIDABLE, min),
            expected=at_least(0.9),
            why="the text's own bound",
        ),
        Claim(
            name="accuracy-half",
            text="Accuracy of about 50 % on the five symmetric ones (the largest of them).",
            where="appendix D",
            paper="~ 0.5",
            ours=_chosen_accuracy(measured, HALF, max),
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


def _names_among(measured: Measured, names: Iterable[str]) -> list[str]:
    """The names of distributions that were run, among some names."""
    return [name for name in names if name in measured.r]


def _least_correlation(
    r: dict[str, dict[str, tuple[float, ...]]], measure: str, names: Iterable[str]
) -> tuple[float, ...]:
    """The least correlation of some distributions, for each repetition."""
    by_name = [r[name][measure] for name in names]
    return tuple(map(min, zip(*by_name, strict=True)))


def _chosen_accuracy(
    measured: Measured, names: Iterable[str], chosen: Callable[[tuple[float, ...]], float]
) -> tuple[float, ...]:
    """The least or the largest accuracy of some distributions, training by training."""
    by_name = [measured.accuracy[name] for name in _names_among(measured, names)]
    return tuple(map(chosen, zip(*by_name, strict=True)))


def figures(run: ExperimentRun[ArgmaxSetting], measured: Measured) -> dict[str, Figure]:
    """A panel of tensors against outputs for every distribution, under each metric of `ACROSS`.

    Args:
        run: The run that was measured.
        measured: Measured matrices of the run.

    Returns:
        Two figures.
    """
    drawn = {}
    for metric, label in ACROSS.items():
        panels = {}
        for name, table in measured.tables.items():
            if name != "spikes-text":  # the paper's nine
                panels[name] = (table[metric], table.output_cosine)
        drawn[f"scatter-{metric}"] = tnsim.figures.scatter_grid(
            panels, label, "cosine of the outputs"
        )
    return drawn


EXPERIMENT = Experiment(
    name="argmax",
    title="Second argmax on nine distributions",
    where="appendix D",
    default=ArgmaxSetting(),
    full={"paper": ArgmaxSetting()},  # the paper's setting takes minutes
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: measured.tables,
)
