"""`tnsim paths` and `tnsim change`: text, JSON, pictures, and errors in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_close
from commands import command, refusal, told
from oracles import bilinear

import tnsim

DATA = Path(tnsim.__file__).parent / "data" / "induction"
TOKENS = ("--metric", "categorical", "--samples", 64, "--n-ctx", 4)


@pytest.mark.slow
def test_paths_of_a_run_and_of_a_checkpoint(tmp_path):
    early, file = (DATA / f"step_{step}.safetensors" for step in ("000900", "004000"))
    picture = tmp_path / "run.png"
    text = command("paths", early, file, *TOKENS, "--plot", picture).stdout
    assert "embed > layer 1 > layer 2" in text and "estimate from samples" in text
    assert sum(line.startswith("4000 ") for line in text.splitlines()) == 1
    assert picture.stat().st_size > 10_000
    found = told("paths", file, *TOKENS, "--by", "head", "--top", 3)
    wanted = tnsim.paths(
        tnsim.load(file, n_ctx=4), metric=tnsim.Categorical(samples=64), by="head", top=3
    )
    assert found["shares"] == dict(zip(wanted.bra, wanted.share.tolist(), strict=True))
    assert "others" not in command("paths", file, *TOKENS).stdout


@pytest.mark.slow
def test_edges_by_legs(tmp_path):
    file, picture = DATA / "step_004000.safetensors", tmp_path / "edges.png"
    options = ("--metric", "categorical", "--samples", 4, "--n-ctx", 4, "--legs")
    text = command("paths", file, *options, "--plot", picture).stdout
    assert "layer 1 > K of layer 2" in text and picture.stat().st_size > 5_000
    found = told("paths", file, *options)
    (edges,) = found["edges"].values()
    wanted = tnsim.paths(tnsim.load(file, n_ctx=4), metric=tnsim.Categorical(samples=4), legs=True)
    assert list(edges) == list(wanted.edges)
    assert_close([edge["cut"] for edge in edges.values()], wanted.cut, rtol=1e-9)


@pytest.mark.slow
def test_the_change_between_two_checkpoints(tmp_path):
    files = [DATA / f"step_{step:06}.safetensors" for step in (900, 4000)]
    picture = tmp_path / "change.png"
    text = command("change", *files, *TOKENS, "--plot", picture).stdout
    assert "surroundings" in text and "layer 2" in text and picture.stat().st_size > 5_000
    found = told("change", *files, *TOKENS, "--swaps")
    assert_close(sum(found["share"]), 1.0, rtol=1e-9)
    assert found["components"] == ["layer 1", "layer 2"] and len(found["removed"]) == 2
    assert np.all(np.array(found["alone"]) > 0)


@pytest.mark.slow
def test_the_changes_of_a_run(tmp_path):
    files = [DATA / f"step_{step:06}.safetensors" for step in (0, 900, 4000)]
    picture = tmp_path / "changes.png"
    text = command("change", *files, *TOKENS, "--plot", picture).stdout
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[-2:]] == ["900", "4000"] and picture.stat().st_size > 5_000
    found = told("change", *files, *TOKENS)
    assert set(found["totals"]) == set(found["shares"]) == {"900", "4000"}
    for row in found["shares"].values():
        assert_close(sum(row.values()), 1.0, rtol=1e-9)
    refusal("change", *files, *TOKENS, "--swaps", said="--swaps shows one change")


@pytest.mark.slow
def test_a_result_prints_what_the_command_says(tmp_path, rng):
    files = [tmp_path / f"{name}.safetensors" for name in "abc"]
    models = [tnsim.Model([tnsim.Residual(bilinear(rng, 3, 4, 3))]) for _ in files]
    for model, file in zip(models, files, strict=True):
        tnsim.save(model, file)
    assert command("paths", files[0]).stdout == f"{tnsim.paths(models[0])}\n"
    assert command("change", *files[:2]).stdout == f"{tnsim.change(*models[:2])}\n"
    cosine = command("change", *files[:2], "--of", "similarity").stdout
    assert "(shares by numerical integration)" in cosine
    two, three = (dict(zip(names, models, strict=False)) for names in ("ab", "abc"))
    assert command("paths", *files[:2]).stdout == f"{tnsim.paths(two)}\n"
    shares = told("paths", *files[:2])["shares"]
    assert [[*each.values()] for each in shares.values()] == tnsim.paths(two).share.tolist()
    assert command("paths", *files[:2], "--legs").stdout == f"{tnsim.paths(two, legs=True)}\n"
    assert command("change", *files).stdout == f"{tnsim.change(three)}\n"


def test_options_of_edges_are_others_than_those_of_paths():
    words = ("--legs", "--top", 2)
    refusal("paths", DATA, *TOKENS, *words, said="leave out --other, --within, --order")


@pytest.mark.slow
def test_forward_passes_on_a_file_of_inputs(tmp_path, rng):
    inputs = rng.normal(size=(30, 3))
    np.save(tmp_path / "x.npy", inputs)
    for name in "ab":
        layers = [tnsim.Residual(bilinear(rng, 3, 4, 3)) for _ in range(2)]
        tnsim.save(tnsim.Model(layers), tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    options = ("--metric", "empirical", "--inputs", tmp_path / "x.npy", "--json")
    metric, models = tnsim.Empirical(inputs), [tnsim.load(file) for file in files]
    found = json.loads(command("paths", files[0], *options).stdout)
    wanted = tnsim.paths(models[0], metric=metric)
    assert found["metric"] == "empirical"
    assert list(found["shares"].values()) == wanted.share.tolist()
    assert list(found["standard_errors"].values()) == wanted.standard_error.tolist()
    found = json.loads(command("change", *files, *options).stdout)
    wanted = tnsim.change(*models, metric)
    assert found["share"] == wanted.share.tolist()
    assert found["standard_error"] == wanted.standard_error.tolist()
    found = json.loads(command("change", tmp_path / "?.safetensors", *options).stdout)
    (errors,) = found["standard_errors"].values()
    assert [*errors.values()] == wanted.standard_error.tolist() and found["how"] == ""
    found = json.loads(command("pairwise", *files, "--out", tmp_path / "o", *options).stdout)
    assert found["standard_error"] == tnsim.pairwise(models, metric).standard_error.values.tolist()
    assert found["symmetric"] is True


def test_json_has_no_infinities(tmp_path):
    """No share of a change is known that is on one input alone."""
    np.save(tmp_path / "x.npy", [[0.0], [1.0]])
    for n in range(1, 3):
        tnsim.save(
            tnsim.Model([tnsim.Bilinear([[1]], [[1]], [[n]])]), tmp_path / f"{n}.safetensors"
        )
    files, options = sorted(tmp_path.glob("*.safetensors")), ("--metric", "empirical", "--inputs")
    assert told("change", *files, *options, tmp_path / "x.npy")["standard_error"] == [None]


def test_labels_of_a_run_differ(tmp_path, monkeypatch):
    """Rows of one label were one row of the JSON."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        tnsim.save(tnsim.Model([tnsim.Linear([[1.0]])]), f"{name}.safetensors")
    run = ("a.safetensors", "b.safetensors", "./a.safetensors")
    for verb in ("paths", "change"):
        refusal(verb, *run, said="must differ, found a.safetensors more than once: give each")


@pytest.mark.slow
def test_a_change_of_any_module(tmp_path):
    """The weights of a network of the user's own code are exchanged by module, on inputs."""
    torch = pytest.importorskip("torch")
    layers = "Linear(3, 4), GELU(), LayerNorm(4), Linear(4, 2)"
    code = tmp_path / "net.py"
    code.write_text(f"from torch.nn import *\nNet = lambda: Sequential({layers})\n")
    space: dict = {}
    exec(code.read_text(), space)
    net, files = space["Net"](), [tmp_path / f"{n}.pt" for n in range(2)]
    torch.save(net.state_dict(), files[0])
    with torch.no_grad():
        net[3].weight.mul_(1.5)
    torch.save(net.state_dict(), files[1])
    inputs, picture = tmp_path / "x.npy", tmp_path / "change.png"
    np.save(inputs, np.random.default_rng(0).normal(size=(30, 3)))
    given = ("change", *files, "--model", f"{code}:Net")
    data = ("--metric", "empirical", "--inputs", inputs)
    found = told(*given, *data)
    assert found["components"] == ["0", "2", "3"]
    assert_close(found["share"], [0, 0, 1], scale=1.0, rtol=1e-3, limited_by="an integral")
    assert_close(sum(found["by_input"]), found["total"])
    said = command(*given, *data).stdout.splitlines()[-1]
    most = int(np.argmax(found["by_input"]))
    assert said.startswith(f"most on inputs  {most} (") and said.endswith("of 30")
    text = command(*given, "--swaps", "--plot", picture).stdout
    assert "gaussian (weights exchanged, on 16,384 normal inputs)" in text
    assert picture.stat().st_size > 5_000
    refusal("change", *files, "--by", "module", said="give the network by --model")
