"""Modules whose reading is easily wrong, each with what makes it so, and the module's own numbers beside a model's.

A case is a forward pass over named parts. The module given has weights at which something in it is inert: a mask of
ones, a LoRA whose B is zero, a clamp that never acts. `active` is the same class with weights at which it is not, and
both have to be read: one as it is, the other from a file that the first one reads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from closeness import LARGEST, assert_close
from torch import nn
from torch.nn import functional

WIDTH = 4
SIZES = (1e-3, 1.0, 30.0, 1e4)  # of inputs
BATCHES = (1, 3)  # a sum over a batch shows where batches differ in their lengths
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Module(nn.Module):
    """A forward pass over named parts.

    Args:
        forward: Function from the module and a batch to the outputs.
        parts: Submodules by name; a shape is a parameter, a tensor a buffer, anything else an attribute.
    """

    def __init__(self, forward: Forward, **parts: Any):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, tuple):
                setattr(self, name, nn.Parameter(torch.randn(part) / max(part[-1], 1) ** 0.5))
            elif isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part.clone())
            else:
                setattr(self, name, copy.deepcopy(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def gated(width: int, rank: int, out: int | None = None) -> Module:
    """`D ((L x) * (R x))`, each map with a bias."""
    left, right = nn.Linear(width, rank), nn.Linear(width, rank)
    down = nn.Linear(rank, out or width)
    return Module(lambda m, x: m.down(m.left(x) * m.right(x)), left=left, right=right, down=down)


@dataclass(frozen=True)
class Case:
    """A module that is read rightly, or refused by a name.

    Attributes:
        build: The module as it is given, in float64; called once for each of `variants`.
        active: Values of tensors by name in the other weights, else random numbers; positive for
            variances and the like.
        refused: Words of a refusal that is as right as a model; None where the module has to be read.
        at: Rows beside the random inputs, at which something rare happens.
        variants: Arguments of `build`: equal classes that compute other functions, read one after another.
        inputs: The example that reading asks for, None where it asks for none.
        tokens: Number of tokens where the inputs are tokens.
        layers: Regular expression for what the model shows of its layers.
        positions: Whether inputs are sequences, of any length.
    """

    build: Callable[..., nn.Module]
    active: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    at: Sequence[Sequence[float]] = ()
    variants: tuple[Any, ...] = (None,)
    inputs: torch.Tensor | None = None
    tokens: int = 0
    layers: str = ""
    positions: bool = False

    def modules(self) -> Iterator[nn.Module]:
        """The modules given, with equal weights; each is built when the one before has been used."""
        for variant in self.variants:
            torch.manual_seed(11)
            yield (self.build() if variant is None else self.build(variant)).double().eval()


def with_active_weights(case: Case, module: nn.Module, seed: int = 5) -> nn.Module:
    """A copy of the module with other weights, at which nothing is inert.

    Args:
        case: The case of the module.
        module: The module given.
        seed: Seed of the weights.
    """
    rng = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for name, tensor in other.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                if name in case.active:
                    tensor.copy_(torch.as_tensor(case.active[name]))
                continue
            drawn = torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
            drawn /= max(tensor.shape[-1] if tensor.ndim else 1, 1) ** 0.5
            if name.rpartition(".")[2] in ("running_var", "std", "original0"):
                drawn = drawn.abs() + 0.5
            if name in case.active:
                drawn = torch.as_tensor(case.active[name], dtype=torch.float64).expand(tensor.shape)
            tensor.copy_(drawn)
    return other


def inputs_for(case: Case, positions: int = 0) -> list[torch.Tensor]:
    """Batches of inputs of every size, and those at which something rare happens.

    Args:
        case: The case.
        positions: Length of sequences of two coordinates, 0 for vectors.
    """
    width = 2 if positions else WIDTH
    rng = torch.Generator().manual_seed(3)
    shape = (*((positions,) if positions else ()), *((width,) if not case.tokens else ()))
    if case.inputs is not None and not positions:
        shape = tuple(case.inputs.shape[1:])
    if case.tokens:
        drawn = [torch.randint(0, case.tokens, (n, *shape), generator=rng) for n in (*BATCHES, 16)]
        return [*drawn, torch.zeros(2, *shape, dtype=torch.long)]
    batches = [
        size * torch.randn((count, *shape), generator=rng, dtype=torch.float64)
        for size in SIZES
        for count in BATCHES
    ]
    rare = torch.as_tensor(np.asarray(case.at, float))
    if len(rare):
        # Each alone, as a row among larger ones would be compared by the size of those.
        batches += [row.reshape(1, *shape) for row in rare]
    return batches


def reads_whole(model: Any, width: int, positions: int) -> bool:
    """Whether a model reads a sequence, or an image, as a single vector.

    Args:
        model: Model of tnsim.
        width: Coordinates at the last axis of the inputs.
        positions: Length of sequences, 0 for vectors.
    """
    return model.n_ctx is None and not (positions and model.d_in == width)


def as_read(model: Any, case: Case, batch: torch.Tensor, positions: int = 0) -> np.ndarray:
    """Inputs of the module in the form in which a model takes them.

    Args:
        model: Model of tnsim.
        case: The case of the module.
        batch: Inputs of the module.
        positions: Length of sequences, 0 for vectors.
    """
    x = np.eye(case.tokens)[batch.numpy()] if case.tokens else batch.numpy()
    return x.reshape(len(x), -1) if reads_whole(model, x.shape[-1], positions) else x


def assert_computes(model: Any, module: nn.Module, case: Case, positions: int = 0) -> None:
    """Assert that a model gives what the module gives, at every size of input.

    Args:
        model: Model of tnsim.
        module: The module that it was read from, in float64.
        case: The case of the module.
        positions: Length of sequences, 0 for vectors.
    """
    for batch in inputs_for(case, positions=positions):
        with torch.no_grad():
            wanted = module(batch).numpy()
        if not np.isfinite(wanted).all():
            continue  # exponentials of 1e4
        found = np.asarray(model(as_read(model, case, batch, positions)))
        assert found.size == wanted.size, f"{found.shape} for {wanted.shape}"
        # 1 + erf(u) of PyTorch is 0 where it is 1e-24, so nothing is asked below 1e-9 of the inputs.
        largest = max(np.abs(wanted).max(initial=0.0), 1e-9 * float(batch.abs().max()))
        assert_close(found.reshape(wanted.shape), wanted, scale=largest)


def assert_same(model: Any, module: nn.Module, x: np.ndarray | None = None, **limits: Any) -> None:
    """Assert that a model gives what the module gives at some inputs, images as vectors where it reads vectors.

    Args:
        model: Model of tnsim.
        module: The module that it was read from, in float64.
        x: Inputs of the module, by default vectors of normal numbers of size 3.
        limits: Tolerance of `assert_close`, relative to the largest output.
    """
    if x is None:
        x = 3 * np.random.default_rng(0).normal(size=(50, model.d_in))
    with torch.no_grad():
        wanted = module(torch.as_tensor(x)).numpy()
    found = np.asarray(model(x if x.shape[-1] == model.d_in else x.reshape(len(x), -1)))
    assert_close(found, wanted.reshape(found.shape), scale=LARGEST, **limits)


def _linear(d_in: int = WIDTH, d_out: int = WIDTH) -> nn.Linear:
    return nn.Linear(d_in, d_out)


def _two(forward: Forward, **parts: Any) -> Callable[[], nn.Module]:
    """A builder of a forward pass with two linear maps `a` and `b` beside its own parts."""
    return lambda: Module(forward, **{"a": _linear(), "b": _linear(), **parts})


def _of(h: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> Callable[[], nn.Module]:
    """A builder of `b(h(a(x)))`."""
    return _two(lambda m, x: m.b(h(m, m.a(x))), **parts)


def _assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x) * m.b(x)
    h[:, 0] = 0
    return h


def _assigned_from(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x).clone()
    h[:, 1] = m.b(x)[:, 2]
    h[:, ::2] *= 3
    return h * h


def _assigned_by_numbers(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.new_zeros(len(x), 5)
    h[:, torch.tensor([3, 0, 4, 1])] = m.a(x) * m.b(x)
    return h


def _factor_of_a_matrix(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The positive matrix of which the outputs are the factor of Cholesky."""
    rows, columns = torch.tril_indices(2, 2)
    lower = x.new_zeros(len(x), 2, 2)
    lower[:, rows, columns] = m.a(x)[:, :3]
    return (lower @ lower.mT).flatten(1)


LIMITS: list[float] = [1.0]  # a global list, as of settings of a script


def _with_limit_in_config(limit: float) -> nn.Module:
    forward = lambda m, x: m.b(m.a(x).clamp(-m.config.limit, m.config.limit))  # noqa: E731
    return _two(forward, config=SimpleNamespace(limit=limit))()


def _with_limit_in_closure(limit: float) -> nn.Module:
    return _two(lambda m, x: m.b(m.a(x).clamp(-limit, limit)))()


def _with_limit_in_list(limit: float) -> nn.Module:
    LIMITS[0] = limit
    return _two(lambda m, x: m.b(m.a(x).clamp(-LIMITS[0], LIMITS[0])))()


def _with_factor(factor: float) -> nn.Module:
    settings = {"factor": factor}
    return _two(lambda m, x: m.a(x) * m.b(x) * m.settings["factor"] + x, settings=settings)()


def _lora(size: float) -> nn.Module:
    forward = lambda m, x: m.b(functional.relu(m.a(x) + x @ m.A.T @ m.B.T))  # noqa: E731
    module = _two(forward, A=(2, WIDTH), B=(WIDTH, 2))()
    with torch.no_grad():
        module.B.mul_(size)  # type: ignore[operator]
    return module


def _reparametrised(reparametrise: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    return nn.Sequential(reparametrise(_linear()), nn.ReLU(), reparametrise(_linear()))


def _tied_head() -> nn.Module:
    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        h = m.embed(tokens)
        return m.head(h + m.up(h) * h)

    head = nn.Linear(WIDTH, 6, bias=False)
    module = Module(forward, embed=nn.Embedding(6, WIDTH), head=head, up=_linear())
    module.head.weight = module.embed.weight  # type: ignore[union-attr]
    return module


def _convolutional(out: int = 32, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, **options), nn.ReLU(), nn.Flatten(), nn.Linear(out, 3)
        )

    return build


def _normalised_images() -> nn.Module:
    a, b = (nn.Conv2d(1, 2, 3, padding=1) for _ in "ab")
    forward = lambda m, x: m.out(functional.avg_pool2d(m.norm(m.a(x) * m.b(x)), 2).flatten(1))  # noqa: E731
    return Module(forward, a=a, b=b, norm=nn.BatchNorm2d(2), out=nn.Linear(8, 3))


def _with_hook() -> nn.Module:
    net = nn.Sequential(_linear(), nn.ReLU(), _linear())

    def doubled(module: nn.Module, inputs: Any, output: Any) -> Any:
        return 2 * output

    net[0].register_forward_hook(doubled)
    return net


IMAGES = torch.zeros(2, 1, 4, 4)
ONES, ZEROS = torch.ones(WIDTH), torch.zeros(WIDTH)
HALF_MASK = (1.0, 0.0, 1.0, 0.0)
VECTORS = torch.zeros(2, WIDTH)
IDENTITY = {"a.weight": np.eye(WIDTH), "a.bias": 0.0}
BATCH = r"batch|other inputs|elements"
BRANCH = r"branch|depends on (the|its) input|control flow|data.dependent|is_nonzero|_local_scalar"
CHOICE = r"where|compar|\bgt\b|\blt\b|chosen|branch|piece|jump|kink|no exact|no layer"
ROUND = r"round|int64|integer|int\b|long|whole numbers|_to_copy|trunc"


def _identity_first(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module with `a` as the identity, so that rare inputs can be written down."""

    def built() -> nn.Module:
        module = build()
        with torch.no_grad():
            module.a.weight.copy_(torch.eye(WIDTH))  # type: ignore[union-attr]
            module.a.bias.zero_()  # type: ignore[union-attr]
        return module

    return built


def _rare(
    h: Callable[[torch.Tensor], torch.Tensor],
    at: Sequence[float],
    refused: str | None = None,
    **fields: Any,
) -> Case:
    """`b(h(a(x)))` with a = 1, and rows that hold the values at which h is rare."""
    rows = np.repeat(np.asarray(at, float)[:, None], WIDTH, axis=1)
    rows[:, 1] *= 1.0001
    build = _identity_first(_of(lambda m, u: h(u)))
    return Case(build, active=IDENTITY, refused=refused, at=rows.tolist(), **fields)


def _branch(u: torch.Tensor) -> torch.Tensor:
    return u * 2 if u.abs().max() > 1000 else u


INERT = {
    "normalised by buffers": Case(
        _of(lambda m, u: (u - m.mean) / m.std, mean=ZEROS, std=ONES, b=nn.Identity())
    ),
    "masked": Case(_of(lambda m, u: functional.relu(u) * m.mask, mask=ONES), {"mask": HALF_MASK}),
    "masked product": Case(
        _two(lambda m, x: m.a(x) * m.b(x) * m.mask, mask=ONES), {"mask": HALF_MASK}
    ),
    "masked by where": Case(
        _of(lambda m, u: torch.where(m.mask > 0.5, functional.relu(u), 0.0), mask=ONES),
        {"mask": HALF_MASK},
    ),
    "masked weights": Case(
        _two(
            lambda m, x: m.b(functional.relu(functional.linear(x, m.a.weight * m.mask, m.a.bias))),
            mask=torch.ones(WIDTH, WIDTH),
        )
    ),
    "LoRA of B = 0": Case(lambda: _lora(0.0)),
    "gain of one": Case(_of(lambda m, u: functional.relu(u) * m.gain, gain=nn.Parameter(ONES))),
    "shift of zero": Case(_of(lambda m, u: functional.relu(u) + m.shift, shift=nn.Parameter(ZEROS))),
    "scale that is clamped": Case(
        _two(
            lambda m, x: x + m.alpha.clamp(0, 1) * m.b(functional.relu(m.a(x))),
            alpha=nn.Parameter(torch.tensor(0.5)),
        ),
        {"alpha": 1.7},
    ),
    "two equal scales": Case(
        _two(
            lambda m, x: m.s * x + m.t * m.a(x) * m.b(x),
            s=nn.Parameter(torch.tensor(0.5)),
            t=nn.Parameter(torch.tensor(0.5)),
        )
    ),
    "a scale of one beside another": Case(
        _two(
            lambda m, x: m.s * x + m.t * m.b(functional.relu(m.a(x))),
            s=nn.Parameter(torch.tensor(1.0)),
            t=nn.Parameter(torch.tensor(1.0)),
        )
    ),
    "gate that is open": Case(
        _of(lambda m, u: functional.relu(u) * torch.tanh(m.gate), gate=nn.Parameter(40 * ONES))
    ),
    "temperature of one": Case(
        _of(lambda m, u: functional.silu(u / m.temperature), temperature=torch.ones(())),
        {"temperature": 0.7},
    ),
    "permutation that is none": Case(
        _of(lambda m, u: functional.relu(u) @ m.order, order=torch.eye(WIDTH))
    ),
    "a branch of zero": Case(
        _two(
            lambda m, x: m.b(functional.relu(m.a(x))) + functional.relu(x @ m.c) @ m.d,
            c=(WIDTH, WIDTH),
            d=nn.Parameter(torch.zeros(WIDTH, WIDTH)),
        )
    ),
    "indices of a buffer": Case(
        _of(lambda m, u: functional.relu(u)[:, m.order.long()], order=torch.arange(4.0)),
        {"order": (2.0, 0.0, 1.0, 1.0)},
    ),
}  # fmt: skip

SMALL = {
    "LoRA of 7e-6": Case(lambda: _lora(7e-6)),
    "a square of 1e-6": Case(_two(lambda m, x: m.a(x) + 1e-6 * m.b(x) ** 2)),
    "a ReLU of 1e-7": Case(_two(lambda m, x: m.a(x) + 1e-7 * functional.relu(m.b(x)))),
}

RARE = {
    "a band of where": _rare(
        lambda u: torch.where((u > 1) & (u < 1.01), 0, u), (1.005, 0.5, 1.02, -1), CHOICE
    ),
    "a clamp at 40": _rare(lambda u: u.clamp(-40, 40), (41, -41, 39, 1000)),
    "a clamp at 1,000": _rare(lambda u: u.clamp(max=1000), (999, 1001, -5000)),
    "a shrink at 0.003": _rare(lambda u: functional.softshrink(u, 0.003), (0.002, -0.002, 0.5)),
    "a threshold far out": _rare(lambda u: functional.threshold(u, -300.0, -300.0), (-301, -299)),
    "leaky beyond 100": _rare(
        lambda u: torch.where(u > 100, 100 + 0.1 * (u - 100), u), (99, 101, 500), CHOICE
    ),
    "ReLU with a cap of 2,000": _rare(lambda u: functional.relu(u).clamp(max=2000), (1999, 2001)),
    "nan_to_num": _rare(lambda u: torch.nan_to_num(functional.relu(u)), (1.0,), r"nan_to_num"),
    "a branch at 1,000": _rare(_branch, (999, 1001), BRANCH),
    "a branch on the sum": _rare(
        lambda u: u.relu() if u.sum() < 5000 else u, (1.0, 2000), BRANCH
    ),
    "softplus with a threshold": _rare(
        lambda u: functional.softplus(u, 1, 3), (2.9, 3.1, 10), r"softplus|threshold"
    ),
    "rounded beyond 1": _rare(lambda u: u + u.div(3000).trunc(), (3001, 2999), ROUND),
    "cast to integers": _rare(lambda u: u.long().to(u.dtype), (0.5, 1.5, 300.2), ROUND),
    "sign": _rare(lambda u: torch.sign(u) * u, (0.5, -0.5), r"sign|compar|no layer"),
    "truncated quotients": _rare(
        lambda u: u + u.div(3000, rounding_mode="trunc"), (3001, 2999), r"rounding_mode"
    ),
    "truth values of zero": _rare(lambda u: u * u.bool(), (0.0, 1.0), ROUND),
    "less than zero beside it": _rare(
        lambda u: torch.where(torch.logical_not(u - 1.23), 5.0, u), (1.23, 0.5), r"logical_not"
    ),
    "a number of its own at 3": _rare(lambda u: torch.where(u == 3, 0.0, u), (3.0,), CHOICE),
    "a step that holds at 1": _rare(lambda u: u * (u >= 1), (1.0, 0.999)),
    "a step from 1 on": _rare(lambda u: (u > 1).to(u.dtype), (1.0, 1.001)),
    "a band that is very narrow": _rare(
        lambda u: torch.where((u > 1) & (u < 1 + 1e-13), 0.0, u), (1 + 5e-14, 1.0), r"\bgt\b"
    ),
    "a bump that is narrow": _rare(
        lambda u: functional.gelu(u) + torch.exp(-(((u - 0.777) * 1e4) ** 2)), (0.777, 0.77705), r"exp"
    ),
    "a bump far out": _rare(
        lambda u: torch.tanh(u) + torch.exp(-((u - 200) ** 2)), (200.0, 200.5), r"exp"
    ),
    "a gate far out": _rare(lambda u: u * torch.sigmoid(u + 1e5), (-1e5, -1.1e5, 3)),
    "tanh of a millionth": _rare(lambda u: 1e6 * torch.tanh(u / 1e6), (3e5, 1e6)),
}  # fmt: skip

ACROSS = {
    "less the mean of the batch": Case(_two(lambda m, x: m.a(x - x.mean(0))), refused=BATCH),
    "divided by the batch": Case(_two(lambda m, x: m.a(x) / len(x)), refused=BATCH),
    "divided by the batch, with an example of one": Case(
        _two(lambda m, x: m.a(x) / len(x)), refused=BATCH, inputs=torch.zeros(1, WIDTH)
    ),
    "less the mean, with an example of one": Case(
        _two(lambda m, x: m.a(x) - x.mean(0) + x), refused=BATCH, inputs=torch.zeros(1, WIDTH)
    ),
    "rolled over the batch": Case(
        _two(lambda m, x: m.a(x) * m.b(x).roll(1, 0)), refused=BATCH, inputs=VECTORS
    ),
    "the first of the batch": Case(
        _two(lambda m, x: m.a(x) + 0.1 * m.b(x[:1])), refused=BATCH, inputs=VECTORS
    ),
    "a branch on the batch": Case(
        _two(lambda m, x: m.a(x) if len(x) > 2 else m.b(x)), refused=BATCH, inputs=VECTORS
    ),
    "numbered in the batch": Case(
        _two(lambda m, x: m.a(x) + torch.arange(len(x))[:, None]), refused=BATCH, inputs=VECTORS
    ),
    "another branch beyond 100": Case(
        _two(lambda m, x: m.a(x) if x.shape[0] <= 100 else m.b(x)), refused=BATCH
    ),
    "another branch beyond a length of 200": Case(
        _two(lambda m, x: m.a(x) if len(x) <= 200 else m.b(x)), refused=BATCH
    ),
    "chunks of 64": Case(_two(lambda m, x: torch.cat([m.a(part) ** 2 for part in x.split(64)]))),
    "a factor of the whole batch": Case(
        _two(lambda m, x: functional.relu(m.a(x)) * x.sum()), refused=BATCH, inputs=VECTORS
    ),
    "attention over the batch": Case(
        _two(lambda m, x: (m.a(x) @ m.b(x).T) @ x), refused=BATCH, inputs=VECTORS
    ),
    "batch norm in training mode": Case(
        lambda: _in_training(nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH), _linear())),
        refused=rf"training|{BATCH}",
        inputs=torch.zeros(3, WIDTH),
    ),
}


def _in_training(net: nn.Module) -> nn.Module:
    """The module with a batch norm that takes its statistics from the batch, in evaluation mode too."""
    net[1] = nn.BatchNorm1d(WIDTH, track_running_stats=False)  # type: ignore[operator]
    return net


GRAPHS = {
    "a limit in a configuration": Case(_with_limit_in_config, variants=(1.0, 3.0)),
    "a limit in a closure": Case(_with_limit_in_closure, variants=(1.0, 3.0)),
    "a limit in a list": Case(_with_limit_in_list, variants=(1.0, 3.0)),
    "a factor in a mapping": Case(_with_factor, variants=(1.0, 3.0)),
    "a slope of an activation": Case(
        lambda slope: nn.Sequential(_linear(), nn.LeakyReLU(slope), _linear()), variants=(0.01, 0.2)
    ),
    "the padding of a convolution": Case(
        lambda mode: _convolutional(padding_mode=mode)(),
        variants=("zeros", "circular"),
        inputs=IMAGES,
    ),
    "an epsilon": Case(
        lambda eps: nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH, eps=eps), nn.ReLU(), _linear()),
        variants=(1e-5, 0.3),
    ),
}

LIMITS_OF_READING = {
    "fifth power": Case(_of(lambda m, u: u**5)),
    "fourth power by squares": Case(_of(lambda m, u: (u * u) * (u * u))),
    "a product along an axis": Case(_of(lambda m, u: torch.stack([u, m.c(u), u + 1], -1).prod(-1), c=_linear())),
    "a product that keeps its axis": Case(_two(lambda m, x: m.a(x) + m.b(x)[:, :3].prod(1, keepdim=True))),
    "products up to each place": Case(_of(lambda m, u: u.cumprod(-1))),
    "a gated linear unit": Case(_of(lambda m, u: functional.glu(torch.cat([u, m.c(u)], -1)), c=_linear())),
    "columns of numbers assigned": Case(_two(_assigned_by_numbers), inputs=VECTORS),
    "a triangle of a matrix": Case(_two(_factor_of_a_matrix), inputs=VECTORS),
    "added at numbers of a buffer": Case(
        _two(
            lambda m, x: m.a(x).scatter_add(1, m.order.expand(len(x), -1), functional.relu(m.b(x))),
            order=torch.arange(WIDTH),
        ),
        {"order": (2, 0, 2, 1)},
    ),
    "put at numbers of a buffer": Case(
        _two(lambda m, x: m.a(x).scatter(1, m.order.expand(len(x), -1), m.b(x) ** 2), order=torch.arange(WIDTH)),
        {"order": (2, 0, 3, 1)},
    ),
    "multiplied at numbers": Case(
        _two(
            lambda m, x: m.a(x).scatter(1, m.order.expand(len(x), -1), m.b(x), reduce="multiply"),
            order=torch.arange(WIDTH),
        ),
        refused="scatter with reduce",
    ),
    "put at numbers of the input": Case(
        _two(lambda m, x: m.a(x).scatter(1, (x > 0).long(), m.b(x))), refused=r"places that depend on the input"
    ),
    "matrices with a diagonal": Case(_of(lambda m, u: (torch.diag_embed(u) @ m.w @ u[..., None])[..., 0], w=(WIDTH, WIDTH))),
    "shuffled channels": Case(
        _of(lambda m, u: functional.channel_shuffle((u * u)[..., None, None], 2).flatten(1)), inputs=VECTORS
    ),
    "blocks on a diagonal": Case(_two(lambda m, x: functional.relu(x @ torch.block_diag(m.c, m.c)) * m.a(x), c=(2, 2)), inputs=VECTORS),
    "upsampled by lines": Case(
        _of(lambda m, u: functional.relu(functional.interpolate(u[:, None], scale_factor=1.5, mode="linear")[:, 0, :WIDTH]))
    ),
    "a column assigned": Case(_two(_assigned), inputs=VECTORS),
    "columns assigned": Case(_two(_assigned_from), inputs=VECTORS),
    "masked_fill": Case(
        _of(lambda m, u: functional.relu(u).masked_fill(m.mask > 0.5, 0.3), mask=ZEROS),
        {"mask": HALF_MASK},
    ),
    "index_fill": Case(_of(lambda m, u: (u * u).index_fill(1, torch.tensor([0, 2]), 1.5))),
    "weight norm": Case(lambda: _reparametrised(nn.utils.parametrizations.weight_norm)),
    "spectral norm": Case(lambda: _reparametrised(nn.utils.parametrizations.spectral_norm)),
    "orthogonal": Case(lambda: _reparametrised(nn.utils.parametrizations.orthogonal)),
    "a layer used twice": Case(_two(lambda m, x: m.b(functional.relu(m.a(functional.relu(m.a(x))))))),
    "a layer used twice, side by side": Case(_two(lambda m, x: m.a(x) * m.a(m.b(x)))),
    "a head used twice": Case(_two(lambda m, x: m.b(functional.relu(m.a(x))) + m.b(x))),
    "tied heads": Case(_tied_head, tokens=6),
    "circular padding and strides": Case(
        _convolutional(padding_mode="circular", stride=(2, 1), out=16), inputs=IMAGES
    ),
    "reflected padding": Case(_convolutional(padding_mode="reflect"), inputs=IMAGES),
    "replicated padding": Case(_convolutional(padding_mode="replicate"), inputs=IMAGES),
    "strides and groups": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
        inputs=torch.zeros(2, 2, 4, 4),
    ),
    "a convolution transposed": Case(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
        ),
        inputs=IMAGES,
    ),
    "batch norm": Case(
        lambda: nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), _linear())
    ),
    "batch norm of images": Case(_normalised_images, inputs=IMAGES),
    "max pooling": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        refused=r"max.?pool",
        inputs=IMAGES,
    ),
    "group norm": Case(
        lambda: nn.Sequential(_linear(), nn.GroupNorm(2, WIDTH), _linear()), refused=r"norm"
    ),
    "a norm written out": Case(
        _two(lambda m, x: m.a(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()) * m.b(x)),
        refused=r"norm|rsqrt|sqrt|divi|\bpow\b",
    ),
    "softmax": Case(_of(lambda m, u: u.softmax(-1)), refused=r"softmax"),
    "a maximum over units": Case(
        _of(lambda m, u: u * u.max(-1, keepdim=True).values), refused=r"max|no layer|cannot tell"
    ),
    "top-k": Case(
        _of(lambda m, u: torch.zeros_like(u).scatter(-1, u.topk(2).indices, u.topk(2).values)),
        refused=r"top.?k|scatter",
    ),
    "a quotient": Case(
        _two(lambda m, x: m.a(x) / (1 + m.b(x) ** 2)), refused=r"divi|quotient|div\b|recip|cannot tell"
    ),
    "a negative power": Case(_of(lambda m, u: u**-1), refused=r"\bpow\b|recip"),
    "a power of one half": Case(_of(lambda m, u: u**0.5), refused=r"\bpow\b|sqrt"),
    "the entry of the largest": Case(_of(lambda m, u: u[:, u.argmax(-1)]), refused=r"argmax"),
    "a choice between maps": Case(_two(lambda m, x: torch.where(x > 0, m.a(x), m.b(x))), refused=CHOICE),
    "a gate with an offset by unit": Case(
        _two(lambda m, x: (torch.tanh(m.a(x)) + m.shift) * m.b(x), shift=(WIDTH,))
    ),
    "float32 and back": Case(_of(lambda m, u: u.float().to(u.dtype)), refused=r"rounds"),
    "two outputs of one activation": Case(
        _two(lambda m, x: torch.cat([functional.relu(m.a(x)), m.b(functional.relu(m.a(x)))], -1))
    ),
    "a forward hook": Case(_with_hook, refused="hook"),
    "a step by the input": Case(_two(lambda m, x: torch.lerp(x, x + 1e-9 * m.a(x), m.b(x)))),
    "a mean of fewer digits": Case(
        _of(lambda m, u: u * u.mean(-1, keepdim=True, dtype=torch.float32)), refused=r"rounds"
    ),
    "a sum of whole numbers": Case(
        _of(lambda m, u: u * u.sum(-1, keepdim=True, dtype=torch.long)), refused=r"rounds"
    ),
    "float32 on the way": Case(
        _of(lambda m, u: functional.relu(u.double() if u.dtype == torch.float64 else u))
    ),
}  # fmt: skip


def _zero_first(build: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """The module with tensors of zeros, as training often begins."""

    def built() -> nn.Module:
        module = build()
        with torch.no_grad():
            for name in names:
                module.get_parameter(name).zero_()
        return module

    return built


def _lora_of_layers(scaling: float, zero: bool = False) -> nn.Module:
    """Adapters as PEFT has them: two layers beside a third, times a constant."""
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    forward = lambda m, x: m.b(functional.relu(m.a(x) + scaling * m.B(m.A(x))))  # noqa: E731
    module = _two(forward, A=down, B=up)()
    if zero:
        nn.init.zeros_(module.B.weight)  # type: ignore[union-attr,arg-type]
    return module


def _two_equal_maps() -> nn.Module:
    module = Module(lambda m, x: m.a(x) * m.b(x), a=_linear())
    module.b = copy.deepcopy(module.a)
    return module


def _of_tensor(value: float) -> nn.Module:
    module = _two(lambda m, x: m.b(functional.relu(m.a(x))) * m.factor)()
    object.__setattr__(module, "factor", torch.tensor(value, dtype=torch.float64))
    return module


def _not_saved() -> nn.Module:
    module = _two(lambda m, x: m.b(functional.relu(m.a(x)) * m.mask))()
    module.register_buffer("mask", torch.tensor(HALF_MASK), persistent=False)
    return module


def _listed() -> nn.Module:
    module = Module(
        lambda m, x: functional.relu(x @ m.both[0]) @ m.both[1], a=(WIDTH, WIDTH), b=(WIDTH, WIDTH)
    )
    module.both = [module.a, module.b]  # type: ignore[assignment]
    return module.double()


class _Keeping(nn.Module):
    """A forward pass that a function does, which keeps the module in which it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _linear(), _linear()
        self.inner = lambda x: self.b(functional.relu(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Scaled(nn.Module):
    """A scale that is saved beside the tensors."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.a, self.scale = _linear(), scale

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.scale, dtype=torch.float64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = float(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.a(x) ** 2


def _counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward pass that is another one from the fiftieth call on."""
    m.count += 1
    return m.a(x) if m.count < 50 else m.b(x)


class _Converted(nn.Linear):
    """A layer that doubles what it loads, as code does that reads weights of an older version."""

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        doubled = {name: 2 * tensor for name, tensor in state.items() if name.startswith(prefix)}
        super()._load_from_state_dict(doubled, prefix, *arguments)


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.a(x) + (m.b(x) if m.count > 3 else 0)


NUMBER = r"item|scalar|branch|taken (from|of|off)|depends on|buffer|parameter|data"
ALWAYS_READ = {
    "ReZero": Case(
        _two(lambda m, x: x + m.gain * m.b(functional.relu(m.a(x))), gain=nn.Parameter(torch.zeros(())))
    ),
    "a last layer of zeros": Case(
        _zero_first(_two(lambda m, x: x + m.b(functional.relu(m.a(x)))), "b.weight", "b.bias")
    ),
    "a factor of zeros": Case(
        _zero_first(_two(lambda m, x: m.a(x) + m.b(x) * m.c(x), c=_linear()), "c.weight", "c.bias")
    ),
    "a map that is one": Case(_identity_first(_of(lambda m, u: functional.relu(u)))),
    "two equal maps": Case(_two_equal_maps),
    "PReLU of slope one": Case(
        lambda: nn.Sequential(_linear(), nn.PReLU(init=1.0), _linear()),
        {"1.weight": 0.3},
        refused="PReLU",
    ),
    "PReLU by unit": Case(
        lambda: nn.Sequential(_linear(), nn.PReLU(WIDTH), _linear()),
        {"1.weight": (0.1, 0.5, 1.5, -0.3)},
    ),
    "Swish of beta one": Case(
        _of(lambda m, u: u * torch.sigmoid(m.beta * u), beta=nn.Parameter(torch.ones(()))), {"beta": 0.7}
    ),
    "Swish by unit": Case(
        _of(lambda m, u: u * torch.sigmoid(m.beta * u), beta=nn.Parameter(ONES)),
        {"beta": (0.7, 1.0, 2.0, 0.3)},
    ),
    "JumpReLU at zero": Case(
        _of(lambda m, u: u * (u > m.threshold), threshold=nn.Parameter(ZEROS)),
        {"threshold": (0.1, 0.2, 0.3, 0.5)},
    ),
    "a clamp by buffers far out": Case(
        _of(lambda m, u: torch.clamp(u, m.low, m.high), low=-1e9 * ONES, high=1e9 * ONES),
        {"low": -2.0, "high": 2.0},
    ),
    "a clamp of inputs": Case(
        _two(lambda m, x: m.a(x.clamp(-50, 50)) * m.b(x.clamp(-50, 50)))
    ),
    "a hole at zero": _rare(lambda u: functional.hardshrink(u, 1e-6), (5e-7, -5e-7, 2e-6)),
    "indices of integers": Case(
        _of(lambda m, u: functional.relu(u)[:, m.order], order=torch.arange(4)),
        {"order": (2, 0, 1, 1)},
    ),
    "a mask of truth values": Case(
        _of(lambda m, u: functional.relu(u) * m.mask, mask=torch.ones(WIDTH, dtype=torch.bool)),
        {"mask": (True, False, True, False)},
    ),
    "a mask of truth values, by where": Case(
        _two(lambda m, x: torch.where(m.mask, m.a(x) * m.b(x), x), mask=torch.ones(WIDTH, dtype=torch.bool)),
        {"mask": (True, False, True, False)},
    ),
    "a buffer that is not saved": Case(_not_saved),
    "a tensor that is no buffer": Case(_of_tensor, variants=(1.0, 3.0)),
    "a tied autoencoder": Case(
        _two(lambda m, x: functional.linear(functional.relu(m.a(x)), m.a.weight.T))
    ),
    "detached on the way": Case(_two(lambda m, x: m.b(functional.relu(m.a(x))).detach())),
    "detached weights": Case(
        _two(lambda m, x: functional.relu(x @ m.a.weight.detach().T) @ m.b.weight.data.T)
    ),
    "LoRA of layers, by 7e-6": Case(lambda: _lora_of_layers(7e-6)),
    "LoRA of layers, of B = 0": Case(lambda: _lora_of_layers(2.0, zero=True)),
    "LoRA of layers of 7e-6 on a product": Case(
        _two(
            lambda m, x: (m.a(x) + 7e-6 * m.B(m.A(x))) * m.b(x),
            A=nn.Linear(WIDTH, 2, bias=False),
            B=nn.Linear(2, WIDTH, bias=False),
        )
    ),
    "parameters in a list of Python": Case(_listed),
    "a scale saved beside the tensors": Case(_Scaled, variants=(1.0, 3.0)),
    "a small residual": Case(_two(lambda m, x: m.b(functional.relu(m.a(x))) + 3e-6 * x)),
    "a small bend": Case(_of(lambda m, u: u + 1e-6 * functional.relu(u))),
    "parameters of a list": Case(
        lambda: Module(
            lambda m, x: functional.relu(x @ m.maps[0]) @ m.maps[1],
            maps=nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)]),
        )
    ),
}  # fmt: skip
"""What a file or a name may lose, though every operation has a place."""

READ_OR_NAMED = {
    "a number taken from a parameter": Case(
        _two(lambda m, x: m.b(functional.relu(m.a(x))) * m.alpha.item(), alpha=nn.Parameter(torch.tensor(0.5))),
        {"alpha": 1.7},
        NUMBER,
    ),
    "a power taken from a buffer": Case(
        _of(lambda m, u: u ** int(m.order), order=torch.tensor(2)), {"order": 3}, NUMBER
    ),
    "a branch on a parameter": Case(
        _two(
            lambda m, x: m.b(functional.relu(m.a(x)) if m.alpha > 0 else m.a(x)),
            alpha=nn.Parameter(torch.tensor(0.5)),
        ),
        {"alpha": -1.0},
        NUMBER,
    ),
    "weights through NumPy": Case(
        _two(lambda m, x: functional.relu(m.a(x)) @ torch.from_numpy(m.b.weight.detach().numpy().T.copy())),
        refused=rf"numpy|{NUMBER}",
    ),
    "weights that loading changes": Case(
        lambda: nn.Sequential(_linear(), nn.ReLU(), _Converted(WIDTH, WIDTH)),
        refused=r"load|_Converted",
    ),
    "noise": Case(
        _two(lambda m, x: m.a(x) + 1e-7 * torch.randn_like(x)), refused=r"random|noise|each time|differ"
    ),
    "noise that is small": Case(
        _two(lambda m, x: m.a(x) + 1e-9 * torch.randn(WIDTH, dtype=x.dtype)), refused=r"random"
    ),
    "noise on weights": Case(
        _two(lambda m, x: x @ (m.a.weight + 1e-9 * torch.randn_like(m.a.weight))), refused=r"random"
    ),
    "a function that keeps the module": Case(_Keeping, refused=r"keeps that module|dtype"),
    "another branch from the fiftieth call on": Case(_two(_counting, count=0), refused=r"count at each call"),
    "dropout at evaluation": Case(
        _two(lambda m, x: m.a(functional.dropout(x, 0.1, training=True))),
        refused=r"random|dropout|each time",
    ),
    "a count of calls": Case(
        _two(_counted, count=torch.tensor(0)),
        refused=r"chang|count|mutat|buffer",
    ),
    "a Fourier transform": Case(
        _of(lambda m, u: torch.fft.irfft(torch.fft.rfft(u) * m.filter, n=WIDTH), filter=torch.ones(3)),
        refused=r"fft|complex",
    ),
    "an embedding of a largest norm": Case(
        lambda: nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.5), _linear()),
        refused=r"max_norm|embedding|renorm|norm",
        tokens=6,
    ),
}  # fmt: skip
"""What may be read rightly, and is else refused by what it is."""


SINGLE = {
    **INERT, **SMALL, **RARE, **ACROSS, **GRAPHS, **LIMITS_OF_READING, **ALWAYS_READ, **READ_OR_NAMED
}  # fmt: skip


# Sequences.

TRIANGLE = torch.ones(16, 16).tril()


def _attention(
    weigh: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any
) -> Callable[[], nn.Module]:
    """A builder of bilinear attention with a residual connection, whose scores `weigh` masks and scales."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = (m.q1(x) @ m.k1(x).mT) * (m.q2(x) @ m.k2(x).mT)
        return x + m.o(weigh(m, scores) @ m.v(x))

    names = ("q1", "k1", "q2", "k2", "v", "o")
    maps = {name: nn.Linear(2, 2, bias=False) for name in names}
    return lambda: Module(forward, **{**maps, **parts})


def _ones(scores: torch.Tensor) -> torch.Tensor:
    return scores.new_ones(scores.shape[-2:])


def _rotated(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """RoPE of base 50."""
    pairs = torch.arange(x.shape[-1] // 2, dtype=x.dtype)
    angles = torch.arange(x.shape[-2])[:, None] * 50.0 ** (-pairs / len(pairs))
    one, two = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    turned = one * cos - two * sin, one * sin + two * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _two_heads(
    weigh: Callable[[torch.Tensor], torch.Tensor],
    turn: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    scores: int = 2,
) -> Callable[[], nn.Module]:
    """A builder of attention by one map of all queries, keys and values, and one of the outputs."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        *legs, v = m.first(x).unflatten(-1, (-1, 2, 4)).transpose(1, 3).unbind(2)
        factors = [turn(q) @ turn(k).mT for q, k in zip(legs[::2], legs[1::2], strict=True)]
        mixed = weigh(math.prod(factors, start=torch.tensor(0.25, dtype=x.dtype))) @ v
        return x + m.second(mixed.transpose(1, 2).flatten(-2))

    return lambda: Module(forward, first=nn.Linear(2, (2 * scores + 1) * 8), second=nn.Linear(8, 2))


def _parameters_by_head(scores: int, out: str) -> Callable[[], nn.Module]:
    """A builder of causal attention by parameters with an axis of heads.

    The outputs have a map "o"; heads are added without one, "", or in one sum with the "keys".
    """
    legs = [f"{leg}{n}" for n in range(scores) for leg in "qk"]

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        pattern = _ones(x @ x.mT).tril()
        for n in range(scores):
            q, k = (torch.einsum("bsd,hdk->bhsk", x, getattr(m, f"{leg}{n}")) for leg in "qk")
            pattern = pattern * (q @ k.mT) / 3
        v = torch.einsum("bsd,hdk->bhsk", x, m.v) + m.bias[:, None]
        if out == "keys":
            return torch.einsum("bhst,bhtv->bsv", pattern, v)
        mixed = torch.einsum("bhst,bhtv->bhsv", pattern, v)
        return mixed.sum(1) if not out else torch.einsum("bhsv,hvd->bsd", mixed, m.o)

    shapes = {"v": (2, 2, 2), "o": (2, 2, 2), "bias": (2, 2), **dict.fromkeys(legs, (2, 2, 3))}
    return lambda: Module(forward, **shapes)


def _banded(width: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda m, scores: scores * (_ones(scores).tril() - _ones(scores).tril(-width))


def _by_distance(scores: torch.Tensor) -> torch.Tensor:
    places = torch.arange(scores.shape[-1], dtype=scores.dtype)
    return torch.exp(-0.1 * (places[:, None] - places))


def _over_visible(m: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores.tril() / (torch.arange(scores.shape[-1]) + 1).to(scores.dtype)[:, None]


def _position_wise(forward: Forward, **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Module(forward, **{"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), **parts})


def _of_tokens(
    forward: Forward, refused: str | None = None, tokens: int = 40, **options: Any
) -> Case:
    """A case of a forward pass of tokens, with a table `embed` of their vectors."""
    build = _position_wise(forward, embed=nn.Embedding(tokens, 2, **options))
    return Case(build, refused=refused, tokens=tokens)


def _windowed_by_config(width: int) -> nn.Module:
    config = SimpleNamespace(window=width)
    return _attention(lambda m, s: _banded(m.config.window)(m, s), config=config)()


def _token_zero_masked(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    h = m.embed(tokens)
    return m.a(torch.where((tokens == 0).unsqueeze(-1), 0.0, h)) * m.b(h)


ATTENDING = {
    "causal": Case(_attention(lambda m, s: s.tril()), layers="Attention"),
    "two heads": Case(_two_heads(torch.tril), layers="2 heads"),
    "two heads of a single score": Case(_two_heads(lambda s: s, scores=1), layers="2 heads"),
    "two heads of a squared score": Case(
        _two_heads(lambda s: (s / 4).square().tril(), scores=1), layers="2 heads"
    ),
    "two heads with rotations": Case(_two_heads(torch.tril, _rotated), layers="2 heads.*RoPE"),
    "two heads with interleaved rotations": Case(
        _two_heads(lambda s: s, lambda x: _rotated(x, interleaved=True)), layers="2 heads.*RoPE"
    ),
    "heads of parameters": Case(_parameters_by_head(2, "o"), layers="2 heads"),
    "heads of parameters, added": Case(_parameters_by_head(1, ""), layers="2 heads"),
    "heads of parameters, added with the keys": Case(
        _parameters_by_head(1, "keys"), layers="2 heads"
    ),
    "keys before queries": Case(_attention(lambda m, s: s.triu().mT), layers="Attention"),
    "unmasked": Case(_attention(lambda m, s: s)),
    "causal by a buffer": Case(
        _attention(lambda m, s: s * m.mask[: s.shape[-1], : s.shape[-1]], mask=TRIANGLE),
        {"mask": TRIANGLE},
    ),
    "a mask of ones": Case(
        _attention(lambda m, s: s * m.mask[: s.shape[-1], : s.shape[-1]], mask=torch.ones(16, 16)),
        {"mask": TRIANGLE},
    ),
    "causal by masked_fill": Case(
        _attention(lambda m, s: s.masked_fill(_ones(s).triu(1) > 0, 0.0))
    ),
    "a window of 8": Case(_attention(_banded(8))),
    "a window of 4": Case(_attention(_banded(4))),
    "a window of a configuration": Case(_windowed_by_config, variants=(8, 2)),
    "every second key": Case(
        _attention(lambda m, s: s.tril() * (torch.arange(s.shape[-1]) % 2 == 0))
    ),
    "over n": Case(_attention(lambda m, s: s.tril() / s.shape[-1])),
    "over the root of n": Case(_attention(lambda m, s: s / s.shape[-1] ** 0.5)),
    "over visible keys": Case(_attention(_over_visible)),
    "longer than 8": Case(_attention(lambda m, s: s.tril() if s.shape[-1] <= 8 else s)),
    "longer than 100": Case(_attention(lambda m, s: s.tril() if s.shape[-1] <= 100 else s)),
    "longer than 100, as a plain number": Case(
        _attention(lambda m, s: s.tril() if len(s[0]) <= 100 else s)
    ),
    "a window of 64": Case(_attention(_banded(64))),
    "a scale by position": Case(
        _attention(
            lambda m, s: s.tril() * m.scale[: s.shape[-1], None], scale=nn.Parameter(torch.ones(16))
        )
    ),
    "a bias by distance": Case(_attention(lambda m, s: s.tril() * _by_distance(s))),
    "softmax attention": Case(_attention(lambda m, s: s.softmax(-1)), refused=r"softmax"),
    "causal softmax attention": Case(
        _attention(lambda m, s: s.masked_fill(_ones(s).triu(1) > 0, float("-inf")).softmax(-1)),
        refused=r"softmax",
    ),
    "normalised scores": Case(
        _attention(lambda m, s: s / s.square().sum(-1, keepdim=True)),
        refused=r"divi|quotient|div\b|norm|cannot tell",
    ),
}
WITHOUT_ATTENTION = {
    "learned positions": Case(
        _position_wise(lambda m, x: m.a(x + m.table[: x.shape[1]]) * m.b(x), table=(16, 2))
    ),
    "positions of zero": Case(
        _position_wise(
            lambda m, x: m.b(functional.relu(m.a(x) + m.table[: x.shape[1]])),
            table=nn.Parameter(torch.zeros(16, 2)),
        )
    ),
    "the mean over the length": Case(
        _position_wise(lambda m, x: m.b(functional.relu(m.a(x)).mean(1)))
    ),
    "the mean added": Case(_position_wise(lambda m, x: m.a(x) * m.b(x.mean(1, keepdim=True)))),
    "the last position": Case(_position_wise(lambda m, x: m.a(x[:, -1]) * m.b(x[:, -1]))),
    "the fourth position from the end": Case(
        _position_wise(lambda m, x: m.a(x[:, -3]) * m.b(x[:, 0]))
    ),
    "sums so far": Case(_position_wise(lambda m, x: m.a(x.cumsum(1)) * m.b(x))),
    "the position before": Case(_position_wise(lambda m, x: m.a(x) * m.b(x.roll(1, 1)))),
    "a causal convolution": Case(
        _position_wise(
            lambda m, x: m.a(x) * m.conv(functional.pad(x.mT, (2, 0))).mT, conv=nn.Conv1d(2, 2, 3)
        )
    ),
    "flattened at a length": Case(
        _position_wise(lambda m, x: m.b(functional.relu(m.a(x))) / x.flatten(1).shape[1])
    ),
}
OF_TOKENS = {
    "token 0 masked": _of_tokens(_token_zero_masked, r"where\b|comparison|\beq\b|chosen"),
    "token 37 masked": _of_tokens(
        lambda m, t: m.a(m.embed(t) * (t != 37).unsqueeze(-1)), r"comparison|\bne\b|chosen"
    ),
    "tokens modulo 32": _of_tokens(lambda m, t: m.a(m.embed(t % 32)), r"remainder|modulo"),
    "tokens of one byte": _of_tokens(
        lambda m, t: m.a(m.embed(t.to(torch.uint8).long())), r"rounds", tokens=300
    ),
    "padding": _of_tokens(lambda m, t: m.a(m.embed(t)) * m.b(m.embed(t)), padding_idx=0),
    "a single score with rotations": _of_tokens(
        lambda m, t: _rotated(m.a(m.embed(t))) @ _rotated(m.b(m.embed(t))).mT @ m.embed(t),
        r"attends by a single score with queries or keys that depend",
    ),
    "positions of tokens": _of_tokens(
        lambda m, t: m.a(m.embed(t)) + torch.arange(t.shape[1])[:, None], r"else at each position"
    ),
    "tokens so far": _of_tokens(lambda m, t: m.a(m.embed(t)).cumsum(1), r"several positions"),
    "a window of 2 tokens": _of_tokens(
        lambda m, t: _banded(2)(m, m.embed(t) @ m.embed(t).mT) @ m.embed(t), r"masks or weighs"
    ),
}
SEQUENCES = {
    name: replace(case, positions=True)
    for name, case in {**ATTENDING, **WITHOUT_ATTENTION, **OF_TOKENS}.items()
}
POSITION_WISE = set(WITHOUT_ATTENTION)
"""Sequences without attention, which from an example without positions are read as vectors."""
