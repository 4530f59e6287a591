"""When something is wrong the command line says so in one line and exits with status 2."""

import json
import sys

import corpus_files as files
import pytest

import tnsim
from tnsim.cli import app


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["tnsim", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code, capsys.readouterr()


def test_the_unforeseen_is_one_line(monkeypatch, capsys):
    def fails(**_):
        raise RuntimeError("of a kind\nthat nobody\x1b[2J foresaw")

    monkeypatch.setattr(app, "app", fails)
    code, shown = command(monkeypatch, capsys)
    assert code == 2 and shown.out == ""
    assert shown.err == (
        "tnsim: error: unforeseen RuntimeError: of a kind that nobody\\x1b[2J foresaw "
        "(TNSIM_DEBUG=1 in the environment shows where)\n"
    )
    monkeypatch.setenv("TNSIM_DEBUG", "1")
    code, shown = command(monkeypatch, capsys)
    assert code == 2 and "Traceback" in shown.err and "in fails" in shown.err


def test_warnings_are_one_line(monkeypatch, capsys):
    def warns(**_):
        app.warnings.warn("two checkpoints\x1b[2J\nare one", tnsim.DuplicateWarning, stacklevel=1)

    monkeypatch.setattr(app, "app", warns)
    with app.warnings.catch_warnings():
        app.warnings.simplefilter("always")
        code, shown = command(monkeypatch, capsys)
    assert code == 0
    assert shown.err == "tnsim: DuplicateWarning: two checkpoints\\x1b[2J are one\n"


def test_a_folder_where_a_file_is_meant(monkeypatch, capsys, tmp_path):
    for arguments in (("similarity", tmp_path, tmp_path), ("convert", tmp_path, "b.safetensors")):
        code, shown = command(monkeypatch, capsys, *arguments)
        assert code == 2
        assert shown.err == f"tnsim: error: {tmp_path}: is a folder, not a checkpoint file\n"


def test_what_is_printed_of_a_file(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.npz").write_bytes(files.npz(files.readout()))
    rule = {"kind": "bilinear", "left": "W_l", "right": "W_r", "down": "W_p"}
    text = {"format": 1, "name": "\x1b[2J", "description": "n" * 10**5, "layers": [rule]}
    (tmp_path / "d.json").write_text(json.dumps(text))
    arguments = ("inspect", tmp_path / "a.npz", "--dialect", tmp_path / "d.json")
    code, shown = command(monkeypatch, capsys, *arguments)
    assert code == 0 and "\x1b" not in shown.out and len(shown.out) < 3000
    assert "assumed     dialect \\x1b[2J: nnn" in shown.out
