"""Which part changed, on trained runs: measures beside the loss when a part is put back.

    python benchmarks/which_trained.py [--seeds N]

Runs of small networks, each over several seeds, each a pair of checkpoints:

    two tasks in phases     a residual MLP learns two outputs, then two more as well
    one block fine-tuned    the first checkpoint, one block of which learns new targets
    LoRA                    the first checkpoint, and adapters of rank 2 in all blocks
    induction               a GPT-2 of two layers, early and late in learning to copy
    induction, probable     the same by the probabilities of the copied tokens instead of logits

The truth of a part is the loss of the second checkpoint with the part's weights put back to the
first, less its loss, from state dicts. A cell is the Spearman correlation of a measure with that
truth over the parts, averaged over seeds (in brackets the least), and how often the part of the
largest truth comes first. Of the fine-tuned block all other truths are zero, so that only the
second number says something.

    put back    |b - b with the part put back| as functions, tnsim.change(...).removed
    share       |share| of the change, tnsim.change(...).share
    distance    |b - a| of the part alone, on the inputs that it has in b
    weights     norm of the difference of the part's weights
    1 - CKA     of the outputs of the part in both checkpoints, debiased
"""

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

import tnsim

MEASURES = ("put back", "share", "distance", "weights", "1 - CKA")
WIDTH, BLOCKS, STEPS, ROWS = 32, 6, 300, 128
TOKENS, LENGTH = 16, 16


class Block(nn.Module):
    """A residual block, with an adapter of low rank where one was added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the block adds."""
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Residual(nn.Module):
    """A residual MLP with an embedding and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four outputs."""
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def goals(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Targets of two tasks, two outputs each, smooth functions drawn by a seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    first, second = (torch.randn(8, 4, generator=draw) / 8**0.5 for _ in range(2))
    return torch.sin(2 * x @ first) * torch.cos(x @ second)


def train(net: nn.Module, weights: Any, loss: Callable[[], torch.Tensor], steps: int) -> None:
    """Adam on some weights."""
    optimiser = torch.optim.Adam(weights, 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def mlp_runs(seed: int) -> Iterator[tuple[str, nn.Module, nn.Module, Any, Any]]:
    """Name, both checkpoints, inputs, and the loss of a network."""
    net = Residual()
    test = torch.randn(ROWS, 8)
    wanted, other = goals(test, seed), goals(test, seed + 500)

    def error(wanted: torch.Tensor, outputs: slice) -> Callable[[nn.Module], torch.Tensor]:
        return lambda net: (net(test) - wanted)[:, outputs].square().mean()

    def on(net: nn.Module, seed: int, outputs: slice) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            x = torch.randn(128, 8)
            return (net(x) - goals(x, seed))[:, outputs].square().mean()

        return loss

    train(net, net.parameters(), on(net, seed, slice(0, 2)), STEPS)
    before = copy.deepcopy(net)
    train(net, net.parameters(), on(net, seed, slice(0, 4)), STEPS)
    yield "two tasks in phases", before, net, test, error(wanted, slice(2, 4))
    tuned = copy.deepcopy(net)
    block = tuned.blocks[seed % BLOCKS]
    train(tuned, block.parameters(), on(tuned, seed + 500, slice(0, 4)), STEPS)
    yield "one block fine-tuned", net, tuned, test, error(other, slice(0, 4))
    adapted = copy.deepcopy(net)
    pairs = []
    for one in adapted.blocks:
        a, b = torch.randn(2, WIDTH) / WIDTH**0.5, torch.zeros(2 * WIDTH, 2)
        pairs.append((one.up, a.requires_grad_(), b.requires_grad_()))
        one.up.weight.requires_grad_(False)
    kept = [up.weight.clone() for up, _, _ in pairs]

    def with_adapters() -> torch.Tensor:
        x = torch.randn(128, 8)
        moved = {f"blocks.{n}.up.weight": kept[n] + b @ a for n, (_, a, b) in enumerate(pairs)}
        outputs = torch.func.functional_call(adapted, moved, (x,))
        return (outputs - goals(x, seed + 500)).square().mean()

    train(adapted, [x for _, a, b in pairs for x in (a, b)], with_adapters, STEPS)
    with torch.no_grad():
        for n, (up, a, b) in enumerate(pairs):
            up.weight.copy_(kept[n] + b @ a)
    yield "LoRA", net, adapted, test, error(other, slice(0, 4))


def induction(seed: int) -> Iterator[tuple[str, nn.Module, nn.Module, Any, Any]]:
    """A small GPT-2 that learns to repeat the first half of a text."""
    import transformers

    ends = {"bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2}
    config = transformers.GPT2Config(**sizes, **ends, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    net = transformers.GPT2LMHeadModel(config)

    def texts(count: int) -> torch.Tensor:
        half = torch.randint(0, TOKENS, (count, LENGTH // 2))
        return torch.cat([half, half], 1)

    def error(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = net(tokens).logits[:, LENGTH // 2 - 1 : -1]
        return nn.functional.cross_entropy(
            logits.reshape(-1, TOKENS), tokens[:, LENGTH // 2 :].reshape(-1)
        )

    train(net, net.parameters(), lambda: error(net, texts(64)), 150)
    before = copy.deepcopy(net)
    train(net, net.parameters(), lambda: error(net, texts(64)), 450)
    test = texts(64)
    yield "induction", before.eval(), net.eval(), test, lambda net: error(net, test)
    both = Copied(before).eval(), Copied(net).eval()
    yield "induction, probable", *both, test, lambda copied: error(copied.net, test)


class Copied(nn.Module):
    """The probabilities that a language model gives to the tokens of a second half."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Probabilities (texts, places, tokens), which do not grow with the size of logits."""
        return self.net(tokens).logits[:, LENGTH // 2 - 1 : -1].softmax(-1)


def put_back(a: nn.Module, b: nn.Module, part: str) -> nn.Module:
    """The second network with the weights of one part of the first."""
    mixed, old = copy.deepcopy(b), a.state_dict()
    new = b.state_dict()
    own = [k for k in new if k == part or k.startswith(part + ".")]
    places = {new[k].data_ptr() for k in own}
    # Tied weights have several names, of which the last would win.
    chosen = {k: old[k] for k, weight in new.items() if weight.data_ptr() in places}
    mixed.load_state_dict({**new, **chosen})
    return mixed


def alone(a: nn.Module, b: nn.Module, part: str, x: Any) -> tuple[float, float]:
    """Distance of a part as a function on its inputs in b, and 1 - CKA of its outputs."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, named: Any, output: Any) -> None:
            seen[name] = (args, named, output[0] if isinstance(output, tuple) else output)

        return hook

    for name, net in (("a", a), ("b", b)):
        handle = net.get_submodule(part).register_forward_hook(keep(name), with_kwargs=True)
        net(x)
        handle.remove()
    args, named, new = seen["b"]
    old = a.get_submodule(part)(*args, **named)
    old = old[0] if isinstance(old, tuple) else old
    states = [seen[name][2].reshape(-1, new.shape[-1]).numpy() for name in "ab"]
    rows = np.arange(len(states[0]), dtype=float)[:, None]
    looked_up = [lambda n, one=one: one[n[:, 0].astype(int)] for one in states]
    alike = float(tnsim.baselines.cka(looked_up, rows).values[0, 1])
    return float((new - old).norm()), 1 - alike


def measured(a: nn.Module, b: nn.Module, x: Any, loss: Any) -> dict[str, np.ndarray]:
    """Every measure, and the truth, of all parts."""
    by: Any = "module"
    if isinstance(b, Residual):
        by = ["read", *(f"blocks.{n}" for n in range(BLOCKS)), "out"]
    if isinstance(b, Copied):
        stream = [f"{n}.{part}" for n in range(2) for part in ("ln_1", "attn", "ln_2", "mlp")]
        by = ["wte", "wpe", *(f"h.{part}" for part in stream), "ln_f"]
        by = [f"net.transformer.{part}" for part in by]
    found = tnsim.change(a, b, tnsim.Empirical(x), by=by)
    old, new = a.state_dict(), b.state_dict()
    values: dict[str, list[float]] = {name: [] for name in (*MEASURES, "truth")}
    with torch.no_grad():
        least = float(loss(b))
        for part, share, removed in zip(found.components, found.share, found.removed, strict=True):
            own = [k for k in new if k == part or k.startswith(part + ".")]
            distance, apart = alone(a, b, part, x)
            values["put back"].append(float(removed))
            values["share"].append(abs(float(share)))
            values["distance"].append(distance)
            values["weights"].append(sum(float((new[k] - old[k]).norm()) ** 2 for k in own))
            values["1 - CKA"].append(apart)
            values["truth"].append(float(loss(put_back(a, b, part))) - least)
    return {name: np.array(one) for name, one in values.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    every: dict[str, list[dict[str, np.ndarray]]] = {}
    for seed in range(asked.seeds):
        for runs in (mlp_runs, induction):
            torch.manual_seed(seed)
            for name, a, b, x, loss in runs(seed):
                every.setdefault(name, []).append(measured(a, b, x, loss))
                print(seed, name, file=sys.stderr, flush=True)
    lines = [f"| run | parts | {' | '.join(MEASURES)} |", "|---" * (len(MEASURES) + 2) + "|"]
    for name, found in every.items():
        cells = []
        for measure in MEASURES:
            with np.errstate(invalid="ignore"):
                ranks = [spearmanr(one[measure], one["truth"]).statistic for one in found]
            first = sum(int(one[measure].argmax() == one["truth"].argmax()) for one in found)
            ranked = f"{np.mean(ranks):.2f} ({min(ranks):.2f}), " if name[:3] != "one" else ""
            cells.append(f"{ranked}{first} of {len(found)}")
        lines.append(f"| {name} | {len(found[0]['truth'])} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
