"""`tnsim info`. In: nothing. Out: versions, devices, extras and caches, as text or JSON."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

from tnsim.cli.options import JsonOption, print_json, say

PACKAGES = ("jax", "jaxlib", "numpy", "quimb", "cotengra", "safetensors")
EXTRAS = ("pairwise", "plot", "dask", "parquet", "torch", "yaml", "reproduce")
_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")
CACHED = ("plans", "programs")


def info(as_json: JsonOption = False) -> None:
    """Versions, devices, which extras are installed, and what the cache holds."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return
    for name, version in facts["versions"].items():
        say(f"{name:<12}{version}")
    say(f"devices     {', '.join(facts['devices'])}")
    for extra, missing in facts["missing"].items():
        said = "present"
        if missing:
            said = f"lacks {', '.join(missing)}: pip install 'tnsim[{extra}]'"
        say(f"[{extra}]".ljust(12) + said)
    cache = facts["cache"]
    if cache["folder"] is None:
        say("cache       none: TNSIM_CACHE_DIR is empty")
    else:
        say(f"cache       {cache['folder']}: {cache['files']} files, {cache['bytes']:,} bytes")


def _facts() -> dict[str, Any]:
    import jax

    import tnsim

    versions = {"tnsim": tnsim.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    return {
        "versions": versions,
        "devices": [f"{one.platform}: {one.device_kind}" for one in jax.local_devices()],
        "missing": {extra: _missing(extra) for extra in EXTRAS},
        "cache": _cache(),
    }


def _missing(extra: str) -> list[str]:
    """Packages of an extra that are not installed."""
    try:
        requirements = metadata.requires("tnsim") or []
    except metadata.PackageNotFoundError:  # run from a folder, without being installed
        return []
    found = [_REQUIREMENT.match(requirement) for requirement in requirements]
    names = [one[1] for one in found if one and one[2] == extra]
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cache() -> dict[str, Any]:
    """Where plans and programs are kept, and how much."""
    from tnsim.engine.cache import cache_folder

    folders = [folder for kind in CACHED if (folder := cache_folder(kind)) is not None]
    if not folders:
        return {"folder": None, "files": 0, "bytes": 0}
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    return {"folder": str(folders[0].parent), "files": len(files), "bytes": sum(sizes)}
