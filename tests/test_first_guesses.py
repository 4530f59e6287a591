"""Calls that people write first: modules, paths, folders and mappings in the place of models."""

import pickle
import weakref
from collections import namedtuple

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim.sessions import Session, using

torch = pytest.importorskip("torch", reason="first guesses are modules of PyTorch")
from module_cases import Module, gated  # noqa: E402

from tnsim.checkpoints import modules  # noqa: E402
from tnsim.checkpoints.load import modules_of  # noqa: E402

nn = torch.nn


def net():
    """A bilinear layer with a readout, and things that are never called."""
    made = gated(3, 4, 2)
    made.loss, made.later = nn.CrossEntropyLoss(), nn.ModuleList()
    return made


def attending(m, x):
    """Bilinear attention of a head, for sequences of any length."""
    scores = (m.q1(x) @ m.k1(x).mT) * (m.q2(x) @ m.k2(x).mT)
    return m.o(torch.tril(scores) @ m.v(x))


def wrapped(net, form):
    """Outputs as models of Hugging Face give them."""
    return Module(lambda m, x: form(m.net(x)), net=net)


class Output(dict):
    """A mapping whose values are attributes too, as `transformers.ModelOutput`."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return [net().double().eval() for _ in range(3)]


@pytest.fixture
def models(nets):
    return [tnsim.from_module(net) for net in nets]


@pytest.fixture
def run(nets, models, tmp_path):
    """A folder of state dicts, and of the same models in files of tnsim's own."""
    (tmp_path / "states").mkdir()
    for n, (net, model) in enumerate(zip(nets, models, strict=True)):
        torch.save(net.state_dict(), tmp_path / "states" / f"step_{n}.pt")
        tnsim.save(model, tmp_path / "own" / f"step_{n}.safetensors")
    return tmp_path


VERBS = {
    "similarity": tnsim.similarity,
    "slices": tnsim.slices,
    "inner": tnsim.inner,
    "log_inner": lambda *pair: tnsim.log_inner(*pair).log,
    "plan": lambda *pair: tnsim.plan(*pair).multiplications,
    "torch": lambda *pair: tnsim.torch.similarity(*pair).detach().numpy(),
}


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize("verb", VERBS)
def test_modules_and_files_are_the_models_read_from_them(verb, nets, models, run):
    expected = VERBS[verb](*models[:2])
    files = [run / "own" / f"step_{n}.safetensors" for n in range(2)]
    for pair in (nets[:2], files, (str(files[0]), nets[1]), (models[0], files[1])):
        assert_close(VERBS[verb](*pair), expected, scale=np.max(np.abs(expected)), rtol=1e-12)


@pytest.mark.slow
def test_all_pairs_of_whatever_there_is(nets, models, run):
    expected = tnsim.pairwise(models).similarity.values
    own, states = run / "own", run / "states"
    for given in (nets, own, f"{own}/*.safetensors", sorted(own.iterdir())):
        assert_close(tnsim.pairwise(given).similarity.values, expected, scale=1, rtol=1e-12)
    paths = sorted(states.iterdir())
    for given in (states, str(states), f"{states}/*.pt", paths, list(map(str, paths))):
        found = tnsim.pairwise(given, dialect=nets[0])  # says what its state dicts mean
        assert found.a.values.tolist() == [0, 1, 2]
        assert_close(found.similarity.values, expected)
    one = tnsim.load(paths[0], nets[0])
    for pair in ((one, nets[1]), (one, tnsim.load(paths[1], nets[0]))):
        assert_close(tnsim.similarity(*pair), expected[0, 1])
    named = tnsim.pairwise({"first": nets[0], "second": models[1]}, other=own)
    assert named.a.values.tolist() == ["first", "second"]
    assert_close(named.similarity.values, expected[:2], scale=1, rtol=1e-12)


@pytest.mark.slow
def test_what_stands_for_several_is_refused_where_one_is_compared(run, models):
    with refused(r"holds 3 checkpoints, 0 to 2: choose one, as"):
        tnsim.similarity(run / "own", models[0])
    for given in (models, [net.state_dict() for net in [nn.Linear(3, 2)] * 2]):
        with refused(r"reads files: .*from_state_dict\(state, dialect"):
            tnsim.pairwise(given, dialect=nn.Linear(3, 2))


@pytest.mark.slow
def test_baselines_take_what_pairwise_takes(nets, models, run):
    named = {"first": nets[0], "second": nets[1]}
    for measure in (tnsim.baselines.weight_cosine, lambda m: tnsim.baselines.cka(m, 200)):
        found = measure(named)
        assert found.a.values.tolist() == ["first", "second"]
        assert_close(found.values, measure(models[:2]).values, scale=1, rtol=1e-12)
        assert measure(run / "own").a.values.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_lengths_of_sequences(rng, tmp_path):
    """Given as `n_ctx`, or told by the inputs, in whatever models and inputs come."""
    torch.manual_seed(0)
    names = "q1", "k1", "q2", "k2", "v", "o"
    pair = [
        Module(attending, **{name: nn.Linear(3, 3, bias=False) for name in names}).double()
        for _ in range(2)
    ]
    models = [tnsim.from_module(net) for net in pair]
    for n, model in enumerate(models):
        tnsim.save(model, tmp_path / f"{n}.safetensors")
    long = [tnsim.from_module(net, n_ctx=2) for net in pair]
    wanted = tnsim.similarity(*long)
    assert tnsim.similarity(*models, n_ctx=2) == wanted
    assert_close(tnsim.similarity(*pair, n_ctx=2), wanted, scale=1, rtol=1e-12)
    with refused(r"attention is compared on sequences of one length: .*n_ctx=12.*\(--n-ctx\)"):
        tnsim.similarity(*pair)
    x = torch.as_tensor(rng.normal(size=(20, 2, 3)))
    inputs = tnsim.Empirical(x)
    wanted = tnsim.similarity(*long, inputs)
    for given in (models, pair):
        assert_close(tnsim.similarity(*given, inputs), wanted)
    for given in (models, tmp_path, tnsim.load(tmp_path)):
        assert_close(tnsim.pairwise(given, inputs).similarity[0, 1].item(), wanted)
    expected = tnsim.baselines.cka(long, x)
    for given in (x, torch.utils.data.DataLoader(x, batch_size=5), {"inputs_embeds": x}):
        assert_close(tnsim.baselines.cka(tmp_path, given).values, expected.values, rtol=1e-12)


FIELDS = namedtuple("FIELDS", "hidden logits")
FORMS = {
    "tuple": lambda y: (y, None),
    "mapping": lambda y: {"logits": y},
    "loss first": lambda y: {"loss": torch.zeros(()), "logits": y},
    "object": lambda y: Output(logits=y, past=None),
    "states": lambda y: Output(last_hidden_state=y),
    "fields": lambda y: FIELDS(None, y),
    "single": lambda y: {"scores": y},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_unwrapped(form, nets, models):
    given = [wrapped(net, FORMS[form]) for net in nets]
    assert_close(tnsim.similarity(*given[:2]), tnsim.similarity(*models[:2]))
    x = np.random.default_rng(0).normal(size=(60, 3))
    metric = tnsim.Empirical(x)
    wanted = tnsim.pairwise(models, metric).similarity.values
    assert_close(tnsim.pairwise(given, metric).similarity.values, wanted, scale=1.0)
    found = tnsim.baselines.cka(given, x)
    assert_close(found, tnsim.baselines.cka(models, x), scale=1.0)


def softmax():
    """A network without a model: softmax attention over tokens, with a tied embedding."""

    def forward(m, tokens):
        x = m.embed(tokens)
        x = x + torch.softmax(x @ x.mT, -1) @ x
        return {"states": x, "logits": m.head(x)}

    net = Module(forward, embed=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False))
    net.head.weight = net.embed.weight
    return net


def test_files_of_networks_without_a_model_run_on_inputs(tmp_path):
    """State dicts of such a module are compared as the modules themselves."""
    torch.manual_seed(0)
    nets = [softmax().train() for _ in range(3)]
    for n, net in enumerate(nets):
        # A tensor of two names is stored under the first of them, as safetensors has it.
        state = {name: value for name, value in net.state_dict().items() if name != "head.weight"}
        torch.save({"model": state, "step": n}, tmp_path / f"step_{5 * n}.pt")
    tokens = np.random.default_rng(0).integers(0, 7, size=(30, 5))
    for output in (None, "states"):
        metric = tnsim.Empirical(tokens, output=output)
        found = tnsim.pairwise(tmp_path, metric, dialect=nets[0])
        assert found.a.values.tolist() == [0, 5, 10]
        assert_close(
            found.similarity.values, tnsim.pairwise(nets, metric).similarity.values, scale=1.0
        )
    with refused("computes _softmax of scores", tnsim.UnsupportedLayer):
        tnsim.pairwise(tmp_path, dialect=nets[0])
    nets[0].dropout = nn.Dropout(0.5)  # as of the module itself
    with refused(r"dropout \(Dropout\) is in training mode, .* call module.eval\(\)"):
        tnsim.pairwise(tmp_path, metric, dialect=nets[0])
    nets[0].eval()
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "step_7.pt")
    with refused(r"step_7.pt: is no state dict of Module", tnsim.CheckpointError):
        tnsim.pairwise(tmp_path, metric, dialect=nets[0])


def test_networks_that_run_stay_loaded_as_memory_allows(tmp_path, monkeypatch, rng):
    """A run of files held all of its networks at once."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1), nn.Linear(3, 2)).double()
    for step in range(5):
        nn.init.normal_(net[0].weight)
        torch.save(net.state_dict(), tmp_path / f"step_{step}.pt")
    metric, living, most = tnsim.Empirical(rng.normal(size=(20, 4))), weakref.WeakSet(), []

    def loaded(self, state):
        living.add(module := load(self, state))
        most.append(len(living))
        return module

    load = modules.StatesOf.loaded
    monkeypatch.setattr(modules.StatesOf, "loaded", loaded)
    wanted = tnsim.pairwise(tmp_path, metric, dialect=net).similarity
    assert len(most) == 5  # few and small: each is loaded once
    living.clear()
    most.clear()
    with using(Session(device_bytes=1)):
        found = tnsim.pairwise(tmp_path, metric, dialect=net).similarity
    assert max(most) <= 2 and len(most) > 5
    assert_close(found, wanted.values, scale=1.0, rtol=1e-14)
    with using(Session(device_bytes=1)):
        first, second, *others = modules_of(tmp_path, net).values()
        sent = pickle.loads(pickle.dumps(second))  # as to a worker
        assert_close(tnsim.similarity(second, sent, metric), 1.0, scale=1.0)
        torch.save(net.state_dict(), tmp_path / "step_0.pt")
        with refused("step_0.pt: has changed while the run was under way", tnsim.CheckpointError):
            tnsim.similarity(first, others[0], metric)


def headed(net, form):
    """Scores and the states that a norm and a head read, as models of Hugging Face with heads."""

    def forward(m, x):
        states = m.net(x)
        return form(m.head(m.norm(states)), states)

    norm, head = nn.LayerNorm(2).double(), nn.Linear(2, 5).double()
    return Module(forward, net=net, norm=norm, head=head).eval()


NAMED = {
    "last_hidden_state": lambda y, h: Output(logits=y, last_hidden_state=h, hidden_states=(h,)),
    "states": lambda y, h: {"loss": torch.zeros(()), "logits": y, "states": h},
    1: lambda y, h: (y, h),
}


@pytest.mark.slow
@pytest.mark.parametrize("output", ["last_hidden_state", "states", 1])
def test_an_output_is_named(output, nets, models, tmp_path):
    """`output=` chooses the states where `logits` would count; the head behind has no share."""
    given = [headed(net, NAMED[output]) for net in nets]
    read = [tnsim.from_module(net, output=output) for net in given]
    assert_close(tnsim.pairwise(read).similarity, tnsim.pairwise(models).similarity)
    x = np.random.default_rng(0).normal(size=(60, 3))
    metric = tnsim.Empirical(x, output=output)
    wanted = tnsim.pairwise(models, tnsim.Empirical(x)).similarity.values
    assert_close(tnsim.pairwise(given, metric).similarity.values, wanted, scale=1.0)
    assert_close(tnsim.similarity(given[0], models[1], metric), wanted[0, 1], scale=1.0)
    store = tmp_path / "store"
    found = tnsim.pairwise(given, metric, other=models[:1], store=store)
    assert_close(found.similarity.values[:, 0], wanted[:, 0], scale=1.0)
    with refused(
        "maps inputs to 2 outputs, but 0 maps inputs to 5"
    ):  # the scores, of another width
        tnsim.pairwise(given, tnsim.Empirical(x), other=models[:1], store=store)
    for measure in (tnsim.baselines.cka, tnsim.baselines.agreement):
        assert_close(measure(given, x, output=output), measure(models, x), scale=1.0)


def cubes(seed):
    """A polynomial of order 3 that is read off its operations, so it has no dialect."""
    cube = torch.randn((2, 3, 3, 3), generator=torch.Generator().manual_seed(seed)).double()
    return Module(
        lambda m, x: torch.einsum("oijk,bi,bj,bk->bo", m.cube, x, x, x), cube=nn.Parameter(cube)
    )


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("output", ["last_hidden_state", "states", 1])
def test_files_have_the_output_named(output, nets, models, tmp_path):
    """State dicts of a module with several outputs are read for the output that is named."""
    cubic = [cubes(seed) for seed in range(2)]
    for name, inner, wanted in (
        ("dialect", nets[:2], tnsim.similarity(*models[:2])),
        ("operations", cubic, tnsim.similarity(*cubic)),
    ):
        given = [headed(net, NAMED[output]) for net in inner]
        (folder := tmp_path / name).mkdir()
        for n, net in enumerate(given):
            torch.save(net.state_dict(), folder / f"step_{n}.pt")
        series = tnsim.load(folder, given[0], output=output)
        assert_close(tnsim.similarity(*series), wanted)
        assert_close(tnsim.similarity(series[1:][0], series[0]), wanted)
        one = tnsim.load(folder / "step_1.pt", given[0], output=output)
        other = tnsim.from_state_dict(given[0].state_dict(), given[1], output=output)
        assert_close(tnsim.similarity(one, other), wanted)
        x = np.random.default_rng(0).normal(size=(60, 3))
        metric = tnsim.Empirical(x, output=output)
        found = tnsim.pairwise(folder, metric, dialect=given[0]).similarity[0, 1].item()
        assert_close(found, tnsim.similarity(*given, metric), scale=1.0)


def test_only_modules_have_outputs_to_choose_from(tmp_path):
    model = tnsim.Model([tnsim.Linear(np.eye(2))])
    tnsim.save(model, tmp_path / "own.safetensors")
    for read in (tnsim.load, tnsim.from_state_dict):
        with refused("give the module in the place of the dialect", tnsim.CheckpointError):
            read(tmp_path / "own.safetensors", output="logits")


def test_the_layers_of_a_network_are_not_networks_to_compare():
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with refused("found one network, Sequential"):
        tnsim.pairwise(torch.nn.Sequential(*layers))
    assert tnsim.pairwise(torch.nn.ModuleList(layers)).similarity.shape == (2, 2)


def test_a_class_in_the_place_of_a_module_is_asked_for_an_instance(tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    for read in (tnsim.load, tnsim.Series):
        with refused(
            r"the class Linear: give an instance, Linear\(\.\.\.\)", tnsim.CheckpointError
        ):
            read(tmp_path / "w.pt", torch.nn.Linear)


def test_an_output_of_a_module_that_reads_tokens(nets):
    """The norm and the head behind the states are left out."""
    del nets[0].loss, nets[0].later
    whole = nn.Sequential(nn.Embedding(5, 3).double(), nets[0])
    given = headed(whole, NAMED["last_hidden_state"])
    model = tnsim.from_module(given, output="last_hidden_state")
    assert_close(tnsim.similarity(model, whole), 1.0, rtol=1e-12)
    assert set(model.origin.ignored) == {
        f"{name}.{w}" for name in ("norm", "head") for w in ("weight", "bias")
    }


def test_an_output_that_is_missing_is_refused(nets):
    given = [headed(net, NAMED["states"]) for net in nets]
    x = np.ones((5, 3))
    for output, message in [
        ("state", "no output 'state'; the function gives loss, logits, states"),
        (1, "no output 1; the function gives loss, logits, states"),
    ]:
        with refused(message):
            tnsim.from_module(given[0], output=output)
        with refused(message):
            tnsim.similarity(*given[:2], tnsim.Empirical(x, output=output))
    pairs = [headed(net, NAMED[1]) for net in nets]
    with refused("a tuple of 2 without names; name its place"):
        tnsim.baselines.cka(pairs, x, output="states")
    with refused("a single Tensor without a name"):
        tnsim.from_module(nets[0], output="logits")


def test_data_loaders_and_named_inputs(nets):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    wanted = tnsim.similarity(*nets[:2], tnsim.Empirical(x))
    loader = torch.utils.data.DataLoader(x, batch_size=16)
    assert_close(tnsim.similarity(*nets[:2], tnsim.Empirical(loader)), wanted)
    assert_close(tnsim.similarity(*nets[:2], tnsim.Empirical({"inputs": x})), wanted)
    tokens = {"input_ids": x, "attention_mask": torch.ones(50, 3)}
    tokens |= {"token_type_ids": torch.zeros(50, 3)}
    assert_close(tnsim.similarity(*nets[:2], tnsim.Empirical(tokens)), wanted)
    rows = [{"input_ids": row, "labels": 1} for row in x]
    assert_close(tnsim.similarity(*nets[:2], tnsim.Empirical(rows)), wanted)
    rows[0] = {"input_ids": x[0, :2], "labels": 1}
    with refused("no array can be made"):
        tnsim.Empirical(rows)
    with refused("some inputs are padded"):
        tnsim.Empirical(tokens | {"attention_mask": torch.eye(50, 3)})
    for name in ("token_type_ids", "position_ids"):  # a second sentence, packed sequences
        with refused(f"no comparison reads {name}: leave them out"):
            tnsim.Empirical(tokens | {name: torch.eye(50, 3)})
    with refused("found p, q: give the inputs alone"):
        tnsim.Empirical({"p": x, "q": x})
    found = tnsim.baselines.cka(nets, loader)
    assert_close(found.values, tnsim.baselines.cka(nets, x).values)
    fitted = tnsim.Gaussian.fit(x)
    normed = nn.Sequential(nn.RMSNorm(3), nn.Linear(3, 2)).double()
    folded = tnsim.from_module(normed, norm_inputs=x)
    for given in (loader, {"inputs": x}):
        assert (tnsim.Gaussian.fit(given).cov == fitted.cov).all()
        read = tnsim.from_module(normed, norm_inputs=given)
        assert (read.layers[0].weight == folded.layers[0].weight).all()
        assert read.origin.caveats == folded.origin.caveats
        assert (tnsim.inputs_of(nets[0], "left", given) == x.numpy()).all()


def test_modules_are_checked(nets, models):
    """By the same draws as the models that they are."""
    found, expected = (tnsim.check(*pair[:2], samples=128) for pair in (nets, models))
    assert_close(found.estimate, expected.estimate, scale=1.0, rtol=1e-12)
    assert_close(found.similarity, expected.similarity, scale=1.0, rtol=1e-12)


def test_sums_over_tokens_are_compared_on_tokens():
    """As networks of modular addition begin."""
    nets = [
        Module(
            lambda m, tokens: m.out(torch.relu(m.embed(tokens).sum(1))),
            embed=nn.Embedding(7, 6),
            out=nn.Linear(6, 7),
        )
        for _ in range(2)
    ]
    with refused(r"Empirical\(inputs\).*tokens \(n, positions\)", tnsim.UnsupportedLayer):
        tnsim.similarity(*nets)
    tokens = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    with torch.no_grad():
        u, v = (net(tokens).double() for net in nets)
    expected = (u * v).sum() / (u.norm() * v.norm())
    found = tnsim.similarity(*nets, tnsim.Empirical(tokens))
    assert_close(found, expected, scale=1.0, rtol=1e-9)


def halves():
    """Products of maps of either half of the input, whose size no layer says."""
    a, b = nn.Linear(3, 4), nn.Linear(3, 4)
    return Module(lambda m, x: m.a(x[:, :3]) * m.b(x[:, 3:]), a=a, b=b).double()


def two(build):
    torch.manual_seed(0)
    return [build().double().eval() for _ in range(2)]


@pytest.mark.slow
def test_a_metric_or_a_model_says_how_many_numbers_a_module_reads(tmp_path):
    nets, metric = two(halves), tnsim.Gaussian(mean=np.zeros(6))
    with refused(r"no inputs were found.*tnsim\.Gaussian\(mean=np\.zeros\(d\)\).*inputs="):
        tnsim.similarity(*nets)
    one, other = (tnsim.from_module(net, inputs=torch.zeros(1, 6)) for net in nets)
    for n, net in enumerate(nets):
        torch.save(net.state_dict(), tmp_path / f"step_{n}.pt")
    values = [
        tnsim.similarity(*nets, metric),
        tnsim.pairwise(tmp_path, metric=metric, dialect=nets[0]).similarity.values[0, 1],
        tnsim.similarity(one, nets[1]),
        tnsim.similarity(nets[0], other),
        tnsim.pairwise(nets, metric=metric).similarity.values[0, 1],
        tnsim.torch.similarity(*nets, metric).item(),
        tnsim.torch.similarity(nets[0], other).item(),
    ]
    assert_close(values, np.full(len(values), tnsim.similarity(one, other)), scale=1.0)


def recurrent():
    return Module(
        lambda m, x: m.out(m.states(x)[1][-1]),
        states=nn.GRU(3, 4, batch_first=True),
        out=nn.Linear(4, 2),
    )


def pooled():
    return Module(
        lambda m, x: m.out(m.up(x).relu().mean(-2).tanh()), up=nn.Linear(3, 4), out=nn.Linear(4, 2)
    )


def softmax_attention():
    attend = nn.MultiheadAttention(3, 1, batch_first=True)
    return Module(lambda m, x: m.attend(x, x, x, need_weights=False)[0], attend=attend)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("build", [recurrent, pooled, softmax_attention])
def test_a_metric_says_how_long_sequences_are(build):
    """Of a batch of vectors such a module makes a sequence, which is no batch."""
    nets, metric = two(build), tnsim.Gaussian(mean=np.zeros((2, 3)), samples=64)
    with refused(
        r"reads sequences of 3 coordinates: say how long they are, by n_ctx=", tnsim.TnsimError
    ):
        tnsim.similarity(*nets)
    expected = tnsim.similarity(*nets, tnsim.Gaussian(samples=64), n_ctx=2)
    values = [
        tnsim.similarity(*nets, metric),
        tnsim.pairwise(nets, metric=metric).similarity.values[0, 1],
        tnsim.torch.similarity(*nets, metric).item(),
    ]
    assert_close(values, np.full(len(values), expected), scale=1.0)


GUESSED = {  # modules for which a guess of the input is wrong, and what the refusal says
    "rows of several inputs": (
        lambda: Module(lambda m, x: (x[:, :, None] * x[:, None]).view(-1, 9) @ m.weight, weight=(9, 2)),
        "no inputs were found.*inputs=",
    ),
    "powers side by side": (
        lambda: Module(lambda m, x: m.out(torch.cat([x, x**2], dim=1)), out=nn.Linear(6, 2)),
        r"Inputs of shape \(n, 5, 6\) were guessed: .* give inputs=",
    ),
    "a mean over positions": (
        lambda: Module(lambda m, x: m.up(x).mean(-2), up=nn.Linear(3, 4)),
        "Of a whole sequence it is a model: .* give inputs=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GUESSED)
def test_a_guess_of_the_input_that_is_wrong_is_told(case):
    build, said = GUESSED[case]
    with refused(said, tnsim.TnsimError):
        tnsim.from_module(build())


def test_a_table_of_frequencies_says_how_many_numbers_are_read():
    """Buffers read inputs as parameters do."""

    def waves(m, x):
        angles = x @ m.frequencies
        return m.out(torch.cat([angles.sin(), angles.cos()], -1))

    net = Module(waves, frequencies=torch.randn(3, 4), out=nn.Linear(8, 2))
    assert tnsim.from_module(net).d_in == 3
