"""What is installed: the wheel in a fresh environment runs the demo; an editable install is found from everywhere."""

import os
import shutil
import subprocess
import sys
import zipfile
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


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
WITHOUT_PATH = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone named as the package is, in which the demo has run."""
    folder = tmp_path_factory.mktemp("clones") / "tnsim"
    shutil.copytree(ROOT / "tnsim", folder / "tnsim")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "tnsim-demo").mkdir()
    (folder / "tnsim-demo" / "report.html").write_text("a page")
    return folder


def fresh_environment(folder):
    """Python and packages of an environment that has nothing but the dependencies of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file makes packages importable, but not what that folder's own .pth files name:
    # dependencies are found there, and the editable install of the checkout is not.
    folders = (path for path in sys.path if Path(path).name == "site-packages")
    (site / "dependencies.pth").write_text("\n".join(folders))
    return folder / "bin" / "python", site


@pytest.fixture(scope="module")
def wheel(clone):
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", clone.parent, clone)
    (wheel,) = clone.parent.glob("tnsim-*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    roots = {name.split("/")[0] for name in files}
    assert roots == {"tnsim", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    assert {"tnsim/py.typed", "tnsim/__init__.pyi", "tnsim/analysis/page/page.html"} <= files
    shipped = (path for path in (ROOT / "tnsim" / "data").rglob("*") if path.is_file())
    assert {str(path.relative_to(ROOT)) for path in shipped} <= files


@pytest.mark.slow
def test_the_wheel_runs_a_similarity_and_the_demo(wheel, tmp_path):
    python, site = fresh_environment(tmp_path / "venv")
    run(*PIP, "install", "--no-deps", "--target", site, wheel)
    where, value = run(python, "-c", SIMILARITY, cwd=tmp_path, env=WITHOUT_PATH).splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert value == "1.000000"
    run(python, "-m", "tnsim", "demo", cwd=tmp_path, env=WITHOUT_PATH)
    assert (tmp_path / "tnsim-demo" / "report.html").exists()
    assert list(tmp_path.glob("tnsim-demo/*.png"))


@pytest.mark.slow
def test_an_editable_install_is_found_beside_the_clone(clone, tmp_path):
    """There the clone itself is a folder of the package's name, which Python takes for a package
    where the install is not a path entry."""
    python, _ = fresh_environment(tmp_path / "venv")
    install = ("install", "--no-deps", "--no-build-isolation", "--editable", clone)
    run(*PIP, "--python", python, *install)
    asked = (python, "-c", "import tnsim; print(tnsim.Model, tnsim.__file__)")
    answer = run(*asked, cwd=clone.parent, env=WITHOUT_PATH)
    assert answer.split() == ["<class", "'tnsim.models.model.Model'>", f"{clone}/tnsim/__init__.py"]
