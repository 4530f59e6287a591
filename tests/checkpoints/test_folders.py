"""Folders of one model, and templates of dialects: read by every command alike, from files that libraries write."""

import json
import os

import numpy as np
import pytest
from commands import command
from oracles import linear
from safetensors.numpy import save_file

import tnsim
from tnsim.checkpoints.suggestions import suggest

KEYS = ("q1", "k1", "q2", "k2", "v", "o")
CONFIG = {"num_attention_heads": 2, "attn_scale": 0.35, "model_type": "mine"}


def state_of(rng):
    names = ["embed", "unembed", *(f"layers.0.{key}" for key in KEYS)]
    return {f"{name}.weight": rng.normal(size=(4, 4)).astype(np.float32) for name in names}


def folder(path, rng, parts=1):
    """A model as Hugging Face's libraries write it, in one file or in several with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    state = state_of(rng)
    if parts == 1:
        save_file(state, path / "model.safetensors", {"format": "pt"})
        return path
    places = {}
    for n in range(parts):
        file = f"model-{n + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(state.items())[n::parts])
        save_file(part, path / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 512}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_folder_of_one_model_is_read_by_every_command(tmp_path, rng):
    for step, parts in ((5, 1), (40, 3)):
        folder(tmp_path / "run" / f"checkpoint-{step}", rng, parts)
        (tmp_path / "run" / f"checkpoint-{step}" / "optimizer.pt").touch()
    one, two = (tmp_path / "run" / f"checkpoint-{step}" for step in (5, 40))
    said = command("inspect", two, "--n-ctx", 2).stdout
    assert "2 heads, causal mask" in said and "s = 0.35" in said and "config:" not in said
    options = ("--metric", "tree", "--n-ctx", 2, "--json")
    value = json.loads(command("similarity", one, two, *options).stdout)["similarity"]
    models = tnsim.load(one, n_ctx=2), tnsim.load(two, n_ctx=2)
    assert value == tnsim.similarity(*models, tnsim.TreeSymmetric())
    planned = command("pairwise", tmp_path / "run", "--dry-run", *options).stdout
    assert json.loads(planned)["pairs"] == 3
    assert tnsim.load(tmp_path / "run").labels == ("5", "40")


def test_a_folder_where_a_file_is_meant(tmp_path, rng):
    for step in (1, 2):
        np.savez(tmp_path / f"step_{step}.npz", w=np.ones((2, 2)))
    done = command("similarity", tmp_path, tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is a folder of 2 checkpoints where one file is meant; name one of them" in done.stderr
    (tmp_path / "empty").mkdir()
    with pytest.raises(tnsim.CheckpointError, match="no checkpoint matches"):
        tnsim.load(tmp_path / "empty")


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
        with pytest.raises(tnsim.CheckpointError, match=message):
            tnsim.load(path)


def test_a_suggestion_reads_what_it_was_made_for(tmp_path, rng):
    path = folder(tmp_path / "model", rng)
    template = command("dialect", "suggest", path).stdout
    assert '"# n_heads"' in template and '"# residual"' in template
    (tmp_path / "mine.json").write_text(template)
    model = tnsim.load(path, tmp_path / "mine.json", n_ctx=2)
    assert [layer.d_out for layer in model.layers] == [4, 4, 4]


SHAPES = {
    "classifier": (
        {"emb.weight": (4, 6), "b.left.weight": (5, 4), "b.right.weight": (5, 4), "b.down.weight": (4, 5), "b.down.bias": (4,), "head.weight": (3, 4), "head.bias": (3,)},
        "degree 2",
    ),
    "tokens": ({"wte.weight": (9, 4), "out.weight": (9, 4)}, "Linear(9 -> 4), Linear(4 -> 9)"),
    "fused": ({"in.weight": (3, 5), "blocks.0.weight": (6, 3), "blocks.1.weight": (6, 3)}, "degree 4"),
    "a gap between numbers": ({"0.weight": (4, 5), "2.weight": (3, 4)}, "Linear(5 -> 4), Linear(4 -> 3)"),
    "names in alphabetical order": (
        {"blocks.0.l": (6, 4), "blocks.0.p": (4, 6), "blocks.0.r": (6, 4), "embed.weight": (4, 5), "head.weight": (3, 4)},
        "Model(Linear(5 -> 4), Residual(Bilinear(4 -> 4, rank 6), skip=1, scale=1), Linear(4 -> 3)",
    ),
    "blocks of two layers": (
        {f"h.{i}.{name}": shape for i in range(2) for name, shape in {"mlp.l": (6, 4), "mlp.r": (6, 4), "mlp.d": (4, 6), "proj.weight": (4, 4)}.items()},
        "rank 6), skip=1, scale=1), Linear(4 -> 4), Residual(Bilinear",
    ),
    "matrices alone": ({"W_l": (5, 4), "W_r": (5, 4), "W_p": (2, 5)}, "rank 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_suggestions(name):
    shapes, said = SHAPES[name]
    state = {key: np.ones(shape) for key, shape in shapes.items()}
    dialect = tnsim.Dialect.from_json(suggest({"model": state, "step": 3}, "mine"))
    assert dialect.nested == ("model?",)
    assert said in repr(tnsim.from_state_dict(state, dialect))
    assert said in repr(tnsim.from_state_dict({"model": state}, dialect))


def test_suggestions_of_fused_attention_and_of_what_may_be_no_polynomial(rng):
    shapes = {"wte": (9, 4), "h.0.attn.qkv.weight": (12, 4), "h.0.attn.qkv.bias": (12,), "h.0.attn.out.weight": (4, 4), "h.0.mlp.gate_proj.weight": (8, 4), "h.0.mlp.up_proj.weight": (8, 4), "h.0.mlp.down_proj.weight": (4, 8), "head.weight": (9, 4)}  # fmt: skip
    state = {f"module.{key}": rng.normal(size=shape) for key, shape in shapes.items()}
    text = json.loads(suggest(state, "mine"))
    embed, attention, gated, last = text["layers"]
    assert embed["weight"] == "wte" and attention["fused_bias"] == "h.0.attn.qkv.bias"
    assert "SwiGLU" in gated["# left"] and "# before" not in last
    attention["n_heads"] = 2
    dialect = tnsim.Dialect.from_json(json.dumps(text))
    model = tnsim.from_state_dict(state, dialect, n_ctx=3).layers[1].layer
    parts = np.split(state["module.h.0.attn.qkv.weight"], 3)
    np.testing.assert_array_equal([model.q1, model.k1, model.v], parts)
    np.testing.assert_array_equal([model.q2, model.k2], parts[:2])
    linear = {f"{n}.weight": rng.normal(size=(3, 3)) for n in (0, 2)}
    assert "ReLU" in json.loads(suggest(linear, "mine"))["layers"][1]["# before"]


def test_suggestions_name_norms_and_what_is_left(rng):
    shapes = {"embed.weight": (9, 4), "blocks.0.norm.weight": (4,), "blocks.0.l.weight": (6, 4), "blocks.0.r.weight": (6, 4), "blocks.0.d.weight": (4, 6), "final_norm.weight": (4,), "final_norm.bias": (4,), "head.weight": (9, 4), "gain": (7,)}  # fmt: skip
    state = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    text = json.loads(suggest({**state, "steps": np.array(3)}, "mine"))
    _, block, head = text["layers"]
    assert block["norm"] == "rms" and head["norm"] == "layer"
    assert head["norm_bias"] == "final_norm.bias"
    assert text["ignore"] == ["steps"] and text["# not accounted for"] == ["gain"]
    dialect = tnsim.Dialect.from_json(json.dumps(text))
    tokens = rng.integers(9, size=(8, 3))
    model = tnsim.from_state_dict(
        {**state, "steps": 3}, dialect, n_ctx=3, leave_out=["gain"], norms=tokens
    )
    assert len(model.origin.caveats) == 2


def test_no_matrix_makes_no_suggestion():
    with pytest.raises(tnsim.CheckpointError, match="no matrix is there"):
        suggest({"step": np.array(3)}, "mine")


def test_files_of_one_name_are_ordered_by_their_folders(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "model.npz").touch()
    series = tnsim.load(str(tmp_path / "step_*" / "model.npz"))
    assert [path.parent.name for path in series.paths] == ["step_9", "step_10", "step_100"]


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
            tnsim.load(f"{cache}@{revision}", n_ctx=2)
    (cache / "refs" / "main").write_text("0123456789\n")
    assert tnsim.load(f"{cache}@main", n_ctx=2).d_in == 4
    assert tnsim.load(f"{cache}@0123", n_ctx=2).d_in == 4
