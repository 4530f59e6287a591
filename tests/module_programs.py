"""Random forward passes over some forty operations, as modules of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from module_cases import Module
from torch import nn
from torch.nn import functional

WIDTH = 4
LARGEST_DEGREE = 8  # of a product; a program beyond it would be refused for its size alone
Run = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """A step of a program.

    Attributes:
        run: Function from the step's parts, a number and values (batch, 4) to a value (batch, 4).
        parts: Parts of the step by name, as of `Module`: a shape is a parameter, a tensor a buffer.
        arity: Number of values that it reads.
        degree: Degree of the result by those of the values.
    """

    run: Run
    parts: Mapping[str, Any] = field(default_factory=dict)
    arity: int = 1
    degree: Callable[..., int] = max


def _map() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _doubled(d: int) -> int:
    return 2 * d


def _assigned(m: Any, c: float, v: torch.Tensor) -> torch.Tensor:
    h = v.clone()
    h[:, 0] = c
    h[:, 1] = v[:, 2]
    h[:, 2:] *= 2
    return h


def _halves(m: Any, c: float, v: torch.Tensor) -> torch.Tensor:
    one, two = v.chunk(2, 1)
    return torch.cat([one * two, one], 1)


def _images(v: torch.Tensor) -> torch.Tensor:
    return v[:, None]


MAP, MAPS = {"a": _map()}, {"a": _map(), "b": _map()}
ONES, ZEROS = torch.ones(WIDTH), torch.zeros(WIDTH)

OPERATIONS: dict[str, Operation] = {
    "linear": Operation(lambda m, c, v: m.a(v), MAP),
    "shared linear": Operation(lambda m, c, v: m.shared(v)),
    "matrix": Operation(lambda m, c, v: v @ m.w.tril() + c, {"w": (WIDTH, WIDTH)}),
    "slice of a matrix": Operation(lambda m, c, v: functional.linear(v, m.w[:, 1:5]), {"w": (WIDTH, 6)}),
    "product of maps": Operation(lambda m, c, v: m.a(v) * m.b(v), MAPS, degree=_doubled),
    "product": Operation(lambda m, c, u, v: u * v, arity=2, degree=lambda a, b: a + b),
    "einsum": Operation(
        lambda m, c, v: torch.einsum("bi,oij,bj->bo", v, m.w, v), {"w": (WIDTH, WIDTH, WIDTH)}, degree=_doubled
    ),
    "bilinear": Operation(
        lambda m, c, u, v: m.w(u, v), {"w": nn.Bilinear(WIDTH, WIDTH, WIDTH)}, 2, lambda a, b: a + b
    ),
    "square": Operation(lambda m, c, v: v**2, degree=_doubled),
    "cube": Operation(lambda m, c, v: v.pow(3), degree=lambda d: 3 * d),
    "fourth power": Operation(lambda m, c, v: v**4, degree=lambda d: 4 * d),
    "quadratic": Operation(lambda m, c, v: 1 + c * v + 0.1 * v.square(), degree=_doubled),
    "scaled": Operation(lambda m, c, v: c * v / 3),
    "residual": Operation(lambda m, c, u, v: u + c * v, arity=2),
    "difference": Operation(lambda m, c, u, v: torch.sub(u, v, alpha=2), arity=2),
    "lerp": Operation(lambda m, c, u, v: torch.lerp(u, v, c), arity=2),
    "lerp by a value": Operation(
        lambda m, c, u, v: torch.lerp(u, m.a(v), v), MAP, 2, lambda a, b: max(a, b) + b
    ),
    "gain": Operation(lambda m, c, v: v * m.gain, {"gain": (WIDTH,)}),
    "clamped gain": Operation(lambda m, c, v: v * m.gain.clamp(0, 1), {"gain": (WIDTH,)}),
    "gain by tanh": Operation(lambda m, c, v: v * torch.tanh(m.gain), {"gain": (WIDTH,)}),
    "LoRA": Operation(lambda m, c, v: m.a(v) + v @ m.A @ m.B, {**MAP, "A": (WIDTH, 2), "B": (2, WIDTH)}),
    "weight norm": Operation(
        lambda m, c, v: m.a(v), {"a": nn.utils.parametrizations.weight_norm(_map())}
    ),
    "masked": Operation(lambda m, c, v: v * m.mask, {"mask": ONES}),
    "where by a mask": Operation(lambda m, c, v: torch.where(m.mask > 0.5, v, c), {"mask": ONES}),
    "masked_fill": Operation(lambda m, c, v: v.masked_fill(m.mask < 0.5, c), {"mask": ONES}),
    "normalised by buffers": Operation(
        lambda m, c, v: (v - m.mean) / m.std, {"mean": ZEROS, "std": ONES}
    ),
    "batch norm": Operation(lambda m, c, v: m.norm(v), {"norm": nn.BatchNorm1d(WIDTH)}),
    "centred": Operation(lambda m, c, v: v - v.mean(-1, keepdim=True)),
    "slices and cat": Operation(lambda m, c, v: torch.cat([v[:, 2:], v[:, :2]], 1)),
    "flip": Operation(lambda m, c, v: v.flip(-1)),
    "roll": Operation(lambda m, c, v: v.roll(1, -1)),
    "cumsum": Operation(lambda m, c, v: v.cumsum(-1)),
    "indices": Operation(lambda m, c, v: v[:, [2, 0, 0, 1]]),
    "halves": Operation(_halves, degree=_doubled),
    "stack": Operation(lambda m, c, u, v: torch.stack([u, v], -1).sum(-1), arity=2),
    "expand": Operation(lambda m, c, v: v[:, :1].expand(-1, WIDTH) + c),
    "assignment": Operation(_assigned),
    "cast": Operation(lambda m, c, v: (v.double() * c).to(v.dtype)),
    "convolution": Operation(
        lambda m, c, v: m.conv(_images(v)).sum(1), {"conv": nn.Conv1d(1, 2, 3, padding=1)}
    ),
    "circular convolution": Operation(
        lambda m, c, v: m.conv(_images(v))[:, 0],
        {"conv": nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")},
    ),
    "pooling": Operation(lambda m, c, v: functional.avg_pool1d(_images(v), 3, 1, 1)[:, 0]),
    "relu": Operation(lambda m, c, v: functional.relu(v)),
    "gelu": Operation(lambda m, c, v: functional.gelu(v)),
    "silu": Operation(lambda m, c, v: functional.silu(v)),
    "tanh": Operation(lambda m, c, v: torch.tanh(v)),
    "softplus": Operation(lambda m, c, v: functional.softplus(v)),
    "relu of a map": Operation(lambda m, c, v: m.b(torch.relu(m.a(v))), MAPS),
    "relu by where": Operation(lambda m, c, v: torch.where(v > 0, v, torch.zeros_like(v))),
    "relu by clamp": Operation(lambda m, c, v: v.clamp(min=0)),
    "silu written out": Operation(lambda m, c, v: v / (1 + torch.exp(-v))),
    "gelu written out": Operation(
        lambda m, c, v: 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))
    ),
    "clamp": Operation(lambda m, c, v: v.clamp(-2, 2)),
    "wide clamp": Operation(lambda m, c, v: v.clamp(-40, 40)),
    "leaky by where": Operation(lambda m, c, v: torch.where(v > 0, v, 0.1 * v)),
    "abs": Operation(lambda m, c, v: v.abs()),
    "gate": Operation(lambda m, c, v: functional.silu(m.a(v)) * m.b(v), MAPS, degree=_doubled),
}  # fmt: skip

NO_LAYER: dict[str, Operation] = {
    "softmax": Operation(lambda m, c, v: v.softmax(-1)),
    "layer norm": Operation(lambda m, c, v: functional.layer_norm(v, (WIDTH,))),
    "quotient": Operation(lambda m, c, u, v: u / (1 + v * v), arity=2),
    "largest unit": Operation(lambda m, c, v: v * v.amax(-1, keepdim=True)),
    "sorted": Operation(lambda m, c, v: v.sort(-1).values),
    "mean of the batch": Operation(lambda m, c, v: v - v.mean(0)),
    "batch size": Operation(lambda m, c, v: v / len(v)),
    "truncated": Operation(lambda m, c, v: v + torch.div(v, 3000, rounding_mode="trunc")),
    "half precision": Operation(lambda m, c, v: v.half().to(v.dtype)),
    "noise": Operation(lambda m, c, v: v + 1e-9 * torch.rand(WIDTH, dtype=v.dtype)),
    "a number of its own": Operation(lambda m, c, v: torch.where(v == c, 0.0, v)),
    "integers": Operation(lambda m, c, v: v.long().to(v.dtype)),
    "branch": Operation(lambda m, c, v: v if v.sum() > 100 else 2 * v),
}  # fmt: skip
"""Operations that no layer describes, or that join the inputs of a batch: what they reach is refused."""


@dataclass(frozen=True)
class Step:
    """An operation on earlier values, of which the input is the first."""

    operation: str
    sources: tuple[int, ...]
    number: float


class Program(nn.Module):
    """A forward pass of steps, whose result is the last value.

    Args:
        steps: The steps in order.
    """

    def __init__(self, steps: tuple[Step, ...]):
        super().__init__()
        self.steps = steps
        shared = _map()
        self.parts = nn.ModuleList()
        for step in steps:
            parts = dict(_known(step).parts)
            made = Module(lambda m, x: x, **parts)
            for part in made.children():  # copies of one map, which have weights of their own
                for layer in part.modules():
                    if hasattr(layer, "reset_parameters") and not hasattr(
                        layer, "parametrizations"
                    ):
                        layer.reset_parameters()  # type: ignore[operator]
            if step.operation == "shared linear":
                made.shared = shared  # a layer used by several steps, under several names
            self.parts.append(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for step, made in zip(self.steps, self.parts, strict=True):
            values.append(_known(step).run(made, step.number, *(values[n] for n in step.sources)))
        return values[-1]

    def extra_repr(self) -> str:
        return "; ".join(f"{step.operation} {step.sources} {step.number}" for step in self.steps)


def _known(step: Step) -> Operation:
    return OPERATIONS.get(step.operation) or NO_LAYER[step.operation]


@st.composite
def programs(draw: Any, operations: tuple[str, ...], longest: int = 5) -> tuple[Step, ...]:
    """Steps of the operations named, each of the last value and of any one before it."""
    steps: list[Step] = []
    degrees = [1]
    for _ in range(draw(st.integers(1, longest))):
        name = draw(st.sampled_from(operations))
        known = OPERATIONS.get(name) or NO_LAYER[name]
        last = len(degrees) - 1
        sources = tuple(draw(st.integers(0, last)) for _ in range(known.arity - 1))
        sources = draw(st.permutations((*sources, last)))
        of_sources = [degrees[n] for n in sources]
        degree = known.degree(*of_sources) if known.degree is not max else max(of_sources)
        if degree > LARGEST_DEGREE:
            continue
        steps.append(Step(name, tuple(sources), draw(st.sampled_from((0.5, -1.0, 1.0, 3.0)))))
        degrees.append(degree)
    return tuple(steps) or (Step("linear", (0,), 1.0),)
