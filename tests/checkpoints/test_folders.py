"""Folders of one model, read by every command alike, and names of tensors, which are no proof of a function."""

import json
import os

import numpy as np
import pytest
from commands import command, refusal
from oracles import linear
from refusals import refused
from safetensors.numpy import load_file, save_file
from transformer_cases import written

import tnsim
from tnsim.checkpoints.native import METADATA

KEYS = ("q1", "k1", "q2", "k2", "v", "o")
CONFIG = {"num_attention_heads": 2, "attn_scale": 0.35, "model_type": "mine"}


def state_of(rng):
    names = ["embed", "unembed", *(f"layers.0.{key}" for key in KEYS)]
    return {f"{name}.weight": rng.normal(size=(4, 4)).astype(np.float32) for name in names}


def folder(path, rng, parts=1):
    return written(path, state_of(rng), CONFIG, parts)


def test_a_folder_of_one_model_is_read_by_every_command(tmp_path, rng):
    for step, parts in ((5, 1), (40, 3)):
        folder(tmp_path / "run" / f"checkpoint-{step}", rng, parts)
        (tmp_path / "run" / f"checkpoint-{step}" / "optimizer.pt").touch()
    one, two = (tmp_path / "run" / f"checkpoint-{step}" for step in (5, 40))
    given = ("--n-ctx", 2, "--dialect", "bilinear-attention")
    said = command("inspect", two, *given).stdout
    assert "2 heads, causal mask" in said and "s = 0.35" in said and "config:" not in said
    options = ("--metric", "tree", *given, "--json")
    value = json.loads(command("similarity", one, two, *options).stdout)["similarity"]
    models = [tnsim.load(file, "bilinear-attention", n_ctx=2) for file in (one, two)]
    assert value == tnsim.similarity(*models, tnsim.TreeSymmetric())
    planned = command("pairwise", tmp_path / "run", "--dry-run", *options).stdout
    assert json.loads(planned)["tiles"]["pairs"] == 3
    assert tnsim.load(tmp_path / "run").labels == ("5", "40")


def test_a_folder_where_a_file_is_meant(tmp_path, rng):
    for step in (1, 2):
        np.savez(tmp_path / f"step_{step}.npz", w=np.ones((2, 2)))
    done = command("similarity", tmp_path, tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is a folder where one file is meant; name one of its 2 checkpoints" in done.stderr
    (tmp_path / "empty").mkdir()
    with refused(r"no checkpoint matches .*holds nothing", tnsim.CheckpointError):
        tnsim.load(tmp_path / "empty")
    (tmp_path / "empty" / "global_step5").mkdir()  # as DeepSpeed writes them, a level deeper
    with refused("the folder holds global_step5", tnsim.CheckpointError):
        tnsim.load(tmp_path / "empty")
    for given in ("", ["", tmp_path / "step_1.npz"]):
        with refused("^the name of a checkpoint is empty", tnsim.CheckpointError):
            tnsim.load(given)
    for verb in ("inspect", "paths"):
        refusal(verb, "", said="error: the name of a checkpoint is empty")
    path = tmp_path / "step_1.npz"
    with path.open("rb") as opened:
        for given in (opened, os.fsencode(path)):
            with refused("expected a path or several, found", tnsim.CheckpointError):
                tnsim.load(given)


def test_parts_that_are_missing_or_elsewhere(tmp_path, rng):
    path = folder(tmp_path / "model", rng, 2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for places, message in [
        ({**good["weight_map"], "more": "model-00001-of-00002.safetensors"}, "its parts lack more"),
        ({**good["weight_map"], "more": "../other.safetensors"}, "its parts must lie beside it"),
        ({**good["weight_map"], "more": "none.safetensors"}, "part none.safetensors: no such file"),
        ({**good["weight_map"], "more": index.name}, "its parts must lie beside it as .safetensor"),
        (None, "not a readable index"),
    ]:
        index.write_text(json.dumps({"weight_map": places}))
        with refused(message, tnsim.CheckpointError):
            tnsim.load(path)


def test_pickles_in_several_files(tmp_path, rng):
    torch = pytest.importorskip("torch")
    path = folder(tmp_path / "run" / "step_1", rng, 2)
    expected = tnsim.load(path, "bilinear-attention", n_ctx=2)
    index = path / "model.safetensors.index.json"
    text = index.read_text().replace(".safetensors", ".bin")
    (path / "pytorch_model.bin.index.json").write_text(text)
    index.unlink()
    for part in path.glob("*.safetensors"):
        state = {name: torch.as_tensor(array) for name, array in load_file(part).items()}
        torch.save(state, part.with_suffix(".bin"))
        part.unlink()
    (found,) = tnsim.load(tmp_path / "run", "bilinear-attention", n_ctx=2)
    assert found.parameters == expected.parameters
    assert tnsim.similarity(found, expected, tnsim.TreeSymmetric()) == 1.0


def test_a_whole_model_beside_an_index_of_another(tmp_path, rng):
    """Libraries differ in which of the two they read; an index of the one file is no other."""
    path = folder(tmp_path / "model", rng, 2)
    state = state_of(rng)
    save_file(state, path / "model.safetensors")
    with refused(
        "model.safetensors, which lies beside it: these may be two", tnsim.CheckpointError
    ):
        tnsim.load(path, "bilinear-attention")
    index = {"weight_map": dict.fromkeys(state, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tnsim.load(path, "bilinear-attention").d_in == 4


def test_files_of_one_name_are_ordered_by_their_folders(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "model.npz").touch()
    series = tnsim.load(str(tmp_path / "step_*" / "model.npz"))
    assert [path.parent.name for path in series.paths] == ["step_9", "step_10", "step_100"]
    assert tnsim.load(str(tmp_path / "**" / "step_*" / "*.npz")).paths == series.paths


def test_folders_that_one_may_not_look_into_are_passed_by(tmp_path, monkeypatch, rng):
    """Such as `lost+found` at the top of a disk."""
    tnsim.save(tnsim.Model([linear(rng, 2, 2)]), tmp_path / "a.safetensors")
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refusing(path, **options):
        if "lost+found/" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert len(tnsim.load(tmp_path)) == 1


def classifier(rng):
    """Tensors with the names of a preset, of a network whose activation would leave none."""
    shapes = {"embed": (4, 6), "body.left": (5, 4), "body.right": (5, 4), "body.down": (4, 5), "head": (3, 4)}  # fmt: skip
    return {f"{key}.weight": rng.normal(size=shape) for key, shape in shapes.items()}


def test_a_preset_that_fits_by_names_is_named_and_never_taken(tmp_path, rng):
    files = [tmp_path / f"step_{n}.npz" for n in range(2)]
    states = [classifier(rng) for _ in files]
    for file, state in zip(files, states, strict=True):
        np.savez(file, **state)
    orders = [
        ("similarity", *files),
        ("paths", *files),
        ("plan", *files),
        ("change", *files),
        ("inspect", files[0]),
        ("convert", files[0], tmp_path / "own.safetensors"),
        ("pairwise", *files, "--out", tmp_path / "run"),
    ]
    for order in orders:
        done = command(*order, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, order
        assert "which show no activation, fit the dialect bilinear-classifier:" in done.stderr
        assert 'dialect="bilinear-classifier" (--dialect)' in done.stderr
        assert done.stderr.endswith("tnsim.load(path, net) (--model FILE.py:NAME)\n")
    assert not (tmp_path / "own.safetensors").exists()
    for read in (lambda: tnsim.load(files[0]), lambda: tnsim.from_state_dict(states[0])):
        with refused('dialect="bilinear-classifier"', tnsim.CheckpointError):
            read()
    said = command("similarity", *files, "--dialect", "bilinear-classifier", "--json")
    assert json.loads(said.stdout)["exact"] is True and said.stderr == ""


def test_dialects_have_no_guesses(tmp_path):
    """Files of earlier versions may hold some, of dialects and of models."""
    rule = {"kind": "linear", "weight": "w"}
    text = json.dumps({"format": 1, "name": "mine", "layers": [rule], "guesses": []})
    with refused("says what is so and has no guesses: mend", tnsim.CheckpointError):
        tnsim.Dialect.from_json(text)
    architecture = {"format": 1, "layers": [{"kind": "Linear"}], "guesses": ["layers: alone"]}
    metadata = {METADATA: json.dumps(architecture)}
    save_file({"layers.0.weight": np.ones((2, 2))}, tmp_path / "own.safetensors", metadata)
    model = tnsim.load(tmp_path / "own.safetensors")
    assert model.origin.caveats == ("not confirmed: layers: alone",)


@pytest.mark.parametrize(
    "commit",
    ["../../elsewhere", "../snapshots/../../elsewhere", "/{root}/elsewhere", ".", "..", ""],
)
def test_a_reference_leads_nowhere_but_to_a_snapshot(commit, tmp_path, rng):
    """A ref of the cache, or a revision that was asked for, with a path in the place of a commit."""
    folder(tmp_path / "elsewhere", rng)
    cache = tmp_path / "models--me--net"
    folder(cache / "snapshots" / "0123456789", rng)
    (cache / "refs").mkdir()
    commit = commit.format(root=tmp_path)
    (cache / "refs" / "main").write_text(commit)
    for revision in ("main", commit or "main", f"{commit}*", "*", "?123456789", "a\0b"):
        with pytest.raises(tnsim.CheckpointError):
            tnsim.load(f"{cache}@{revision}", "bilinear-attention", n_ctx=2)
    (cache / "refs" / "main").write_text("0123456789\n")
    for revision in ("main", "0123"):
        model = tnsim.load(f"{cache}@{revision}", "bilinear-attention", n_ctx=2)
        assert model.d_in == 4
