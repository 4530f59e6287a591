"""Ctrl-C ends in one line and the exit status of a shell, whatever is being imported."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import typer

import tnsim.__main__ as program
from tnsim.cli import app
from tnsim.cli.options import stoppable

INTERRUPTING = """
import os, signal, sys

# As at a terminal; a suite that runs in the background may have been told to ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
MODULES = ("typer", "tnsim.cli.options", "numpy", "jax", "jax._src.lib", "jaxlib.xla_client")


@pytest.mark.sampled(quick=1)
@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_while_something_is_imported(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    done = subprocess.run(
        [sys.executable, "-m", "tnsim", "info"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPTED_AT": module},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "tnsim: stopped by SIGINT\n"


@pytest.mark.sampled(quick=1)
@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_callback_is_not_lost(number, capsys):
    """Python drops what a callback of the collection of garbage raises, and JAX has such a callback."""

    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(number)

    with pytest.raises(typer.Exit) as stopped, stoppable("kept"):
        gc.callbacks.append(callback)
        gc.collect(0)
        for _ in range(1000):
            time.sleep(0.01)
    assert stopped.value.exit_code == 128 + number
    assert capsys.readouterr().err == f"tnsim: stopped by {number.name}: kept\n"


def test_an_interrupt_is_told_and_ends_without_a_crash(monkeypatch, capfd):
    """Threads of XLA that still compile crash a process that ends as others do."""

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            program._interrupted(signal.SIGINT, None)
        sys.exit(130)

    ended = []
    monkeypatch.setattr(app, "main", interrupted)
    monkeypatch.setattr(program, "prepare", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit):
        program.main()
    assert ended == [130] and capfd.readouterr().err == "tnsim: stopped by SIGINT\n"
