"""The picture of the rooms, read off the imports: arrows point one way, foreign libraries stay in their rooms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tnsim

ROOMS = {  # module: what it may import from tnsim; nothing points back
    "errors": [],
    "names": [],
    "diagrams": ["names"],
    "orbits": [],
    "problem": [],
    "canonical": [],
    "results": [],
    "layers": ["errors"],
    "local": ["layers", "names"],
    "model": ["errors", "layers"],
    "positional": ["layers", "local", "names"],
    "dialects": ["errors", "layers"],
    "presets": ["dialects"],
    "states": ["dialects", "errors", "layers", "model", "presets"],
    "checkpoints": ["dialects", "errors", "layers", "model", "presets", "states"],
    "metrics": ["diagrams", "errors", "layers"],
    "folding": ["diagrams", "errors", "local", "metrics", "names", "problem"],
    "wick": ["names", "problem"],
    "legs": ["folding", "names", "positional", "problem", "wick"],
    "places": [],
    "frames": ["legs", "names", "places", "positional", "problem", "wick"],
    "steps": ["folding", "frames", "legs", "metrics", "names", "positional", "problem", "wick"],
    "sequences": ["errors", "folding", "legs", "metrics", "names", "places", "positional", "problem", "steps"],
    "tokens": ["errors", "folding", "layers", "legs", "local", "model", "names", "positional", "problem"],
    "deep": ["errors", "folding", "layers", "local", "metrics", "model", "names", "orbits", "problem"],
    "nodes": ["layers", "local", "names", "positional"],
    "flattening": ["errors", "layers", "local", "names", "nodes"],
    "unrolled": ["errors", "model", "names", "nodes"],
    "closing": [
        "deep",
        "diagrams",
        "errors",
        "flattening",
        "folding",
        "local",
        "metrics",
        "model",
        "names",
        "orbits",
        "positional",
        "unrolled",
    ],
    "plans": ["errors"],
    "paths": [],
    "expressions": ["canonical", "paths", "plans"],
    "assembly": ["canonical", "expressions", "paths", "plans", "problem"],
    "planning": ["assembly", "paths", "plans", "problem"],
    "execution": ["errors", "plans"],
    "structure": [
        "deep",
        "errors",
        "execution",
        "flattening",
        "folding",
        "legs",
        "local",
        "metrics",
        "model",
        "names",
        "places",
        "planning",
        "plans",
        "positional",
        "sequences",
        "tokens",
    ],
    "verbs": ["deep", "errors", "execution", "folding", "metrics", "model", "plans", "results", "structure"],
    "attributing": [
        "errors",
        "execution",
        "layers",
        "legs",
        "metrics",
        "model",
        "names",
        "planning",
        "sequences",
        "steps",
        "structure",
        "tokens",
    ],
    "identity": ["metrics"],
    "products": [],
    "placement": [],
    "features": ["execution", "local", "metrics", "model", "names", "placement", "positional", "products", "structure"],
    "recursion": ["deep", "execution", "folding", "local", "metrics", "model", "names", "placement", "plans", "products", "structure"],
    "sources": ["checkpoints", "dialects", "errors", "identity", "local", "model", "structure"],
    "tiles": ["errors", "features", "model", "products", "recursion", "sources"],
    "costs": ["execution", "features", "local", "model", "paths", "recursion", "sources", "structure"],
    "stores": ["errors"],
    "executors": ["errors"],
    "checking": ["errors", "metrics", "structure", "verbs"],
    "bench": ["closing", "errors", "execution", "layers", "metrics", "model", "verbs"],
    "plots": ["errors", "names"],
    "labelled": ["errors"],
    "baselines": ["errors", "labelled", "model"],
    "reading": ["errors", "labelled"],
    "figures": ["errors", "labelled", "plots", "reading"],
    "report": ["errors", "labelled", "reading"],
    "pairs": ["errors", "figures"],
    "runs": [
        "",
        "costs",
        "errors",
        "executors",
        "features",
        "identity",
        "local",
        "metrics",
        "model",
        "pairs",
        "products",
        "recursion",
        "sources",
        "stores",
        "structure",
        "tiles",
        "verbs",
    ],
    "exports": ["errors", "pairs"],
    "hub": ["checkpoints", "errors"],
    "cli_options": [""],
    "cli_pairwise": ["", "cli_options", "errors", "exports", "hub", "report"],
    "cli": [
        "",
        "baselines",
        "bench",
        "checkpoints",
        "cli_options",
        "cli_pairwise",
        "errors",
        "exports",
        "model",
        "plots",
        "reading",
        "report",
    ],
    "__main__": ["cli"],
    "__init__": [],
}
CONFINED = {
    "quimb": {"unrolled", "closing", "plots"},  # plots: the name of a type only
    "cotengra": {"paths"},
    "matplotlib": {"figures", "plots"},
    "torch": {"checkpoints"},
    "safetensors": {"checkpoints"},
    "scipy": {"figures", "reading"},
    "xarray": {"pairs", "baselines", "figures", "labelled", "reading", "report"},
    "zarr": {"stores"},
    "distributed": {"cli_pairwise"},
    "pyarrow": {"exports"},
    "typer": {"cli", "cli_options", "cli_pairwise"},
}
SOURCE = Path(tnsim.__file__).parent


def imports(module):
    """(tnsim modules, foreign packages) imported anywhere in a module, functions included."""
    own, foreign = set(), set()
    for node in ast.walk(ast.parse((SOURCE / f"{module}.py").read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"tnsim.{alias.name}" for alias in node.names] if node.module == "tnsim" else [node.module]
        for name in names:
            head, _, rest = name.partition(".")
            (own if head == "tnsim" else foreign).add(rest.partition(".")[0] if head == "tnsim" else head)
    return own, foreign


def test_every_module_has_a_room():
    assert {p.stem for p in SOURCE.glob("*.py")} == set(ROOMS)


@pytest.mark.parametrize("module", ROOMS)
def test_arrows_point_one_way(module):
    own, _ = imports(module)
    assert own == set(ROOMS[module])
    earlier = list(ROOMS)[: list(ROOMS).index(module)]
    assert own - {""} <= set(earlier)


@pytest.mark.parametrize("package", CONFINED)
def test_foreign_libraries_stay_in_their_rooms(package):
    assert {m for m in ROOMS if package in imports(m)[1]} == CONFINED[package]


def test_every_room_says_what_comes_in_and_goes_out():
    for module in set(ROOMS) - {"__init__", "__main__"}:
        doc = ast.get_docstring(ast.parse((SOURCE / f"{module}.py").read_text()))
        assert " In: " in doc and " Out: " in doc, module


def test_public_names():
    for name in tnsim.__all__:
        assert getattr(tnsim, name) is not None
        assert getattr(tnsim, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        tnsim.nope  # noqa: B018


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_is_light_and_a_similarity_needs_no_quimb_or_torch():
    assert run("import sys, tnsim; print(*(m for m in ('jax', 'numpy', 'quimb', 'cotengra') if m in sys.modules))") == []
    code = "import sys, numpy as np, tnsim; m = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)]); tnsim.similarity(m, 2.0 * m)"
    assert run(code + "; print(*(m for m in ('quimb', 'torch', 'matplotlib') if m in sys.modules))") == []
