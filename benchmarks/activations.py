"""Inner products of MLP blocks with an activation: first call, warm calls, memory.

    python benchmarks/activations.py [--units 3072] [--inputs 768] [--out FILE]

Two random blocks under N(0, cov) with identity covariance and with spectra k^-0.7 and k^-2.5,
beside the floor of two matrix products of the same shapes. The first call prepares both blocks.
Memory is the peak of the process, which runs one activation.
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
COLUMNS = "activation | spectrum | first (s) | warm (s) | CPU (s) | two products (s) | MiB"


def measure(name: str, exponent: float, units: int, inputs: int) -> str:
    """A line of the table, in this process."""
    import tnsim

    g = np.random.default_rng(0)
    spectrum = np.arange(1.0, inputs + 1) ** -exponent
    metric = tnsim.Gaussian(cov=np.diag(spectrum * inputs / spectrum.sum()))

    def block() -> tnsim.Model:
        gate, up = (g.normal(size=(units, inputs)) / np.sqrt(inputs) for _ in range(2))
        down, bias = g.normal(size=(inputs, units)), 0.3 * g.normal(size=units)
        if name == "swiglu":
            return tnsim.Model([tnsim.Gated(gate, up, down, "silu", bias)])
        return tnsim.Model([tnsim.Gated(gate, None, down, name, bias)])

    a, b = block(), block()
    times = []
    for _ in range(4):
        start, cpu = time.perf_counter(), time.process_time()
        tnsim.inner(a, b, metric)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rows = g.normal(size=(units, inputs))
    start = time.perf_counter()
    for _ in range(2):
        rows @ rows.T
    floor = time.perf_counter() - start
    warm, cpu = min(times[1:])
    return (
        f"{name} | k^-{exponent} | {times[0][0]:.2f} | {warm:.2f} | {cpu:.2f} | {floor:.2f} | "
        f"{memory}"
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
