"""Notebooks run when the site is built; what they show is looked at here (`pytest -m site`)."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = ROOT / "docs" / "_build" / "jupyter_execute"
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
PAGES = ("gallery", "theory")
FIGURE = re.compile(r"<\w+ size \d+x\d+ with \d+ Axes>")  # as matplotlib writes it

pytestmark = pytest.mark.site


@pytest.mark.parametrize("name", [*(f"notebooks/{source.stem}" for source in SOURCES), *PAGES])
def test_every_figure_is_a_picture(name):
    cells = json.loads((RUN / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3 and all(cell["execution_count"] for cell in code)
    shown = [output["data"] for cell in code for output in cell["outputs"] if "data" in output]
    figures = [data for data in shown if FIGURE.search("".join(data.get("text/plain", "")))]
    assert figures and all("image/png" in data for data in figures)
    assert name in PAGES or any("text/html" in data for data in shown)


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_every_tutorial_is_linked_as_a_notebook(source):
    """The link below the title leads to a notebook with the cells of the script."""
    built = RUN.parent
    page = (built / "html" / "notebooks" / f"{source.stem}.html").read_text()
    (link,) = re.findall(r'href="\.\./(_downloads/[^"]+\.ipynb)"', page)
    cells = json.loads((built / "html" / link).read_text())["cells"]
    assert len(cells) == len(re.findall(r"^# %%", source.read_text(), re.M))
