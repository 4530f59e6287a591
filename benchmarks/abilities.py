"""What answers: layers by metrics by verbs, precisions and transforms, and by which route.

    python benchmarks/abilities.py --out now.json                     # answers of this version
    python benchmarks/abilities.py --out now.json --before then.json  # and what differs

Every question is asked of two small random models. An answer is the route, `yes`, or the class of
the refusal. The script uses public names alone, also those that earlier versions had, so that it
runs on both sides of a change.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tnsim

D, UNITS, POSITIONS, TOKENS = 3, 4, 2, 5
TRACED = ("Gaussian", "inputs")
"""Metrics under which derivatives and traces are asked for, as each compiles for seconds."""
LONGEST = 20.0
"""Seconds that an inner product may be expected to take; of longer ones the route is told alone."""


def layers_of(g: np.random.Generator) -> dict[str, Callable[[], tuple[list[Any], int | None]]]:
    """Layers and length of sequences of a model, by the name of its form."""

    def w(*shape: int) -> np.ndarray:
        return g.normal(size=shape) / np.sqrt(shape[-1])

    def linear(out: int, into: int) -> Any:
        return tnsim.Linear(w(out, into), w(out))

    def bilinear(biases: bool = False) -> Any:
        own = (w(UNITS), w(UNITS), w(D)) if biases else ()
        return tnsim.Bilinear(w(UNITS, D), w(UNITS, D), w(D, UNITS), *own)

    def attention(biases: bool = False) -> Any:
        own = {"q1_bias": w(4), "v_bias": w(4), "o_bias": w(D)} if biases else {}
        return tnsim.Attention(*[w(4, D) for _ in range(5)], w(D, 4), 2, **own)

    def hidden(name: str) -> list[Any]:
        return [linear(UNITS, D), tnsim.Elementwise(name), linear(D, UNITS)]

    def gated() -> Any:
        return tnsim.Gated(w(UNITS, D), w(UNITS, D), w(D, UNITS), "silu")

    def residual(layer: Any) -> Any:
        return tnsim.Residual(layer, 0.7, 0.3)

    return {
        "linear": lambda: ([linear(UNITS, D), linear(2, UNITS)], None),
        "bilinear": lambda: ([bilinear()], None),
        "bilinear, biases": lambda: ([bilinear(True)], None),
        "two bilinear": lambda: ([bilinear(), bilinear()], None),
        "two residual, biases": lambda: ([residual(bilinear(True)), residual(bilinear())], None),
        "three bilinear": lambda: ([bilinear(), bilinear(), bilinear()], None),
        "multilinear": lambda: (
            [tnsim.Multilinear([w(UNITS, D) for _ in range(3)], w(2, UNITS))],
            None,
        ),
        "ReLU": lambda: (hidden("relu"), None),
        "GELU": lambda: (hidden("gelu"), None),
        "SwiGLU": lambda: ([gated()], None),
        "ReLU twice": lambda: ([*hidden("relu"), *hidden("relu")], None),
        "attention": lambda: ([attention()], POSITIONS),
        "attention, biases": lambda: ([residual(attention(True))], POSITIONS),
        "attention twice": lambda: ([attention(), attention()], POSITIONS),
        "tokens": lambda: (
            [linear(D, TOKENS), residual(attention(True)), residual(bilinear()), linear(2, D)],
            POSITIONS,
        ),
    }


def metrics(g: np.random.Generator, form: str, n_ctx: int | None) -> dict[str, Any]:
    """Metrics by name, for models of a form."""
    root = g.normal(size=(D, D))
    width = TOKENS if form == "tokens" else D
    shape = (6, n_ctx, width) if n_ctx else (6, width)
    found = {
        "Gaussian": tnsim.Gaussian(),
        "closure": tnsim.GaussianClosure(),
        "Symmetric": tnsim.Symmetric(),
        "tree": tnsim.TreeSymmetric(),
        "Frobenius": tnsim.Frobenius(),
        "inputs": tnsim.Empirical(g.normal(size=shape)),
    }
    if form == "tokens":
        found["tokens"] = tnsim.Categorical(np.full(TOKENS, 1 / TOKENS))
    elif n_ctx is None:
        found["Gaussian, moments"] = tnsim.Gaussian(g.normal(size=D), root @ root.T)
    return found


def route(a: Any, b: Any, metric: Any) -> str:
    plan = tnsim.plan(a, b, metric)
    return str(getattr(plan, "route", type(plan).__name__))


def is_long(a: Any, b: Any, metric: Any) -> bool:
    try:
        return (getattr(tnsim.plan(a, b, metric), "seconds", None) or 0.0) > LONGEST
    except Exception:  # what is refused is soon refused
        return False


def networks(a: Any, b: Any, metric: Any) -> Any:
    module = getattr(tnsim, "tensor_networks", tnsim)
    return getattr(module, "networks", None) and list(module.networks(a, b, metric))


VERBS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "route": route,
    "similarity": tnsim.similarity,
    "float32": lambda a, b, m: tnsim.similarity(a, b, m, dtype="float32"),
    "inner": tnsim.inner,
    "log_inner": tnsim.log_inner,
    "slices": tnsim.slices,
    "difference": lambda a, b, m: tnsim.similarity(b - a, b, m),
    "check": lambda a, b, m: tnsim.check(a, b, m, samples=64),
    "pairwise": lambda a, b, m: tnsim.pairwise([a, b], m),
    "pairwise, slices": lambda a, b, m: tnsim.pairwise([a, b], m, slices=True),
    "paths": lambda a, b, m: tnsim.paths(a, b, metric=m),
    "edges": lambda a, b, m: tnsim.paths(a, None, metric=m, legs=True),
    "change": lambda a, b, m: tnsim.change(a, b, m),
    "networks": networks,
    "grad": lambda a, b, m: jax.grad(lambda x: tnsim.similarity(x, b, m))(a),
    "jit": lambda a, b, m: jax.jit(lambda x: tnsim.similarity(x, b, m))(a),
}


def answers() -> dict[str, str]:
    """Every answer by form, metric and verb."""
    found = {}
    for form in layers_of(np.random.default_rng(0)):
        pair = []
        for seed in (1, 2):
            layers, n_ctx = layers_of(np.random.default_rng(seed))[form]()
            pair.append(tnsim.Model(layers, n_ctx))
        for name, metric in metrics(np.random.default_rng(3), form, n_ctx).items():
            long = is_long(*pair, metric)
            for verb, ask in VERBS.items():
                if verb in ("grad", "jit") and (name not in TRACED or "twice" in form):
                    continue
                if long and verb != "route":
                    continue
                with warnings.catch_warnings(), jax.enable_x64(verb in ("grad", "jit")):
                    warnings.simplefilter("ignore")
                    try:
                        answer = ask(*pair, metric)
                        said = answer if verb == "route" else "yes"
                    except Exception as error:  # every refusal is an answer
                        said = type(error).__name__
                found[f"{form} | {name} | {verb}"] = said
        tnsim.session().clear()
        jax.clear_caches()  # compiled programs of all forms would not fit
        print(form, flush=True)
    return found


def table(now: dict[str, str], before: dict[str, str] | None) -> list[str]:
    """Lines of a table of forms by metrics: the route, and the verbs that are refused."""
    forms = list(dict.fromkeys(key.split(" | ")[0] for key in now))
    names = list(dict.fromkeys(key.split(" | ")[1] for key in now))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for form in forms:
        row = []
        for name in names:
            own = {verb: now.get(f"{form} | {name} | {verb}") for verb in VERBS}
            refused = [
                verb for verb, said in own.items() if verb != "route" and said not in ("yes", None)
            ]
            if own["route"] is None:
                row.append("")
            elif own["similarity"] is None:
                row.append(f"{own['route']}, long")
            elif own["similarity"] != "yes":
                row.append(f"refused ({own['similarity']})")
            else:
                row.append(f"{own['route']}{'; not ' if refused else ''}{', '.join(refused)}")
        lines.append(f"| {form} | {' | '.join(row)} |")
    if before is not None:
        both = now.keys() & before.keys()
        moved = [f"- {key}: {before[key]} -> {now[key]}" for key in now if key in both]
        changed = [line for line in moved if len(set(line.rpartition(": ")[2].split(" -> "))) > 1]
        lines += ["", f"{len(both):,} answers, {len(changed)} of which differ:", "", *changed]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all answers")
    parser.add_argument("--before", type=Path, help="JSON file of another version")
    given = parser.parse_args()
    now = answers()
    given.out.write_text(json.dumps(now, indent=1))
    before = json.loads(given.before.read_text()) if given.before else None
    print("\n".join(table(now, before)))


if __name__ == "__main__":
    main()
