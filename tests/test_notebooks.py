"""Notebooks are py:percent sources, executed here from start to end."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

LONG = ("2-exact-deep-metrics", "3-attention")
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
    for path in sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path, tmp_path):
    notebook = jupytext.read(path)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) > 3
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
