"""`from_module`: modules made by PyTorch itself, compared with their own forward passes; what it refuses, by name."""

import copy

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim

torch = pytest.importorskip("torch", reason="reading modules needs the torch extra")
from module_cases import Module, gated  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from tnsim.checkpoints import norms  # noqa: E402
from tnsim.checkpoints.module_examples import forward_error  # noqa: E402

nn = torch.nn
F = nn.functional


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def in_residuals(m, x):
    x = m.embed(x)
    x = x + 0.35 * m.blocks[0](x)
    x = x + m.alpha * m.blocks[1](x)
    x = torch.lerp(x, m.blocks[2](x), 0.25)
    x = x + m.mix(x)
    return m.head(x)


def residuals():
    """Every rule of a residual, one of them with a scale that is learned, and layers that are dead."""
    return Module(
        in_residuals,
        embed=nn.Linear(6, 4),
        blocks=nn.ModuleList(gated(4, rank) for rank in (5, 3, 2)),
        mix=nn.Linear(4, 4),
        alpha=nn.Parameter(torch.tensor(0.3)),
        head=nn.Linear(4, 3, bias=False),
        norm=nn.LayerNorm(2),
    )


def halves(m, x):
    a, b = m.both(x).chunk(2, dim=-1)
    return a * b


MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(5, 4), nn.Identity(), nn.Linear(4, 2, bias=False)),
    "nested": lambda: nn.Sequential(nn.Linear(5, 4), nn.Sequential(gated(4, 7), gated(4, 3, 2))),
    "residuals": residuals,
    "fused without down": lambda: Module(halves, both=nn.Linear(6, 8)),
    "square": lambda: Module(lambda m, x: m.b(m.a(x) ** 2), a=nn.Linear(6, 8), b=nn.Linear(8, 3)),
    "square without down": lambda: Module(lambda m, x: m.a(x) ** 2, a=nn.Linear(6, 8)),
    "product": lambda: Module(lambda m, x: m.a(x).view(-1, 4, 2).prod(-1), a=nn.Linear(6, 8)),
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


def test_casts_to_the_precision_of_a_network_do_nothing(rng):
    """The copy in float64 that is read mixed both types in one product, and was refused."""

    def plain(m, x):
        return m.b(m.a(x).relu())

    def casting(m, x):
        return m.b(m.a(x.float()).to(torch.float32).relu().type(torch.float32))

    a, b, moved = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 8)
    found = tnsim.similarity(Module(casting, a=a, b=b), Module(plain, a=a, b=b))
    assert found.exact and found == 1
    inputs = tnsim.Empirical(rng.normal(size=(20, 4)))
    soft = (
        lambda m, x: casting(m, x).softmax(-1, dtype=torch.float32).to(x.dtype),
        lambda m, x: plain(m, x).softmax(-1),
    )
    shares = [
        tnsim.change(*(Module(function, a=one, b=b) for one in (a, moved)), inputs, by="parameter")
        for function in soft
    ]
    assert_close(shares[0].share, shares[1].share, scale=1.0)


def test_nodes_from_the_last_to_the_first_are_no_iterator_in_older_pytorch(monkeypatch):
    """`reversed(graph.nodes)` is a list of nodes there, as earlier versions have it."""
    nodes = torch.fx.graph._node_list
    monkeypatch.setattr(nodes, "__reversed__", lambda self: nodes(self.graph, "_prev"))
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.ones(1, 3, dtype=torch.float64)
    assert_close(tnsim.from_module(module)(x.numpy()), module(x).detach().numpy(), rtol=1e-12)


def test_a_module_reads_the_files_of_a_run(rng, tmp_path):
    module = residuals()
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
    module = residuals()
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


def language(*options, tied=False):
    unembed, embed = nn.Linear(8, 11, bias=False), nn.Embedding(11, 8)
    if tied:
        unembed.weight = embed.weight
    both = nn.ModuleDict({"embed": embed, "unembed": unembed})  # copied as one: they stay tied
    return Module(
        lambda m, x: m.both.unembed((lambda x: x + 0.35 * m.layer(x))(m.both.embed(x))),
        both=both,
        layer=Attention(*options),
    )


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "options",
    [(False, True, 2), (True, True, 1), (True, False, 2, True)],
    ids=["plain", "rotary", "interleaved"],
)
def test_bilinear_attention_by_what_it_gives(options, rng):
    module = language(*options, tied=options[0])
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


def stacked(m, x):
    """Query, key and value by one layer, of which both scores are made."""
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.first(x).chunk(3, -1))
    scores = (q @ k.mT / 4).square() * torch.ones(x.shape[1], x.shape[1]).tril()
    return x + m.second((scores @ v).transpose(1, 2).flatten(-2))


@pytest.mark.slow
def test_fused_attention_by_what_it_gives(rng):
    module = Module(stacked, first=nn.Linear(8, 24), second=nn.Linear(8, 8))
    x = rng.normal(size=(3, 4, 8))
    model = tnsim.from_module(module, n_ctx=4, inputs=torch.ones(2, 4, 8))
    assert "read by the graph of Module at n_ctx 4" in " ".join(model.origin.assumptions)
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
    with refused(
        r"1 \(LinearAttention\) attends by a single score with queries or keys that depend",
        tnsim.UnsupportedLayer,
    ):
        tnsim.from_module(module, n_ctx=4)


def test_lengths_that_memory_does_not_hold_are_refused():
    with refused("memory holds no inputs of this length", tnsim.TooLarge):
        tnsim.from_module(nn.Linear(2, 2), n_ctx=2**60)


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
    with refused("what was recognised is another function", tnsim.TnsimError):
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
    with refused(r"a\.pt: '2\.bias' has numbers that are NaN"):
        tnsim.load(tmp_path / "a.pt", module)
    with torch.no_grad():
        module[0].weight[1, 2] = torch.inf
    with refused(r"^'0\.weight' has numbers that are NaN or infinite: the run diverged there$"):
        tnsim.similarity(module, nn.Linear(3, 2))


def test_what_is_compiled_inside_of_a_module_is_looked_through(tmp_path):
    """A submodule and a function that are compiled, as of models compiled block by block."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    module = Module(lambda m, x: m.second(torch.relu(m.twice(m.first(x)))), second=second)
    module.first = torch.compile(first, backend="eager")
    module.twice = torch.compile(lambda x: 2 * x, backend="eager")
    plain = Module(lambda m, x: m.b(torch.relu(2 * m.a(x))), a=first, b=second)
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


def test_programs_of_torchscript_run_on_inputs():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    program = torch.jit.script(module)
    value = tnsim.similarity(program, module, tnsim.Gaussian(samples=512))
    assert value.route == "sampling"
    assert_close(value, 1.0, scale=1.0, rtol=1e-6, limited_by="float32")
    with refused("TorchScript", tnsim.UnsupportedLayer):
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


def hidden(function):
    """A function that is no submodule."""
    first, second = nn.Linear(4, 5), nn.Linear(5, 3)
    return Module(lambda m, x: m.second(function(m.first(x))), first=first, second=second)


def gate(function):
    gate, up, down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
    return Module(lambda m, x: m.down(function(m.gate(x)) * m.up(x)), gate=gate, up=up, down=down)


def hooked():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


def means():
    """Parameters alone, beside inputs of any width."""
    return Module(lambda m, x: x.mean(-1, keepdim=True) * m.weight.sum(), weight=(3, 5))


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
    "pruned": (
        lambda: nn.utils.prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5),
        r"the module: pruned by a forward hook: .*torch\.nn\.utils\.prune\.remove\(module, 'weight'\)",
    ),
    "function": (lambda: hidden(F.softsign), r"Module\) computes abs, add and div: these .* no activation that is known.*tnsim\.Activation\("),
    "gate": (lambda: gate(F.softsign), "computes abs, add and div: these of a value make no activation"),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2).eval(),
        "self_attn: MultiheadAttention, which is softmax attention",
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)), "norm_inputs=inputs"),
    "last norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), "a norm stands before layer 1.*norm_inputs"),
    "several widths": (means, r"the module takes vectors of 3, 5 entries: give inputs=, an example"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name):
    build, message = REFUSED[name]
    with refused(message, tnsim.TnsimError):
        tnsim.from_module(build())


def tokens():
    """Two tokens side by side, as networks of modular addition read them."""
    parts = {"embed": nn.Embedding(7, 6), "first": nn.Linear(12, 10), "out": nn.Linear(10, 7)}
    return Module(lambda m, x: m.out(m.first(m.embed(x).flatten(1)).relu()), **parts)


def added_heads(m, x):
    """Linear attention of heads as parameters, which mixes positions as no layer does."""
    q, k, v = (torch.einsum("bsd,hdk->bhsk", x, row) for row in (m.q, m.k, m.v))
    return torch.einsum("bhsk,bhtk,bhtv->bsv", q, k, v)


def positions():
    """Sums over positions, which no layer has."""
    return Module(lambda m, x: x.cumsum(1) * x)


def test_heads_that_are_added_up_are_attention(rng):
    module = Module(added_heads, **{name: (2, 4, 3) for name in "qkv"}).double()
    x = rng.normal(size=(2, 3, 4))
    model = tnsim.from_module(module, n_ctx=3)
    assert [type(layer).__name__ for layer in model.layers] == ["Attention"]
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


def attending(m, tokens):
    x = m.embed(tokens)
    q, k, v = (layer(m.norm(x)) for layer in m.attn.values())
    return x + torch.softmax(q @ k.mT, -1) @ v


def softmax():
    """A head of softmax attention behind a norm, in names of Hugging Face."""
    attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj")})
    return Module(attending, embed=nn.Embedding(7, 4), norm=nn.LayerNorm(4), attn=attn)


TOKENS = {"inputs": torch.zeros(1, 2, dtype=torch.long)}
FIXED = {  # a module, arguments of from_module, and the fix that the refusal names
    "tokens": (tokens, TOKENS, r"numbers of several positions of a sequence together.*Empirical\(inputs\).*tokens"),
    "positions": (
        positions,
        {"inputs": torch.randn(1, 3, 4), "n_ctx": 3},
        "its 3 positions are read as a single vector of 12 numbers: .* leave n_ctx out",
    ),
    "parts": (softmax, TOKENS, r"tnsim\.parts\(net\).*Empirical\(inputs\)"),
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


@pytest.mark.parametrize("name", FIXED)
def test_refusals_name_the_fix(name):
    build, arguments, fix = FIXED[name]
    with refused(fix, tnsim.TnsimError):
        tnsim.from_module(build(), **arguments)


def scored(inside=1.0, outside=1.0, both=True):
    """Bilinear attention whose scores, or outputs, have a constant factor."""

    def attend(m, x):
        scores = inside * (m.q1(x) @ m.k1(x).mT)
        if both:
            scores = scores * (m.q2(x) @ m.k2(x).mT)
        return outside * m.o(scores.tril() @ m.v(x))

    names = "q1", "k1", "q2", "k2", "v", "o"
    return Module(attend, **{name: nn.Linear(4, 4, bias=False) for name in names})


class Scaled(nn.Module):
    """A bilinear block, times a number."""

    def __init__(self, factor=64.0):
        super().__init__()
        self.left, self.right, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.factor = factor

    def forward(self, x):
        return self.factor * self.down(self.left(x) * self.right(x))


BLOCK = tnsim.dialects.BilinearRule(left="left.weight", right="right.weight", down="down.weight")


def test_a_constant_factor_is_said_as_a_factor():
    with refused("gives 64 times the outputs", tnsim.TnsimError):
        tnsim.from_module(nn.Sequential(Scaled()), layers={Scaled: BLOCK})


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: scored(inside=1 / 64),
        lambda: scored(outside=64.0),
        lambda: scored(inside=-3.0, both=False),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), Module(lambda m, x: 3.0 * x)),
    ],
)
@pytest.mark.parametrize("length", [{}, {"n_ctx": 3}])
def test_factors_are_part_of_the_weights(build, length, rng):
    torch.manual_seed(0)
    module, x = build().double(), rng.normal(size=(5, 3, 4))
    model = tnsim.from_module(module, **length)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


def test_polynomials_of_whole_sequences_are_read_as_vectors(rng):
    module, x = positions().double(), rng.normal(size=(5, 3, 4))
    model = tnsim.from_module(module, inputs=torch.zeros(1, 3, 4))
    expected = forward(module, x).reshape(5, 12)
    assert_close(model(x.reshape(5, 12)), expected, scale=LARGEST, rtol=1e-12)


def test_activations_without_a_name_have_a_road():
    net = nn.Sequential(nn.Linear(3, 4), nn.Softsign(), nn.Linear(4, 2))
    with refused(
        r"as Hardshrink, tnsim\.Activation\(kinks=.*as softsign, .*Empirical\(inputs\)",
        tnsim.UnsupportedLayer,
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


def late():
    """Tokens are read by an embedding that was made last."""
    parts = {"left": nn.Linear(4, 3), "right": nn.Linear(4, 3), "embed": nn.Embedding(7, 4)}
    return Module(lambda m, x: (lambda x: m.left(x) * m.right(x))(m.embed(x)), **parts)


@pytest.mark.parametrize("example", [None, np.zeros((4, 1), "u2"), np.zeros((4, 1), ">i8")])
def test_an_embedding_made_last_says_that_inputs_are_tokens(example):
    """Of whole numbers of any width, where an example is given."""
    assert tnsim.from_module(late(), inputs=example).d_in == 7


@pytest.mark.parametrize("given", [np.zeros((2, 3)), "x", [1], {"x": 1}])
@pytest.mark.parametrize("read", [tnsim.from_module, tnsim.torch.from_module])
def test_an_example_in_the_place_of_layers_names_the_way(read, given):
    with refused(r"layers maps classes .* by name, inputs=x"):
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
        with refused(said, tnsim.CheckpointError):
            read()


class Quantised(nn.Linear):
    """A linear layer as bitsandbytes has it."""


Quantised.__module__ = "bitsandbytes.nn.modules"


def test_quantised_weights_are_named(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    dynamic = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    for module in (dynamic, nn.Sequential(Quantised(3, 4))):
        with refused(r"0: .*quantised: .* module before quantisation", tnsim.UnsupportedLayer):
            tnsim.from_module(module)
    torch.save(dynamic.state_dict(), tmp_path / "dynamic.pt")
    for dialect in (None, net):
        with refused(r"quantised weights.* dequantise it", tnsim.CheckpointError):
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
        with refused(f"{besides} belongs to quantised weights", tnsim.CheckpointError):
            tnsim.from_state_dict({"model": state}, net)


def test_files_of_softmax_attention_have_parts():
    with refused(r"attn\.q_proj.*tnsim\.parts\(path\)", tnsim.UnsupportedLayer):
        tnsim.from_state_dict(softmax().state_dict())


def test_what_is_no_module():
    with refused(r"expected a torch\.nn\.Module, found dict"):
        tnsim.from_module({})
    with refused("n_ctx must be a positive integer or None, found -1"):
        tnsim.from_module(nn.Linear(3, 2), n_ctx=-1)


def normed():
    parts = {"embed": nn.Linear(6, 4), "norm": nn.RMSNorm(4), "block": gated(4, 5)}
    return Module(
        lambda m, x: m.head(m.last((lambda x: x + m.block(m.norm(x)))(m.embed(x)))),
        **parts,
        last=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    )


@pytest.mark.slow
def test_norms_are_folded_at_their_energy_on_inputs(rng):
    """The error that is reported is that of the module's own forward pass."""
    module, x = normed(), rng.normal(size=(200, 6))
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

    def forward(m, x):
        return function(m.second(m.first(x))) if last else m.second(function(m.first(x)))

    said = {"softsign": "abs, add and div", "normalize": "linalg_vector_norm"}.get(name, f"_{name}")
    said = "a norm stands before layer" if name.endswith("norm") else rf"\(Module\) computes {said}"
    with refused(said, tnsim.UnsupportedLayer):
        tnsim.from_module(Module(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))


def block(function):
    """One hidden layer inside a residual, as in a transformer."""
    parts = {"c_fc": nn.Linear(4, 9), "c_proj": nn.Linear(9, 4)}
    return Module(lambda m, x: x + m.c_proj(function(m.c_fc(x))), **parts)


def glu(function, fused=False):
    """A gated block by three linear layers, or by two with one that holds both halves."""

    def forward(m, x):
        up, gate = m.w1(x).chunk(2, -1) if fused else (m.w3(x), m.w1(x))
        return m.w2(up * function(gate))

    w1 = nn.Linear(4, 18 if fused else 9, bias=False)
    return Module(forward, w1=w1, w2=nn.Linear(9, 4), w3=nn.Linear(4, 9))


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
        lambda: nn.Sequential(block(F.silu), block(F.relu6)),
        "Residual(Gated(4 -> 4, rank 9, silu, gate_bias, down_bias), skip=1, scale=1), "
        "Residual(Gated(4 -> 4, rank 9, relu6, gate_bias, down_bias), skip=1, scale=1)",
    ),
    "gate": (lambda: glu(F.silu), "Gated(4 -> 4, rank 9, silu, up_bias, down_bias)"),
    "halves": (lambda: glu(F.gelu, True), "Gated(4 -> 4, rank 9, gelu, down_bias)"),
    "residual of a gate": (
        lambda: block(F.leaky_relu),
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


def stream():
    """A transformer's stream with an MLP behind a norm, and a part that is never called."""
    parts = {"embed": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "spare": nn.Linear(4, 4)}
    return Module(
        lambda m, x: (lambda x: x + m.mlp(input=m.norm(x)))(m.embed(x)),
        **parts,
        mlp=nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)),
    )


def test_states_that_enter_a_submodule(rng):
    torch.manual_seed(0)
    net = stream().double()
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
    with refused(words):
        tnsim.inputs_of(stream(), path, rng.integers(7, size=(2, 5)))


def test_states_of_modules_that_drop_units_are_refused(rng):
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    before = copy.deepcopy(normed.state_dict())
    for first in (nn.Dropout(0.5), normed):
        with pytest.raises(tnsim.ModelError, match="training mode"):
            tnsim.inputs_of(nn.Sequential(first, nn.Linear(3, 2)), "1", rng.normal(size=(4, 3)))
    assert all(torch.equal(normed.state_dict()[name], kept) for name, kept in before.items())
    with refused(r"taken from a torch\.nn\.Module"):
        tnsim.inputs_of(abs, "1", rng.normal(size=(4, 3)))


def squares(m, x):
    """Squares of linear maps, one after another."""
    for one in m.maps:
        x = one(x) ** 2
    return x


def test_a_deep_polynomial_is_compared_where_it_has_numbers():
    torch.manual_seed(0)
    net = Module(squares, maps=nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(10)))
    net = net.double()
    for one in net.maps:
        nn.init.normal_(one.weight)
    assert tnsim.from_module(net.eval()).degree == 1024
    for one in net.maps:
        nn.init.constant_(one.weight, 1e9)
    with refused("no finite numbers"):
        tnsim.from_module(net)


def test_layers_that_give_no_number_are_refused():
    net = nn.Linear(2, 2).double()
    wrong = norms.Normed(tnsim.Linear(np.full((2, 2), 1e308)))
    with refused(r"differ by (nan|inf)"):
        forward_error(net, [wrong], torch.zeros(1, 2))


@pytest.mark.parametrize("name", "abc")
def test_a_tensor_of_three_names_may_be_there_under_any(name):
    net = Module(lambda m, x: m.a(x) * m.b(x) * m.c(x)).double()
    net.a = net.b = net.c = nn.Linear(3, 3).double()
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
        with refused(said):
            call()
    one = Module(lambda m, x: m.net(x[:, :3], x[:, 3:]), net=net)  # as errors advise to write it
    model = tnsim.from_module(one, inputs=torch.ones(2, 7))
    y = rng.normal(size=(5, 7))
    assert_close(model(y), one.double()(torch.as_tensor(y)).detach().numpy(), scale=LARGEST)
    # An error of its own is told, whatever the number of inputs.
    net.forward = lambda x, mask=None: 1 / 0
    with refused("ZeroDivisionError: division by zero"):
        tnsim.similarity(net, net, tnsim.Empirical(x))
