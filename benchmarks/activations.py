"""Inner products of MLP blocks with an activation: first call, warm calls, memory.

    python benchmarks/activations.py [--units 3072] [--inputs 768] [--biases 0.3] [--out FILE]
    python benchmarks/activations.py --one relu 0.0 --units 16384 --inputs 768

Two random blocks under N(0, cov) with identity covariance and with spectra k^-0.7 and k^-2.5,
beside the floor of two matrix products of the same shapes. The first call prepares both blocks.
Warm times are the least of two; memory is the peak of the process, which runs
one activation.
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
COLUMNS = (
    "activation | spectrum | first (s) | its CPU (s) | warm (s) | its CPU (s) | "
    "two products (s) | their CPU (s) | MiB"
)


def measure(name: str, exponent: float, units: int, inputs: int, biases: float) -> str:
    """A line of the table, in this process."""
    import tnsim

    g = np.random.default_rng(0)
    spectrum = np.arange(1.0, inputs + 1) ** -exponent
    metric = tnsim.Gaussian(cov=np.diag(spectrum * inputs / spectrum.sum()))

    def block() -> tnsim.Model:
        gate, up = (g.normal(size=(units, inputs)) / np.sqrt(inputs) for _ in range(2))
        down = g.normal(size=(inputs, units))
        bias = biases * g.normal(size=units) if biases else None
        if name == "swiglu":
            return tnsim.Model([tnsim.Gated(gate, up, down, "silu", bias)])
        return tnsim.Model([tnsim.Gated(gate, None, down, name, bias)])

    a, b = block(), block()
    times = []
    for _ in range(3):
        start, cpu = time.perf_counter(), time.process_time()
        tnsim.inner(a, b, metric)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rows, others = (g.normal(size=(units, inputs)) for _ in range(2))
    floors = []
    for _ in range(3):
        start, cpu = time.perf_counter(), time.process_time()
        (rows @ others.T) @ others
        floors.append((time.perf_counter() - start, time.process_time() - cpu))
    warm, own = (min(x) for x in zip(*times[1:], strict=True))
    floor, floor_cpu = (min(x) for x in zip(*floors, strict=True))
    return (
        f"{name} | k^-{exponent} | {times[0][0]:.2f} | {times[0][1]:.2f} | {warm:.2f} | "
        f"{own:.2f} | {floor:.2f} | {floor_cpu:.2f} | {memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--biases", type=float, default=0.3)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "EXPONENT"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        name, exponent = options.one
        sizes = options.units, options.inputs, options.biases
        print(measure(name, float(exponent), *sizes))
        return
    lines = [COLUMNS, " | ".join("---" for _ in COLUMNS.split("|"))]
    for name in NAMES:
        for exponent in SPECTRA:
            size = ["--units", str(options.units), "--inputs", str(options.inputs)]
            size += ["--biases", str(options.biases)]
            command = [sys.executable, __file__, "--one", name, str(exponent), *size]
            lines.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
