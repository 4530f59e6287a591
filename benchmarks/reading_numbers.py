"""What a similarity of .9 is: random pairs, seeds, noise and edits, as a table.

    python benchmarks/reading_numbers.py

Networks of 16 inputs, 64 hidden units and 4 outputs, with ReLU and bilinear ones, learn products of
two inputs. Every row is one question, over all pairs of five seeds or over five networks; the
numbers are exact, `tnsim.similarity` under N(0, I).
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

import tnsim

INPUTS, HIDDEN, OUTPUTS = 16, 64, 4
SEEDS = range(5)
Pair = tuple[nn.Module, nn.Module]


class Bilinear(nn.Module):
    """A bilinear layer with biases, as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(INPUTS, HIDDEN), nn.Linear(INPUTS, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of a batch of inputs."""
        return self.down(self.left(x) * self.right(x))


def relu() -> nn.Module:
    """A network of one hidden layer with ReLU."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))


def products(x: torch.Tensor, first: int) -> torch.Tensor:
    """Four products of two inputs, those from `first` on."""
    return x[:, first : first + 4] * x[:, first + 4 : first + 8]


def train(net: nn.Module, steps: int, first: int = 0) -> nn.Module:
    """A copy that was trained on."""
    net = copy.deepcopy(net)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(128, INPUTS)
        optimiser.zero_grad()
        (net(x) - products(x, first)).square().mean().backward()
        optimiser.step()
    return net


def changed(net: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy with every tensor of weights changed."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(change(weight))
    return net


def to_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """Weights rounded to 255 steps of one size."""
    step = weight.abs().max() / 127
    return (weight / step).round() * step


def noisy(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Noise of a share of a tensor's own size."""
    return lambda weight: weight + size * weight.std() * torch.randn_like(weight)


def questions(make: Callable[[], nn.Module]) -> Iterator[tuple[str, list[Pair]]]:
    """Questions, and the pairs of networks that answer."""
    fresh, early, late = [], [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        fresh.append(make())
        early.append(train(fresh[-1], 400))
        late.append(train(early[-1], 400))
    yield "two random initialisations", list(itertools.combinations(fresh, 2))
    yield "before and after training", list(zip(fresh, late, strict=True))
    yield "two seeds, 400 steps on one task", list(itertools.combinations(early, 2))
    yield "two seeds, 800 steps", list(itertools.combinations(late, 2))
    yield "step 400 and step 800 of one run", list(zip(early, late, strict=True))
    yield (
        "200 steps on another task",
        [(net, train(net, 200, first=8)) for net in late],
    )
    for size in (0.01, 0.1):
        yield (
            f"noise of {size:.0%} of the size of each tensor",
            [(net, changed(net, noisy(size))) for net in late],
        )
    yield "weights of 8 bits", [(net, changed(net, to_eight_bits)) for net in late]


def row(pairs: list[Pair]) -> str:
    """The mean and the range of the similarities of all pairs."""
    found = [float(tnsim.similarity(a, b)) for a, b in pairs]
    return f"{np.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for make in (relu, Bilinear):
        for question, pairs in questions(make):
            rows.setdefault(question, []).append(row(pairs))
            print(question, rows[question], file=sys.stderr)
    print("| pair | ReLU | bilinear |\n|---|---|---|")
    for question, cells in rows.items():
        print(f"| {question} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
