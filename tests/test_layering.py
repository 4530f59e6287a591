"""The picture of the folders, read off the imports: arrows point one way, libraries stay put."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from processes import python

import tnsim

FOLDERS = {  # folder (or file of the root): the folders that it imports; nothing points back
    "errors": "",
    "files": "",
    "long_work": "",
    "names": "",
    "options": "errors",
    "scaled": "",
    "sessions": "errors options",
    "tables": "",
    "engine": "errors files options scaled sessions tables",
    "activations": "errors options scaled",
    "models": "activations errors options scaled sessions tables",
    "checkpoints": "activations errors files models options sessions tables",
    "analysis": "checkpoints engine errors files models names options tables",
    "metrics": "errors models names options scaled sessions",
    "problems": "activations engine errors long_work metrics models names scaled sessions",
    "compare": "activations checkpoints engine errors long_work metrics models names options problems scaled sessions tables",
    "circuits": "activations checkpoints errors models options tables",
    "all_pairs": "analysis checkpoints circuits compare engine errors files long_work metrics models names options problems scaled sessions tables tnsim",
    "localise": "all_pairs checkpoints compare engine errors metrics models options problems scaled tables",
    "tensor_networks": "engine errors metrics models names options problems scaled sessions",
    "torch": "analysis checkpoints compare engine errors localise metrics models options problems scaled sessions",
    "cli": "all_pairs analysis checkpoints circuits compare engine errors files localise metrics models tables tensor_networks tnsim",
    "__main__": "cli",
    "__init__": "activations all_pairs analysis checkpoints circuits compare engine errors localise metrics models sessions tensor_networks torch",
}
PHASES = (  # of the engine, in order: a phase imports earlier phases only
    ("ir",),
    ("costs", "disk_cache"),
    ("plan", "precision"),
    ("hoisting", "search"),
    ("runtime",),
    ("planner",),
)
CONFINED = {  # foreign package: the files that import it
    "quimb": "analysis/figures tensor_networks/contraction tensor_networks/quimb_networks",
    "cotengra": "engine/plan engine/search/paths",
    "matplotlib": "all_pairs/result analysis/axes analysis/figures torch/monitor",
    "torch": (
        "checkpoints/formats checkpoints/graphs checkpoints/module_calls "
        "localise/switched_weights models/functions torch/__init__ torch/autograd"
    ),
    "safetensors": "checkpoints/formats checkpoints/native metrics/finite_measures",
    "scipy": (
        "activations/activation activations/normal all_pairs/heads analysis/axes "
        "analysis/reading checkpoints/entrywise metrics/input_moments metrics/metric "
        "models/arrays"
    ),
    "xarray": (
        "all_pairs/heads all_pairs/result all_pairs/run analysis/baselines "
        "analysis/figures analysis/hidden_states analysis/matrices analysis/reading "
        "analysis/report localise/change localise/differences torch/monitor"
    ),
    "distributed": "cli/pairwise",
    "pyarrow": "all_pairs/result",
    "typer": "cli/app cli/commands cli/localise cli/options cli/pairwise",
}
SOURCE = Path(tnsim.__file__).parent
STUB = SOURCE / "__init__.pyi"  # the imports of `__init__.py`, which are made on first use
FILES = [*SOURCE.rglob("*.py"), STUB]


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imported(path):
    """Dotted names imported anywhere in a file, functions included."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = "tnsim." if node.level else ""
            whole = f"{inside}{node.module or ''}".rstrip(".")
            names |= {f"{whole}.{alias.name}" for alias in node.names}
    return names


def module_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path): path for path in SOURCE.rglob("*.py")}


def modules_imported(path):
    """Modules of tnsim that a file imports, whole or a name of them."""
    found = set()
    for name in imported(path):
        while name and name not in MODULES and name != "tnsim":
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found


def folder_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def folders_imported_by(folder):
    names = set()
    for path in FILES:
        if folder_of(path) == folder:
            names |= modules_imported(path)
    return {(*name.split("."), "tnsim")[1] for name in names} - {folder}


def circle(arrows):
    """Nodes that lead back to themselves: what is left when ends are taken away one by one."""
    left = {node: set(ends) for node, ends in arrows.items()}
    while ends := [node for node, reached in left.items() if not reached & set(left)]:
        for node in ends:
            del left[node]
    return sorted(left)


def test_every_file_is_in_a_folder_of_the_picture():
    assert {folder_of(p) for p in SOURCE.rglob("*.py")} == set(FOLDERS)


def test_every_source_is_text():
    """Half of a surrogate pair in a docstring stops the import under Python 3.13 and later."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value.encode()


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_point_one_way(folder):
    reached = folders_imported_by(folder)
    assert reached == set(FOLDERS[folder].split())
    below = list(FOLDERS)[: list(FOLDERS).index(folder)]
    assert reached - {"tnsim"} <= set(below)


def test_no_module_leads_back_to_itself():
    """Imports inside functions and of types count: nothing hides a circle."""
    arrows = {
        m: modules_imported(path) - {m} for m, path in MODULES.items() if m != "tnsim.__init__"
    }
    assert circle(arrows) == []


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def phase_of(module):
    (number,) = [n for n, names in enumerate(PHASES) if module.split(".")[2] in names]
    return number


def test_the_engine_is_a_row_of_phases():
    engine = {m for m in MODULES if m.startswith("tnsim.engine.")}
    assert {m.split(".")[2] for m in engine} == {name for names in PHASES for name in names}
    for module in engine:
        for reached in modules_imported(MODULES[module]) & engine:
            own = reached.split(".")[2] == module.split(".")[2]
            assert own or phase_of(reached) < phase_of(module), (module, reached)


def test_the_intermediate_representation_imports_nothing_of_the_engine():
    for path in (SOURCE / "engine" / "ir").rglob("*.py"):
        for name in modules_imported(path):
            assert name.startswith("tnsim.engine.ir.") or name in ("tnsim.errors", "tnsim.tables")


@pytest.mark.parametrize("package", CONFINED)
def test_foreign_libraries_stay_in_their_rooms(package):
    users = set()
    for path in SOURCE.rglob("*.py"):
        if package in {name.partition(".")[0] for name in imported(path)}:
            users.add(str(path.relative_to(SOURCE).with_suffix("")))
    assert users == set(CONFINED[package].split())


LAYER_CLASSES = {"Linear", "Bilinear", "Multilinear", "Attention", "Elementwise", "Gated"}
LAYERS_ARE_TOLD_APART_IN = ("models/", "problems/layer_", "checkpoints/", "circuits/")
NAME_LAYERS = {
    "cli/bench",  # makes the random models that it times
    "compare/surrogate",  # makes polynomial layers of layers with an activation
    "problems/units",
    "problems/tokens",
}


def layer_classes_named(path):
    """Layer classes that a file imports from tnsim, or writes as a string to compare with."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tnsim.models"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & LAYER_CLASSES


def test_layers_are_told_apart_in_few_folders():
    """Others ask a `LayerKind`, so a layer is added without touching them."""
    users = set()
    for path in SOURCE.rglob("*.py"):
        room = str(path.relative_to(SOURCE).with_suffix(""))
        if not room.startswith(LAYERS_ARE_TOLD_APART_IN) and layer_classes_named(path):
            users.add(room)
    assert users == NAME_LAYERS


def test_experiments_use_tnsim_as_a_user_would():
    """They see tnsim's public names and one another, nothing behind them; their command has the
    parser of `tnsim`."""
    files = list((SOURCE.parent / "benchmarks" / "paper").glob("*.py"))
    assert len(files) > 10
    command = {"tnsim.__main__", "tnsim.cli.app", "tnsim.cli.options"}
    for path in files:
        allowed = {"tnsim", "tnsim.errors", "tnsim.files"}
        if path.stem == "__main__":
            allowed |= command
        assert modules_imported(path) <= allowed, path


def test_nothing_installed_needs_the_experiments():
    for path in SOURCE.rglob("*.py"):
        assert not any(name.partition(".")[0] == "benchmarks" for name in imported(path)), path


def test_import_is_light_and_a_similarity_needs_no_quimb_or_torch():
    code = """
import sys, tnsim
print(*sys.modules.keys() & {"jax", "numpy", "quimb", "cotengra"})
import numpy as np
m = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
tnsim.similarity(m, 2.0 * m)
print(*sys.modules.keys() & {"quimb", "torch", "matplotlib"})
"""
    assert python(code)[0].split() == []


@pytest.mark.parametrize(
    "package", [path for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE]
)
def test_a_package_lists_its_modules_in_their_reading_order(package):
    text = ast.get_docstring(tree_of(package))
    rows = re.findall(r"^    (\w+(?:, \w+)*) {2,}\S", text or "", re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    beside = [path for path in package.parent.iterdir() if not path.name.startswith("_")]
    # A folder that was moved leaves what Python compiled of it.
    inside = {path.stem for path in beside if path.is_file() or set(path.glob("[!_]*"))}
    assert sorted(named) == sorted(inside)
