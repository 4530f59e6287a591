"""README's Python snippets run as they stand, one after the other; its files exist."""

import re
from pathlib import Path

import backends
import pytest

import tnsim

pytestmark = backends.compiled

ROOT = Path(__file__).parent.parent


def test_readme_snippets(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 8
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


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "benchmarks/README.md"])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link.partition("#")[0]).exists(), link
