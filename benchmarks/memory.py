"""Planned memory beside measured memory, shape by shape.

    python benchmarks/memory.py [--out benchmarks/results/memory.md]

One process per row, in which nothing was compiled before and no program is read from disk: the
first program of a process costs some 60 MiB more than later ones. The process makes two models (or
a series), plans, starts JAX, notes its resident size, resets the kernel's high-water mark, and
compares the models: `measured` is the mark less the size before, so compiling, laying out weights
and running are all in it, and Python, imports and plans are not. `arrays` is `Plan.peak_bytes`,
`programs` is
`Plan.program_bytes`, `planned` their sum, which is held against the free memory. For many models
`arrays` is `Estimate.peak_bytes`. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

UNCACHED = os.environ | {"TNSIM_PROGRAM_CACHE": "off"}
DEEP = {"metric": "Gaussian"}
ROWS = (
    {"layers": [[16, 32, 16], [16, 32, 10]], **DEEP},
    {"layers": [[16, 32, 16], [16, 32, 10]], "bias": True, **DEEP},
    {"layers": [[64, 128, 64], [64, 128, 10]], **DEEP},
    {"layers": [[64, 128, 64], [64, 128, 10]], "bias": True, **DEEP},
    {"layers": [[128, 256, 128], [128, 256, 128]], **DEEP},
    {"layers": [[512, 1024, 512]], **DEEP},
    {"layers": [[2048, 2048, 512]], **DEEP},
    {"layers": [[2048, 2048, 512]], "dtype": "float32", **DEEP},
    {"layers": [[256, 512, 256]] * 4, "metric": "TreeSymmetric"},
    {"layers": [[256, 512, 256]] * 16, "metric": "TreeSymmetric"},
    {"layers": [[1024, 2048, 1024]] * 4, "metric": "TreeSymmetric"},
    {"layers": [[512, 1024, 512]] * 4, "bias": True, "metric": "GaussianClosure"},
    {"layers": [[1024, 1024, 1024]] * 4, "metric": "GaussianClosure"},
    {"attention": [64, 4, 1], "n_ctx": 8, **DEEP},
    {"attention": [64, 4, 2], "n_ctx": 8, "metric": "TreeSymmetric"},
    {"attention": [64, 4, 2], "n_ctx": 4, "metric": "GaussianClosure"},
    {"attention": [64, 4, 2], "n_ctx": 24, "metric": "TreeSymmetric"},
    {"attention": [64, 4, 1], "n_ctx": 24, "metric": "TreeSymmetric"},
    {"layers": [[128, 6000, 32]], "activation": "gelu", **DEEP},
    {"layers": [[128, 6000, 32]], "activation": "tanh", **DEEP},
    {"layers": [[128, 6000, 32]], "activation": "silu", "gated": True, **DEEP},
    {"layers": [[600, 900, 300]], "activation": "relu", **DEEP},
    {"layers": [[80, 160, 80], [80, 160, 10]], "bias": True, **DEEP},
    {"layers": [[60, 60, 60], [60, 60, 1]], **DEEP},
    {"layers": [[12, 12, 12]] * 3, **DEEP},
    {"layers": [[16, 4, 16], [16, 4, 16], [16, 4, 1]], **DEEP},
    {"layers": [[600, 600, 20]], "models": 6, **DEEP},
    {"layers": [[600, 600, 600], [600, 600, 300]], "models": 16, "metric": "TreeSymmetric"},
    {"layers": [[128, 256, 10]], "models": 60, "slices": True, **DEEP},
    {"layers": [[64, 64, 10]], "models": 60, "slices": True, "metric": "TreeSymmetric"},
    {"layers": [[128, 256, 10]], "models": 100, **DEEP},
    {"layers": [[256, 512, 256]] * 2, "models": 12, "metric": "GaussianClosure"},
)


def model(spec: dict, seed: int):
    """A random model of a row."""
    import numpy as np

    import tnsim

    g = np.random.default_rng(seed)
    dtype = spec.get("dtype", "float64")

    def weight(*shape):
        return (g.normal(size=shape) / shape[-1] ** 0.5).astype(dtype)

    if "attention" in spec:
        width, heads, depth = spec["attention"]
        square = (width, width)
        layers = [
            tnsim.Attention(*(weight(*square) for _ in range(6)), n_heads=heads)
            for _ in range(depth)
        ]
        return tnsim.Model(layers, n_ctx=spec["n_ctx"])
    layers = []
    for d_in, rank, d_out in spec["layers"]:
        bias = [weight(rank)] if spec.get("bias") else []
        made = weight(rank, d_in), weight(rank, d_in), weight(d_out, rank)
        if spec.get("gated"):
            layers.append(tnsim.Gated(*made, spec["activation"]))
        elif "activation" in spec:
            first, last = tnsim.Linear(made[0], weight(rank)), tnsim.Linear(made[2])
            layers += [first, tnsim.Elementwise(spec["activation"]), last]
        else:
            layers.append(tnsim.Bilinear(*made, *bias))
    return tnsim.Model(layers)


def resident(name: str) -> float:
    """A size of this process in MiB: VmRSS is now, VmHWM the largest since the mark was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise SystemExit("resident sizes are read from /proc")


def row(spec: dict) -> dict:
    import jax
    import numpy as np

    import tnsim

    metric = getattr(tnsim, spec["metric"])()
    jax.devices()
    tiny = [tnsim.Model([tnsim.Bilinear(*[c * np.eye(2)] * 3)]) for c in (1.0, 3.0)]
    points = tnsim.Empirical(np.eye(2))  # so few points are run through without a compiler
    tnsim.similarity(*tiny, points)
    models = [model(spec, seed) for seed in range(spec.get("models", 2))]
    slices = spec.get("slices", False)
    if "models" in spec:
        tnsim.pairwise(tiny, points)
        plan = tnsim.plan_pairwise(models, metric, slices=slices)
    else:
        estimate = tnsim.plan(*models, metric, cosine=True)
        plan = estimate if estimate.contraction is None else estimate.contraction
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    if "models" in spec:
        tnsim.pairwise(models, metric, slices=slices)
    else:
        tnsim.similarity(*models, metric)
    measured = resident("VmHWM") - before
    programs = getattr(plan, "program_bytes", 0)  # only contractions and runs of pairs compile
    return {
        "arrays": plan.peak_bytes / 2**20,
        "programs": programs / 2**20,
        "measured": measured,
        "ratio": (plan.peak_bytes + programs) / 2**20 / measured,
    }


def described(spec: dict) -> str:
    """A row in words."""
    if "attention" in spec:
        width, heads, depth = spec["attention"]
        text = f"{depth} x attention {width}, {heads} heads, n_ctx {spec['n_ctx']}"
    else:
        shapes = ["/".join(map(str, shape)) for shape in spec["layers"]]
        same = len(set(shapes)) == 1 and len(shapes) > 1
        text = f"{len(shapes)} x {shapes[0]}" if same else ", ".join(shapes)
    if "models" in spec:
        text = f"{spec['models']} models of {text}"
    extra = [name for name in ("bias", "gated", "slices") if spec.get(name)]
    extra += [spec[name] for name in ("activation", "dtype") if name in spec]
    return ", ".join([text, *extra])


HEAD = (
    "# Planned and measured memory\n\n"
    "| models | metric | arrays MiB | programs MiB | measured MiB | planned / measured |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row")
    args = parser.parse_args()
    if args.row:
        os.environ.update(UNCACHED)
        import tnsim

        with tnsim.using(
            tnsim.Session(tier="compile")
        ):  # interpreted plans know their peak exactly
            print(json.dumps(row(json.loads(args.row))))
        return
    lines = [HEAD]
    print(HEAD)
    for spec in ROWS:
        command = [sys.executable, __file__, "--row", json.dumps(spec)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=UNCACHED)
        figures = json.loads(done.stdout.splitlines()[-1])
        sizes = (f"{figures[name]:,.0f}" for name in ("arrays", "programs", "measured"))
        cells = (described(spec), spec["metric"], *sizes, f"{figures['ratio']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
