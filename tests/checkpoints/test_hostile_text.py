"""Configurations and dialects of wrong types, without end, or no text at all are refused."""

import json

import corpus_files as files
import numpy as np
import pytest
from refusals import not_read, refused

import tnsim
from tnsim import Dialect
from tnsim.checkpoints.rules import LinearRule, rule_of


def attention(folder, name, text):
    (folder / "a.npz").write_bytes(files.npz(files.attention()))
    (folder / name).write_bytes(text)
    return folder / "a.npz"


@pytest.mark.parametrize(
    "text, error, message",
    [
        (
            "null",
            tnsim.CheckpointError,
            "config.json beside it must hold names and values, found N",
        ),
        (
            "[1]",
            tnsim.CheckpointError,
            "config.json beside it must hold names and values, found list",
        ),
        (
            "[" * 10**5,
            tnsim.CheckpointError,
            "config.json beside it is not JSON: it is nested too d",
        ),
        (" " * 2**21, tnsim.CheckpointError, "config.json is longer than 1,048,576 bytes"),
        ("\xff", tnsim.CheckpointError, "config.json beside it is not JSON: 'utf-8' codec"),
        (
            {"attn_scale": None},
            tnsim.ModelError,
            "residual scale must be a finite number, found None",
        ),
        (
            {"attn_scale": [1]},
            tnsim.ModelError,
            r"residual scale must be a finite number, found \[1\]",
        ),
        (
            {"attn_scale": 10**400},
            tnsim.ModelError,
            "residual scale must be a finite number, found 1",
        ),
        ({"rope_base": "x"}, tnsim.ModelError, "RoPE base must be a finite number, found 'x'"),
    ],
)
def test_configurations_in_json(text, error, message, tmp_path):
    if isinstance(text, dict):
        text = json.dumps({"model": files.CONFIG["model"] | text})
    path = attention(tmp_path, "config.json", text.encode("latin-1"))
    not_read(path, message, error, dialect="quadratic-attention")


def test_no_rope_in_the_configuration(tmp_path):
    text = json.dumps({"model": files.CONFIG["model"] | {"rope_base": None}})
    path = attention(tmp_path, "config.json", text.encode())
    assert tnsim.load(path, "quadratic-attention").layers[1].layer.rope_base is None


@pytest.mark.parametrize(
    "base, error, message",
    [
        ("2020-01-01", tnsim.ModelError, "RoPE base must be a finite number, found datetime.date"),
        ("[" * 50_000, tnsim.CheckpointError, "config.yaml beside it is nested deeper than 64"),
        ("&a [*a]", tnsim.CheckpointError, r"config.yaml beside it refers to itself by \*a"),
        ("#" * 2**18, tnsim.CheckpointError, "config.yaml is longer than 131,072 bytes"),
        ("}", tnsim.CheckpointError, "config.yaml beside it is not YAML"),
    ],
)
def test_configurations_in_yaml(base, error, message, tmp_path):
    pytest.importorskip("yaml")
    text = f"model:\n  n_head: 2\n  attn_scale: 0.5\n  rope_base: {base}"
    path = attention(tmp_path, "config.yaml", text.encode())
    not_read(path, message, error, dialect="quadratic-attention")


def test_numbers_kept_in_tensors(tmp_path):
    rule = LinearRule(weight="w", norm_energy="e")
    for energy, message in {
        (1.0, 2.0): r"tensor 'e' must hold one number, found shape \(2,\)",
        (-1.0,): "e must be above 0, found -1.0",
        (np.nan,): "e must be above 0, found nan",
    }.items():
        np.savez(tmp_path / "a.npz", w=np.ones((2, 2)), e=np.array(energy))
        dialect = Dialect("d", (rule,))
        not_read(tmp_path / "a.npz", message, tnsim.ModelError, dialect=dialect)


LINEAR = {"kind": "linear", "weight": "w"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"repeat": True}, "repeats 'w', which is the same key each time; put {i} where"),
        ({"weight": 5}, r"layer rule 0: weight must be str \| None, found 5"),
        ({"weight": "w?"}, r"weight 'w\?' may not be absent, remove the \?"),
        ({"norm_epsilon": True}, "norm_epsilon must be float, found True"),
        ({"scale": None}, r"scale must be float \| str, found None"),
        ({"scale": 10**400}, r"scale must be float \| str, found 1000"),
        ({"repeat": "yes"}, "repeat must be bool, found 'yes'"),
        ({"mask": "none"}, r"unknown fields \['mask'\]; a linear rule has \['bias', 'norm', "),
        ({"kind": "linear"}, "a linear rule names weight"),
        ({"kind": "softmax"}, "kind 'softmax' is no layer that can be read"),
        (
            {"kind": "bilinear", "fused": "a", "residual": "gated"},
            "residual 'gated' is unknown, use",
        ),
        ({"kind": "elementwise"}, "a elementwise rule names activation"),
        ({"kind": "elementwise", "activation": "rleu"}, "no activation is called 'rleu'"),
        ({"kind": "gated", "gate": "w", "down": "o"}, "a gated rule names gate, down, activation"),
    ],
)
def test_rules_that_say_what_they_cannot(change, message):
    rule = change if "kind" in change else LINEAR | change
    text = json.dumps({"format": 1, "name": "x", "layers": [rule]})
    errors = tnsim.CheckpointError, tnsim.UnsupportedLayer
    with refused(message, errors):
        Dialect.from_json(text)
    with refused(message, errors):
        Dialect("x", (rule_of(rule, "rule 0"),))


def test_marks_of_encodings_and_line_ends_of_windows(tmp_path):
    """As Notepad and PowerShell write them."""
    text = '{"format": 1, "name": "x",\r\n "layers": [{"kind": "linear", "weight": "w"}]}\r\n'
    path = tmp_path / "d.json"
    path.write_bytes(text.encode("utf-8-sig"))
    assert tnsim.from_state_dict({"w": np.eye(2)}, path).d_in == 2
    text = json.dumps({"model": files.CONFIG["model"]}, indent=1).replace("\n", "\r\n")
    path = attention(tmp_path, "config.json", text.encode("utf-8-sig"))
    assert tnsim.load(path, "quadratic-attention").layers[1].layer.n_heads


def test_dialects_that_are_none(tmp_path):
    path = tmp_path / "d.json"
    for text, message in {
        b"\xff": "'utf-8' codec",
        b"[" * 10**5: "not a dialect: it is nested too deeply",
        b" " * 2**21: "d.json is longer than 1,048,576 bytes, and is not read",
        b"[]": "not a dialect",
        b'{"format": 1, "name": "x", "layers": []}': "dialect x has no layer rules",
        b'{"format": 1, "name": "x", "layers": [1]}': "layer rule 0 must be an object, found 1",
        b'{"format": 1, "name": 1, "layers": []}': "the name of a dialect must be text",
        b'{"format": 1, "name": "x", "layers": [], "nested": "a"}': "nested must list keys, found",
    }.items():
        path.write_bytes(text)
        with refused(message, tnsim.CheckpointError) as caught:
            tnsim.from_state_dict({}, path)
        assert str(caught.value).startswith(str(path))


def test_settings_of_attention_out_of_range():
    ones = [np.ones((2, 2))] * 6
    for base in (10**400, float("inf"), "x"):
        with refused("Attention rope_base"):
            tnsim.Attention(*ones, n_heads=1, rope_base=base)
