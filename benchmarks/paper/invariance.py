"""Invariance and exactness: changes that tensor similarity does not see, and its closed form.

The claims come from the paper's figure 2 and of its theory. Nothing is learned here: the claims
are theorems, so random networks are as good as any. A copy of a network is the same function
written with other weights, or another function that some measure mistakes for it. Networks and
copies are written as `seed-N/NAME.safetensors`, and the figure shows three matrices of a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import tnsim
from benchmarks.paper.claims import Claim, at_least, at_most, near
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import ExperimentRun, Recorder

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

ONE_LAYER = (
    "original",
    "permuted",
    "swapped",
    "rescaled",
    "both",
    "perturbed",
    "backdoor",
    "unrelated",
    "negated",
)
SAME_FUNCTION = ("permuted", "swapped", "rescaled", "both")
ROUNDING = 1e-9  # tolerance of theorems in float64
ERRORS = 4.0
"""Number of standard errors that chance exceeds once in 16,000 times."""
_WORDS = {
    "permuted": "permuted in its hidden units",
    "swapped": "swapped left and right in half of its units",
    "rescaled": "rescaled, unit by unit and as a whole",
    "both": "permuted and swapped",
}
PANELS = ("weight_cosine", "output_cosine", "similarity")


@dataclass(frozen=True)
class InvarianceSetting:
    """Sizes of the networks, and the number of samples.

    Args:
        inputs: Inputs of the networks of a single layer; the last input is zero in the data.
        hidden: Hidden units of the networks of a single layer.
        outputs: Outputs of the networks of a single layer.
        deep_width: Width of the networks of two layers.
        networks: Number of random networks, seed by seed.
        noise: Size of a small change of the weights, relative to the weights.
        samples: Number of sampled inputs.
    """

    inputs: int = 16
    hidden: int = 48
    outputs: int = 8
    deep_width: int = 8
    networks: int = 3
    noise: float = 0.01
    samples: int = 65536


def train(run: ExperimentRun[InvarianceSetting]) -> None:
    """Write every network and its copies.

    Args:
        run: The run whose networks are written.
    """
    seeds = {f"seed-{run.seed + n}": run.seed + n for n in range(run.setting.networks)}
    for name in run.unfinished(seeds):
        recorder = Recorder(run, name, seed=seeds[name])
        rng = np.random.default_rng(seeds[name])
        copies = {**one_layer(rng, run.setting), **two_layers(rng, run.setting), **written_twice()}
        for step, (copy, model) in enumerate(copies.items()):
            recorder.add(step, model, copy)
        recorder.finish()


def one_layer(rng: np.random.Generator, setting: InvarianceSetting) -> dict[str, tnsim.Model]:
    """A bilinear layer `D (L x * R x)`, its copies and its changed versions, by name."""
    left, right, down = layer(rng, setting.inputs, setting.hidden, setting.outputs)
    # the last unit squares the last input, and nothing reads it: a place for a backdoor
    left[-1] = right[-1] = np.eye(setting.inputs)[-1]
    down[:, -1] = 0.0
    opened = down.copy()
    opened[:, -1] = rng.normal(size=setting.outputs)
    # a * b = b * a, so left and right may be swapped in any hidden unit
    swapped = rng.permutation(setting.hidden) % 2 == 0
    left_or_right = np.where(swapped[:, None], right, left)
    right_or_left = np.where(swapped[:, None], left, right)
    order = rng.permutation(setting.hidden)
    # A factor on left is undone in down, unit by unit.
    sizes = rng.uniform(0.5, 2.0, setting.hidden)
    perturbed = [noisy(rng, weight, setting.noise) for weight in (left, right, down)]
    return {
        "original": bilinear(left, right, down),
        "permuted": bilinear(left[order], right[order], down[:, order]),
        "swapped": bilinear(left_or_right, right_or_left, down),
        "rescaled": bilinear(sizes[:, None] * left, right, 3 * down / sizes),
        "both": bilinear(left_or_right[order], right_or_left[order], down[:, order]),
        "perturbed": bilinear(*perturbed),
        "backdoor": bilinear(left, right, opened),
        "unrelated": bilinear(*layer(rng, setting.inputs, setting.hidden, setting.outputs)),
        "negated": bilinear(left, right, -down),
    }


def two_layers(rng: np.random.Generator, setting: InvarianceSetting) -> dict[str, tnsim.Model]:
    """A model of two bilinear layers, the same in another hidden basis, and a changed model."""
    width = setting.deep_width
    first = layer(rng, width, 2 * width, width)
    second = layer(rng, width, 2 * width, width)
    # U and its inverse stand between the layers; U = QS stretches the axes, then rotates
    rotation, _ = np.linalg.qr(rng.normal(size=(width, width)))
    stretch = rng.uniform(0.5, 2.0, width)
    basis, inverse = rotation * stretch, rotation.T / stretch[:, None]
    turned = [
        tnsim.Bilinear(first[0], first[1], basis @ first[2]),
        tnsim.Bilinear(second[0] @ inverse, second[1] @ inverse, second[2]),
    ]
    changed = [tnsim.Bilinear(*(noisy(rng, w, 0.5) for w in ws)) for ws in (first, second)]
    return {
        "deep": tnsim.Model([tnsim.Bilinear(*first), tnsim.Bilinear(*second)]),
        "deep turned": tnsim.Model(turned),
        "deep changed": tnsim.Model(changed),
    }


def written_twice() -> dict[str, tnsim.Model]:
    """The polynomial x1^2 x2^2 as (x1 x1)(x2 x2) and as (x1 x2)(x1 x2).

    Both models have two layers: the first gives three products, the second multiplies two of them.
    """
    left, right = np.array([[1, 0], [0, 1], [1, 0]]), np.array([[1, 0], [0, 1], [0, 1]])
    products = tnsim.Bilinear(left, right, np.eye(3))
    first, second, third = np.eye(3)[:, None]
    one = np.ones((1, 1))
    return {
        "squares": tnsim.Model([products, tnsim.Bilinear(first, second, one)]),
        "mixed": tnsim.Model([products, tnsim.Bilinear(third, third, one)]),
    }


def layer(
    rng: np.random.Generator, inputs: int, hidden: int, outputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random weights left, right and down, of variance 1 / columns."""
    left = rng.normal(size=(hidden, inputs)) / np.sqrt(inputs)
    right = rng.normal(size=(hidden, inputs)) / np.sqrt(inputs)
    down = rng.normal(size=(outputs, hidden)) / np.sqrt(hidden)
    return left, right, down


def noisy(rng: np.random.Generator, weight: np.ndarray, share: float) -> np.ndarray:
    """A weight with normal noise of a share of its size added."""
    return weight + share * weight.std() * rng.normal(size=weight.shape)


def bilinear(left: np.ndarray, right: np.ndarray, down: np.ndarray) -> tnsim.Model:
    """A model of a single bilinear layer."""
    return tnsim.Model([tnsim.Bilinear(left, right, down)])


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims and the figure.

    Args:
        values: Numbers by name, network by network.
        pictured: Matrices over the first network's copies: `similarity`, `weight_cosine` and
            `output_cosine`.
    """

    values: dict[str, tuple[float, ...]]
    pictured: xr.Dataset


def measure(run: ExperimentRun[InvarianceSetting]) -> Measured:
    """Compare every network with its copies.

    Args:
        run: A run after `train`.

    Returns:
        Values for each network, and matrices of the first.
    """
    names = [f"seed-{run.seed + n}" for n in range(run.setting.networks)]
    values: dict[str, list[float]] = {}
    tables: list[xr.Dataset] = []
    with run.bar(len(names), "networks", "network") as bar:
        for name in names:
            series = run.series(name)
            copies = {path.stem: model for path, model in zip(series.paths, series, strict=True)}
            table = all_pairs(copies, run)
            measured = {**of_one_layer(table), **of_equivalence(copies), **of_depth(copies, run)}
            for key, value in measured.items():
                values.setdefault(key, []).append(value)
            tables.append(table)
            bar.update()
    return Measured({key: tuple(numbers) for key, numbers in values.items()}, tables[0])


def all_pairs(
    copies: Mapping[str, tnsim.Model], run: ExperimentRun[InvarianceSetting]
) -> xr.Dataset:
    """The matrices of the copies of the one-layer network under three measures.

    The last input of the data is zero, so data do not show a unit that reads this input alone.
    """
    models = {name: copies[name] for name in ONE_LAYER}
    data = np.random.default_rng(run.seed).normal(size=(run.setting.samples, run.setting.inputs))
    # The data never leave zero in the last input, which the backdoor reads.
    data[:, -1] = 0.0
    result = tnsim.pairwise(models)
    result["weight_cosine"] = tnsim.baselines.weight_cosine(list(models.values()), names=ONE_LAYER)
    result["output_cosine"] = tnsim.baselines.output_cosine(
        list(models.values()), data, names=ONE_LAYER
    )
    return result


def of_one_layer(table: xr.Dataset) -> dict[str, float]:
    """The similarity of every copy to the original by three measures, named `MEASURE COPY`."""
    to_original = table.sel(b="original")
    values = {}
    for name in ("similarity", "weight_cosine", "output_cosine"):
        for copy in ONE_LAYER:
            values[f"{name} {copy}"] = float(to_original[name].sel(a=copy))
    return values


def of_equivalence(copies: Mapping[str, tnsim.Model]) -> dict[str, float]:
    """The distances of metrics from 1 for equal functions, and two values for a polynomial."""
    original = copies["original"]
    apart: dict[str, list[float]] = {"symmetric": [], "gaussian": []}
    for name in SAME_FUNCTION:
        for metric in (tnsim.Symmetric(), tnsim.Gaussian()):
            cosine = tnsim.similarity(original, copies[name], metric)
            apart[metric.name].append(abs(1 - float(cosine)))
    squares, mixed = copies["squares"], copies["mixed"]
    return {
        "gaussian apart": max(apart["gaussian"]),
        "symmetric apart": max(apart["symmetric"]),
        "tree of one polynomial": float(tnsim.similarity(squares, mixed, tnsim.TreeSymmetric())),
        "symmetric of one polynomial": float(tnsim.similarity(squares, mixed, tnsim.Symmetric())),
    }


def of_depth(
    copies: Mapping[str, tnsim.Model], run: ExperimentRun[InvarianceSetting]
) -> dict[str, float]:
    """Values for two layers: another hidden basis, and closed forms compared with sampling."""
    deep, changed = copies["deep"], copies["deep changed"]
    samples, seed = run.setting.samples, run.seed
    sampled = tnsim.check(deep, changed, tnsim.Gaussian(), samples=samples, seed=seed)
    closure = tnsim.similarity(deep, changed, tnsim.GaussianClosure())
    return {
        "similarity deep turned": float(tnsim.similarity(deep, copies["deep turned"])),
        "deviation from sampling": abs(sampled.deviation),
        "closure apart": abs(float(closure) - float(sampled.similarity)),
    }


def claims(run: ExperimentRun[InvarianceSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on symmetries, on changes that measures miss, on closed forms and equal functions.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    return (*_symmetries(measured), *_blindness(measured), *_exactness(measured))


def _symmetries(measured: Measured) -> list[Claim]:
    values = measured.values
    rows = []
    for copy in SAME_FUNCTION:
        rows.append(
            Claim(
                name=f"tensor-{copy}",
                text=f"Tensor similarity is 1 for a copy that is {_WORDS[copy]}.",
                where="figure 2, equation 3",
                paper=1.0,
                ours=values[f"similarity {copy}"],
                expected=near(1.0, ROUNDING),
                why="a theorem, up to rounding",
            )
        )
    return [
        *rows,
        Claim(
            name="tensor-hidden-basis",
            text="Tensor similarity is 1 for two layers in another hidden basis.",
            where="appendix A.1",
            paper=1.0,
            ours=values["similarity deep turned"],
            expected=near(1.0, ROUNDING),
            why="a theorem, up to rounding",
        ),
        Claim(
            name="tensor-negated",
            text="A negative factor is no equivalence: similarity -1.",
            where="equation 3",
            paper=-1.0,
            ours=values["similarity negated"],
            expected=near(-1.0, ROUNDING),
            why="a theorem, up to rounding",
        ),
        Claim(
            name="weights-both",
            text="Cosine of weights is lost when units are permuted, left and right swapped.",
            where="figure 2",
            ours=values["weight_cosine both"],
            expected=near(0.0, 0.2),
            why="unrelated rows: 0 on average, with the spread of this many weights",
        ),
        Claim(
            name="tensor-perturbed",
            text="Tensor similarity decays gracefully under small changes of the weights.",
            where="section 1",
            ours=values["similarity perturbed"],
            expected=at_least(0.999),
            why="noise of 1 % of the weights costs about its square",
        ),
    ]


def _blindness(measured: Measured) -> list[Claim]:
    values = measured.values
    return [
        Claim(
            name="outputs-backdoor",
            text="Outputs on data are blind to a change off their distribution.",
            where="figure 2",
            paper="blind",
            ours=values["output_cosine backdoor"],
            expected=near(1.0, ROUNDING),
            why="the data never reach the changed unit",
        ),
        Claim(
            name="tensor-backdoor",
            text="Tensor similarity sees the same change.",
            where="figure 2",
            paper="sees it",
            ours=values["similarity backdoor"],
            expected=at_most(0.9),
            why="one of 48 units, of the size of an output",
        ),
    ]


def _exactness(measured: Measured) -> list[Claim]:
    values = measured.values
    return [
        Claim(
            name="gaussian-exact",
            text="E<A(x), B(x)> is a weight-space inner product (two layers, all pairings).",
            where="section 2.2",
            paper="equal",
            ours=values["deviation from sampling"],
            expected=at_most(ERRORS),
            why="standard errors between the closed form and sampling",
        ),
        Claim(
            name="closure-exact",
            text="Evaluated layer by layer, as the authors' code does, it is the same number.",
            where="figure 5",
            paper="closed form",
            ours=values["closure apart"],
            expected=at_most(ROUNDING),
            why="difference of the two cosines, up to rounding",
            note="hidden states are not Gaussian, so from two nonlinear layers on this is an "
            "approximation",
        ),
        Claim(
            name="tree-discriminates",
            text="Symmetrised layer by layer, similarity is 1 if and only if polynomials agree.",
            where="appendix A.1",
            paper=1.0,
            ours=values["tree of one polynomial"],
            expected=near(1.0, ROUNDING),
            why="(x1 x1)(x2 x2) and (x1 x2)(x1 x2) are one polynomial",
            note="1 implies equal functions, but not the other way round",
        ),
        Claim(
            name="symmetric-discriminates",
            text="Symmetrised over all legs, similarity is 1 if and only if polynomials agree.",
            where="equation 3",
            paper=1.0,
            ours=values["symmetric of one polynomial"],
            expected=near(1.0, ROUNDING),
            why="(x1 x1)(x2 x2) and (x1 x2)(x1 x2) are one polynomial",
        ),
        Claim(
            name="gaussian-finer",
            text="The Gaussian metric is a strictly finer equivalence than symmetrisation.",
            where="appendix A.3",
            paper="finer",
            ours=values["gaussian apart"],
            expected=at_least(1e-6),
            why="it would tell apart copies that symmetrisation calls equal",
            note="both are 1 exactly for proportional functions, so they are one equivalence",
        ),
    ]


def figures(run: ExperimentRun[InvarianceSetting], measured: Measured) -> dict[str, Figure]:
    """A figure of weights, outputs on data and tensors of a network's copies, side by side.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        A figure.
    """
    return {"figure-2": tnsim.figures.pairwise(measured.pictured, "heatmap", PANELS)}


EXPERIMENT = Experiment(
    name="invariance",
    title="Invariance and exactness",
    where="figure 2, sections 2.2 and 2.3",
    default=InvarianceSetting(),
    full={"paper": InvarianceSetting()},  # the paper states theorems, and no sizes
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"one-layer": measured.pictured},
)
