"""How the site is made: `sphinx-build -W docs docs/_build/html`.

Tutorials, theory and gallery are notebooks and run when they are read; the snippets of all other
pages run in tests/test_docs.py. Pages that live elsewhere in the repository are copied here under
their own paths.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

import jupytext
from sphinx.application import Sphinx

import tnsim

HERE = Path(__file__).parent
ELSEWHERE = (  # .gitignore lists the copies
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.png",
    "notebooks/*.py",
)
DOWNLOADS = "notebooks/ipynb"
"""Tutorials as notebooks without outputs, made of the scripts; .gitignore lists the folder."""
MATHJAX = ("es5/tex-chtml.js", "es5/output/chtml/fonts/woff-v2")
"""What a page with formulas loads of MathJax, copied from its package; git ignores the copy."""
PAPER = "https://arxiv.org/abs/2605.15183"
os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of notebooks

project = "tnsim"
author = "tnsim developers"
copyright = author
version = release = tnsim.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
suppress_warnings = ["toc.no_title"]  # tables of benchmarks, which are linked where they are told
exclude_patterns = ["_build", "*.py", f"{DOWNLOADS}/*"]

html_theme = "furo"
html_title = f"tnsim {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = ">>> "
mathjax_path = "mathjax/es5/tex-chtml.js"  # with the site, so that it needs no network

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True

default_role = "code"  # docstrings are read in editors too, so they mark code as Markdown does
add_module_names = False
autodoc_type_aliases = {"DTypeLike": "DTypeLike"}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_custom_sections = [("Source", "notes_style")]
napoleon_use_rtype = False
napoleon_use_ivar = True


def setup(app: Sphinx) -> None:
    app.connect("config-inited", _copy_pages)
    app.connect("config-inited", _copy_mathjax)
    app.connect("source-read", _link_copies)
    app.connect("source-read", _link_notebook)
    app.connect("autodoc-process-docstring", _link_names)


def _copy_pages(app: Sphinx, config: object) -> None:
    for pattern in ELSEWHERE:
        for page in HERE.parent.glob(pattern):
            copy = HERE / page.relative_to(HERE.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(page, copy)  # with its time, so that what did not change is not run again
    (HERE / DOWNLOADS).mkdir(exist_ok=True)
    for script in (HERE / "notebooks").glob("*.py"):
        notebook = jupytext.read(script, fmt="py:percent")
        jupytext.write(notebook, HERE / DOWNLOADS / f"{script.stem}.ipynb")


def _copy_mathjax(app: Sphinx, config: object) -> None:
    package = Path(str(files("mathjax"))) / "static" / "mathjax"
    for name in MATHJAX:
        source, copy = package / name, HERE / "_static" / "mathjax" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copy2(source, copy)


def _link_copies(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link that leaves this folder, as it must on a page of the repository, goes to the copy."""
    out_of_docs = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({out_of_docs}", "](/")
    if f"{docname}.md" in ELSEWHERE:  # and a link from the root into this folder to its page
        source[0] = source[0].replace("](docs/", "](/")


def _link_notebook(app: Sphinx, docname: str, source: list[str]) -> None:
    """Below its title, a tutorial links to itself as a notebook."""
    folder, _, name = docname.rpartition("/")
    if folder == "notebooks":
        link = f"# {{download}}`Download as a Jupyter notebook <ipynb/{name}.ipynb>`"
        source[0] = re.sub(r"^# # .*$", rf"\g<0>\n#\n{link}", source[0], count=1, flags=re.M)


def _link_names(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """`Model` in a docstring becomes a link where it is a public name, and so does the paper."""
    for number, line in enumerate(lines):
        linked = re.sub(r"(?<![`:])`(\w+)`(?!`)", _linked, line)
        lines[number] = re.sub(r"^Paper,", f"`Paper <{PAPER}>`__,", linked)


def _linked(match: re.Match[str]) -> str:
    name = match[1]
    if name in tnsim.__all__:
        return f":py:obj:`{name} <tnsim.{name}>`"
    return match[0]
