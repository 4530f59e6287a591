"""Networks of the sizes that people have, on inputs, beside their forward passes by hand.

    python benchmarks/real_sizes.py [--rows NAMES] [--verbs NAMES]

Random weights of GPT-2 (124 million), a ResNet-18 and a small ViT, and versions with weights a
twentieth apart. Every cell is a process of its own: `by hand` runs the networks of the cell once on
the inputs, as anybody would, in seconds of the processor; `times` is what the first and the second
call of tnsim take by that; `memory` is how far the first call raises the high-water mark of the
process above its size with the networks in it. A logit of GPT-2 is 4 bytes, of which 16 sequences
of 128 tokens have 103 million. Linux only.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tnsim

COLUMNS = ("network", "inputs", "call", "by hand, s", "times, first", "second", "memory, GiB")


def gpt2(count: int, length: int) -> tuple[Any, torch.Tensor]:
    """GPT-2, and tokens."""
    import transformers

    net = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return net, torch.randint(0, 50257, (count, length))


def resnet(count: int) -> tuple[Any, torch.Tensor]:
    """A ResNet-18 of ten classes, and images."""
    import transformers

    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
    config = transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=10)
    return transformers.ResNetForImageClassification(config), torch.randn(count, 3, 64, 64)


def vit(count: int) -> tuple[Any, torch.Tensor]:
    """A ViT of 11 million weights, and images."""
    import transformers

    sizes = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}
    config = transformers.ViTConfig(
        **sizes, num_attention_heads=6, num_labels=10, image_size=64, patch_size=8
    )
    return transformers.ViTForImageClassification(config), torch.randn(count, 3, 64, 64)


ROWS: dict[str, tuple[str, Callable[[], tuple[Any, torch.Tensor]]]] = {
    "GPT-2": ("16 x 64 tokens", lambda: gpt2(16, 64)),
    "GPT-2, longer": ("16 x 128 tokens", lambda: gpt2(16, 128)),
    "ResNet-18": ("64 images of 64 x 64", lambda: resnet(64)),
    "ViT": ("64 images of 64 x 64", lambda: vit(64)),
}
VERBS: dict[str, Callable[[list[Any], torch.Tensor], Any]] = {
    "similarity": lambda nets, x: tnsim.similarity(nets[0], nets[1], tnsim.Empirical(x)),
    "pairwise": lambda nets, x: tnsim.pairwise(nets, tnsim.Empirical(x)),
    "layer_similarity": lambda nets, x: tnsim.layer_similarity(nets[0], nets[1], x.numpy()),
}
NETWORKS = {"pairwise": 3}
"""Number of networks of a call, two by default."""


def resident(field: str) -> float:
    """A size of this process in GiB, `VmRSS` now or `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 2**20


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of the processor that a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def cell(name: str, verb: str) -> dict[str, float]:
    """The measurements of a cell, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, x = ROWS[name][1]()
    nets = [net.eval()]
    for _ in range(NETWORKS.get(verb, 2) - 1):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for weight in other.parameters():
                weight += 0.05 * weight.abs().mean() * torch.randn_like(weight)
        nets.append(other)

    def by_hand() -> None:
        with torch.no_grad():
            for one in nets:
                one(x)

    line = tnsim.Model([tnsim.Linear(np.eye(1))])
    tnsim.similarity(line, line, tnsim.Empirical(np.ones((1, 1))))  # imports are not counted
    nets[0](x[:1])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is the size now
    before = resident("VmRSS")
    first = seconds(lambda: VERBS[verb](nets, x))
    memory = resident("VmHWM") - before
    hand = [seconds(by_hand)]
    second = seconds(lambda: VERBS[verb](nets, x))
    hand.append(seconds(by_hand))
    return {"hand": min(hand), "first": first, "second": second, "memory": memory}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=";".join(ROWS), help="names with semicolons")
    parser.add_argument("--verbs", default=",".join(VERBS), help="names with commas")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        print(json.dumps(cell(*asked.cell)))
        return
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name in asked.rows.split(";"):
        for verb in asked.verbs.split(","):
            command = [sys.executable, __file__, "--cell", name, verb]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(said.splitlines()[-1])
            times = (f"{found[call] / found['hand']:.1f}" for call in ("first", "second"))
            numbers = (f"{found['hand']:.1f}", *times, f"{found['memory']:.1f}")
            lines.append("| " + " | ".join([name, ROWS[name][0], verb, *numbers]) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
