"""Seconds from `pip install` to the first matrix, in a fresh environment and with empty caches.

    python benchmarks/first_matrix.py

Installs this repository with PyTorch and transformers into a new environment from pip's cache or a
mirror, and runs three programs of a newcomer: each makes five networks and compares all pairs. The
cache of tnsim is empty for each program, so that planning and compiling count.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MLP = """
import tnsim, torch
from torch import nn
nets = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)) for _ in range(5)]
print(tnsim.pairwise(nets, progress=False).similarity.shape)
"""
BILINEAR = """
import tnsim, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 128), nn.Linear(64, 128)
        self.down = nn.Linear(128, 10)
    def forward(self, x):
        return self.down(self.left(x) * self.right(x))
print(tnsim.pairwise([Net() for _ in range(5)], progress=False).similarity.shape)
"""
GPT2 = """
import tnsim, torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=1000, n_positions=64)
nets = [GPT2LMHeadModel(config).eval() for _ in range(5)]
tokens = torch.randint(0, 1000, (64, 32))
print(tnsim.pairwise(nets, tnsim.Empirical(tokens), progress=False).similarity.shape)
"""
PROGRAMS = {
    "ReLU network 64-128-10, exact": MLP,
    "bilinear network 64-128-10, exact": BILINEAR,
    "GPT-2 of 4 layers and width 128, on 64 sequences of 32 tokens": GPT2,
}


def seconds(*command: object, **options: object) -> float:
    """Wall time of a command, which must succeed."""
    start = time.perf_counter()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = seconds(sys.executable, "-m", "venv", f"{folder}/venv")
        pip = (f"{folder}/venv/bin/pip", "install", "-q")
        torch = seconds(*pip, "torch")
        own = seconds(*pip, "-e", f"{ROOT}[pairwise,plot,torch]")
        transformers = seconds(*pip, "transformers")
        print(f"environment {made:.0f}, PyTorch {torch:.0f}, tnsim {own:.0f}, ", end="")
        print(f"transformers {transformers:.0f} seconds", flush=True)
        print("| network | from import to matrix | from pip install to matrix |\n|---|---|---|")
        for number, (name, program) in enumerate(PROGRAMS.items()):
            surroundings = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache{number}"}
            ran = seconds(f"{folder}/venv/bin/python", "-c", program, env=surroundings)
            whole = own + ran + torch + (transformers if program is GPT2 else 0)
            print(f"| {name} | {ran:.1f} s | {whole:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
