"""A store that grows: 200 tiny checkpoints, then 203, then 210, while a second process looks.

    python benchmarks/growing.py

Prints for each step its time, the records that it computed, and the looks of the second process,
and at the end the largest difference from one run over all checkpoints; then the time and the files
that checkpoints one after another take, and the cost of the monitor of a training loop.
"""

import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

import tnsim

STEPS = (200, 203, 210)
ONE_BY_ONE = 20

LOOKS = """
import sys, time, warnings
from pathlib import Path
import numpy as np, tnsim
store, stop, first = Path(sys.argv[1]), Path(sys.argv[2]), None
looks, sizes, changed = 0, set(), 0
warnings.simplefilter("ignore")
while not stop.exists():
    if store.exists():
        found = tnsim.open_pairwise(store).similarity.values
        if first is not None:
            same = found[: len(first), : len(first)]
            changed += int((~np.isnan(first) & (same != first)).sum())
        first, looks = found, looks + 1
        sizes.add(len(found))
    time.sleep(0.02)
print(f"second process: {looks} looks at {sorted(sizes)} models, {changed} numbers changed")
"""


def model(rng: np.random.Generator) -> tnsim.Model:
    """A bilinear layer with biases, 16 inputs."""
    shapes = (32, 16), (32, 16), (8, 32), (8,)
    left, right, down, bias = (rng.normal(size=shape) for shape in shapes)
    return tnsim.Model([tnsim.Bilinear(left, right, down, down_bias=bias)])


def records(store: Path) -> int:
    """Number of records that were begun in a store."""
    return sum(len(log.read_text().splitlines()) for log in store.rglob("computed.log"))


def main() -> None:
    """Run all steps in a temporary folder."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for n in range(STEPS[-1] + ONE_BY_ONE):
            tnsim.save(model(rng), folder / "run" / f"step_{n:04}.safetensors")
        series, store = tnsim.load(folder / "run"), folder / "store"
        tnsim.pairwise(series[:2])  # imports and the first programs
        stop = folder / "stop"
        reader = subprocess.Popen([sys.executable, "-c", LOOKS, store, stop])
        known, before = None, 0
        for count in STEPS:
            start = time.perf_counter()
            found = tnsim.pairwise(series[:count], store=store).similarity.values
            seconds = time.perf_counter() - start
            same = known is None or bool((found[: len(known), : len(known)] == known).all())
            now = records(store)
            new = now - before
            print(f"{count} checkpoints: {seconds:.2f} s, {new} records, earlier equal: {same}")
            known, before = found, now
        stop.touch()
        reader.wait()
        start = time.perf_counter()
        whole = tnsim.pairwise(series[: STEPS[-1]]).similarity.values
        seconds = time.perf_counter() - start
        print(f"in one run: {seconds:.2f} s, largest difference {np.abs(whole - known).max():.1e}")
        files = sum(path.is_file() for path in store.rglob("*"))
        start = time.perf_counter()
        for count in range(STEPS[-1] + 1, STEPS[-1] + ONE_BY_ONE + 1):
            tnsim.pairwise(series[:count], store=store)
        each = (time.perf_counter() - start) / ONE_BY_ONE
        more = (sum(path.is_file() for path in store.rglob("*")) - files) / ONE_BY_ONE
        print(f"one after another: {each:.2f} s and {more:.0f} files each")
        start = time.perf_counter()
        tnsim.open_pairwise(store)
        print(f"opened after {ONE_BY_ONE + 2} growths in {time.perf_counter() - start:.2f} s")
    monitor()


def monitor() -> None:
    """Seconds of the processor of a record of `tnsim.torch.Monitor`, beside a training step."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(64, 256), nn.Linear(64, 256)
            self.down = nn.Linear(256, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.left(x) * self.right(x))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    relu = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    relu.append(nn.Linear(256, 10))
    inputs = tnsim.Empirical(np.random.default_rng(0).normal(size=(512, 64)))
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    cases = [("bilinear, from weights", Net(), tnsim.Gaussian(), 32)]
    cases += [("bilinear, 4 in the matrix", Net(), tnsim.Gaussian(), 4)]
    cases += [("three layers of ReLU, 512 inputs", relu, inputs, 32)]
    for name, net, metric, most in cases:
        watch = tnsim.torch.Monitor(metric, every=1, matrix=most)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
        steps, looks = [], []
        for step in range(34):
            start = time.process_time()
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
            between = time.process_time()
            watch(step, net)
            looks.append(time.process_time() - between)
            steps.append(between - start)
        step, look = np.median(steps), np.median(looks[24:32])
        print(f"{name}: a step {1e3 * step:.1f} ms, a record {1e3 * look:.0f} ms")


if __name__ == "__main__":
    main()
