"""Networks that people have, each through similarity, pairwise, change and the page at first try.

    python benchmarks/networks.py [--rows NAMES]

Every network is tiny, in two versions of which the second has other weights by a fifth. Networks of
vectors are compared as they are; those that read tokens, images or sequences on 64 inputs, as
`docs/which-call.md` says. A cell is the time of the call in seconds of the processor, with a word
where a number is exact from the weights, an estimate, or on the inputs; or the error. Rows of
Equinox and Flax ask for these libraries, which no extra of tnsim installs.
"""

import argparse
import copy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tnsim

COLUMNS = ("network", "similarity", "pairwise of 3", "change", "page")
INPUTS = 64
Made = tuple[Any, Any]
"""A network, and the inputs on which it is compared, None for normal inputs of its own."""


class Residual(nn.Module):
    """A block with a skip."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input and what the block adds."""
        return x + self.block(x)


class Bilinear(nn.Module):
    """A bilinear layer with a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The products of two maps, read out."""
        return self.down(self.left(x) * self.right(x))


class Mixture(nn.Module):
    """A mixture of experts by a softmax gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        hidden = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(3)]
        self.experts = nn.ModuleList(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all experts, weighed."""
        weights = torch.softmax(self.gate(x), -1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[:, None]).sum(-1)


class Recurrent(nn.Module):
    """Token logits of a recurrent network."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.cell = cell(8, 8, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits at every position."""
        return self.out(self.cell(self.embed(tokens))[0])


class Patches(nn.Module):
    """A transformer over the patches of an image, as vision transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class logits."""
        return self.head(self.blocks(self.patch(images).flatten(2).mT).mean(1))


class Sparse(nn.Module):
    """A sparse autoencoder with tied bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.encode, self.decode = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the features rebuild."""
        return self.decode(torch.relu(self.encode(x - self.bias))) + self.bias


def stack(*between: nn.Module) -> nn.Sequential:
    """Two layers with something between."""
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 4))


def images() -> torch.Tensor:
    """Random images of one channel."""
    return torch.randn(INPUTS, 1, 8, 8)


def tokens() -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, 20, (INPUTS, 6))


def vectors() -> np.ndarray:
    """Random vectors."""
    return np.random.default_rng(0).normal(size=(INPUTS, 8))


def convolutional(*blocks: nn.Module) -> nn.Sequential:
    """Convolutions, a mean over the image, and a readout."""
    first = nn.Conv2d(1, 8, 3, padding=1)
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(first, nn.ReLU(), *blocks, *ends)


def hugging_face(name: str, **sizes: Any) -> nn.Module:
    """A tiny network of the library of Hugging Face."""
    import transformers

    config = getattr(transformers, f"{name}Config")
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[name]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 20}
    return getattr(transformers, kind)(config(**sizes, **ends))


def jax_function(scale: float) -> Any:
    """A network of JAX, read from its parameters."""
    import jax.numpy as jnp

    g = np.random.default_rng(0)
    weights = {"in": g.normal(size=(16, 8)), "out": g.normal(size=(4, 16))}
    weights["in"] = weights["in"] * scale

    def run(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["in"].T) @ w["out"].T

    return tnsim.from_function(run, weights, np.zeros((2, 8)))


def equinox_mlp() -> Any:
    """A module of Equinox, which takes a single input."""
    import equinox
    import jax

    net = equinox.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    return jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), net)


def flax_attention() -> Any:
    """Attention behind a norm, in Flax."""
    import jax
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            x = linen.Embed(20, 16)(tokens)
            normed = linen.LayerNorm()(x)
            return linen.Dense(20)(x + linen.MultiHeadDotProductAttention(2)(normed, normed))

    net = Block()
    weights = net.init(jax.random.key(0), np.zeros((1, 6), int))
    return jax.tree_util.Partial(net.apply, weights)


def nnx_mlp() -> Any:
    """A module of `flax.nnx`, called as it is."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner, self.outer = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.outer(nnx.gelu(self.inner(x)))

    return Network(nnx.Rngs(0))


GPT2 = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BERT = {key: LLAMA[key] for key in list(LLAMA)[:4]}

NETWORKS: dict[str, Callable[[], Made]] = {
    "MLP, one hidden layer": lambda: (stack(nn.ReLU()), None),
    "MLP, three layers": lambda: (stack(nn.GELU(), nn.Linear(16, 16), nn.GELU()), None),
    "MLP with batch norm": lambda: (stack(nn.BatchNorm1d(16), nn.ReLU()), None),
    "MLP with layer norm": lambda: (stack(nn.LayerNorm(16), nn.ReLU()), None),
    "MLP with dropout": lambda: (stack(nn.ReLU(), nn.Dropout(0.5)), None),
    "softmax classifier": lambda: (nn.Sequential(stack(nn.ReLU()), nn.Softmax(-1)), None),
    "residual MLP": lambda: (stack(Residual(stack16()), nn.ReLU()), None),
    "bilinear": lambda: (Bilinear(), None),
    "residual bilinear, two layers": lambda: (
        nn.Sequential(Residual(Bilinear()), Residual(Bilinear())),
        None,
    ),
    "sparse autoencoder": lambda: (Sparse(), None),
    "mixture of experts": lambda: (Mixture(), None),
    "CNN": lambda: (convolutional(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), images()),
    "ResNet-like": lambda: (
        convolutional(
            Residual(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
        ),
        images(),
    ),
    "ViT-like": lambda: (Patches(), images()),
    "LSTM": lambda: (Recurrent(nn.LSTM), tokens()),
    "GPT-2": lambda: (hugging_face("GPT2", **GPT2), tokens()),
    "Llama": lambda: (hugging_face("Llama", **LLAMA), tokens()),
    "BERT": lambda: (hugging_face("Bert", **BERT), tokens()),
    "function of JAX": lambda: (jax_function(1.0), None),
    "Equinox": lambda: (equinox_mlp(), vectors()),
    "Flax, attention": lambda: (flax_attention(), tokens().numpy()),
    "Flax, nnx": lambda: (nnx_mlp(), vectors()),
    "plain function": lambda: (np.tanh, vectors()),
}


def stack16() -> nn.Sequential:
    """A block of one width."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def other(network: Any, size: float) -> Any:
    """The same network with weights that differ by a share of their size."""
    if isinstance(network, nn.Module):
        network = copy.deepcopy(network)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in network.parameters():
                spread = weight.abs().mean()
                weight += size * spread * torch.randn(weight.shape, generator=generator)
        return network
    if isinstance(network, tnsim.Model):
        return jax_function(1 + size)
    if network is not np.tanh:  # a pytree with weights
        import jax

        generator = np.random.default_rng(1)

        def moved(weight: Any) -> Any:
            if not hasattr(weight, "dtype") or weight.dtype != np.float32:
                return weight
            spread = np.abs(np.asarray(weight)).mean()
            return weight + (size * spread * generator.normal(size=weight.shape)).astype(np.float32)

        return jax.tree.map(moved, network)
    return lambda x: np.tanh((1 + size) * np.asarray(x))


def timed(call: Callable[[], Any], words: Callable[[Any], str]) -> tuple[str, Any]:
    """The cell of a call, and what it gave."""
    start = time.process_time()
    try:
        found = call()
    except Exception as error:  # the table says which
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:160]}", None
    said = words(found)
    return f"{time.process_time() - start:.1f}{said and ' ' + said}", found


def kind_of(exact: bool, on_inputs: bool) -> str:
    """How a number was found, in a word."""
    return "on inputs" if on_inputs else "exact" if exact else "estimate"


def row(name: str) -> list[str]:
    """The cells of a network."""
    torch.manual_seed(0)
    made, inputs = NETWORKS[name]()
    first = made.eval() if isinstance(made, nn.Module) else made
    between, last = other(first, 0.1), other(first, 0.2)
    metric: Any = () if inputs is None else (tnsim.Empirical(inputs),)
    on = inputs is not None
    similar, _ = timed(
        lambda: tnsim.similarity(first, last, *metric), lambda s: kind_of(s.exact, on)
    )
    many, result = timed(
        lambda: tnsim.pairwise([first, between, last], *metric),
        lambda r: kind_of(bool(r.attrs["exact"]), on),
    )
    changed, _ = timed(
        lambda: tnsim.change(first, last, *metric), lambda c: f"{len(c.components)} parts"
    )
    page = "–"
    if result is not None:
        with tempfile.TemporaryDirectory() as folder:
            page, _ = timed(
                lambda: tnsim.report.write(result, Path(folder) / "page.html"), lambda _: ""
            )
    return [name, similar, many, changed, page]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="names with commas; all by default")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in NETWORKS if not asked.rows or name in asked.rows.split(",")]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name in names:
        lines.append("| " + " | ".join(row(name)) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
