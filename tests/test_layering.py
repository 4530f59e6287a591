"""The picture of the folders, read off the imports: arrows point one way, libraries stay put."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import tnsim

FOLDERS = {  # folder (or file of the root): what it may import from tnsim; nothing points back
    "errors": [],
    "files": [],
    "names": [],
    "kept": [],
    "sessions": ["kept"],
    "tables": [],
    "models": ["errors", "tables"],
    "checkpoints": ["errors", "files", "models", "tables"],
    "tensors": ["errors", "models", "names", "sessions"],
    "metrics": ["errors", "models", "names", "sessions"],
    "engine": ["errors", "files", "sessions", "tables"],
    "folding": ["engine", "errors", "metrics", "models", "names", "sessions", "tensors"],
    "compare": [
        "engine",
        "errors",
        "folding",
        "metrics",
        "models",
        "names",
        "sessions",
        "tables",
        "tensors",
    ],
    "tensor_networks": [
        "engine",
        "errors",
        "folding",
        "metrics",
        "models",
        "names",
        "sessions",
        "tensors",
    ],
    "torch": ["checkpoints", "compare", "engine", "errors", "folding", "metrics", "models"],
    "analysis": ["errors", "files", "models", "names"],
    "gram": [
        "",
        "analysis",
        "checkpoints",
        "compare",
        "engine",
        "errors",
        "files",
        "folding",
        "metrics",
        "models",
        "names",
        "sessions",
        "tensors",
    ],
    "reproduce": ["", "errors", "files"],  # a user of tnsim, through its public names
    "cli": [
        "",
        "analysis",
        "checkpoints",
        "compare",
        "engine",
        "errors",
        "files",
        "gram",
        "metrics",
        "models",
        "reproduce",
        "tensor_networks",
    ],
    "__main__": ["cli"],
    "__init__": [  # on first use of a name, and for type checkers
        "analysis",
        "checkpoints",
        "compare",
        "engine",
        "errors",
        "gram",
        "metrics",
        "models",
        "tensor_networks",
        "torch",
        "sessions",
    ],
}
CONFINED = {  # foreign package: the files that may import it; * is any experiment
    "quimb": {
        "tensor_networks/network",
        "tensor_networks/closed_networks",
        "tensor_networks/contraction",  # the name of a type only
        "tensor_networks/network_checks",
        "tensor_networks/network_sums",  # the name of a type only
        "analysis/plots",  # the name of a type only
    },
    "cotengra": {"engine/pathfinding"},
    "matplotlib": {
        "analysis/axes",
        "analysis/curves",  # the name of a type only
        "analysis/figures",
        "analysis/pictures",
        "analysis/plots",
        "analysis/scatter",  # the name of a type only
        "gram/result",  # the name of a type only
        "reproduce/experiment",  # the name of a type only
        "reproduce/*/figure",  # the name of a type only
        "reproduce/street_digits",  # its fonts
    },
    "torch": {
        "checkpoints/formats",
        "checkpoints/module_forward",
        "models/functions",
        "torch/__init__",  # the name of a type only
        "torch/autograd",
    },
    "safetensors": {"checkpoints/formats", "checkpoints/native", "metrics/input_files"},
    "scipy": {
        "analysis/chords",
        "analysis/correlations",
        "analysis/figures",
        "reproduce/images",  # SVHN's own files
    },
    "xarray": {
        "analysis/axes",  # the name of a type only
        "analysis/baselines",
        "analysis/chords",
        "analysis/curves",  # the name of a type only
        "analysis/figures",
        "analysis/matrices",
        "analysis/reading",
        "analysis/report",
        "analysis/weights",  # the name of a type only
        "gram/result",
        "reproduce/experiment",  # the name of a type only
        "reproduce/*/measure",  # the name of a type only
        "reproduce/phases",  # the name of a type only
    },
    "zarr": {"gram/zarr_files"},
    "optax": {"reproduce/*/train", "reproduce/classifiers"},
    "distributed": {"cli/pairwise"},
    "pyarrow": {"gram/export"},
    "typer": {
        "cli/app",
        "cli/bench_commands",
        "cli/demo_command",
        "cli/dialect_commands",
        "cli/options",
        "cli/pairwise",
        "cli/reproduce_command",
        "cli/stopping",
    },
}
SOURCE = Path(tnsim.__file__).parent


def imported(path):
    """Dotted names imported anywhere in a file, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "tnsim":
            names |= {f"tnsim.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def folder_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def files_of(folder):
    return [p for p in SOURCE.rglob("*.py") if folder_of(p) == folder]


def folders_imported_by(folder):
    names = set().union(*(imported(path) for path in files_of(folder)))
    own = [name.split(".") for name in names if name.split(".")[0] == "tnsim"]
    return {parts[1] if len(parts) > 1 else "" for parts in own} - {folder}


def test_every_file_is_in_a_folder_of_the_picture():
    assert {folder_of(p) for p in SOURCE.rglob("*.py")} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_point_one_way(folder):
    reached = folders_imported_by(folder)
    assert reached == set(FOLDERS[folder])
    below = list(FOLDERS)[: list(FOLDERS).index(folder)]
    assert reached - {""} <= set(below)


@pytest.mark.parametrize("package", CONFINED)
def test_foreign_libraries_stay_in_their_rooms(package):
    users = set()
    for path in SOURCE.rglob("*.py"):
        if package in {name.partition(".")[0] for name in imported(path)}:
            users.add(str(path.relative_to(SOURCE).with_suffix("")))
    allowed = CONFINED[package]
    assert [user for user in users if not any(fnmatch(user, room) for room in allowed)] == []
    assert [room for room in allowed if not any(fnmatch(user, room) for user in users)] == []


LAYER_CLASSES = {"Linear", "Bilinear", "Multilinear", "Attention"}
LAYERS_ARE_TOLD_APART_IN = {"models", "tensors", "checkpoints"}
NAMES_LAYERS = {
    "__init__",  # the public names
    "folding/state_sizes",  # follows states through layers as they are, before any plan
    "cli/bench",  # makes the random models that it times
}


def layer_classes_named(path):
    """Layer classes that a file imports from tnsim, or writes as a string to compare with."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tnsim.models"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & LAYER_CLASSES


def test_layers_are_told_apart_in_models_tensors_and_checkpoints_only():
    """Others ask a `LayerKind`, so a layer is added without touching them."""
    users = set()
    for path in SOURCE.rglob("*.py"):
        if folder_of(path) not in LAYERS_ARE_TOLD_APART_IN and layer_classes_named(path):
            users.add(str(path.relative_to(SOURCE).with_suffix("")))
    assert users == NAMES_LAYERS


def test_an_experiment_is_measured_as_a_user_would():
    """`measure.py` sees tnsim's public names and its own experiment, nothing behind them."""
    for path in SOURCE.glob("reproduce/*/measure.py"):
        own = {name for name in imported(path) if name.startswith("tnsim.")}
        assert all(name.startswith("tnsim.reproduce.") for name in own), path


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_import_is_light_and_a_similarity_needs_no_quimb_or_torch():
    heavy = "('jax', 'numpy', 'quimb', 'cotengra')"
    assert run(f"import sys, tnsim; print(*(m for m in {heavy} if m in sys.modules))") == []
    code = (
        "import sys, numpy as np, tnsim; m = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)]);"
        "tnsim.similarity(m, 2.0 * m)"
    )
    heavy = "('quimb', 'torch', 'matplotlib')"
    assert run(f"{code}; print(*(m for m in {heavy} if m in sys.modules))") == []
