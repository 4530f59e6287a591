"""Ctrl-C ends in one line and the exit status of a shell, whatever is being imported."""

import os
import subprocess
import sys

import pytest

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
