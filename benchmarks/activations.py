"""Kernels of activations for pairs of MLP blocks: first call, warm calls, memory, pairs alone.

    python benchmarks/activations.py [--units 3072] [--inputs 768] [--out FILE]

Two random layers under N(mean, cov) with identity covariance and with spectra k^-0.7 and k^-2.5,
beside the floor of two matrix products of the same shapes. Memory is the peak of the process, which
runs one activation.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NAMES = ("gelu", "relu", "tanh", "gelu_tanh", "swiglu")
SPECTRA = (0.0, 0.7, 2.5)
COLUMNS = "activation | spectrum | first (s) | warm (s) | CPU (s) | two products (s) | bound | MiB"


def measure(name: str, exponent: float, units: int, inputs: int) -> str:
    """A line of the table, in this process."""
    from tnsim.activations.gated import GatedUnits, gated_kernel
    from tnsim.activations.kernels import Units, kernel

    g = np.random.default_rng(0)
    spectrum = np.arange(1, inputs + 1) ** (-exponent / 2)
    spectrum *= np.sqrt(inputs / np.sum(spectrum**2))

    def layer() -> Units:
        rows = g.normal(size=(units, inputs)) * spectrum / np.sqrt(inputs)
        return Units(0.3 * g.normal(size=units), rows)

    if name == "swiglu":
        left, right = (GatedUnits(layer(), layer()) for _ in range(2))
        call = lambda: gated_kernel("silu", "silu", left, right)  # noqa: E731
    else:
        left, right = layer(), layer()
        call = lambda: kernel(name, name, left, right)  # noqa: E731
    times = []
    for _ in range(4):
        start, cpu = time.perf_counter(), time.process_time()
        found = call()
        found.values.block_until_ready()
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    rows = g.normal(size=(units, inputs))
    start = time.perf_counter()
    for _ in range(2):
        rows @ rows.T
    floor = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    warm, cpu = min(times[1:])
    return (
        f"{name} | k^-{exponent} | {times[0][0]:.2f} | {warm:.2f} | {cpu:.2f} | {floor:.2f} | "
        f"{float(found.share):.0e} | {memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "EXPONENT"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one[0], float(options.one[1]), options.units, options.inputs))
        return
    lines = [COLUMNS, " | ".join("---" for _ in COLUMNS.split("|"))]
    for name in NAMES:
        for exponent in SPECTRA:
            size = ["--units", str(options.units), "--inputs", str(options.inputs)]
            command = [sys.executable, __file__, "--one", name, str(exponent), *size]
            lines.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
