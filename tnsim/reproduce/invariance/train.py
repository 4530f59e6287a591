"""Networks and their copies. In: a run. Out: files `seed-N/NAME.safetensors`.

Nothing is learned here: the claims are theorems, so random networks are as good as any. A copy is
the same function written with other weights, or another function that some measure mistakes for it.
"""

from __future__ import annotations

import numpy as np

import tnsim
from tnsim.reproduce.invariance.setting import Setting
from tnsim.reproduce.run import Recorder, Run


def train(run: Run[Setting]) -> None:
    """Write every network and its copies.

    Args:
        run: Where to.
    """
    seeds = {f"seed-{run.seed + n}": run.seed + n for n in range(run.setting.networks)}
    for name in run.unfinished(seeds):
        recorder = Recorder(run, name, seed=seeds[name])
        rng = np.random.default_rng(seeds[name])
        copies = {**one_layer(rng, run.setting), **two_layers(rng, run.setting), **written_twice()}
        for step, (copy, model) in enumerate(copies.items()):
            recorder.add(step, model, copy)
        recorder.finish()


def one_layer(rng: np.random.Generator, setting: Setting) -> dict[str, tnsim.Model]:
    """A bilinear layer `D (L x * R x)`, its copies and its changes."""
    left, right, down = layer(rng, setting.inputs, setting.hidden, setting.outputs)
    # the last unit squares the last input, and nothing reads it: a place for a backdoor
    left[-1] = right[-1] = np.eye(setting.inputs)[-1]
    down[:, -1] = 0.0
    opened = down.copy()
    opened[:, -1] = rng.normal(size=setting.outputs)
    # a * b = b * a, unit by unit
    swapped = rng.permutation(setting.hidden) % 2 == 0
    left_or_right = np.where(swapped[:, None], right, left)
    right_or_left = np.where(swapped[:, None], left, right)
    order = rng.permutation(setting.hidden)
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


def two_layers(rng: np.random.Generator, setting: Setting) -> dict[str, tnsim.Model]:
    """Two bilinear layers in a row, the same in another hidden basis, and a changed one."""
    width = setting.deep_width
    first = layer(rng, width, 2 * width, width)
    second = layer(rng, width, 2 * width, width)
    # U and its inverse between the layers; U = QS is a rotation of stretched axes
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

    Two layers each: the first gives three products, the second multiplies two of them.
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
    """A model of one bilinear layer."""
    return tnsim.Model([tnsim.Bilinear(left, right, down)])
