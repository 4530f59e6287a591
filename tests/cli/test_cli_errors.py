"""When something is wrong the command line says so in one line and exits with status 2."""

import json
import sys

import corpus_files as files
import pytest
from commands import command, refusal

import tnsim
from tnsim.cli import app


def test_memory_that_runs_out_is_told(monkeypatch):
    def fails(**_):
        raise MemoryError("Unable to allocate 9 MiB")

    monkeypatch.setattr(app, "app", fails)
    refusal(said="memory ran out: Unable to allocate 9 MiB; give the process more")


def test_the_unforeseen_is_one_line(monkeypatch):
    def fails(**_):
        raise RuntimeError("of a kind\nthat nobody\x1b[2J foresaw")

    monkeypatch.setattr(app, "app", fails)
    done = command(check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "tnsim: error: unforeseen RuntimeError: of a kind that nobody\\x1b[2J foresaw "
        "(TNSIM_DEBUG=1 in the environment shows where)\n"
    )
    monkeypatch.setenv("TNSIM_DEBUG", "1")
    done = command(check=False)
    assert done.returncode == 2 and "Traceback" in done.stderr and "in fails" in done.stderr


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_without_arguments_the_whole_help_is_shown(group):
    done = command(*group, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == command(*group, "--help").stdout


def test_warnings_are_one_line(monkeypatch):
    def warns(**_):
        app.warnings.warn(
            "two checkpoints\x1b[2J\nare one", tnsim.errors.DuplicateWarning, stacklevel=1
        )

    monkeypatch.setattr(app, "app", warns)
    done = command()
    assert done.stderr == "tnsim: DuplicateWarning: two checkpoints\\x1b[2J are one\n"


def test_a_closed_stderr_is_no_error(tmp_path, monkeypatch):
    tnsim.save(tnsim.Model([tnsim.Linear([[1.0]])]), tmp_path / "a.safetensors")
    file = str(tmp_path / "a.safetensors")
    monkeypatch.setattr(sys, "argv", ["tnsim", "similarity", file, file])
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as ended:
        app.main()
    sys.stderr.close()  # what it was opened as in the meantime
    assert ended.value.code == 0


def test_a_folder_where_a_file_is_meant(tmp_path):
    for arguments in (("similarity", tmp_path, tmp_path), ("convert", tmp_path, "b.safetensors")):
        said = "a folder without a checkpoint (.safetensors, .npz, .pt, .pth, .ckpt); name a file"
        assert refusal(*arguments) == f"tnsim: error: {tmp_path}: is {said}\n"


def test_what_is_printed_of_a_file(tmp_path):
    (tmp_path / "a.npz").write_bytes(files.npz(files.readout()))
    rule = {"kind": "bilinear", "left": "W_l", "right": "W_r", "down": "W_p"}
    text = {"format": 1, "name": "\x1b[2J", "description": "n" * 10**5, "layers": [rule]}
    (tmp_path / "d.json").write_text(json.dumps(text))
    arguments = ("inspect", tmp_path / "a.npz", "--dialect", tmp_path / "d.json")
    done = command(*arguments)
    assert "\x1b" not in done.stdout and len(done.stdout) < 3000
    assert "assumed     dialect \\x1b[2J: nnn" in done.stdout
