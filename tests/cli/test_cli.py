"""The command line as a user runs it: its output and its exit status, some in a process of its own."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import command, process, processor_seconds, refusal, told
from oracles import bilinear, linear
from processes import python

import tnsim
import tnsim.engine.plan
from tnsim.checkpoints.dialects import PRESETS
from tnsim.cli import app

SHIPPED = Path(tnsim.__file__).parent / "data" / "modular-addition"


@pytest.fixture
def pair(tmp_path, rng):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        tnsim.save(tnsim.Model([bilinear(rng, 4, 5, 3, True)]), path)
    return paths


def test_help_is_quick_and_imports_nothing_heavy():
    start = processor_seconds()
    done = process("--help")
    assert processor_seconds() - start < 2  # half a second here
    for word in ("similarity", "inspect", "plan", "convert", "demo", "bench"):
        assert word in done.stdout
    code = "import sys, tnsim.cli.app\nprint({'jax', 'numpy', 'quimb'} & {*sys.modules})"
    assert python(code)[0] == "set()\n"


def test_similarity(pair):
    a, b = map(tnsim.load, pair)
    found = told("similarity", *pair, "--slices")
    assert found["similarity"] == tnsim.similarity(a, b)
    assert found["slices"] == tnsim.slices(a, b).tolist()
    assert (found["metric"], found["exact"], found["dtype"]) == ("gaussian", True, "float64")
    text = command("similarity", *pair, "--metric", "tree", "--dtype", "float32", "--slices").stdout
    assert "tree (exact)" in text and "output 2" in text


def test_inspect(pair):
    found = told("inspect", pair[0])
    assert found["degree"] == found["legs"] == 2 and found["parameters"] == 4 * 10 + 15 + 10 + 3
    text = command("inspect", pair[0]).stdout
    assert "Bilinear(4 -> 3, rank 5, left_bias, right_bias, down_bias)" in text
    assert "nothing assumed" in text


def test_plan(pair):
    text = command("plan", *pair, "--cosine", "--metric", "tree").stdout
    assert "scalar multiplications" in text and "MiB of float64" in text and "A.LAYER0.DOWN" in text
    planned = told("plan", *pair)
    assert planned["route"] == "contractions" and planned["outputs"] == ["AB"]
    again = tnsim.engine.plan.Plan.from_json(json.dumps(planned["contraction"]))
    assert again.outputs == ("AB",)


def test_convert(tmp_path, rng):
    shapes = {"W_l": (5, 4), "W_r": (5, 4), "W_p": (2, 5)}
    state = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    np.savez(tmp_path / "m.npz", epoch=3, **state)
    given = tmp_path / "m.npz", tmp_path / "m.safetensors"
    command("convert", *given, "--dialect", "bilinear-readout")
    source = tnsim.load(given[0], "bilinear-readout")
    assert tnsim.similarity(tnsim.load(given[1]), source) == 1
    (tmp_path / "d.json").write_text(PRESETS["bilinear-readout"].to_json())
    said = command("inspect", given[0], "--dialect", tmp_path / "d.json").stdout
    assert "rank 5" in said


def test_demo(tmp_path):
    done = command("demo", "--out", tmp_path / "out")
    assert "What is to be seen" in done.stdout and "network: 3 tensors" in done.stdout
    assert "pair" in done.stderr
    with np.load(tmp_path / "out" / "similarity.npz") as data:
        matrix, steps = data["similarity"], data["a"]
    assert (tmp_path / "out" / "similarity.png").stat().st_size > 10_000
    shipped = list((SHIPPED.parent / "grokking").glob("*.safetensors"))
    assert list(steps) == sorted(steps) and len(steps) == len(shipped)
    assert np.linalg.eigvalsh(matrix).min() > -1e-12
    memorised, understood = (steps >= 1250) & (steps <= 5000), steps >= 20000
    assert matrix[np.ix_(memorised, memorised)].min() > 0.7
    assert matrix[np.ix_(understood, understood)].min() > 0.7
    assert matrix[np.ix_(memorised, understood)].max() < 0.35


@pytest.mark.slow
def test_bench_depth(tmp_path):
    sizes = ("--width", 6, "--rank", 8, "--max-depth", 4, "--repeats", 2)
    done = command("bench", "depth", *sizes, "--out", tmp_path)
    assert "multiplications" in done.stdout
    rows = json.loads((tmp_path / "depth.json").read_text())["rows"]
    assert [r["depth"] for r in rows] == [1, 2, 4] and (tmp_path / "depth.png").exists()
    assert all(r["log_difference"] < 1e-10 for r in rows)
    assert rows[2]["unrolled_multiplications"] > 2 * rows[2]["multiplications"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["similarity", "absent.npz", "b.npz"], "absent.npz: no such file"),
        (["similarity", "--nope"], "No such option: --nope"),
        (["similarity", "a.npz", "b.npz", "--metric", "cosine"], "'cosine' is not one of"),
        (["nope"], "No such command 'nope'"),
        (["similarity", "a.npz"], "Missing argument '"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(*arguments, said=message).startswith("tnsim: error: ")


def test_deep_models_and_check(tmp_path, rng):
    files = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for file in files:
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 3), bilinear(rng, 3, 4, 2)]), file)
    exact = told("similarity", *files, "--check", 20000, "--seed", 3)
    assert exact["exact"] is True and abs(exact["check"]["deviation"]) < 6
    assert exact["check"]["samples"] >= 19000
    closure = told("similarity", *files, "--metric", "closure")
    assert closure["exact"] is False and closure["similarity"] != exact["similarity"]
    assert told("similarity", *files, "--metric", "symmetric")["metric"] == "symmetric"
    done = command("similarity", *files, "--check", 2000)
    assert "standard errors away" in done.stdout and "samples" in done.stderr
    deep = tnsim.Model([bilinear(rng, 12, 12, 12) for _ in range(4)])  # too wide for quadrature
    file = tmp_path / "deep.safetensors"
    tnsim.save(deep, file)
    refusal("similarity", file, file, said="use GaussianClosure()")


def test_cold_start(tmp_path):
    """A fresh process with an empty plan cache; the figure to reach is 6 s."""
    files = sorted(SHIPPED.glob("*.safetensors"))[-2:]
    start = processor_seconds()
    environment = {**os.environ, "TNSIM_CACHE_DIR": str(tmp_path)}
    done = process("similarity", *files, "--json", env=environment)
    assert processor_seconds() - start < 15
    assert 0 < json.loads(done.stdout)["similarity"] < 1


READING = {"--dialect", "--model", "--example", "--n-ctx", "--leave-out", "--norm-inputs"}
METRIC = {"--metric", "--fit", "--inputs", "--samples", "--dtype"}


@pytest.mark.parametrize(
    "verb", ["similarity", "pairwise", "paths", "change", "plan", "inspect", "convert"]
)
def test_options_in_common_are_the_same_everywhere(verb):
    every = typer.main.get_command(app.app).commands
    told = {option.opts[-1]: (option.help, option.default) for option in every[verb].params}
    usual = {option.opts[-1]: (option.help, option.default) for option in every["pairwise"].params}
    wanted = READING if verb in ("inspect", "convert") else READING | METRIC
    assert wanted == (READING | METRIC) & set(told)
    assert all(told[flag] == usual[flag] and told[flag][0] for flag in wanted)


def test_a_metric_takes_its_files_in_every_command(pair, tmp_path, rng):
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 4)))
    planned = command("plan", *pair, "--fit", tmp_path / "x.npy", "--json").stdout
    assert json.loads(planned)["metric"] == "gaussian"
    planned = ("plan", *pair, "--samples", 4)
    said = "--samples are those of --metric categorical or gaussian, found closure"
    refusal(*planned, "--metric", "closure", said=said)
    refusal(*planned, said="samples of a Gaussian are a whole number, 32 to 2^30, or 0")


def test_samples_of_the_estimate_are_an_option(tmp_path, rng):
    np.save(tmp_path / "x.npy", 1.0 + rng.normal(size=(40, 3)))
    layers = [lambda: linear(rng, 3, 3), lambda: tnsim.Elementwise("relu")]
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for file in files:
        tnsim.save(tnsim.Model([make() for make in layers * 2]), file)
    models = [tnsim.load(file) for file in files]
    fitted = tnsim.Gaussian.fit(np.load(tmp_path / "x.npy"))
    for given, metric in (
        ((), tnsim.Gaussian(samples=64)),
        (("--fit", tmp_path / "x.npy"), dataclasses.replace(fitted, samples=64)),
    ):
        said = told("similarity", *files, "--samples", 64, *given)
        wanted = tnsim.similarity(*models, metric)
        assert said["similarity"] == wanted and wanted.inputs == 64
    refusal("similarity", *files, "--samples", 0)
