"""What a new user asks of the command line first: version, help for the shell, the state of the installation, input by pipes."""

import json
import os
import sys

import numpy as np
import pytest
from commands import command, piped, refusal, told
from oracles import bilinear, linear
from processes import python
from transformer_cases import CONFIGS, checkpoint, written

import tnsim
from tnsim.checkpoints.dialects import PRESETS


@pytest.fixture
def files(tmp_path, rng):
    paths = [tmp_path / f"step_{n}.safetensors" for n in (1, 2)]
    for path in paths:
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), path)
    return paths


@pytest.mark.slow
def test_version_and_completion():
    assert command("--version").stdout == f"tnsim {tnsim.__version__}\n"
    assert "--install-completion" in command("--help").stdout


@pytest.mark.parametrize(
    "words, expected",
    [
        ("tnsim pa", ["pairwise", "paths"]),
        ("tnsim similarity --metric c", ["closure", "categorical"]),
        ("tnsim inspect x --dialect bilinear-r", ["bilinear-readout"]),
    ],
)
def test_the_shell_completes(words, expected, monkeypatch):
    monkeypatch.setenv("_TNSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert command().stdout.split() == expected


def test_standard_input_is_read_once(files, monkeypatch):
    monkeypatch.setattr(sys, "stdin", piped("\n".join(map(str, files))))
    said = "- stands for names of checkpoints, one a line, on standard input"
    line = refusal("pairwise", "-", "--other", "-", "--dry-run", said=said)
    assert "it can be read for one - only" in line


def test_info():
    found = told("info")
    assert found["versions"]["tnsim"] == tnsim.__version__ and found["devices"]
    extras = {"pairwise", "plot", "dask", "parquet", "zarr", "torch", "yaml"}
    assert set(found["missing"]) == extras
    assert found["cache"]["bytes"] >= 0
    assert "devices     " in command("info").stdout


def test_the_device_is_named(files):
    assert told("similarity", *files)["device"] == "cpu"
    assert tnsim.pairwise(tnsim.load(files)).attrs["device"] == "cpu"


def test_moments_from_samples(files, tmp_path, rng):
    samples = rng.normal(size=(40, 3)) + 1.0
    np.save(tmp_path / "x.npy", samples)
    np.savez(tmp_path / "x.npz", samples)
    wanted = tnsim.similarity(*tnsim.load(files), tnsim.Gaussian.fit(samples))
    for name in ("x.npy", "x.npz"):
        assert told("similarity", *files, "--fit", tmp_path / name)["similarity"] == wanted
    said = "--fit takes mean and covariance from samples, which metric tree has not"
    refusal("similarity", *files, "--metric", "tree", "--fit", tmp_path / "x.npy", said=said)
    refusal("similarity", *files, "--fit", files[0], said="cannot be read as inputs")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_other_shells_write_standard_input_otherwise(encoding, tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{name}.safetensors" for name in ("\u00e9", "\x85x", "b c")]
    for name in names:
        tnsim.save(tnsim.Model([linear(rng, 2, 2)]), name)
    monkeypatch.setattr(sys, "stdin", piped("\r\n\r\n".join([*names, ""]).encode(encoding)))
    assert told("pairwise", "-", "--dry-run")["tiles"]["pairs"] == 6
    dialect = PRESETS["bilinear-readout"].to_json()
    np.savez(tmp_path / "m.npz", W_l=np.ones((4, 2)), W_r=np.ones((4, 2)), W_p=np.ones((3, 4)))
    monkeypatch.setattr(sys, "stdin", piped(dialect.encode(encoding)))
    assert "rank 4" in command("inspect", tmp_path / "m.npz", "--dialect", "-").stdout


def test_what_is_no_text_on_standard_input(tmp_path, rng, monkeypatch):
    """Names of files may be such; nothing else is."""
    name = os.fsencode(tmp_path) + b"/\xff.safetensors"
    try:
        tnsim.save(tnsim.Model([linear(rng, 2, 2)]), os.fsdecode(name))
    except tnsim.TnsimError:
        pytest.skip("this file system holds no such names")
    monkeypatch.setattr(sys, "stdin", piped(name))
    assert told("pairwise", "-", "--dry-run")["tiles"]["pairs"] == 1
    for data in (b"\xff\xfe\0", b"\xff{", b"", None):
        for arguments in (("pairwise", "-", "--dry-run"), ("inspect", name, "--dialect", "-")):
            monkeypatch.setattr(sys, "stdin", data if data is None else piped(data))
            refusal(*map(os.fsdecode, arguments))


@pytest.mark.slow
def test_a_platform_without_a_device_is_a_sentence(files):
    """From every verb that computes, and told by `info`."""
    verbs = ["similarity"], ["pairwise", "--dry-run"]
    asked = [[*verb, *map(str, files)] for verb in verbs] + [["info"]]
    code = f"""
import sys, jax
from tnsim.cli import app
for name in ("cuda", "nonsense"):
    jax.config.update("jax_platforms", name)
    for arguments in {asked}:
        sys.argv = ["tnsim", *arguments]
        try:
            app.main()
        except SystemExit as ended:
            print("ended", ended.code)
"""
    out, err = python(code)
    for name in ("cuda", "nonsense"):
        said = f"JAX finds no device of JAX_PLATFORMS={name}: "
        assert f"devices     {said}" in out
        assert err.count(f"tnsim: error: {said}") == 2
    assert len(err.splitlines()) == 4
    assert [line[6:] for line in out.splitlines() if line.startswith("ended")] == [*"220220"]


@pytest.mark.slow
def test_what_is_done_is_logged(files):
    code = "import logging, sys, tnsim; logging.basicConfig(level='DEBUG', format='%(name)s %(message)s');"
    code += "tnsim.load(sys.argv[1])"
    assert "tnsim.checkpoints.load read" in python(code, files[0])[1]


def test_blocks_of_transformers_by_path(tmp_path, rng):
    config = CONFIGS["gpt2 by layer"]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        written(folder, checkpoint(rng, config), config)
    names = [str(folder) for folder in folders]
    said = command("similarity", *names, "--layers", "h.1.mlp").stdout
    one, two = (tnsim.parts(name, "mlp")["layer 1 mlp"] for name in names)
    assert f"layer 1 mlp\nsimilarity  {tnsim.similarity(one, two):.12g}\n" in said
    states = tmp_path / "states.npy"
    np.save(states, rng.normal(size=(50, 12)) + 1.0)
    words = ("--layers", "h.*.mlp", "--fit", str(states), "--json")
    found = json.loads(command("similarity", *names, *words).stdout)["layers"]
    assert list(found) == ["layer 0 mlp", "layer 1 mlp"]
    one, two = (tnsim.parts(name, "mlp", norm="leave")["h.1.mlp"] for name in names)
    value = tnsim.similarity(one, two, tnsim.Gaussian.fit(np.load(states)))
    assert found["layer 1 mlp"]["similarity"] == value
    refusal("similarity", *names, "--layers", "h.7.mlp", said="no MLP block is called h.7.mlp")
    first = {name: one for name, one in checkpoint(rng, config).items() if ".h.1." not in name}
    short = written(tmp_path / "c", first, {**config, "n_layer": 1})
    said = f"{short}: there is no part 'layer 1 mlp'"
    refusal("similarity", names[0], short, "--layers", "*", said=said)
    for option in (("--leave-out", "*.bias"), ("--norm-inputs", states), ("--n-ctx", 4)):
        told = ("pairwise", *names, "--parts", "mlp", "--dry-run", *option)
        refusal(*told, said=f"({option[0]})")
    folder = ("similarity", names[0], tmp_path, "--layers", "h.1.mlp")
    refusal(*folder, said=f"{tmp_path}: stands for several checkpoints")
    refusal(
        "similarity", *names, "--layers", "h.1.mlp", "--check", 8, said="--check does not apply"
    )
