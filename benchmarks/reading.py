"""Reading modules of PyTorch: CPU seconds from import to model, of further ones, files, refusals.

    python benchmarks/reading.py [--out FILE]
    python benchmarks/reading.py --one "SwiGLU block"

Every row runs in two processes of its own. In the first the module is the first one read: the time
from after the import of PyTorch, tnsim's own import included, to the model; then that of another
module of the class, and of two files of a run of its weights, of which the second is read by the
graph of the first. In the second it is read after an MLP with ReLU
(after a bilinear network, for the MLP itself). Seconds are those of the processor, of all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HIDDEN, CLASSES, VOCABULARY, LENGTH = 64, 128, 10, 50, 12


class Net(nn.Module):
    """A forward pass over named parts; a shape is a parameter."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, tuple):
                part = nn.Parameter(torch.randn(part) / part[-1] ** 0.5)
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def linear(d_in: int = WIDTH, d_out: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(d_in, d_out, bias=bias)


def mlp() -> nn.Module:
    return nn.Sequential(linear(WIDTH, HIDDEN), nn.ReLU(), linear(HIDDEN, CLASSES))


def swiglu(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.down(functional.silu(m.gate(x)) * m.up(x))


def gelu_written_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    return m.b(0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3))))


def attended(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = (m.q1(x) @ m.k1(x).mT) * (m.q2(x) @ m.k2(x).mT)
    return x + m.o(scores.tril() @ m.v(x))


def attention() -> dict[str, nn.Module]:
    return {name: linear(bias=False) for name in ("q1", "k1", "q2", "k2", "v", "o")}


def language_model(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    return m.head(m.block(m.embed(tokens)))


def lora(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(functional.relu(m.a(x) + x @ m.A.T @ m.B.T))


def convolutional(pool: nn.Module, activation: bool = True) -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)]
    between = [nn.ReLU()] if activation else []
    return nn.Sequential(*first, *between, pool, nn.Flatten(), linear(8 * 36, CLASSES))


def weight_normed() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(normed(linear(WIDTH, HIDDEN)), nn.ReLU(), normed(linear(HIDDEN, CLASSES)))


IMAGES = {"inputs": torch.zeros(2, 1, 12, 12)}
SEQUENCES = {"n_ctx": LENGTH}
BUILT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "MLP with ReLU": (mlp, {}),
    "bilinear network": (
        lambda: Net(
            lambda m, x: m.c(m.a(x) * m.b(x)),
            a=linear(WIDTH, HIDDEN),
            b=linear(WIDTH, HIDDEN),
            c=linear(HIDDEN, CLASSES),
        ),
        {},
    ),
    "SwiGLU block": (
        lambda: Net(
            swiglu,
            gate=linear(WIDTH, HIDDEN),
            up=linear(WIDTH, HIDDEN),
            down=linear(HIDDEN, WIDTH),
        ),
        {},
    ),
    "GELU written out": (lambda: Net(gelu_written_out, a=linear(), b=linear()), {}),
    "factors of a tensor by einsum": (
        lambda: Net(
            lambda m, x: torch.einsum("bi,ri,bj,rj,or->bo", x, m.a, x, m.b, m.c),
            a=(HIDDEN, WIDTH),
            b=(HIDDEN, WIDTH),
            c=(CLASSES, HIDDEN),
        ),
        {},
    ),
    "convolution, batch norm, ReLU": (lambda: convolutional(nn.AvgPool2d(2)), IMAGES),
    "bilinear attention": (lambda: Net(attended, **attention()), SEQUENCES),
    "language model of one layer of attention": (
        lambda: Net(
            language_model,
            embed=nn.Embedding(VOCABULARY, WIDTH),
            block=Net(attended, **attention()),
            head=linear(WIDTH, VOCABULARY),
        ),
        SEQUENCES,
    ),
    "weight norm": (weight_normed, {}),
    "LoRA": (
        lambda: Net(
            lora, a=linear(WIDTH, HIDDEN), b=linear(HIDDEN, CLASSES), A=(4, WIDTH), B=(HIDDEN, 4)
        ),
        {},
    ),
    "refused: softmax": (
        lambda: Net(lambda m, x: m.b(m.a(x).softmax(-1)), a=linear(), b=linear()),
        {},
    ),
    "refused: max pooling": (lambda: convolutional(nn.MaxPool2d(2)), IMAGES),
    "refused: a quotient": (
        lambda: Net(lambda m, x: m.a(x) / (1 + m.b(x) ** 2), a=linear(), b=linear()),
        {},
    ),
    "refused: mean of the batch": (
        lambda: Net(lambda m, x: m.a(x - x.mean(0)), a=linear()),
        {},
    ),
    "refused: a branch": (
        lambda: Net(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), a=linear(), b=linear()),
        {},
    ),
}  # fmt: skip
COLUMNS = ("first", "further of the class", "file", "next file of a run", "after another class")


def read(name: str) -> tuple[float, nn.Module]:
    """Seconds for a module that is built before, and the module."""
    build, asked = BUILT[name]
    net = build().eval()
    start = time.process_time()
    import tnsim  # a part of the first reading

    try:
        tnsim.from_module(net, **asked)
    except tnsim.TnsimError as refused:
        if not name.startswith("refused"):
            print(f"{name}: {refused}", file=sys.stderr)
    else:
        if name.startswith("refused"):
            print(f"{name}: read, and should be refused", file=sys.stderr)
    return time.process_time() - start, net


def measure(name: str, after: bool) -> list[float]:
    """Seconds of this process for a row: as the first module and what follows, or after another."""
    torch.manual_seed(0)
    if after:
        read("bilinear network" if name == "MLP with ReLU" else "MLP with ReLU")
        return [read(name)[0]]
    first, _ = read(name)
    again, net = read(name)
    import tnsim

    with tempfile.TemporaryDirectory() as folder:
        for n in range(2):
            torch.save(BUILT[name][0]().state_dict(), Path(folder, f"step_{n}.pt"))
        run, seconds = tnsim.load(folder, net, **BUILT[name][1]), [first, again]
        for n in range(2):
            start = time.process_time()
            with contextlib.suppress(tnsim.TnsimError):
                run[n]
            seconds.append(time.process_time() - start)
        return seconds


def row(name: str) -> str:
    """A line of the table, from two processes."""
    times: list[float] = []
    for after in ([], ["--after"]):
        command = [sys.executable, __file__, "--one", name, *after]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times += json.loads(done.stdout.splitlines()[-1])
        for line in done.stderr.splitlines():
            if line.startswith(name):
                print(line, file=sys.stderr)
    return " | ".join(("", name, *(f"{seconds:.3g}" for seconds in times), "")).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", choices=BUILT, help="a row, in this process")
    parser.add_argument("--after", action="store_true", help="of --one: after another module")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.after)))
        return
    lines = [f"| module | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    print("\n".join(lines), flush=True)
    for name in BUILT:
        lines.append(row(name))
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
