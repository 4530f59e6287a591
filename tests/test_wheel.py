"""The built wheel, installed in a fresh environment outside the checkout, runs a similarity and the demo."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIMILARITY = """
import numpy as np, tnsim
model = tnsim.Model([tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2))])
print(tnsim.__file__)
print(f"{tnsim.similarity(model, 2.0 * model):.6f}")
"""


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory):
    """Python of an environment that has the wheel, and its dependencies from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = folder / "source"  # a build leaves files beside what it reads
    shutil.copytree(ROOT / "tnsim", source / "tnsim")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("tnsim-*.whl")
    run(*pip, "install", "--no-deps", "--target", site, wheel)
    # A path in a .pth file makes packages importable, but not what that folder's own .pth files name:
    # dependencies are found there, and the editable install of the checkout is not.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_runs_a_similarity_and_the_demo(fresh_python, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where, value = run(fresh_python, "-c", SIMILARITY, cwd=tmp_path, env=environment).splitlines()
    assert Path(where).is_relative_to(fresh_python.parent.parent)
    assert value == "1.000000"
    run(fresh_python, "-m", "tnsim", "demo", cwd=tmp_path, env=environment)
    assert (tmp_path / "tnsim-demo" / "report.html").exists()
    assert list(tmp_path.glob("tnsim-demo/*.png"))
