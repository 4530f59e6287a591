"""A pipe, a folder or something damaged where a file is meant: one sentence, and nobody waits."""

import json
import os
import signal

import corpus_files as files
import numpy as np
import pytest
from commands import command, refusal
from refusals import refused

import tnsim
from tnsim.checkpoints.formats import INDEX

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes as POSIX has them")


PAIR = ("similarity", "a.npz", "b.npz", "--dialect", "bilinear-readout")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(files.npz(files.readout()))
    return tmp_path


def test_pipes_are_not_waited_for(folder):
    for name in (INDEX, "d.json", "x.npy", "x.npz", "c.safetensors"):
        os.mkfifo(folder / name)
    refusal("inspect", INDEX, said="is no regular file")
    refusal("inspect", "c.safetensors", said="is no regular file")
    refusal("inspect", "a.npz", "--dialect", "d.json", said="d.json")
    for option in ("--norm-inputs", "--fit"):
        for name in ("x.npy", "x.npz"):
            refusal(*PAIR, option, name, said=f"{name}: ")


def test_names_of_files_are_no_lines_of_the_answer(folder):
    (folder / "b.npz").rename("b\nsimilarity  1.npz")
    runs = ("paths",), ("paths", "--legs"), ("pairwise", "--out", "out\nsimilarity")
    for order in runs:
        done = command(*order, ".", "--dialect", "bilinear-readout")
        assert "b\\nsimilarity  1" in done.stdout and "\nsimilarity" not in done.stdout
    assert "\n" not in f"{tnsim.load('.')}"
    refusal("change", "absent", "--dialect", "bilinear-readout", said="absent: no such file")


def zipped(**changes):
    members = [files.Member("x.npy", files.npy(np.ones((4, 2))))]
    return files.archive([members[0]._replace(**changes)])


SAMPLES = {
    "damaged": zipped(checksum=1),
    "encrypted": zipped(flags=1),
    "compressed otherwise": zipped(method=99),
    "truncated": zipped()[:-30],
    "no array": zipped(data=b"text"),
    "empty": b"",
}


@pytest.mark.parametrize("option", ["--fit", "--norm-inputs"])
@pytest.mark.parametrize("damage", [*SAMPLES, "objects"])
def test_samples_that_cannot_be_read(damage, option, folder):
    if damage == "objects":
        np.savez(folder / "x.npz", x=np.array([{"a": 1}, None], dtype=object))
        np.save(folder / "x.npy", np.array([{"a": 1}, None], dtype=object))
        refusal(*PAIR, option, "x.npy", said="x.npy: cannot be read as")
    else:
        (folder / "x.npz").write_bytes(SAMPLES[damage])
    refusal(*PAIR, option, "x.npz", said="x.npz: ")


def test_numbers_that_are_none(folder):
    for option in ("--width", "--rank", "--repeats", "--max-depth"):
        refusal("bench", "depth", option, "-1", said=option)


def test_patterns_of_a_dialect_have_a_limit_and_names_have_none(folder):
    extra = files.readout() | {f"step_{n}": np.ones(1) for n in range(50)}
    (folder / "a.npz").write_bytes(files.npz(extra))
    names = [f"other_{n}" for n in range(20_000)]
    (folder / "d.json").write_text(json.dumps(files.DIALECT | {"ignore": [*names, "step_*"]}))
    assert tnsim.load("a.npz", "d.json").d_in == 2
    patterns = [f"{name}*" for name in names]
    (folder / "d.json").write_text(json.dumps(files.DIALECT | {"ignore": patterns}))
    refusal("inspect", "a.npz", "--dialect", "d.json", said="20,000 patterns of keys")


class TooSlow(BaseException):
    """Not an `Exception`, so that nobody swallows it."""


@pytest.fixture
def processor_limit():
    """A minute of the processor, which other work on the machine does not shorten."""

    def give_up(*_):
        raise TooSlow

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [tnsim.Gaussian(), tnsim.TreeSymmetric()])
def test_a_plan_does_not_take_longer_for_longer_sequences(metric, processor_limit):
    args = (files.attention(), "quadratic-attention", 2 * 10**9, files.CONFIG)
    assert tnsim.plan(tnsim.from_state_dict(*args), tnsim.from_state_dict(*args), metric)


def test_all_sequences_of_any_length_are_refused():
    args = (files.attention(), "quadratic-attention", 2 * 10**9, files.CONFIG)
    model = tnsim.from_state_dict(*args)
    for verb in (tnsim.plan, tnsim.similarity):
        with refused(r"2,000,000,000 tokens out of 4 cannot be counted", tnsim.TooLarge):
            verb(model, model, tnsim.Categorical())
