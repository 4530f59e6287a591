"""Files as training code writes them: wrapped, prefixed, named by steps and epochs. Read as they are."""

import numpy as np
import pytest
from refusals import refused

import tnsim
from tnsim.checkpoints.state_dict import place_of

RULES = [
    tnsim.dialects.BilinearRule(left="body.l", right="body.r", down="body.d", down_bias="body.b"),
    tnsim.dialects.LinearRule(weight="head"),
]
DIALECT = tnsim.Dialect("mine", tuple(RULES))


def weights(rng):
    shapes = {"body.l": (4, 3), "body.r": (4, 3), "body.d": (3, 4), "body.b": (3,), "head": (2, 3)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def before(prefix, state):
    return {f"{prefix}{name}": array for name, array in state.items()}


@pytest.mark.parametrize(
    "wrap, said",
    [
        (lambda w: {"model": w, "optimizer": {"state": {0: {}}}, "step": 3}, "under 'model'"),
        (
            lambda w: {"state_dict": before("net.", w), "callbacks": {}, "epoch": 3},
            "under 'state_dict' behind 'net.'",
        ),
        (lambda w: {"a": {"b": {"state": w}}}, "under 'a' / 'b' / 'state'"),
        (lambda w: before("module._orig_mod.", w), "behind 'module._orig_mod.'"),
    ],
)
def test_what_is_wrapped_is_found(wrap, said, rng):
    state = weights(rng)
    model = tnsim.from_state_dict(wrap(state), DIALECT)
    assert f"weights found {said}" in model.origin.assumptions
    x = rng.normal(size=(5, 3))
    np.testing.assert_array_equal(model(x), tnsim.from_state_dict(state, DIALECT)(x))


INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@pytest.mark.parametrize("part", [*INNER, "".join(INNER)])
@pytest.mark.parametrize("around", ["", "module.", "_fsdp_wrapped_module."])
def test_blocks_that_were_wrapped_one_by_one_are_read(part, around, rng):
    """As `torch.compile` of each block, sharding and activation checkpointing name their tensors."""
    state = weights(rng)
    named = {f"{around}{name.replace('body.', f'body.{part}')}": w for name, w in state.items()}
    x = rng.normal(size=(5, 3))
    for wrapped in (named, {"model": named, "step": 3, "optimizer": {"state": {0: {}}}}):
        model = tnsim.from_state_dict(wrapped, DIALECT)
        said = str(model.origin.assumptions)
        assert "without '_" in said and "' in their names" in said
        np.testing.assert_array_equal(model(x), tnsim.from_state_dict(state, DIALECT)(x))
    # Two names that would become one are two tensors.
    twice = {**named, f"{around}body.l": state["body.l"]}
    with pytest.raises(tnsim.CheckpointError):
        tnsim.from_state_dict(twice, DIALECT)


def test_what_could_be_meant_is_not_chosen(rng):
    """Two places with all names, tensors beside a prefix, and mappings that hold themselves."""
    state = weights(rng)
    refusals = [
        (
            {"model": state, "ema": dict(state)},
            r"more than once: under 'model'; under 'ema'\. Say .* by nested, such as \['model'\].*"
            r"tnsim\.from_state_dict\(mapping, net\)",
        ),
        (
            {**before("online.", state), **before("ema.", state)},
            r"behind 'online\.'; behind 'ema\.'\. Say in a dialect which are meant, by names",
        ),
        ({**before("net.", state), "loss.w": state["head"]}, "does not account for loss.w"),
        ({**before("net.", state), "body.b": state["body.b"]}, "'body.b' is there with 'net.'"),
        ({"model": {"body.l": state["body.l"]}}, "tensor 'body.l' is missing"),
    ]
    for found, message in refusals:
        with refused(message, tnsim.CheckpointError):
            tnsim.from_state_dict(found, DIALECT)
    alone = tnsim.Dialect("relu", (tnsim.dialects.ElementwiseRule(activation="relu"),))
    with refused("does not account for body.l", tnsim.CheckpointError):
        tnsim.from_state_dict(state, alone)
    chosen = tnsim.Dialect("mine", DIALECT.layers, nested=("ema",))
    assert tnsim.from_state_dict({"model": {}, "ema": state}, chosen).degree == 2
    circle = {}
    circle.update({str(n): circle for n in range(1000)})
    assert place_of(circle, ["w"]).way == ()


@pytest.mark.parametrize(
    "names, labels",
    [
        (["epoch=0-step=50.ckpt", "epoch=10-step=550.ckpt"], ("50", "550")),
        (["e=0-epoch=1-loss=0.91.ckpt", "e=0-epoch=2-loss=0.85.ckpt"], ("1", "2")),
        (["seed_1_step_1.pt", "seed_2_step_3.pt"], ("seed_1_step_1", "seed_2_step_3")),
        (
            ["epoch_step_1_seed_1.pt", "epoch_step_2_seed_3.pt"],
            ("epoch_step_1_seed_1", "epoch_step_2_seed_3"),
        ),
        (["net_seed_9.pt", "net_seed_10.pt"], ("net_seed_9", "net_seed_10")),
        (["seed=1-lr=2.ckpt", "seed=2-lr=1.ckpt"], ("seed=1-lr=2", "seed=2-lr=1")),
        (["step_9.pt", "step_10.pt", "final.pt"], ("step_9", "step_10", "final")),
        (
            ["epoch=3-val=0.12.ckpt", "epoch=12-val=0.09.ckpt", "model_best.pt", "last.pt"],
            ("3", "12", "model_best", "last"),
        ),
        (["lr0.1.pt", "lr0.25.pt"], ("lr0.1", "lr0.25")),
        (["lr1e-3.pt", "lr1e-4.pt"], ("lr1e-3", "lr1e-4")),
        (["v2.1.step_3.pt", "v2.1.step_4.pt"], ("3", "4")),
    ],
)
def test_a_run_in_order_and_labelled_by_its_steps(names, labels, tmp_path):
    for name in reversed(names):
        (tmp_path / name).touch()
    series = tnsim.load(tmp_path)
    assert series.labels == labels and [path.name for path in series.paths] == names
    revisions = tnsim.Series(series.paths[:2], names=["v1.0", "v2.5"])
    assert revisions.labels == ("v1.0", "v2.5")


def test_what_holds_no_weights_is_no_checkpoint_of_a_run(tmp_path, logged):
    others = ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"]
    others += ["optimizer_step_9.pt", "trainer_state.pt", "training_args.ckpt", "optim-epoch=3.pt"]
    others += [".step_11.pt", "._step_9.pt"]
    mine = ["step_9.pt", "step_10.pt", "scaler_net.pt", "optimizers.pt", "optimizer.safetensors"]
    for name in (*others, *mine):
        (tmp_path / name).touch()
    (tmp_path / "step_8.pt").symlink_to(tmp_path / "removed.pt")
    (tmp_path / "last.pt").symlink_to(tmp_path / "step_10.pt")
    # The last as a shell writes a pattern out.
    for source in (tmp_path, str(tmp_path / "*"), sorted(tmp_path.iterdir())):
        matched = [name for name in others if name[0] != "." or type(source) is not str]
        logged.clear()
        series = tnsim.load(source)
        assert {path.name for path in series.paths} == {*mine, "last.pt"}
        assert f"{tmp_path / 'step_8.pt'} is left out: it is a broken link" in logged
        assert len(set(logged)) == len(matched) + 1
    with refused("no such file", tnsim.CheckpointError):
        tnsim.load(tmp_path / "step_8.pt")
    for name in mine:
        (tmp_path / name).unlink()
    with refused(r"no checkpoint matches .*; the folder holds", tnsim.CheckpointError):
        tnsim.load(tmp_path)


def test_what_is_not_known_is_listed_from_inside(rng):
    wrapped = {"step": 3, "weights": {f"layers.0.{name}": rng.normal(size=3) for name in "abc"}}
    with refused(r"these keys \(found layers.0.a, layers.0.b", tnsim.CheckpointError):
        tnsim.from_state_dict(wrapped)
    with refused("expected named tensors, found list", tnsim.CheckpointError):
        tnsim.from_state_dict([3])


def test_what_is_no_file(tmp_path):
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused(r"is a pointer of Git LFS.*git lfs pull", tnsim.CheckpointError):
        tnsim.load(tmp_path / "a.safetensors")
    for source, message in (({"w": 1}, "from_state_dict"), (abs, "tnsim.from_module")):
        with refused(message, tnsim.CheckpointError):
            tnsim.load(source)


class TestTorch:
    """Files of PyTorch; skipped where torch is not installed."""

    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch", reason="needs the torch extra")

    def test_a_lightning_run_and_an_old_folder_of_hugging_face(self, rng, tmp_path):
        for step in (5, 50):
            tensors = {k: self.torch.tensor(v) for k, v in before("net.", weights(rng)).items()}
            saved = {"state_dict": tensors, "global_step": step, "hyper_parameters": {"lr": 0.1}}
            self.torch.save(saved, tmp_path / f"epoch=1-step={step}.ckpt")
        series = tnsim.load(tmp_path, DIALECT)
        assert series.labels == ("5", "50") and series[1].degree == 2
        old = tmp_path / "old"
        old.mkdir()
        self.torch.save(tensors, old / "pytorch_model.bin")
        self.torch.save({}, old / "optimizer.pt")
        np.testing.assert_array_equal(tnsim.load(old, DIALECT)(np.ones(3)), series[1](np.ones(3)))

    def test_what_is_no_part_of_the_module_is_left_out_by_name(self, tmp_path):
        nn = self.torch.nn
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        state = {f"net.{name}": value for name, value in net.state_dict().items()}
        lightning = {"state_dict": {**state, "criterion.weight": self.torch.ones(2)}, "epoch": 1}
        averaged = self.torch.optim.swa_utils.AveragedModel(net).state_dict()
        for name, saved, pattern in (
            ("a.ckpt", lightning, "criterion.*"),
            ("b.pt", averaged, "n_averaged"),
        ):
            self.torch.save(saved, tmp_path / name)
            with pytest.raises(tnsim.CheckpointError) as caught:
                tnsim.load(tmp_path / name, net)
            way = f"is left out by tnsim.load(path, net, leave_out=['{pattern}']) (--leave-out "
            assert way in str(caught.value)
            model = tnsim.load(tmp_path / name, net, leave_out=[pattern])
            assert len(model.layers) == 3 and "left out" in model.origin.caveats[0]
            with pytest.warns(tnsim.CaveatWarning, match="fits no tensor by 'criterium'"):
                tnsim.load(tmp_path / name, net, leave_out=[pattern, "criterium"])
            with refused(r"0\.bias, which the module Sequential", tnsim.CheckpointError):
                tnsim.load(tmp_path / name, net, leave_out=[pattern, "0.bias"])
        likely, inputs = nn.Sequential(*net, nn.Softmax(-1)), tnsim.Empirical(np.ones((4, 3)))
        with refused("give a module that has them as well", tnsim.CheckpointError):
            tnsim.pairwise(tmp_path / "a.ckpt", inputs, dialect=likely)
        saved = nn.ModuleDict({"net": likely, "criterion": nn.CrossEntropyLoss(self.torch.ones(2))})
        saved.forward = likely.forward
        assert tnsim.pairwise(tmp_path / "a.ckpt", inputs, dialect=saved).similarity.shape == (1, 1)
        deeper = nn.Sequential(*net, nn.Linear(2, 2))
        self.torch.save(deeper.state_dict(), tmp_path / "c.pt")
        with refused(r"has besides 3\.bias, 3\.weight$", tnsim.CheckpointError):
            tnsim.load(tmp_path / "c.pt", net)
        with refused(r"is no state dict of ReLU: it has besides 0\.bias", tnsim.CheckpointError):
            tnsim.load(tmp_path / "c.pt", nn.ReLU())

    def test_a_whole_module_is_refused_with_the_way_out(self, tmp_path):
        path = tmp_path / "whole.pt"
        self.torch.save({"model": self.torch.nn.Linear(2, 2)}, path)
        with refused(r"such as torch\.nn\..*save the state_dict alone", tnsim.CheckpointError):
            tnsim.load(path)
