"""`from_module`: modules made by PyTorch itself, compared with their own forward passes; what it refuses, by name."""

import copy

import numpy as np
import pytest
from closeness import LARGEST, assert_close

import tnsim

torch = pytest.importorskip("torch", reason="reading modules needs the torch extra")
from torch.nn.utils import prune  # noqa: E402

from tnsim.checkpoints import norms  # noqa: E402
from tnsim.checkpoints.module_examples import forward_error  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Gated(nn.Module):
    """D ((L x) * (R x))."""

    def __init__(self, width, rank, out=None, bias=True):
        super().__init__()
        self.left, self.right = nn.Linear(width, rank, bias), nn.Linear(width, rank, bias)
        self.down = nn.Linear(rank, out or width, bias)

    def forward(self, x):
        return self.down(self.left(x) * self.right(x))


class Residuals(nn.Module):
    """Every rule of a residual, one of them with a scale that is learned, and layers that are dead."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Gated(4, rank) for rank in (5, 3, 2))
        self.mix = nn.Linear(4, 4)
        self.alpha = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(4, 3, bias=False)
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        x = self.embed(x)
        x = x + 0.35 * self.blocks[0](x)
        x = x + self.alpha * self.blocks[1](x)
        x = torch.lerp(x, self.blocks[2](x), 0.25)
        x = x + self.mix(x)
        return self.head(x)


class Fused(nn.Module):
    def __init__(self, down):
        super().__init__()
        self.both = nn.Linear(6, 8)
        self.down = nn.Linear(4, 3) if down else None

    def forward(self, x):
        a, b = self.both(x).chunk(2, dim=-1)
        return self.down(a * b) if self.down else a * b


class Square(nn.Module):
    def __init__(self, down):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3) if down else None

    def forward(self, x):
        return self.down(self.up(x) ** 2) if self.down else self.up(x) ** 2


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)

    def forward(self, x):
        return self.a(x) * self.b(x)


MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(5, 4), nn.Identity(), nn.Linear(4, 2, bias=False)),
    "nested": lambda: nn.Sequential(nn.Linear(5, 4), nn.Sequential(Gated(4, 7), Gated(4, 3, 2))),
    "residuals": Residuals,
    "fused": lambda: Fused(True),
    "fused without down": lambda: Fused(False),
    "square": lambda: Square(True),
    "square without down": lambda: Square(False),
    "product": Product,
}


def forward(module, x):
    with torch.no_grad():
        return module.double()(torch.tensor(x)).numpy()


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", MODULES)
def test_what_is_recognised_computes_the_same(name, rng):
    module = MODULES[name]()
    model = tnsim.from_module(module)
    assert model.origin.error < 1e-12 and not model.origin.caveats
    x = rng.normal(size=(7, model.d_in))
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


def test_nodes_from_the_last_to_the_first_are_no_iterator_in_older_pytorch(monkeypatch):
    """`reversed(graph.nodes)` is a list of nodes there, as earlier versions have it."""
    nodes = torch.fx.graph._node_list
    monkeypatch.setattr(nodes, "__reversed__", lambda self: nodes(self.graph, "_prev"))
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.ones(1, 3, dtype=torch.float64)
    assert_close(tnsim.from_module(module)(x.numpy()), module(x).detach().numpy(), rtol=1e-12)


def test_a_module_reads_the_files_of_a_run(rng, tmp_path):
    module = Residuals()
    assert tnsim.from_module(module).origin.ignored == ("norm.weight", "norm.bias")
    for step in (1, 2):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        torch.save(module.state_dict(), tmp_path / f"step_{step}.pt")
    series = tnsim.load(tmp_path, module)
    x = rng.normal(size=(7, 6))
    assert_close(series[1](x), forward(module, x), scale=LARGEST, rtol=1e-5, limited_by="float32")
    assert series.labels == ("1", "2")


def test_weights_at_their_start_do_not_mislead(rng):
    """Zeros and ones fit many things; others in the same places do not."""
    module = Residuals()
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    model = tnsim.from_module(module)
    assert [type(layer).__name__ for layer in model.layers].count("Residual") == 3
    assert not np.any(model(rng.normal(size=(5, 6)))) and module.alpha.dtype == torch.float32


class Attention(nn.Module):
    def __init__(self, rope, causal, power, interleaved=False):
        super().__init__()
        self.rope, self.causal, self.power, self.interleaved = rope, causal, power, interleaved
        for name in ("q1", "k1", "q2", "k2"):
            setattr(self, name, nn.Linear(8, 8))
        self.v, self.o = nn.Linear(8, 6, bias=False), nn.Linear(6, 8)
        self.rope_base = 1000.0

    def turned(self, x):
        if not self.rope:
            return x
        angle = torch.arange(x.shape[-2])[:, None] * self.rope_base ** (-torch.arange(2) / 2)
        a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)

    def forward(self, x):
        def heads(layer):
            return layer(x).unflatten(-1, (2, -1)).transpose(1, 2)

        q1, k1, q2, k2 = (self.turned(heads(m)) for m in (self.q1, self.k1, self.q2, self.k2))
        scores = (q1 @ k1.mT) * (q2 @ k2.mT) / 4**self.power
        if self.causal:
            scores = scores * torch.ones(x.shape[1], x.shape[1]).tril()
        return self.o((scores @ heads(self.v)).transpose(1, 2).flatten(-2))


class Language(nn.Module):
    def __init__(self, *options, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Attention(*options)])
        self.unembed = nn.Linear(8, 11, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + 0.35 * layer(x)
        return self.unembed(x)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "options",
    [(False, True, 2), (True, True, 1), (True, False, 2, True)],
    ids=["plain", "rotary", "interleaved"],
)
def test_bilinear_attention_by_what_it_gives(options, rng):
    module = Language(*options, tied=options[0])
    model = tnsim.from_module(module, n_ctx=4)
    assert model.n_ctx == 4 and model.origin.error < 1e-6
    layer = model.layers[1].layer
    assert layer.n_heads == 2 and layer.mask == ("causal" if options[1] else "none")
    assert layer.rope_base == (1000.0 if options[0] else None)
    tokens = rng.integers(11, size=(3, 4))
    assert_close(
        model(np.eye(11)[tokens]),
        forward(module, tokens),
        scale=LARGEST,
        rtol=1e-6,
        limited_by="float32",
    )


class Stacked(nn.Module):
    """Query, key and value by one layer, of which both scores are made."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.first(x).chunk(3, -1))
        scores = (q @ k.mT / 4).square() * torch.ones(x.shape[1], x.shape[1]).tril()
        return x + self.second((scores @ v).transpose(1, 2).flatten(-2))


@pytest.mark.slow
def test_fused_attention_by_what_it_gives(rng):
    module, x = Stacked(), rng.normal(size=(3, 4, 8))
    model = tnsim.from_module(module, n_ctx=4, inputs=torch.ones(2, 4, 8))
    assert "read by the graph of Stacked at n_ctx 4" in " ".join(model.origin.assumptions)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-5, limited_by="float32")


class LinearAttention(nn.Module):
    """Attention without softmax by a single score."""

    def __init__(self, names="q k v o", power=0.5, causal=True, rope=False, residual=False):
        super().__init__()
        self.names, self.power, self.causal = names.split(), power, causal
        self.rope, self.residual = rope, residual
        for name in self.names:
            setattr(self, name, nn.Linear(8, 8, bias=residual))
        # Libraries put the last projection before dropout.
        setattr(self, name, nn.Sequential(nn.Linear(8, 8, bias=residual), nn.Dropout(0.5)))

    def forward(self, x):
        *legs, out = (getattr(self, name) for name in self.names)
        q, k, v = (leg(x).unflatten(-1, (2, 4)).transpose(1, 2) for leg in legs)
        if self.rope:
            angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.01])
            cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
            q, k = (y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin for y in (q, k))
        scores = q @ k.mT / 4**self.power
        scores = scores.tril() if self.causal else scores
        return out((scores @ v).transpose(1, 2).flatten(-2)) + self.residual * x


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "options",
    [
        ("q k v o",),
        ("q_proj k_proj v_proj out_proj", 1, False),
        ("to_q to_k to_v to_out", 0, True, False, True),
        ("W_Q W_K W_V W_O", 2, False, False, True),
    ],
)
def test_linear_attention_by_what_it_gives(options, rng):
    torch.manual_seed(0)
    module, x = LinearAttention(*options).double().eval(), rng.normal(size=(3, 5, 8))
    model = tnsim.from_module(module, n_ctx=5)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-13)
    other = LinearAttention(*options).double().eval()
    read = tnsim.from_state_dict(other.state_dict(), module, 5)
    assert_close(read(x), forward(other, x), scale=LARGEST, rtol=1e-13)


class ByHead(nn.Module):
    """Attention without softmax by parameters with an axis of heads."""

    def __init__(self, scores):
        super().__init__()
        both = [f"{leg}{i}" for i in (1, 2) for leg in "QK"]
        self.scores = [both[:2], both[2:]] if scores == 2 else [["Q", "K"]]
        for name in both if scores == 2 else "QK":
            setattr(self, f"W_{name}", nn.Parameter(torch.randn(3, 6, 4)))
        self.b_V, self.b_O = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(6))
        self.W_V = nn.Parameter(torch.randn(3, 6, 2))
        self.W_O = nn.Parameter(torch.randn(3, 2, 6))

    def forward(self, x):
        scores = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        for q, k in self.scores:
            q, k = (torch.einsum("bsd,hdk->bhsk", x, getattr(self, f"W_{leg}")) for leg in (q, k))
            scores = scores * torch.einsum("bhsk,bhtk->bhst", q, k) / 4**0.5
        v = torch.einsum("bsd,hdk->bhsk", x, self.W_V) + self.b_V[:, None]
        return torch.einsum("bhst,bhtv,hvd->bsd", scores, v, self.W_O) + self.b_O


@pytest.mark.slow
@pytest.mark.parametrize("scores", [1, 2])
def test_attention_of_parameters_by_head(scores, rng):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), ByHead(scores), nn.Linear(6, 3)).double()
    x = rng.normal(size=(3, 4, 6))
    model = tnsim.from_module(module, n_ctx=4)
    assert model.layers[1].n_heads == 3 and model.layers[1].d_value == 2
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-13)
    state = {name: tensor + 1.0 for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)
    read = tnsim.from_state_dict(state, module, 4)
    assert_close(read(x), forward(module, x), scale=LARGEST, rtol=1e-13)


@pytest.mark.slow
def test_parameters_tell_the_width_of_a_sequence(rng):
    module, x = ByHead(1).double(), rng.normal(size=(3, 4, 6))
    model = tnsim.from_module(module, n_ctx=4)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-13)


@pytest.mark.slow
def test_an_example_of_zeros_tells_attention_by_its_shape(rng):
    module, x = LinearAttention().double().eval(), rng.normal(size=(3, 5, 8))
    model = tnsim.from_module(module, inputs=torch.zeros(1, 5, 8))
    assert [type(layer).__name__ for layer in model.layers] == ["Attention"]
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-13)


def test_a_single_score_under_a_rotation_is_no_layer():
    module = nn.Sequential(nn.Embedding(5, 8), LinearAttention(rope=True)).eval()
    with pytest.raises(
        tnsim.UnsupportedLayer,
        match=r"1 \(LinearAttention\) attends by a single score with queries or keys that depend",
    ):
        tnsim.from_module(module, n_ctx=4)


def test_images_are_flat():
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    assert tnsim.from_module(module, inputs=torch.zeros(3, 1, 3, 4)).d_in == 12


class Raw(nn.Module):
    """Parameters without layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in "ab")

    def forward(self, x):
        return (x @ self.a.T) * (x @ self.b.T)


def test_classes_are_declared_by_rules_or_functions(rng):
    module = nn.Sequential(nn.Linear(3, 4), Raw(), nn.Linear(4, 2))
    rule = tnsim.dialects.BilinearRule(left="a", right="b")

    def function(raw):
        return tnsim.Bilinear(raw.a, raw.b, np.eye(4))

    x = rng.normal(size=(5, 3))
    expected = forward(module, x)
    for declared in (rule, function):
        model = tnsim.from_module(module, {Raw: declared})
        assert_close(model(x), expected, scale=LARGEST, rtol=1e-5, limited_by="float32")
    wrong = tnsim.dialects.BilinearRule(left="a", right="a")
    with pytest.raises(tnsim.TnsimError, match="what was recognised is another function"):
        tnsim.from_module(module, {Raw: wrong})


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)]
)
def test_wrappers_are_looked_through(wrap, tmp_path):
    """In modules, and in the names that they give to the tensors of a file."""
    wrapped = wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model = tnsim.from_module(wrapped)
    torch.save(wrapped.state_dict(), tmp_path / "model.pt")
    assert tnsim.similarity(tnsim.load(tmp_path / "model.pt", wrapped), model) == 1


def test_files_of_a_run_that_diverged_name_the_tensors(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.save(module.state_dict() | {"2.bias": torch.full((2,), torch.nan)}, tmp_path / "a.pt")
    with pytest.raises(tnsim.ModelError, match=r"a\.pt: '2\.bias' has numbers that are NaN"):
        tnsim.load(tmp_path / "a.pt", module)


class CompiledInside(nn.Module):
    """A submodule and a function that are compiled, as of models compiled block by block."""

    def __init__(self):
        super().__init__()
        self.first = torch.compile(nn.Linear(3, 4), backend="eager")
        self.twice = torch.compile(lambda x: 2 * x, backend="eager")
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.twice(self.first(x))))


def test_what_is_compiled_inside_of_a_module_is_looked_through(tmp_path):
    module = CompiledInside()
    plain = nn.Sequential(module.first._orig_mod, Times(2.0), nn.ReLU(), module.second)
    assert tnsim.similarity(module, plain) == 1
    torch.save(module.state_dict(), tmp_path / "model.pt")
    assert tnsim.similarity(tnsim.load(tmp_path / "model.pt", module), plain) == 1


def test_blocks_of_the_default_compiler_are_run_as_they_are(tmp_path):
    """Their machine code took the inputs of a trace for numbers, which ended the process."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module = nn.Sequential(torch.compile(plain[0]), *plain[1:])
    assert tnsim.similarity(module, plain) == 1
    torch.save(module.state_dict(), tmp_path / "model.pt")
    for net in (module, plain):
        assert tnsim.similarity(tnsim.load(tmp_path / "model.pt", net), plain) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_programs_of_torchscript_run_on_inputs():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    program = torch.jit.script(module)
    value = tnsim.similarity(program, module, tnsim.Gaussian(samples=512))
    assert value.route == "sampling"
    assert_close(value, 1.0, scale=1.0, rtol=1e-6, limited_by="float32")
    with pytest.raises(tnsim.UnsupportedLayer, match="TorchScript"):
        tnsim.from_module(nn.Sequential(program))


def test_what_is_parametrised_is_read_as_what_it_amounts_to(rng):
    module = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    model = tnsim.from_module(module)
    x = rng.normal(size=(5, 4))
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-5, limited_by="float32")


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_before_every_call_are_no_obstacle(rng, normed):
    """Pruning, and norms of weights in their older form, keep tensors that PyTorch copies not."""
    maps = nn.Linear(4, 6)
    maps = nn.utils.weight_norm(maps) if normed else prune.random_unstructured(maps, "weight", 0.5)
    module = nn.Sequential(maps, nn.GELU(), nn.Linear(6, 2)).double()
    plain = nn.Sequential(nn.Linear(4, 6).double(), *module[1:])
    module(torch.ones(1, 4).double())
    with torch.no_grad():
        plain[0].weight.copy_(maps.weight)
        plain[0].bias.copy_(maps.bias)
    other = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)).double()
    data = tnsim.Empirical(rng.normal(size=(20, 4)))
    assert_close(*(tnsim.similarity(net, other, data) for net in (module, plain)), scale=1.0)
    estimate, exact = (tnsim.similarity(net, other) for net in (module, plain))
    assert estimate.standard_error and exact.exact
    assert_close(
        estimate, exact, scale=estimate.standard_error, rtol=5, limited_by="samples of the estimate"
    )


class Hidden(nn.Module):
    """A function that is no submodule, and no activation with a name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(nn.functional.softsign(self.first(x)))


class GatedBySoftsign(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(nn.functional.softsign(self.gate(x)) * self.up(x))


def hooked():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


class Means(nn.Module):
    """Parameters alone, beside inputs of any width."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return x.mean(-1, keepdim=True) * self.weight.sum()


REFUSED = {
    "activations": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(-1)),
        r": 3: Softmax, which has no exact similarity.*layers=\{Class: .*tnsim\.baselines",
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1)),
        r"1: Dropout\(p=0\.1\) in training mode, .*: call module\.eval\(\) first",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        r"1: BatchNorm1d in training mode, .*: call module\.eval\(\) first",
    ),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))),
        r"0\.parametrizations\.weight\.0: _SpectralNorm in training mode, .*: call module\.eval\(\)",
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 1)), "0: Conv1d, of which .* give inputs="),
    "hook": (hooked, "0: a forward hook, which may change what is computed: remove it"),
    "function": (Hidden, r"Hidden\) computes abs, add and div: these .* no activation that is known.*tnsim\.Activation\("),
    "gate": (GatedBySoftsign, "computes abs, add and div: these of a value make no activation"),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2).eval(),
        "self_attn: MultiheadAttention, which is softmax attention",
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)), "norm_inputs=inputs"),
    "last norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), "a norm stands before layer 1.*norm_inputs"),
    "several widths": (Means, r"the module takes vectors of 3, 5 entries: give inputs=, an example"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name):
    build, message = REFUSED[name]
    with pytest.raises(tnsim.TnsimError, match=message):
        tnsim.from_module(build())


class Tokens(nn.Module):
    """Two tokens side by side, as networks of modular addition read them."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.out = nn.Embedding(7, 6), nn.Linear(12, 10), nn.Linear(10, 7)

    def forward(self, tokens):
        return self.out(self.first(self.embed(tokens).flatten(1)).relu())


class Sequential(nn.Module):
    """Linear attention of heads as parameters, which mixes positions as no layer does."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Parameter(torch.randn(2, 4, 3)))

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,hdk->bhsk", x, row) for row in (self.q, self.k, self.v))
        return torch.einsum("bhsk,bhtk,bhtv->bsv", q, k, v)


class Positions(nn.Module):
    """Sums over positions, which no layer has."""

    def forward(self, x):
        return x.cumsum(1) * x


def test_heads_that_are_added_up_are_attention(rng):
    module, x = Sequential().double(), rng.normal(size=(2, 3, 4))
    model = tnsim.from_module(module, n_ctx=3)
    assert [type(layer).__name__ for layer in model.layers] == ["Attention"]
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


class Softmax(nn.Module):
    """A head of softmax attention behind a norm, in names of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.attn = nn.ModuleDict(
            {name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj")}
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (layer(self.norm(x)) for layer in self.attn.values())
        return x + torch.softmax(q @ k.mT, -1) @ v


TOKENS = {"inputs": torch.zeros(1, 2, dtype=torch.long)}
FIXED = {  # a module, arguments of from_module, and the fix that the refusal names
    "tokens": (Tokens, TOKENS, r"numbers of several positions of a sequence together.*Empirical\(inputs\).*tokens"),
    "positions": (
        Positions,
        {"inputs": torch.randn(1, 3, 4), "n_ctx": 3},
        "its 3 positions are read as a single vector of 12 numbers: .* leave n_ctx out",
    ),
    "parts": (Softmax, TOKENS, r"tnsim\.parts\(net\).*Empirical\(inputs\)"),
    "recurrent": (lambda: nn.LSTM(4, 5), {}, r"LSTM, which is recurrent.*Empirical\(inputs\)"),
    "logits": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(-1)),
        {},
        r"1: LogSoftmax, which has no exact similarity; logits have: .* net\[:-1\]",
    ),
    "script": (
        lambda: torch.jit.script(nn.Linear(4, 5)),
        {},
        r"TorchScript program .* load its state_dict\(\) .*Empirical\(inputs\)",
    ),
    "no numbers": (lambda: nn.Linear(4, 5, device="meta"), {}, "'meta'.*load_state_dict"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", FIXED)
def test_refusals_name_the_fix(name):
    build, arguments, fix = FIXED[name]
    with pytest.raises(tnsim.TnsimError, match=fix):
        tnsim.from_module(build(), **arguments)


class Scored(nn.Module):
    """Bilinear attention whose scores, or outputs, have a constant factor."""

    def __init__(self, inside=1.0, outside=1.0, both=True):
        super().__init__()
        for name in ("q1", "k1", "q2", "k2", "v", "o"):
            setattr(self, name, nn.Linear(4, 4, bias=False))
        self.inside, self.outside, self.both = inside, outside, both

    def forward(self, x):
        scores = self.inside * (self.q1(x) @ self.k1(x).mT)
        if self.both:
            scores = scores * (self.q2(x) @ self.k2(x).mT)
        return self.outside * self.o(scores.tril() @ self.v(x))


class Scaled(nn.Module):
    """A bilinear block, times a number."""

    def __init__(self, factor=64.0):
        super().__init__()
        self.left, self.right, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.factor = factor

    def forward(self, x):
        return self.factor * self.down(self.left(x) * self.right(x))


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


BLOCK = tnsim.dialects.BilinearRule(left="left.weight", right="right.weight", down="down.weight")


def test_a_constant_factor_is_said_as_a_factor():
    with pytest.raises(tnsim.TnsimError, match="gives 64 times the outputs"):
        tnsim.from_module(nn.Sequential(Scaled()), layers={Scaled: BLOCK})


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: Scored(inside=1 / 64),
        lambda: Scored(outside=64.0),
        lambda: Scored(inside=-3.0, both=False),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), Times(3.0)),
    ],
)
@pytest.mark.parametrize("length", [{}, {"n_ctx": 3}])
def test_factors_are_part_of_the_weights(build, length, rng):
    torch.manual_seed(0)
    module, x = build().double(), rng.normal(size=(5, 3, 4))
    model = tnsim.from_module(module, **length)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


def test_polynomials_of_whole_sequences_are_read_as_vectors(rng):
    module, x = Positions().double(), rng.normal(size=(5, 3, 4))
    model = tnsim.from_module(module, inputs=torch.zeros(1, 3, 4))
    expected = forward(module, x).reshape(5, 12)
    assert_close(model(x.reshape(5, 12)), expected, scale=LARGEST, rtol=1e-12)


def test_activations_without_a_name_have_a_road():
    net = nn.Sequential(nn.Linear(3, 4), nn.Softsign(), nn.Linear(4, 2))
    with pytest.raises(
        tnsim.UnsupportedLayer,
        match=r"as Hardshrink, tnsim\.Activation\(kinks=.*as softsign, .*Empirical\(inputs\)",
    ):
        tnsim.from_module(net)


def test_a_declared_hardshrink_is_the_one_of_pytorch(rng):
    """By the pieces that the refusal shows."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Hardshrink(), nn.Linear(4, 2)).double()
    shrink = tnsim.Activation(kinks=(-0.5, 0.5), pieces=((0, 1), (0,), (0, 1)))
    model = tnsim.from_module(net, layers={nn.Hardshrink: lambda _: tnsim.Elementwise(shrink)})
    assert_close(tnsim.similarity(model, tnsim.from_module(net)), 1.0, scale=1.0)
    x = rng.normal(size=(50, 3))
    assert_close(model(x), forward(net, x), scale=LARGEST, rtol=1e-12)


class Late(nn.Module):
    """Tokens are read by an embedding that was made last."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.embed = nn.Embedding(7, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.left(x) * self.right(x)


def test_an_embedding_made_last_says_that_inputs_are_tokens():
    assert tnsim.from_module(Late()).d_in == 7


@pytest.mark.parametrize("dtype", ["u2", ">i8"])
def test_an_example_of_tokens_has_any_width(dtype):
    assert tnsim.from_module(Late(), inputs=np.zeros((4, 1), dtype)).d_in == 7


@pytest.mark.parametrize("given", [np.zeros((2, 3)), "x", [1], {"x": 1}])
@pytest.mark.parametrize("read", [tnsim.from_module, tnsim.torch.from_module])
def test_an_example_in_the_place_of_layers_names_the_way(read, given):
    with pytest.raises(tnsim.ModelError, match=r"layers maps classes .* by name, inputs=x"):
        read(nn.Linear(3, 2), given)


def test_files_of_other_widths_than_the_module_are_refused(tmp_path):
    net, wide = (nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)) for n in (4, 5))
    torch.save({"model": wide.state_dict()}, tmp_path / "step_1.pt")
    said = r"'0\.weight' has shape \(5, 3\), in the module Sequential \(4, 3\): give"
    for read in (
        lambda: tnsim.load(tmp_path / "step_1.pt", net),
        lambda: tnsim.load(tmp_path, net)[0],
        lambda: tnsim.pairwise(tmp_path, dialect=net),
        lambda: tnsim.from_state_dict(wide.state_dict(), net),
    ):
        with pytest.raises(tnsim.CheckpointError, match=said):
            read()


class Quantised(nn.Linear):
    """A linear layer as bitsandbytes has it."""


Quantised.__module__ = "bitsandbytes.nn.modules"


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_weights_are_named(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    dynamic = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    for module in (dynamic, nn.Sequential(Quantised(3, 4))):
        with pytest.raises(
            tnsim.UnsupportedLayer, match=r"0: .*quantised: .* module before quantisation"
        ):
            tnsim.from_module(module)
    torch.save(dynamic.state_dict(), tmp_path / "dynamic.pt")
    for dialect in (None, net):
        with pytest.raises(tnsim.CheckpointError, match=r"quantised weights.* dequantise it"):
            tnsim.load(tmp_path / "dynamic.pt", dialect)
    float_state = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    rounded = {"0.weight": np.ones((4, 3), np.int8), "2.weight": np.ones((2, 4), np.int8)}
    for besides in (
        "0.SCB",
        "0.weight.absmax",
        "0.weight.quant_state.bitsandbytes__nf4",
        "0.qweight",
    ):
        state = float_state | rounded | {besides: np.ones(4)}
        with pytest.raises(tnsim.CheckpointError, match=f"{besides} belongs to quantised weights"):
            tnsim.from_state_dict({"model": state}, net)


def test_files_of_softmax_attention_have_parts():
    with pytest.raises(tnsim.UnsupportedLayer, match=r"attn\.q_proj.*tnsim\.parts\(path\)"):
        tnsim.from_state_dict(Softmax().state_dict())


def test_what_is_no_module():
    with pytest.raises(tnsim.ModelError, match=r"expected a torch\.nn\.Module, found dict"):
        tnsim.from_module({})
    with pytest.raises(
        tnsim.ModelError, match="n_ctx must be a positive integer or None, found -1"
    ):
        tnsim.from_module(nn.Linear(3, 2), n_ctx=-1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.block = nn.Linear(6, 4), nn.RMSNorm(4), Gated(4, 5)
        self.last, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.block(self.norm(x))
        return self.head(self.last(x))


@pytest.mark.slow
def test_norms_are_folded_at_their_energy_on_inputs(rng):
    """The error that is reported is that of the module's own forward pass."""
    module, x = Normed(), rng.normal(size=(200, 6))
    nn.init.normal_(module.norm.weight), nn.init.normal_(module.last.bias)
    model = tnsim.from_module(module, norm_inputs=x)
    expected = forward(module, x)
    error = np.linalg.norm(model(x) - expected) / np.linalg.norm(expected)
    assert_close(model.origin.error, error, rtol=1e-4, limited_by="float32")
    assert 0.05 < error < 1
    assert f"differ by {error:.2%} of their size" in model.origin.caveats[0]
    one = x[:1]  # on a single input the energy is that of the input
    single = tnsim.from_module(module, norm_inputs=one)
    assert_close(single(one), forward(module, one), scale=LARGEST, rtol=1e-5, limited_by="float32")


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ["softsign", "softmax", "normalize", "layer_norm", "rms_norm"])  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_functions_that_are_no_submodules_are_named_wherever_they_stand(name, last):
    def function(x):
        settings = {"dim": -1} if name in ("softmax", "normalize") else {}
        if name.endswith("norm"):
            settings = {"normalized_shape": x.shape[-1:]}
        return getattr(nn.functional, name)(x, **settings)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return function(self.second(x)) if last else self.second(function(x))

    said = {"softsign": "abs, add and div", "normalize": "linalg_vector_norm"}.get(name, f"_{name}")
    said = "a norm stands before layer" if name.endswith("norm") else rf"\(Net\) computes {said}"
    with pytest.raises(tnsim.UnsupportedLayer, match=said):
        tnsim.from_module(Net())


class Block(nn.Module):
    """One hidden layer inside a residual, as in a transformer."""

    def __init__(self, function):
        super().__init__()
        self.c_fc, self.c_proj, self.function = nn.Linear(4, 9), nn.Linear(9, 4), function

    def forward(self, x):
        return x + self.c_proj(self.function(self.c_fc(x)))


class GLU(nn.Module):
    """A gated block by three linear layers, or by two with one that holds both halves."""

    def __init__(self, function, fused=False):
        super().__init__()
        self.fused, self.function = fused, function
        self.w1, self.w2 = nn.Linear(4, 18 if fused else 9, bias=False), nn.Linear(9, 4)
        self.w3 = nn.Linear(4, 9)

    def forward(self, x):
        if self.fused:
            up, gate = self.w1(x).chunk(2, -1)
            return self.w2(up * self.function(gate))
        return self.w2(self.w3(x) * self.function(self.w1(x)))


F = nn.functional
ACTIVATED = {
    "relu": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        "Linear(4 -> 5, bias), Elementwise(5 -> 5, relu), Linear(5 -> 3, bias)",
    ),
    "both forms of gelu": (
        lambda: nn.Sequential(nn.GELU("tanh"), nn.Linear(4, 5), nn.GELU()),
        "Elementwise(4 -> 4, gelu_tanh), Linear(4 -> 5, bias), Elementwise(5 -> 5, gelu)",
    ),
    "functions": (
        lambda: nn.Sequential(Block(F.silu), Block(F.relu6)),
        "Residual(Gated(4 -> 4, rank 9, silu, gate_bias, down_bias), skip=1, scale=1), "
        "Residual(Gated(4 -> 4, rank 9, relu6, gate_bias, down_bias), skip=1, scale=1)",
    ),
    "gate": (lambda: GLU(F.silu), "Gated(4 -> 4, rank 9, silu, up_bias, down_bias)"),
    "halves": (lambda: GLU(F.gelu, True), "Gated(4 -> 4, rank 9, gelu, down_bias)"),
    "residual of a gate": (
        lambda: Block(lambda x: F.leaky_relu(x)),
        "Residual(Gated(4 -> 4, rank 9, leaky_relu, gate_bias, down_bias), skip=1, scale=1)",
    ),
}


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_are_told_by_their_values(name, tmp_path):
    build, layers = ACTIVATED[name]
    module = build().double()
    model = tnsim.from_module(module)
    assert repr(model).startswith(f"Model({layers};"), model
    assert model.origin.error < 1e-12
    x = np.random.default_rng(0).normal(size=(6, 4))
    again = tnsim.from_state_dict(module.state_dict(), module)
    tnsim.save(model, tmp_path / "model.safetensors")
    for read in (again, tnsim.load(tmp_path / "model.safetensors")):
        np.testing.assert_array_equal(read(x), model(x))
        assert repr(read) == repr(model)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


class Stream(nn.Module):
    """A transformer's stream with an MLP behind a norm, and a part that is never called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.spare = nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + self.mlp(input=self.norm(x))


def test_states_that_enter_a_submodule(rng):
    torch.manual_seed(0)
    net = Stream().double()
    tokens = rng.integers(7, size=(20, 5))
    with torch.no_grad():
        expected = net.norm(net.embed(torch.as_tensor(tokens))).double().numpy().reshape(100, 4)
    for path in ("mlp", "mlp.0"):
        states = tnsim.inputs_of(net, path, tokens)
        assert_close(states, expected, scale=LARGEST)
    with torch.no_grad():
        hidden = net.mlp[:2](torch.as_tensor(states)).numpy()
    assert_close(tnsim.inputs_of(net.mlp, "2", states), hidden, scale=LARGEST)
    half = tnsim.inputs_of(copy.deepcopy(net).bfloat16(), "mlp", tokens)
    assert half.dtype == np.float64
    block = tnsim.from_module(net.mlp)
    assert (block.d_in, len(tnsim.Gaussian.fit(states).mean)) == (4, 4)
    assert not net.mlp._forward_pre_hooks


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("h.0.mlp", "there is no submodule 'h.0.mlp'; there are mlp"),
        ("spare", "spare is not called"),
        ("embed", "which are no states"),
    ],
)
def test_submodules_without_states_are_named(path, words, rng):
    with pytest.raises(tnsim.ModelError, match=words):
        tnsim.inputs_of(Stream(), path, rng.integers(7, size=(2, 5)))


def test_states_of_modules_that_drop_units_are_refused(rng):
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    before = copy.deepcopy(normed.state_dict())
    for first in (nn.Dropout(0.5), normed):
        with pytest.raises(tnsim.ModelError, match="training mode"):
            tnsim.inputs_of(nn.Sequential(first, nn.Linear(3, 2)), "1", rng.normal(size=(4, 3)))
    assert all(torch.equal(normed.state_dict()[name], kept) for name, kept in before.items())
    with pytest.raises(tnsim.ModelError, match=r"taken from a torch\.nn\.Module"):
        tnsim.inputs_of(abs, "1", rng.normal(size=(4, 3)))


class Squares(nn.Module):
    """Squares of linear maps, one after another."""

    def __init__(self, layers):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(layers))

    def forward(self, x):
        for one in self.maps:
            x = one(x) ** 2
        return x


def test_a_deep_polynomial_is_compared_where_it_has_numbers():
    torch.manual_seed(0)
    net = Squares(10).double()
    for one in net.maps:
        nn.init.normal_(one.weight)
    assert tnsim.from_module(net.eval()).degree == 1024
    for one in net.maps:
        nn.init.constant_(one.weight, 1e9)
    with pytest.raises(tnsim.ModelError, match="no finite numbers"):
        tnsim.from_module(net)


def test_layers_that_give_no_number_are_refused():
    net = nn.Linear(2, 2).double()
    wrong = norms.Normed(tnsim.Linear(np.full((2, 2), 1e308)))
    with pytest.raises(tnsim.ModelError, match=r"differ by (nan|inf)"):
        forward_error(net, [wrong], torch.zeros(1, 2))


class Thrice(nn.Module):
    """A submodule under three names."""

    def __init__(self):
        super().__init__()
        self.a = self.b = self.c = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x) * self.b(x) * self.c(x)


@pytest.mark.parametrize("name", "abc")
def test_a_tensor_of_three_names_may_be_there_under_any(name):
    net = Thrice().double()
    state = {key: one for key, one in net.state_dict().items() if key.startswith(f"{name}.")}
    model, x = tnsim.from_state_dict(state, net), np.eye(3)
    assert_close(model(x), net(torch.as_tensor(x)).detach().numpy(), scale=LARGEST, rtol=1e-12)
    assert model.origin.ignored == ()


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x, mask):
        return self.left(x) + self.right(mask)


class One(nn.Module):
    """The same network as errors advise to write it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x[:, :3], x[:, 3:])


def test_networks_of_several_inputs_name_the_way(rng):
    net, x = Two(), rng.normal(size=(10, 3))
    calls = [
        lambda: tnsim.from_module(net),
        lambda: tnsim.from_module(net, inputs=torch.as_tensor(x)),
        lambda: tnsim.from_module(net, inputs=(torch.as_tensor(x), torch.as_tensor(x))),
        lambda: tnsim.similarity(net, net),
        lambda: tnsim.similarity(net, net, tnsim.Empirical(x)),
        lambda: tnsim.change(net, net, tnsim.Empirical(x)),
        lambda: tnsim.hidden_states(net, x),
    ]
    said = r"Two takes 2 inputs \(x, mask\).*`return self.net\(x\[:, :3\], x\[:, 3:\]\)`"
    for call in calls:
        with pytest.raises(tnsim.ModelError, match=said):
            call()
    one, example = One(net), torch.ones(2, 7)
    model = tnsim.from_module(one, inputs=example)
    y = rng.normal(size=(5, 7))
    assert_close(model(y), one.double()(torch.as_tensor(y)).detach().numpy(), scale=LARGEST)
    # An error of its own is told, whatever the number of inputs.
    net.forward = lambda x, mask=None: 1 / 0
    with pytest.raises(tnsim.ModelError, match="ZeroDivisionError: division by zero"):
        tnsim.similarity(net, net, tnsim.Empirical(x))
