"""What users have in hand is compared as it is: modules, files, folders, mappings, sequences of inputs."""

import numpy as np
import pytest
from closeness import assert_close

import tnsim

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.down(self.left(x) * self.right(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q1", "k1", "q2", "k2", "v", "o"):
            setattr(self, name, nn.Linear(3, 3, bias=False))

    def forward(self, x):
        scores = (self.q1(x) @ self.k1(x).mT) * (self.q2(x) @ self.k2(x).mT)
        return self.o(torch.tril(scores) @ self.v(x))


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return [Block() for _ in range(3)]


@pytest.fixture
def models(nets):
    return [tnsim.from_module(net) for net in nets]


@pytest.fixture
def run(nets, tmp_path):
    """A folder of state dicts, and of the same models in files of tnsim's own."""
    for name in ("states", "own"):
        (tmp_path / name).mkdir()
    for n, net in enumerate(nets):
        torch.save(net.state_dict(), tmp_path / "states" / f"step_{n}.pt")
        tnsim.save(tnsim.from_module(net), tmp_path / "own" / f"step_{n}.safetensors")
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
    for given in (
        nets,
        run / "own",
        str(run / "own" / "*.safetensors"),
        sorted((run / "own").iterdir()),
    ):
        assert_close(tnsim.pairwise(given).similarity.values, expected, scale=1, rtol=1e-12)
    found = tnsim.pairwise(run / "states", dialect=nets[0])
    assert_close(found.similarity.values, expected, scale=1, rtol=1e-12)
    assert found.a.values.tolist() == [0, 1, 2]
    named = tnsim.pairwise({"first": nets[0], "second": models[1]}, other=run / "own")
    assert named.a.values.tolist() == ["first", "second"]
    assert_close(named.similarity.values, expected[:2], scale=1, rtol=1e-12)


@pytest.mark.slow
def test_what_stands_for_several_is_refused_where_one_is_compared(run, models):
    with pytest.raises(tnsim.ModelError, match=r"holds 3 checkpoints, 0 to 2: choose one, as"):
        tnsim.similarity(run / "own", models[0])
    for given in (models, [net.state_dict() for net in [nn.Linear(3, 2)] * 2]):
        with pytest.raises(
            tnsim.ModelError, match=r"reads files: .*from_state_dict\(state, dialect"
        ):
            tnsim.pairwise(given, dialect=nn.Linear(3, 2))


@pytest.mark.slow
def test_baselines_take_what_pairwise_takes(nets, models, run, rng):
    inputs = rng.normal(size=(20, 4))
    named = {"first": nets[0], "second": nets[1]}
    for measure in (tnsim.baselines.weight_cosine, lambda m: tnsim.baselines.cka(m, inputs)):
        expected = measure(models[:2])
        found = measure(named)
        assert found.a.values.tolist() == ["first", "second"]
        assert_close(found.values, expected.values, scale=1, rtol=1e-5, limited_by="float32")
        assert measure(run / "own").a.values.tolist() == [0, 1, 2]
    expected = tnsim.baselines.cka(run / "own", inputs).values
    loader = torch.utils.data.DataLoader(torch.as_tensor(inputs), batch_size=8)
    for given in (torch.as_tensor(inputs), loader, {"x": torch.as_tensor(inputs)}):
        assert (tnsim.baselines.cka(run / "own", given).values == expected).all()


@pytest.mark.slow
def test_inputs_say_the_length_in_whatever_they_come(rng, tmp_path):
    """Models in files are open in their length; a loader of sequences closes them."""
    torch.manual_seed(0)
    models = [tnsim.from_module(Attention()) for _ in range(2)]
    for n, model in enumerate(models):
        tnsim.save(model, tmp_path / f"{n}.safetensors")
    x = torch.as_tensor(rng.normal(size=(12, 3, 3)))
    expected = tnsim.baselines.cka([tnsim.Model(model.layers, 3) for model in models], x)
    for given in (x, torch.utils.data.DataLoader(x, batch_size=5), {"inputs_embeds": x}):
        assert_close(tnsim.baselines.cka(tmp_path, given).values, expected.values, rtol=1e-12)


@pytest.mark.slow
def test_lengths_of_sequences_are_said_once(rng):
    torch.manual_seed(0)
    one, two = Attention(), Attention()
    open_ended = [tnsim.from_module(net) for net in (one, two)]
    expected = tnsim.similarity(*(tnsim.from_module(net, n_ctx=2) for net in (one, two)))
    assert tnsim.similarity(*open_ended, n_ctx=2) == expected
    assert_close(tnsim.similarity(one, two, n_ctx=2), expected, scale=1, rtol=1e-12)
    inputs = tnsim.Empirical(rng.normal(size=(5, 3, 3)))
    by_function = tnsim.similarity(one.double(), two.double(), inputs)
    assert_close(
        tnsim.similarity(*open_ended, inputs), by_function, scale=1, rtol=1e-5, limited_by="float32"
    )
    with pytest.raises(tnsim.ModelError, match="attention is compared on sequences of one length"):
        tnsim.similarity(one, two)
