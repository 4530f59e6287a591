"""`from_module`: modules made by PyTorch itself, compared with their own forward passes; what it refuses, by name."""

import copy
import threading
import warnings

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim

torch = pytest.importorskip("torch", reason="reading modules needs the torch extra")
from module_cases import SEQUENCES, Module, gated  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from tnsim.checkpoints import norms  # noqa: E402
from tnsim.checkpoints.module_calls import forward_error  # noqa: E402

nn = torch.nn
F = nn.functional


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


def forward(module, x):
    with torch.no_grad():
        return module.double()(torch.tensor(x)).numpy()


def test_casts_to_the_precision_of_a_network_do_nothing(rng):
    """The copy in float64 that is read mixed both types in one product, and was refused."""

    def plain(m, x):
        return m.b(m.a(x).relu())

    def casting(m, x):
        return m.b(m.a(x.float()).to(torch.float32).relu().type(torch.float32))

    a, b, moved = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 8)
    moved.load_state_dict({name: 1.01 * weight for name, weight in a.state_dict().items()})
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


def test_threads_read_one_after_another():
    """One that began within the reading of another left its default type behind, float64."""
    inside, done = threading.Event(), threading.Event()

    def waiting(m, x):
        inside.set()
        done.wait(5)
        return m.a(x)

    def starting(m, x):
        if not threads:
            threads.append(threading.Thread(target=tnsim.from_module, args=(other,)))
            threads[0].start()
            inside.wait(0.2)
        return m.a(x)

    threads = []
    other, net = (Module(forward, a=nn.Linear(3, 2)) for forward in (waiting, starting))
    before = torch.get_default_dtype()
    tnsim.from_module(net)
    done.set()
    threads[0].join()
    assert torch.get_default_dtype() is before


def test_an_example_of_zeros_tells_attention_by_its_shape(rng):
    (module,), x = SEQUENCES["two heads"].modules(), rng.normal(size=(3, 5, 2))
    model = tnsim.from_module(module, inputs=torch.zeros(1, 5, 2))
    assert "Attention" in repr(model)
    assert_close(model(x), forward(module, x), scale=LARGEST, rtol=1e-12)


def test_lengths_that_memory_does_not_hold_are_refused():
    with refused("memory holds no inputs of this length", tnsim.TooLarge):
        tnsim.from_module(nn.Linear(2, 2), n_ctx=2**60)


def test_a_module_without_outputs_is_refused_as_such():
    with warnings.catch_warnings(), refused("Linear weight is empty"):
        warnings.simplefilter("ignore")  # of PyTorch, that there are no weights to begin with
        tnsim.from_module(nn.Linear(2, 0))


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
    scaled = lambda raw: tnsim.Bilinear(raw.a, raw.b, np.eye(4) / 64)  # noqa: E731
    with refused("gives 64 times the outputs", tnsim.TnsimError):
        tnsim.from_module(nn.Sequential(Raw()), {Raw: scaled})


def test_numbers_residuals_and_norms_around_declared_layers(rng):
    def bilinear(raw):
        return tnsim.Bilinear(raw.a, raw.b, np.eye(4))

    parts = {"raw": Raw(), "norm": nn.RMSNorm(4, eps=1e-3)}
    x = rng.normal(size=(1, 4))  # whose energy is that of the norm
    for function, inputs in (
        (lambda m, x: -2 * m.raw(x), None),
        (lambda m, x: 3 * x - 2 * m.raw(x), None),
        (lambda m, x: x + 2 * m.raw(m.norm(x)), x),
    ):
        module = Module(function, **parts).double()
        (layer,) = tnsim.from_module(module, {Raw: bilinear}, norm_inputs=inputs).layers
        assert_close(layer(x), forward(module, x), scale=LARGEST)
    for made in ([bilinear(Raw()), tnsim.Linear(np.eye(4))], tnsim.Residual(bilinear(Raw()))):
        with refused(
            "stands before several layers.* before one that .* residual", tnsim.TnsimError
        ):
            tnsim.from_module(module, {Raw: lambda _, made=made: made})


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


@pytest.mark.slow
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


def means():
    """Parameters alone, beside inputs of any width."""
    return Module(lambda m, x: x.mean(-1, keepdim=True) * m.weight.sum(), weight=(3, 5))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()


def locked():
    """A layer that holds what belongs to this process."""
    module = nn.Linear(3, 4)
    module.lock = threading.Lock()
    return module


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
    "instance norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.InstanceNorm1d(4, track_running_stats=True)),
        r"1: InstanceNorm1d in training mode, .*: call module\.eval\(\) first",
    ),
    "dropout that is no submodule": (
        lambda: Module(lambda m, x: F.dropout(m.a(x), 0.001, m.training), a=nn.Linear(3, 4)),
        r"in training mode, in which it computes something else .*: call module\.eval\(\) first",
    ),
    "another output in training": (
        lambda: Module(lambda m, x: (m.b(x) if m.training else m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(3, 4)),
        r"in training mode, in which it computes something else .*: call module\.eval\(\) first",
    ),
    "several inputs in training": (
        lambda: Module(lambda m, x, y=None: m.a(x) + (y + 1 if m.training else 0), a=nn.Linear(3, 4)),
        r"in training mode, in which it computes something else .*: call module\.eval\(\) first",
    ),
    "weights that the first call draws": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5)),
        r"1 \(LazyLinear\) has no weights yet, .*: call the module on an input, net\(x\)",
    ),
    "a function with a gradient of its own": (
        lambda: Module(lambda m, x: m.a(Rounded.apply(x)), a=nn.Linear(3, 4)),
        r"calls an autograd\.Function, through which PyTorch does not trace",
    ),
    "what Python does not copy": (
        locked,
        r"cannot be copied: cannot pickle '_thread\.lock' object\..*Empirical\(inputs\)",
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 1)), "0: Conv1d, of which .* give inputs="),
    "pruned": (
        lambda: nn.utils.prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5),
        r"the module: pruned by a forward hook: .*torch\.nn\.utils\.prune\.remove\(module, 'weight'\)",
    ),
    "function": (lambda: hidden(F.softsign), r"Module\) computes abs, add and div: these .* no activation that is known.*tnsim\.Activation\("),
    "gate": (lambda: gate(F.softsign), "computes abs, add and div: these of a value make no activation"),
    "a norm that is no submodule": (lambda: hidden(lambda x: F.layer_norm(x, (5,))), "a norm stands before layer"),
    "a norm of vectors": (lambda: hidden(F.normalize), "computes linalg_vector_norm"),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2).eval(),
        "self_attn: MultiheadAttention, which is softmax attention",
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)), "norm_inputs=inputs"),
    "last norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), "a norm stands before layer 1.*norm_inputs"),
    "little of the batch": (
        lambda: Module(lambda m, x: m.a(x) + 1e-12 * x.mean(0), a=nn.Linear(4, 4)),
        "depends on the batch around it",
    ),
    "little of its size": (
        lambda: Module(lambda m, x: m.a(x) + 1e-12 * len(x), a=nn.Linear(4, 4)),
        "depends on the batch around it",
    ),
    "several widths": (means, r"the module takes vectors of 3, 5 entries: give inputs=, an example"),
}  # fmt: skip


def tokens():
    """Two tokens side by side, as networks of modular addition read them."""
    parts = {"embed": nn.Embedding(7, 6), "first": nn.Linear(12, 10), "out": nn.Linear(10, 7)}
    return Module(lambda m, x: m.out(m.first(m.embed(x).flatten(1)).relu()), **parts)


def positions():
    """Sums over positions, which no layer has."""
    return Module(lambda m, x: x.cumsum(1) * x)


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


@pytest.mark.parametrize(
    "build, arguments, said",
    [*((build, {}, said) for build, said in REFUSED.values()), *FIXED.values()],
    ids=[*REFUSED, *FIXED],
)
def test_what_is_refused_is_named_with_its_fix(build, arguments, said):
    with refused(said, tnsim.TnsimError):
        tnsim.from_module(build(), **arguments)


def test_polynomials_of_whole_sequences_are_read_as_vectors(rng):
    module, x = positions().double(), rng.normal(size=(5, 3, 4))
    model = tnsim.from_module(module, inputs=torch.zeros(1, 3, 4))
    expected = forward(module, x).reshape(5, 12)
    assert_close(model(x.reshape(5, 12)), expected, scale=LARGEST, rtol=1e-12)


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


def block(function):
    """One hidden layer inside a residual, as in a transformer."""
    parts = {"c_fc": nn.Linear(4, 9), "c_proj": nn.Linear(9, 4)}
    return Module(lambda m, x: x + m.c_proj(function(m.c_fc(x))), **parts)


def glu(function):
    """A gated block by two linear layers, of which one holds both halves."""

    def forward(m, x):
        up, gate = m.first(x).chunk(2, -1)
        return m.last(up * function(gate))

    return Module(forward, first=nn.Linear(4, 18, bias=False), last=nn.Linear(9, 4))


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
    "halves": (lambda: glu(F.gelu), "Gated(4 -> 4, rank 9, gelu, down_bias)"),
}


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_are_told_by_their_values(name):
    build, layers = ACTIVATED[name]
    module = build().double()
    model = tnsim.from_module(module)
    assert repr(model).startswith(f"Model({layers};"), model
    assert model.origin.error < 1e-12
    x = np.random.default_rng(0).normal(size=(6, 4))
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
    with refused(r"found str; a folder of .*from_pretrained\(folder\)"):
        tnsim.inputs_of("folder", path, rng.integers(7, size=(2, 5)))


def test_states_of_modules_that_drop_units_are_refused(rng):
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    before = copy.deepcopy(normed.state_dict())
    for first in (nn.Dropout(0.5), normed):
        with pytest.raises(tnsim.ModelError, match="training mode"):
            tnsim.inputs_of(nn.Sequential(first, nn.Linear(3, 2)), "1", rng.normal(size=(4, 3)))
    assert all(torch.equal(normed.state_dict()[name], kept) for name, kept in before.items())
    net = nn.Linear(3, 3)
    net.p = 3.0  # no chance, but a power
    tnsim.inputs_of(nn.Sequential(net, nn.Linear(3, 2)), "1", rng.normal(size=(4, 3)))
    with refused(r"taken from a torch\.nn\.Module"):
        tnsim.inputs_of(abs, "1", rng.normal(size=(4, 3)))


def squares(m, x):
    """Squares of linear maps, one after another."""
    for one in m.maps:
        x = one(x) ** 2
    return x


def test_a_deep_polynomial_is_compared_where_it_has_numbers():
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
