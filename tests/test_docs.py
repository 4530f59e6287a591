"""Snippets of README and of all pages run as they stand; links lead somewhere; nothing is missing."""

import ast
import importlib
import inspect
import re
import runpy
import sys
import textwrap
import tomllib
from pathlib import Path

import backends
import pytest
from closeness import assert_close

import tnsim

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COPIED = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")  # by a build of the site
WRITTEN = [page for page in DOCS.rglob("*.md") if page.name not in COPIED]
PAGES = [page for page in WRITTEN if page.parent in (DOCS, DOCS / "how-to", DOCS / "api")]
PUBLIC = {*tnsim.__all__, "torch"}
SNIPPET = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)  # not `python no-run`


def names(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in sorted(pages)]


def snippets(page):
    return [textwrap.dedent(snippet) for snippet in SNIPPET.findall(page.read_text())]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder to write into that has the shipped checkpoints where a clone has them."""
    (tmp_path / "tnsim").mkdir()
    (tmp_path / "tnsim" / "data").symlink_to(ROOT / "tnsim" / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page):
    for package in ("torch", "optax"):
        if f"import {package}" in page.read_text():
            pytest.importorskip(package)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # tests share the cores
    space: dict = {}
    for snippet in snippets(page):
        exec(compile(snippet, page.name, "exec"), space)
    return space


@pytest.mark.slow
def test_training(clone):
    space = run(DOCS / "how-to" / "training.md")
    learned = tnsim.from_module(space["student"])
    assert tnsim.similarity(learned, space["goal"]) > 0.97
    assert tnsim.similarity(space["pupil"], space["goal"]) > 0.97
    apart = learned - space["goal"]
    assert tnsim.inner(apart, apart) < 0.1 * tnsim.inner(space["goal"], space["goal"])
    assert space["low"].grad.abs().max() > 0


@pytest.mark.slow
def test_non_polynomial_models(clone):
    space = run(DOCS / "how-to" / "non-polynomial-models.md")
    assert space["value"].standard_error > 0
    assert_close(float(space["run"].similarity[0, 1]), space["value"])


LOOKED_AT = ("training", "non-polynomial-models")
OTHERS = [page for page in PAGES if snippets(page) and page.stem not in LOOKED_AT]


def by_length(pages):
    """Pages as cases; how-tos are many, and among the slow tests."""
    for page in sorted(pages):
        marks = [pytest.mark.slow] if page.parent.name == "how-to" else []
        yield pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("page", by_length(OTHERS))
def test_snippets_run(page, clone):
    run(page)


@pytest.mark.slow
@backends.compiled
def test_readme_runs(clone):
    space = run(ROOT / "README.md")
    assert space["result"].sizes == {"a": 20, "b": 20}
    assert (clone / "run.png").exists()


def test_dialects_are_read():
    for page in PAGES:
        for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL):
            assert tnsim.Dialect.from_json(text).name == "mine"


@pytest.mark.parametrize("page", names([ROOT / "README.md", *PAGES]))
def test_shipped_files_exist(page):
    for name in re.findall(r"tnsim/data/[\w./-]+", page.read_text()):
        assert (ROOT / name).exists(), name


LINKED = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / n for n in COPIED),
    *PAGES,
]


@pytest.mark.parametrize("page", names(LINKED))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        assert (page.parent / link.partition("#")[0]).exists(), link


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))
    entries = re.findall(r"^\.\. auto(?:function|class|exception|module):: (\S+)", text, re.M)
    shown = [entry.rpartition(".")[2] for entry in entries]
    assert set(shown) >= PUBLIC and len(shown) == len(set(shown))
    for entry in entries:  # results, protocols and rules stand in their modules
        if entry.startswith("tnsim.") and entry.count(".") > 1:
            module, _, name = entry.rpartition(".")
            assert hasattr(importlib.import_module(module), name), entry


@pytest.mark.site
def test_the_built_reference_has_all_members():
    """Functions and properties of public classes, and functions of public modules."""
    from sphinx.util.inventory import InventoryFile

    built = (DOCS / "_build" / "html" / "objects.inv").read_bytes()
    kinds = InventoryFile.loads(built, uri="").data
    shown = {name for kind, entries in kinds.items() if kind.startswith("py:") for name in entries}
    for name in PUBLIC:
        thing = getattr(tnsim, name)
        home = f"tnsim.{name}"
        if inspect.ismodule(thing):
            home = thing.__name__
        assert home in shown
        for member in public_members(thing):
            assert f"{home}.{member}" in shown, f"{home}.{member} has no docstring"


def public_members(thing):
    """Functions and properties of a class, functions of a module that its `__all__` names."""
    listed = getattr(thing, "__all__", vars(thing))
    for name, member in vars(thing).items():
        if name not in listed:
            continue
        is_own = getattr(member, "__module__", None) == thing.__name__
        in_module = inspect.isfunction(member) and is_own and inspect.ismodule(thing)
        in_class = isinstance(member, property | classmethod) or inspect.isfunction(member)
        if not name.startswith("_") and (in_module or (inspect.isclass(thing) and in_class)):
            yield name


def test_the_licence_and_the_citation_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["authors"] == [{"name": "tnsim developers"}]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {tnsim.__version__}" in citation and "license: Apache-2.0" in citation


def architecture():
    return (ROOT / "ARCHITECTURE.md").read_text()


def pages_of_code():
    """ARCHITECTURE.md, and the pages to which it leads for more."""
    pages = DOCS / "mathematics-in-code.md", DOCS / "how-to" / "extend.md"
    return "\n".join([architecture(), *(page.read_text() for page in pages)])


def in_the_repository(name):
    """A path of ARCHITECTURE.md, which is below `tnsim/` or, of tests and pages, the repository."""
    return next((top / name for top in (ROOT / "tnsim", ROOT) if (top / name).exists()), None)


def test_pages_of_code_name_files_that_exist():
    """`folder/file.py` and `folder/`, and after a colon a name that stands in the file."""
    named = re.findall(r"`([\w/]+(?:\.py|/))(?:: (\w+))?`", pages_of_code())
    assert len(named) > 100
    for name, inside in named:
        path = in_the_repository(name)
        assert path is not None, name
        if inside:
            written = rf"^(?:(?:class|def) )?{inside}\b"
            assert re.search(written, path.read_text(), re.MULTILINE), f"{name}: {inside}"


@pytest.mark.slow
def test_argument_entries_name_arguments():
    """An entry of a docstring goes with its argument when that is renamed."""
    for path in (ROOT / "tnsim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                text = re.search(
                    r"^Args:\n((?: {4}.*\n?|\n)+)", ast.get_docstring(node) or "", re.M
                )
                entries = re.findall(r"^ {4}(\w[\w, *]*):", text[1] if text else "", re.M)
                entered = {name.strip(" *") for entry in entries for name in entry.split(",")}
                arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
                assert entered <= arguments, f"{path}: {node.name}"


def test_faults_of_earlier_versions_can_be_put_back():
    """`scripts/faults` replaces text that is in the code once, and runs tests that exist."""
    for name, fault in runpy.run_path(str(ROOT / "scripts" / "faults"))["FAULTS"].items():
        assert (ROOT / "tnsim" / fault.file).read_text().count(fault.right) == 1, name
        assert all((ROOT / test.split("::")[0]).exists() for test in fault.tests.split()), name


def test_architecture_has_every_folder():
    source = ROOT / "tnsim"
    folders = {path.parent.relative_to(source) for path in source.rglob("__init__.py")}
    table = re.findall(r"^\| `([\w/]+)/` \|", architecture(), re.MULTILINE)
    assert {Path(name) for name in table} <= folders
    assert {folder.parts[0] for folder in folders if folder.parts} <= set(table)
