"""Attack suggested dialects: networks of PyTorch whose files do not say what they compute.

    python scripts/attack/dialects.py          a minute on two cores; needs PyTorch

Each network is written twice with random weights. A dialect is suggested for the file of the first,
both are read through it and compared, and the first is held against its own forward pass. Counted:

    refused       nothing is suggested: an activation, or another way to be no polynomial
    unread        what is suggested does not read the file, said in one sentence
    confirmed     the model computes what the network does, and `confirm` says so
    refuted       the model computes something else, and `confirm` says so
    wrong         a similarity with guesses is called exact, or `confirm` errs: an error in tnsim
    raw           any other exception: an error in tnsim

Prints rows of a markdown table. Ends with status 1 where anything is an error in tnsim.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import tnsim
from tnsim.checkpoints.suggestions import suggest

COLUMNS = ("refused", "unread", "confirmed", "refuted", "wrong", "raw")
ERRORS = ("wrong", "raw")
WIDTH, HIDDEN, INPUTS = 6, 8, 4
Function = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Function] = {
    "none": lambda x: x,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
GATES = (  # names of the left, right and last matrix of a product
    ("left", "right", "down"),
    ("l", "r", "d"),
    ("w_l", "w_r", "w_p"),
    ("w1", "w2", "w3"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    ("gate_proj", "up_proj", "down_proj"),
    ("w_gate", "w_up", "w_down"),
    ("wi_0", "wi_1", "wo"),
    ("fc1_g", "fc1_x", "fc2"),
    ("linear_v", "linear_w", "linear_o"),
    ("up", "right", "proj"),
    ("g_proj", "up_proj", "down_proj"),
)
FUSED = (
    ("gate_up_proj", "down_proj"),
    ("w12", "w3"),
    ("fused", "down"),
    ("lr", "p"),
    ("fc1", "fc2"),
    ("wi", "wo"),
)
CHAINS = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("embed", "head"),
    ("lin1", "lin2"),
    ("l", "r"),
    ("w1", "w2"),
    ("encoder", "decoder"),
    ("wte", "lm_head"),
    ("left", "right"),
    ("up", "down"),
    ("dense", "out"),
    ("hidden", "output"),
    ("tok", "head"),
)


class Product(nn.Module):
    """`down(act(left x) * right x)`, with a residual stream or without, perhaps in a scope."""

    def __init__(
        self,
        names: Sequence[str],
        activation: Function,
        residual: bool = False,
        scope: str | None = None,
    ) -> None:
        super().__init__()
        self.names, self.activation, self.residual, self.scope = names, activation, residual, scope
        if scope:
            setattr(self, scope, nn.Module())
        sizes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        for name, size in zip(names, sizes, strict=True):
            setattr(self._host, name, nn.Linear(*size))

    @property
    def _host(self) -> nn.Module:
        return getattr(self, self.scope) if self.scope else self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, down = (getattr(self._host, name) for name in self.names)
        y = down(self.activation(left(x)) * right(x))
        return x + y if self.residual else y


class Fused(nn.Module):
    """A product of the two halves of one matrix's outputs, perhaps without a last matrix."""

    def __init__(self, names: Sequence[str], activation: Function, down: bool) -> None:
        super().__init__()
        self.names, self.activation, self.down = names, activation, down
        setattr(self, names[0], nn.Linear(WIDTH, 2 * HIDDEN))
        if down:
            setattr(self, names[1], nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = getattr(self, self.names[0])(x).chunk(2, -1)
        y = self.activation(left) * right
        return getattr(self, self.names[1])(y) if self.down else y


class Chain(nn.Module):
    """Two linear layers of given names with an activation between them."""

    def __init__(self, names: Sequence[str], activation: Function, residual: bool = False) -> None:
        super().__init__()
        self.names, self.activation, self.residual = names, activation, residual
        setattr(self, names[0], nn.Linear(WIDTH, HIDDEN))
        setattr(self, names[1], nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name) for name in self.names)
        y = second(self.activation(first(x)))
        return x + y if self.residual else y


class Normed(nn.Module):
    """A layer behind a norm, beside a residual stream."""

    def __init__(self, make: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.mlp = norm(WIDTH), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """An embedding, equal blocks, a readout."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequential(activation: Callable[[], nn.Module], sizes: Sequence[int]) -> nn.Module:
    """Linear layers with activations between them, named by numbers."""
    layers: list[nn.Module] = []
    for size in itertools.pairwise(sizes):
        layers += [nn.Linear(*size), activation()]
    return nn.Sequential(*layers[:-1])


class Case(NamedTuple):
    """A network by its family, its description, and how to make it with random weights."""

    family: str
    text: str
    make: Callable[[], nn.Module]


def products() -> Iterator[Case]:
    scopes = (None, "mlp", "swiglu", "feed_forward")
    for names, name, skip, scope in itertools.product(GATES, ACTIVATIONS, (False, True), scopes):
        make = partial(Product, names, ACTIVATIONS[name], skip, scope)
        yield Case("products of two matrices", f"{names} {name} {skip} {scope}", make)
    for names, name, down in itertools.product(FUSED, ACTIVATIONS, (True, False)):
        make = partial(Fused, names, ACTIVATIONS[name], down)
        yield Case("products of halves", f"{names} {name} {down}", make)


def chains() -> Iterator[Case]:
    modules = nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity, nn.Sigmoid, nn.Softplus, nn.PReLU
    widths = (6, 6), (6, 8, 3), (6, 6, 6), (6, 8, 8, 3), (6, 12, 6), (4, 8, 4), (6, 8, 8, 8, 3)
    for activation, sizes in itertools.product(modules, widths):
        make = partial(sequential, activation, sizes)
        yield Case("linear layers by number", f"{activation.__name__} {sizes}", make)
    for names, name in itertools.product(CHAINS, ACTIVATIONS):
        make = partial(Chain, names, ACTIVATIONS[name])
        yield Case("linear layers by name", f"{names} {name}", make)


def blocks() -> Iterator[Case]:
    few = GATES[:9]
    for names, name, count, skip in itertools.product(few, ACTIVATIONS, (1, 2, 3), (False, True)):
        layer = partial(Product, names, ACTIVATIONS[name], skip)
        text = f"{names} {name} {count} {skip}"
        yield Case("blocks of products", text, partial(Blocks, layer, count))
    for count in (1, 2, 3):
        layer = partial(Chain, ("fc1", "fc2"), ACTIVATIONS["gelu"], True)
        yield Case("blocks of linear layers", f"{count}", partial(Blocks, layer, count))
    norms = (nn.LayerNorm, nn.RMSNorm)
    for norm, affine, names, name in itertools.product(norms, (True, False), few, ("none", "silu")):
        product = partial(Product, names, ACTIVATIONS[name])
        layer = partial(Normed, product, partial(norm, elementwise_affine=affine))
        text = f"{norm.__name__} {affine} {names} {name}"
        yield Case("blocks with norms", text, partial(Blocks, layer, 2))


def modules() -> Iterator[Case]:
    """Layers of PyTorch that are no polynomials, or none that tnsim has."""
    family = "layers of PyTorch"
    yield Case(family, "encoder", lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True))
    yield Case(family, "decoder", lambda: nn.TransformerDecoderLayer(6, 2, 12, batch_first=True))
    yield Case(family, "attention", lambda: nn.MultiheadAttention(6, 2))
    for cell in (nn.LSTM, nn.GRU, nn.RNN):
        yield Case(family, cell.__name__, partial(cell, 6, 8))
    yield Case(
        family,
        "convolution",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
    )
    yield Case(family, "bilinear", lambda: nn.Bilinear(6, 6, 3))
    yield Case(family, "GLU", lambda: nn.Sequential(nn.Linear(6, 16), nn.GLU(), nn.Linear(8, 3)))


def outcome(case: Case) -> str:
    """The word of the table for a network."""
    first, second = (case.make().double().eval() for _ in range(2))
    states = [{k: v.detach().numpy() for k, v in x.state_dict().items()} for x in (first, second)]
    try:
        text = suggest(states[0], "suggested")
    except tnsim.TnsimError:
        return "refused"
    dialect = tnsim.Dialect.from_json(text)
    inputs = np.random.default_rng(0).normal(size=(400, INPUTS))
    norm_inputs = inputs if case.family == "blocks with norms" else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tnsim.CaveatWarning)
            a, b = (
                tnsim.from_state_dict(state, dialect, norm_inputs=norm_inputs) for state in states
            )
            value = tnsim.similarity(a, b, tnsim.TreeSymmetric())
    except tnsim.TnsimError:
        return "unread"
    if value.exact or not value.caveats:
        return "wrong"

    def forward(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return first(torch.as_tensor(x, dtype=torch.float64)).numpy()

    x = np.random.default_rng(1).normal(size=(400, a.d_in))
    theirs, ours = forward(x), a(x)
    is_right = theirs.shape == ours.shape and np.allclose(theirs, ours, rtol=1e-6, atol=1e-9)
    try:
        tnsim.confirm(a, forward)
    except tnsim.ModelError:
        return "wrong" if is_right else "refuted"
    return "confirmed" if is_right else "wrong"


def main() -> int:
    torch.manual_seed(0)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case in itertools.chain(products(), chains(), blocks(), modules()):
        try:
            found = outcome(case)
        except Exception:
            traceback.print_exc()
            found = "raw"
        if found in ERRORS:
            print(case.family, case.text, "->", found, file=sys.stderr, flush=True)
        counts[case.family][found] += 1
    print(f"| networks | tried | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    total = sum(counts.values(), Counter())
    for family, found in [*counts.items(), ("**all**", total)]:
        cells = [found.total(), *(found[name] for name in COLUMNS)]
        print(f"| {family} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return int(any(total[name] for name in ERRORS))


if __name__ == "__main__":
    sys.exit(main())
