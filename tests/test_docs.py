"""README's Python snippets run as they stand, one after the other; its files exist."""

import re
import textwrap
import tomllib
from pathlib import Path

import backends
import pytest

import tnsim

pytestmark = backends.compiled

ROOT = Path(__file__).parent.parent


def test_readme_snippets(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 9
    space: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), space)
    assert "gaussian True" in capsys.readouterr().out


def test_readme_dialect():
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tnsim.Dialect.from_json(text).name == "mine"


def test_readme_commands_name_shipped_files():
    named = re.findall(r"tnsim/data/[\w./-]+", (ROOT / "README.md").read_text())
    assert len(named) >= 4
    assert all((ROOT / name).exists() for name in named)


def test_the_road_from_pytorch(monkeypatch, tmp_path):
    """The page's snippets run one after the other, beside a run of the network they define."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "from-pytorch.md").read_text()
    network, matrix = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict = {}
    exec(compile(network, "from-pytorch.md", "exec"), space)
    (tmp_path / "run").mkdir()
    for step in range(3):
        torch.save(space["Net"]().state_dict(), tmp_path / "run" / f"step_{step}.pt")
    exec(compile(matrix, "from-pytorch.md", "exec"), space)
    assert space["result"].sizes == {"a": 3, "b": 3}
    assert (tmp_path / "run.png").exists()


def run_page(name, folder, monkeypatch):
    """Run a page's snippets one after the other; what they leave behind."""
    monkeypatch.chdir(folder)
    page = (ROOT / "docs" / "how-to" / name).read_text()
    space: dict = {}
    for snippet in re.findall(r"^ *```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE):
        exec(compile(textwrap.dedent(snippet), name, "exec"), space)
    return space


def test_training(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("optax")
    space = run_page("training.md", tmp_path, monkeypatch)
    learned = tnsim.from_module(space["student"])
    assert tnsim.similarity(learned, space["goal"]) > 0.97
    assert tnsim.similarity(space["pupil"], space["goal"]) > 0.97
    apart = learned - space["goal"]
    assert tnsim.inner(apart, apart) < 0.1 * tnsim.inner(space["goal"], space["goal"])
    assert space["low"].grad.abs().max() > 0


def test_non_polynomial_models(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    space = run_page("non-polynomial-models.md", tmp_path, monkeypatch)
    assert space["value"].standard_error > 0
    assert float(space["run"].similarity[0, 1]) == pytest.approx(space["value"])


def test_the_licence_and_the_citation_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["authors"] == [
        {"name": "tnsim developers"}
    ]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {tnsim.__version__}" in citation and "license: Apache-2.0" in citation


PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/from-pytorch.md", "docs/how-to/training.md", "docs/how-to/non-polynomial-models.md", "benchmarks/README.md"]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link.partition("#")[0]).exists(), link
