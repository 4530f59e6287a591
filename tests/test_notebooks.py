"""Notebooks are py:percent sources, executed here from start to end; what they show is looked at."""

import ast
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
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 3
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    drawn = [cell for cell in cells if ends_in_a_figure(cell.source)]
    assert drawn and all("image/png" in formats_of(cell) for cell in drawn)
    assert any("text/html" in formats_of(cell) for cell in cells)


def ends_in_a_figure(source):
    """Whether the last line of a cell calls something of `figures` or `plots`."""
    last = ast.parse(source).body[-1]
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return False
    return ast.unparse(last.value.func).partition(".")[0] in ("figures", "plots")


def formats_of(cell):
    """The media types in which a cell shows something."""
    return {kind for output in cell.outputs for kind in output.get("data", {})}
