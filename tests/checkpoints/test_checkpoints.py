"""Files: every format read and written, every wrong one refused by name, nothing half-written left behind."""

import os

import cases
import ml_dtypes
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, linear
from refusals import not_read, refused
from safetensors.numpy import save_file
from sequence_cases import ONE_LAYER

import tnsim
from tnsim.checkpoints.dialects import PRESETS
from tnsim.checkpoints.load import read
from tnsim.checkpoints.rules import BilinearRule, LinearRule


def classifier(rng, dtype=np.float32):
    shapes = {
        "embed.weight": (4, 6),
        "body.left.weight": (5, 4),
        "body.right.weight": (5, 4),
        "body.left.bias": (5,),
        "body.right.bias": (5,),
        "body.down.weight": (4, 5),
        "body.down.bias": (4,),
        "head.weight": (3, 4),
    }
    return {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}


def forward(s, x):
    e = x @ s["embed.weight"].T
    hidden = (e @ s["body.left.weight"].T + s["body.left.bias"]) * (
        e @ s["body.right.weight"].T + s["body.right.bias"]
    )
    return (hidden @ s["body.down.weight"].T + s["body.down.bias"]) @ s["head.weight"].T


@pytest.mark.parametrize(
    "name, n_ctx",
    [*((name, None) for name in cases.SHALLOW | cases.DEEP), *((name, 5) for name in ONE_LAYER)],
)
def test_save_and_load_round_trip(name, n_ctx, rng, tmp_path):
    make = ONE_LAYER[name] if n_ctx else (cases.SHALLOW | cases.DEEP)[name]
    for layers in make(rng):
        model = tnsim.Model(layers, n_ctx)
        tnsim.save(model, tmp_path / "m.safetensors")
        again = tnsim.load(tmp_path / "m.safetensors")
        x = rng.normal(size=(4, 5, model.d_in))
        np.testing.assert_array_equal(again(x), model(x))
        assert repr(again) == repr(model) and again.n_ctx == n_ctx
    assert tnsim.load(tmp_path / "m.safetensors", n_ctx=2).n_ctx == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_foreign_files_through_a_preset(suffix, rng, tmp_path):
    state, path = classifier(rng), tmp_path / f"model{suffix}"
    np.savez(path, **state) if suffix == ".npz" else save_file(state, path)
    checkpoint = read(path, "bilinear-classifier")
    assert "dialect bilinear-classifier" in checkpoint.model.origin.assumptions[0]
    assert checkpoint.dtypes == ("float32",)
    error = tnsim.compare_forward(checkpoint.model, lambda x: forward(state, x))
    assert error.relative < 1e-5
    wrong = {**state, "body.left.bias": -state["body.left.bias"]}
    assert (
        tnsim.compare_forward(
            tnsim.from_state_dict(wrong, "bilinear-classifier"), lambda x: forward(state, x)
        ).relative
        > 1e-2
    )


def test_a_forward_pass_that_agrees_with_nothing():
    """One that writes into its inputs agreed with every model of what is left there."""
    model = tnsim.Model([tnsim.Linear(np.eye(2))])
    double = lambda x: np.multiply(x, 2, out=x)  # noqa: E731
    assert tnsim.compare_forward(model, double).relative == 0.5
    with refused("forward gives outputs that are NaN or infinite"):
        tnsim.compare_forward(model, lambda x: x * np.nan)
    large = tnsim.Model([tnsim.Linear(1e200 * np.eye(2)), tnsim.Linear(1e200 * np.eye(2))])
    with refused("the model gives outputs that are NaN or infinite"):
        tnsim.compare_forward(large, double)
    with refused(r"memory does not hold .* inputs of shape \(2,\): draw fewer", tnsim.TooLarge):
        tnsim.compare_forward(model, double, samples=2**61)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_are_read_exactly(name, rng, tmp_path):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    state = {k: v.astype(dtype) for k, v in classifier(rng).items()}
    save_file(state, tmp_path / "m.safetensors")
    checkpoint = read(tmp_path / "m.safetensors", "bilinear-classifier")
    assert checkpoint.dtypes == (name,)
    for model in (checkpoint.model, tnsim.from_state_dict(state, "bilinear-classifier")):
        left = model.layers[1].left
        assert left.dtype == np.float32
        np.testing.assert_array_equal(left, state["body.left.weight"].astype(np.float32))


class TestTorch:
    """PyTorch files; skipped where torch is not installed."""

    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch", reason="reading .pt files needs the torch extra")

    @pytest.mark.parametrize(
        "dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    )
    def test_state_dicts(self, dtype, rng, tmp_path):
        state = {k: self.torch.tensor(v) for k, v in classifier(rng).items()}
        state = {
            k: v.to(getattr(self.torch, dtype)) if "body" in k else v for k, v in state.items()
        }
        self.torch.save(state, tmp_path / "m.pt")
        checkpoint = read(tmp_path / "m.pt", "bilinear-classifier")
        assert set(checkpoint.dtypes) == {"float32", dtype}
        expected = forward(
            {k: v.double().numpy() for k, v in state.items()}, x := rng.normal(size=(3, 6))
        )
        assert_close(checkpoint.model(x), expected, rtol=1e-12)
        direct = tnsim.from_state_dict(state, "bilinear-classifier")
        named = tnsim.load(tmp_path / "m.pt", "bilinear-classifier")
        assert tnsim.similarity(direct, named) == 1

    def test_nested_state(self, rng, tmp_path):
        state = {k: self.torch.tensor(v) for k, v in classifier(rng).items()}
        self.torch.save({"step": 3, "model_state_dict": state}, tmp_path / "m.pt")
        preset = PRESETS["bilinear-classifier"]
        dialect = tnsim.Dialect("nested", preset.layers, nested=("model_state_dict",))
        assert tnsim.load(tmp_path / "m.pt", dialect).d_in == 6
        found = read(tmp_path / "m.pt", "bilinear-classifier")
        assert "weights found under 'model_state_dict'" in found.model.origin.assumptions
        self.torch.save({"step": 3}, tmp_path / "m.pt")
        with refused(
            r"m.pt: no dialect is known for these keys \(found step\).*tnsim.from_function",
            tnsim.CheckpointError,
        ):
            tnsim.load(tmp_path / "m.pt")

    def test_unknown_keys_beside_an_optimiser_are_those_of_the_weights(self, tmp_path):
        """A refusal names the weights, not `model`, `optimizer`, `step`, and asks for the module."""
        net = self.torch.nn.Sequential(self.torch.nn.Linear(3, 2))
        optimiser = self.torch.optim.Adam(net.parameters()).state_dict()
        state = {"model": net.state_dict(), "optimizer": optimiser, "step": 3}
        self.torch.save(state, tmp_path / "m.pt")
        match = r"keys \(found 0\.weight, 0\.bias\)\. With .* tnsim\.load\(path, net\)"
        with refused(match, tnsim.CheckpointError):
            tnsim.load(tmp_path / "m.pt")

    def test_layers_take_tensors(self, rng):
        weight = self.torch.tensor(rng.normal(size=(2, 3))).to(self.torch.bfloat16)
        assert tnsim.Linear(weight).weight.dtype == np.float32

    def test_a_name_that_is_not_utf8(self, rng, tmp_path):
        self.torch.save({"w": self.torch.ones(2)}, tmp_path / "m.pt")
        path = (tmp_path / "m.pt").rename(tmp_path / os.fsdecode(b"\xff.pt"))
        with refused("not UTF-8: rename it", tnsim.CheckpointError):
            tnsim.load(path)

    def test_truncated(self, rng, tmp_path):
        self.torch.save(
            {k: self.torch.tensor(v) for k, v in classifier(rng).items()}, tmp_path / "m.pt"
        )
        data = (tmp_path / "m.pt").read_bytes()
        (tmp_path / "m.pt").write_bytes(data[: len(data) // 2])
        with refused(r"m\.pt: not a readable PyTorch file, or truncated", tnsim.CheckpointError):
            tnsim.load(tmp_path / "m.pt")


def test_torch_is_an_extra(monkeypatch, tmp_path):
    (tmp_path / "m.pt").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with refused(
        r"needs torch, which is not installed: run  pip install 'tnsim\[torch\]'",
        tnsim.errors.MissingExtra,
    ):
        tnsim.load(tmp_path / "m.pt")


def test_wrong_files_are_refused_by_name(rng, tmp_path):
    not_read(tmp_path / "absent.npz", "no such file")
    (tmp_path / "notes.txt").write_text("hello")
    not_read(
        tmp_path / "notes.txt",
        r"unknown format '\.txt'; readable are \.safetensors, \.npz, \.pt, \.pth",
    )
    for name in ("m.safetensors", "m.npz"):
        (tmp_path / name).write_bytes(b"not a checkpoint at all")
        not_read(tmp_path / name, "not a readable")
    tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2)]), tmp_path / "own.safetensors")
    not_read(tmp_path / "own.safetensors", "read it without dialect", dialect="bilinear-readout")
    data = (tmp_path / "own.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-20])
    not_read(tmp_path / "cut.safetensors", "not a readable safetensors file, or truncated")
    np.savez(tmp_path / "good.npz", **classifier(rng))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:200])
    not_read(tmp_path / "cut.npz", "not a readable npz file")
    np.savez(tmp_path / "objects.npz", x=np.array([object()]))
    not_read(tmp_path / "objects.npz", "holds Python objects, which are not read")


def test_missing_and_surplus_tensors(rng, tmp_path):
    state = classifier(rng)
    np.savez(tmp_path / "short.npz", **{k: v for k, v in state.items() if k != "body.right.weight"})
    not_read(
        tmp_path / "short.npz",
        "tensor 'body.right.weight' is missing",
        dialect="bilinear-classifier",
    )
    np.savez(tmp_path / "long.npz", extra=np.ones(3), **state)
    not_read(
        tmp_path / "long.npz",
        "dialect bilinear-classifier does not account for extra; extend it",
        dialect="bilinear-classifier",
    )
    np.savez(tmp_path / "norm.npz", **{"final_norm.weight": np.ones(3)}, **state)
    not_read(
        tmp_path / "norm.npz", r"final_norm\.weight is a normalisation", tnsim.UnsupportedLayer
    )
    np.savez(tmp_path / "attention.npz", **{"layers.0.q1.weight": np.ones((2, 2))})
    not_read(
        tmp_path / "attention.npz",
        r"layers\.0\.q1\.weight belongs to an attention layer",
        tnsim.UnsupportedLayer,
    )


def test_bad_weights_name_file_layer_and_tensor(rng, tmp_path):
    state = classifier(rng)
    state["body.left.weight"][2, 1] = np.nan
    np.savez(tmp_path / "nan.npz", **state)
    message = (
        r"nan\.npz: layer 1: Bilinear left has 1 NaN or infinite entries, the first at \[2, 1\]"
    )
    not_read(tmp_path / "nan.npz", message, tnsim.ModelError)
    state = classifier(rng)
    state["head.weight"] = np.ones((3, 5))
    np.savez(tmp_path / "chain.npz", **state)
    not_read(
        tmp_path / "chain.npz", "layer 2 expects 5 inputs but layer 1 gives 4", tnsim.ModelError
    )


def test_damaged_architecture(rng, tmp_path):
    path = tmp_path / "m.safetensors"
    cases_ = {
        '{"format": 1, "layers": [{"kind": "ReLU"}]}': (
            tnsim.UnsupportedLayer,
            "layer kind 'ReLU' is not one of Linear, Bilinear, Multilinear, Attention, Elementwise, Gated, Residual",
        ),
        '{"format": 7, "layers": []}': (
            tnsim.CheckpointError,
            "written in tnsim format 7; this version reads 1",
        ),
        "not json": (tnsim.CheckpointError, "its tnsim metadata is damaged"),
        '{"format": 1, "layers": [{"kind": "Linear"}]}': (
            tnsim.CheckpointError,
            r"tensor 'layers.0.weight' is missing",
        ),
        '{"format": 1, "layers": []}': (
            tnsim.CheckpointError,
            "holds tensors that its architecture does not mention: w",
        ),
    }
    for text, (error, message) in cases_.items():
        save_file({"w": np.ones((2, 2))}, path, {"tnsim": text})
        not_read(path, message, error)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_file_can_have(name, rng, tmp_path):
    model = tnsim.Model([bilinear(rng, 3, 4, 2)])
    with refused(r"cannot be written: (File name|the name holds)", tnsim.CheckpointError):
        tnsim.save(model, tmp_path / f"{name}.safetensors")
    with refused(r"no such file|File name too long", tnsim.CheckpointError):
        tnsim.load(tmp_path / f"{name}.safetensors")
    with refused("no such file of inputs"):
        tnsim.Empirical(tmp_path / f"{name}.npy")
    assert not list(tmp_path.iterdir())


def test_saving_leaves_nothing_behind_when_it_fails(rng, tmp_path, monkeypatch):
    model = tnsim.Model([bilinear(rng, 3, 4, 2)])
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with refused(
        r"m\.safetensors: cannot be written: No space left on device", tnsim.CheckpointError
    ):
        tnsim.save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
    with refused(r"models are saved as \.safetensors", tnsim.CheckpointError):
        tnsim.save(model, tmp_path / "m.npz")
    with refused("only a Model can be saved"):
        tnsim.save(model - model, tmp_path / "m.safetensors")


def test_series(rng, tmp_path):
    for step in (0, 100, 20, 3):
        tnsim.save(tnsim.Model([linear(rng, 2, 2)]), tmp_path / f"step_{step}.safetensors")
    for source in (tmp_path, str(tmp_path / "step_*.safetensors")):
        series = tnsim.load(source)
        assert series.labels == ("0", "3", "20", "100") and len(series) == 4
        assert [m.d_in for m in series] == [2] * 4 and series[1:3].labels == ("3", "20")
    listed = tnsim.load([tmp_path / "step_20.safetensors", tmp_path / "step_3.safetensors"])
    assert listed.labels == ("20", "3")
    with refused("no checkpoint matches", tnsim.CheckpointError):
        tnsim.load(tmp_path / "*.npz")


# dialects


def test_dialect_json_both_ways():
    for dialect in PRESETS.values():
        assert tnsim.Dialect.from_json(dialect.to_json()) == dialect


def test_every_foreign_convention_in_one_dialect(rng, tmp_path):
    """Transposed embedding, fused halves in the other order, lifted columns, lerp with a stored scale, a folded norm."""
    state = {
        "wte": rng.normal(size=(7, 4)),
        "h.0.lr": rng.normal(size=(10, 5)),
        "h.0.d": rng.normal(size=(4, 5)),
        "h.0.s": np.array([0.3]),
        "h.1.lr": rng.normal(size=(6, 5)),
        "h.1.d": rng.normal(size=(4, 3)),
        "h.1.s": np.array([0.6]),
        "out": rng.normal(size=(3, 4)),
        "out_bias": rng.normal(size=3),
        "energy": np.array([2.5]),
        "step": np.array(7),
    }
    dialect = tnsim.Dialect(
        "all",
        (
            LinearRule(weight="wte", transpose=True),
            BilinearRule(
                fused="h.{i}.lr",
                fused_order="right-left",
                down="h.{i}.d",
                lifted=True,
                residual="lerp",
                scale="h.{i}.s",
                repeat=True,
            ),
            LinearRule(weight="out", bias="out_bias", norm_energy="energy", norm_epsilon=1e-6),
        ),
        ignore=("st*",),
    )
    (tmp_path / "d.json").write_text(dialect.to_json())
    np.savez(tmp_path / "m.npz", **state)
    model = tnsim.load(tmp_path / "m.npz", tmp_path / "d.json")

    def theirs(x):
        h = x @ state["wte"]
        for i in range(2):
            one = np.concatenate([np.ones((len(h), 1)), h], axis=1)
            right, left = np.split(state[f"h.{i}.lr"], 2)
            s = state[f"h.{i}.s"]
            h = (1 - s) * h + s * (((one @ left.T) * (one @ right.T)) @ state[f"h.{i}.d"].T)
        return (h / np.sqrt(2.5 + 1e-6)) @ state["out"].T + state["out_bias"]

    assert tnsim.compare_forward(model, theirs).relative < 1e-12
    said = "\n".join(dialect.assumptions())
    for phrase in (
        "stored (in, out)",
        "right then left",
        "column 0",
        "(1 - s) x + s f(x)",
        "sqrt(energy + 1e-06)",
    ):
        assert phrase in said


def test_ambiguous_layouts_are_not_guessed(rng):
    state = {
        "embed.weight": rng.normal(size=(4, 6)),
        "blocks.0.weight": rng.normal(size=(8, 4)),
        "head.weight": rng.normal(size=(2, 4)),
    }
    with refused(
        "fit the dialects fused-blocks, fused-blocks-residual, which mean different functions: where",
        tnsim.CheckpointError,
    ):
        tnsim.from_state_dict(state)
    plain, residual = (
        tnsim.from_state_dict(state, name) for name in ("fused-blocks", "fused-blocks-residual")
    )
    assert plain.layers[1].order == 2 and isinstance(residual.layers[1], tnsim.Residual)


def test_unknown_dialect_name():
    with refused("no dialect 'gpt2': neither a preset", tnsim.CheckpointError):
        tnsim.from_state_dict({}, "gpt2")


def test_a_series_as_a_table(tmp_path, rng):
    weight = rng.normal(size=(2, 2))
    for step in (0, 100):
        tnsim.save(tnsim.Model([tnsim.Linear(weight)]), tmp_path / f"step_{step}.safetensors")
    table = tnsim.load(tmp_path)._repr_html_()
    assert table.startswith("<table><caption>2 checkpoints</caption>")
    assert f"<tr><th>100</th><td>{tmp_path / 'step_100.safetensors'}</td></tr>" in table
