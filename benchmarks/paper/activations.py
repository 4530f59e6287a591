"""Networks with activations: what is exact from the weights, and what is no estimate.

The paper asks for polynomials; the claims here are what its metric is for other networks. Networks
of a single hidden layer and of two are trained on the same task from two seeds, for each
activation. A copy of a network is the same function written with other weights. Networks and copies
are written as `seed-N/NAME.safetensors`.

Beyond one hidden layer `GaussianClosure` treats hidden states of both networks as jointly Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import tnsim
from benchmarks.paper.claims import Claim, Summary, at_least, at_most
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import ExperimentRun, Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTIONS = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, False), "tanh": jnp.tanh}
SMOOTH = ("gelu", "tanh")
"""Activations for which a grid of a few hundred points a coordinate integrates to rounding."""
PLACE = "beyond the paper; its limitations name activations"
ROUNDING = 1e-12  # tolerance of theorems in float64
ERRORS = 4.0
"""Number of standard errors that chance exceeds once in 16,000 times."""

Weights = list[tuple[Float[Array, "out in"], Float[Array, " out"]]]
"""Matrices and biases of linear layers, from the input up."""


@dataclass(frozen=True)
class ActivationsSetting:
    """Sizes of the networks, their training, and the number of samples.

    Args:
        inputs: Inputs of the networks, at least 6.
        hidden: Hidden units of every layer.
        steps: Steps of training.
        rate: Rate of Adam.
        networks: Number of pairs of networks, a pair for each seed.
        grid: Points of the grid in each of two coordinates.
        samples: Number of sampled inputs.
    """

    inputs: int = 8
    hidden: int = 32
    steps: int = 1000
    rate: float = 4e-3
    networks: int = 2
    grid: int = 200
    samples: int = 32768


def train(run: ExperimentRun[ActivationsSetting]) -> None:
    """Train every network, and write it beside its copies.

    Args:
        run: The run whose networks are written.
    """
    seeds = {f"seed-{run.seed + n}": run.seed + n for n in range(run.setting.networks)}
    names = run.unfinished(seeds)
    with run.bar(len(names) * len(FUNCTIONS), "networks", "kind") as bar:
        for name in names:
            recorder = Recorder(run, name, seed=seeds[name])
            for n, kind in enumerate(FUNCTIONS):
                made = networks(kind, seeds[name], run.setting)
                for step, (copy, model) in enumerate(made.items()):
                    # Steps only order the files here: a hundred for each kind.
                    recorder.add(100 * n + step, model, f"{kind}-{copy}")
                bar.update()
            recorder.finish()


def networks(kind: str, seed: int, setting: ActivationsSetting) -> dict[str, tnsim.Model]:
    """Networks of an activation, trained and random, with copies of the first, by name."""
    first, second, *deep = (
        trained(kind, depth, jax.random.key(2 * seed + n), setting)
        for depth in (1, 2)
        for n in range(2)
    )
    rng = np.random.default_rng(seed)
    drawn = started(jax.random.key(seed), 2, setting)
    moved = [(w + 0.3 * np.std(w) * rng.normal(size=w.shape), b) for w, b in drawn]
    plane = started(jax.random.key(seed), 1, setting, inputs=2)
    near = [(w + 0.3 * np.std(w) * rng.normal(size=w.shape), b) for w, b in plane]
    made = {
        "one": first,
        "other": second,
        "permuted": permuted(rng, first),
        "deep": deep[0],
        "deep-other": deep[1],
        "drawn": drawn,
        "drawn-other": moved,
        "plane": plane,
        "plane-other": near,
    }
    # ReLU passes positive factors on, tanh changes of sign.
    if kind == "relu":
        made["rescaled"] = scaled(first, rng.uniform(0.5, 2.0, setting.hidden), odd=False)
    if kind == "tanh":
        made["flipped"] = scaled(first, rng.choice([-1.0, 1.0], setting.hidden), odd=True)
    models = {name: model_of(weights, kind) for name, weights in made.items()}
    if kind == "gelu":
        models["by-tanh"] = model_of(first, "gelu_tanh")
    return models


def started(
    key: Array, depth: int, setting: ActivationsSetting, inputs: int | None = None
) -> Weights:
    """Random weights of a network, of variance 2 / inputs."""
    sizes = [inputs or setting.inputs, *[setting.hidden] * depth, 4]
    weights = []
    for n, (width, rows) in enumerate(pairwise(sizes)):
        weight, bias = (jax.random.fold_in(key, 2 * n + k) for k in range(2))
        # Variance 2 / inputs keeps the size of states behind a rectifier.
        matrix = jax.random.normal(weight, (rows, width)) * (2 / width) ** 0.5
        weights.append((matrix, 0.2 * jax.random.normal(bias, (rows,))))
    return weights


def trained(kind: str, depth: int, key: Array, setting: ActivationsSetting) -> Weights:
    """Weights of a network after training on `task`."""
    return _trained_weights(kind, setting, started(key, depth, setting), key)


@partial(jax.jit, static_argnums=(0, 1))
def _trained_weights(
    kind: str, setting: ActivationsSetting, weights: Weights, key: Array
) -> Weights:
    optimiser = optax.adam(setting.rate)

    def loss(weights: Weights, x: Array) -> Array:
        return jnp.mean((outputs(weights, x, kind) - task(x)) ** 2)

    def step(n: int, state: tuple[Weights, Any]) -> tuple[Weights, Any]:
        weights, remembered = state
        # Fresh inputs at each step, so that nothing can be learned by heart.
        x = jax.random.normal(jax.random.fold_in(key, 1000 + n), (256, setting.inputs))
        updates, remembered = optimiser.update(jax.grad(loss)(weights, x), remembered)
        stepped: Any = optax.apply_updates(weights, updates)
        return stepped, remembered

    return jax.lax.fori_loop(0, setting.steps, step, (weights, optimiser.init(weights)))[0]


def task(x: Float[Array, "n inputs"]) -> Float[Array, "n 4"]:
    """Four functions of a few inputs each: a product, a wave, a kink and a saturating sum."""
    values = (x[:, 0] * x[:, 1], jnp.sin(2 * x[:, 2]), abs(x[:, 3]), jnp.tanh(x[:, 4] + x[:, 5]))
    return jnp.stack(values, 1)


def outputs(weights: Weights, x: Float[Array, "n inputs"], kind: str) -> Float[Array, "n 4"]:
    """The forward pass of a network."""
    *inner, (last, bias) = weights
    for weight, shift in inner:
        x = FUNCTIONS[kind](x @ weight.T + shift)
    return x @ last.T + bias


def permuted(rng: np.random.Generator, weights: Weights) -> Weights:
    """The same network with its hidden units in another order."""
    (into, shift), (out, bias) = weights
    order = rng.permutation(len(into))
    return [(into[order], shift[order]), (out[:, order], bias)]


def scaled(weights: Weights, factors: Any, odd: bool) -> Weights:
    """The same network with hidden units that are multiplied by factors, and divided again.

    Args:
        weights: Weights of a single hidden layer.
        factors: Numbers by hidden unit: positive for ReLU, signs for an odd activation.
        odd: Whether the activation is odd, so that a sign passes it unchanged.
    """
    (into, shift), (out, bias) = weights
    factors = np.asarray(factors)
    into, shift, out = (np.asarray(array, np.float64) for array in (into, shift, out))
    # An odd function passes the sign on, so it is multiplied again; a factor is divided out.
    after = factors if odd else 1 / factors
    return [(factors[:, None] * into, factors * shift), (out * after, bias)]


def model_of(weights: Weights, activation: str) -> tnsim.Model:
    """A network as a model of tnsim, in float64."""
    layers: list[Any] = []
    for weight, bias in weights:
        matrix = tnsim.Linear(np.asarray(weight, np.float64), np.asarray(bias, np.float64))
        function: Any = activation  # the name of one
        layers += [matrix, tnsim.Elementwise(function)]
    return tnsim.Model(layers[:-1])


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims, the table and the figure.

    Args:
        values: Numbers by name, a number for each pair of networks.
        errors: Pairs (true cosine, cosine of the closure) of all trained pairs of two layers.
        drawn: The same pairs of random networks.
    """

    values: dict[str, tuple[float, ...]]
    errors: tuple[tuple[float, float], ...]
    drawn: tuple[tuple[float, float], ...]


def measure(run: ExperimentRun[ActivationsSetting]) -> Measured:
    """Compare every network with its copies, and with the network of the other seed.

    Args:
        run: A run after `train`.

    Returns:
        Values for each pair of networks.
    """
    values: dict[str, list[float]] = {}
    errors, drawn = [], []
    names = [f"seed-{run.seed + n}" for n in range(run.setting.networks)]
    with run.bar(len(names) * len(FUNCTIONS), "networks", "kind") as bar:
        for name in names:
            series = run.series(name)
            models = {path.stem: model for path, model in zip(series.paths, series, strict=True)}
            for kind in FUNCTIONS:
                own = {
                    copy.removeprefix(f"{kind}-"): model
                    for copy, model in models.items()
                    if copy.startswith(f"{kind}-")
                }
                numbers = {**of_one_layer(kind, own, run), **of_polynomials(own, run)}
                errors.append(of_closure(own["deep"], own["deep-other"], run))
                drawn.append(of_closure(own["drawn"], own["drawn-other"], run))
                for key, value in numbers.items():
                    values.setdefault(key, []).append(value)
                bar.update()
    for key, pairs in (("trained", errors), ("drawn", drawn)):
        values[f"closure {key}"] = [abs(numbers - truth) for truth, numbers in pairs]
    return Measured(
        {key: tuple(numbers) for key, numbers in values.items()}, tuple(errors), tuple(drawn)
    )


def of_one_layer(
    kind: str, models: Mapping[str, tnsim.Model], run: ExperimentRun[ActivationsSetting]
) -> dict[str, float]:
    """Exact values beside sampling and a grid, and distances of equal functions from 1."""
    one, other = models["one"], models["other"]
    samples = run.setting.samples
    checked = tnsim.check(one, other, samples=samples, seed=run.seed)
    errors = {f"sampling {kind}": abs(checked.deviation)}
    copies = [name for name in ("permuted", "rescaled", "flipped") if name in models]
    for name in copies:
        apart = abs(1 - float(tnsim.similarity(one, models[name])))
        errors[f"{name} {kind}"] = apart
    if kind in SMOOTH:
        plane = models["plane"], models["plane-other"]
        value = float(tnsim.similarity(*plane))
        errors[f"grid {kind}"] = abs(value - on_grid(*plane, run.setting.grid))
    if "by-tanh" in models:
        errors["by tanh"] = 1 - float(tnsim.similarity(one, models["by-tanh"]))
    return errors


def on_grid(a: tnsim.Model, b: tnsim.Model, points: int) -> float:
    """The cosine under N(0, I) in two coordinates by the trapezoidal rule."""
    x = np.linspace(-9, 9, points)
    inputs = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2)
    # Weights of a grid need no normalisation: a cosine does not see their sum.
    metric = tnsim.Empirical(inputs, np.exp(-(inputs**2).sum(1) / 2))
    return float(tnsim.similarity(a, b, metric))


def of_closure(
    a: tnsim.Model, b: tnsim.Model, run: ExperimentRun[ActivationsSetting]
) -> tuple[float, float]:
    """The cosine of two networks of two layers, sampled, and with Gaussian hidden states."""
    rng = np.random.default_rng(run.seed)
    truth = tnsim.Empirical(rng.normal(size=(run.setting.samples, a.d_in)))
    estimate = tnsim.similarity(a, b, tnsim.GaussianClosure())
    return float(tnsim.similarity(a, b, truth)), float(estimate)


def of_polynomials(
    models: Mapping[str, tnsim.Model], run: ExperimentRun[ActivationsSetting]
) -> dict[str, float]:
    """The distance of angles of networks and of their polynomials, as a share of its bound."""
    rng = np.random.default_rng(run.seed)
    metric = tnsim.Empirical(rng.normal(size=(4096, models["deep"].d_in)))
    pair = models["deep"], models["deep-other"]
    try:
        surrogates = [tnsim.polynomial(model, 2, metric) for model in pair]
    except tnsim.ModelError:
        return {"refused": 1.0}  # by its own error
    errors = [surrogate.origin.error or 0.0 for surrogate in surrogates if surrogate.origin]
    outputs = [model(metric.inputs) for model in (*pair, *surrogates)]
    angle, near = angle_of(*outputs[:2]), angle_of(*outputs[2:])
    share = abs(angle - near) / float(np.arcsin(errors).sum())
    return {"share of bound": share, "refused": 0.0}


def angle_of(one: Any, two: Any) -> float:
    """The angle of outputs on a sample, in radians."""
    return float(np.arccos(np.vdot(one, two) / np.linalg.norm(one) / np.linalg.norm(two)))


def claims(run: ExperimentRun[ActivationsSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on exactness, on symmetries, and on what is no estimate.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    values = measured.values
    rows = []
    for kind in FUNCTIONS:
        rows.append(
            Claim(
                name=f"exact-{kind}",
                text=f"E<A(x), B(x)> of two trained networks of one {kind} layer is a closed form.",
                where=PLACE,
                ours=values[f"sampling {kind}"],
                expected=at_most(ERRORS),
                why="standard errors between the closed form and sampling",
            )
        )
    for kind in SMOOTH:
        rows.append(
            Claim(
                name=f"grid-{kind}",
                text=f"Two random {kind} networks of two inputs have the cosine of a fine grid.",
                where=PLACE,
                ours=values[f"grid {kind}"],
                expected=at_most(ROUNDING),
                why="the trapezoidal rule converges exponentially for smooth activations",
            )
        )
    return (*rows, *_symmetries(values), *_claims_beyond(values))


def _symmetries(values: Mapping[str, tuple[float, ...]]) -> list[Claim]:
    same = {
        "permuted relu": "whose ReLU units are permuted",
        "permuted gelu": "whose GELU units are permuted",
        "rescaled relu": "whose ReLU units are scaled by positive factors, and scaled back",
        "flipped tanh": "whose tanh units change their signs",
    }
    rows = [
        Claim(
            name="-".join(name.split()[::-1]),
            text=f"The similarity is 1 for a copy {words}.",
            where=PLACE,
            ours=values[name],
            expected=at_most(ROUNDING),
            why="the distance from 1: equal functions, up to rounding",
        )
        for name, words in same.items()
    ]
    return [
        *rows,
        Claim(
            name="gelu-by-tanh",
            text="GELU and its form by tanh, of GPT-2, are two functions, and told apart.",
            where=PLACE,
            ours=values["by tanh"],
            expected=at_least(1e-10),
            why="1 less the similarity; units differ by up to 4e-4",
        ),
    ]


def _claims_beyond(values: Mapping[str, tuple[float, ...]]) -> list[Claim]:
    rows = [
        Claim(
            name="closure-drawn",
            text="Hidden states taken for Gaussian give the cosine of random networks.",
            where=PLACE,
            ours=values["closure drawn"],
            expected=at_most(0.02),
            why="error of the cosine; sums of many independent units are nearly Gaussian",
        ),
        Claim(
            name="closure-trained",
            text="Hidden states taken for Gaussian give the cosine of trained networks.",
            where=PLACE,
            ours=values["closure trained"],
            expected=at_most(0.02),
            why="error of the cosine; an estimate would have that of random networks",
            note="trained units read few inputs, and their sums are not Gaussian at any width: the "
            "closure is a similarity of its own",
        ),
    ]
    if "share of bound" in values:
        rows.append(
            Claim(
                name="polynomial-bound",
                text="Polynomials of degree 2 keep angles of 2-layer networks within their bound.",
                where=PLACE,
                ours=values["share of bound"],
                expected=at_most(1.0),
                why="|angle(A, B) - angle(P, Q)| is at most asin e_A + asin e_B, a theorem",
                note="networks whose error is above .5 are refused, and not counted",
            )
        )
    return rows


def figures(run: ExperimentRun[ActivationsSetting], measured: Measured) -> dict[str, Figure]:
    """A figure of closure against truth, for trained and random networks.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        A figure.
    """
    figure, axes = tnsim.figures.new_figure(figsize=(4.5, 4.2))
    for pairs, label in ((measured.drawn, "random"), (measured.errors, "trained")):
        truth, estimates = zip(*pairs, strict=True)
        axes.plot(truth, estimates, "o", label=f"{label} networks")
    low = min(min(pair) for pair in (*measured.errors, *measured.drawn))
    axes.plot([low, 1], [low, 1], color="0.6", linewidth=1)
    axes.set_xlabel("cosine of two networks of two layers, sampled")
    axes.set_ylabel("cosine with Gaussian hidden states")
    axes.legend()
    return {"closure": figure}


def summaries(measured: Measured) -> tuple[Summary, ...]:
    """A table of the cosines behind the figure."""
    rows = [
        (words, kind, f"{truth:.3f}", f"{estimates - truth:+.3f}")
        for words, pairs in (("random", measured.drawn), ("trained", measured.errors))
        for kind, (truth, estimates) in zip(_pair_kinds(pairs), pairs, strict=True)
    ]
    heads = ("networks of two layers", "activation", "cosine", "error of the closure")
    return (Summary("Hidden states taken for Gaussian", heads, tuple(rows)),)


def _pair_kinds(pairs: Sequence[Any]) -> list[str]:
    """The activation of every pair, in the order in which `measure` goes through them."""
    return [list(FUNCTIONS)[n % len(FUNCTIONS)] for n in range(len(pairs))]


EXPERIMENT = Experiment(
    name="activations",
    title="Activations",
    where=PLACE,
    default=ActivationsSetting(),
    full={"longer": ActivationsSetting(hidden=128, networks=3, samples=1_000_000)},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    summaries=summaries,
)
