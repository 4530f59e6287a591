"""Small files of text: configurations and dialects. In: paths. Out: text, or names and values.

All have a limit of length, as parsers of nested text take much more time and memory than the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tnsim.checkpoints.guard import refusing
from tnsim.errors import CheckpointError, MissingExtra
from tnsim.files import regular

JSON_BYTES = 2**20
YAML_BYTES = 2**17  # takes a second, where JSON takes ten milliseconds
YAML_DEPTH = 64
NAMES = ("config.json", "config.yaml", "config.yml")


def read_text(path: Path, longest: int = JSON_BYTES) -> str:
    """A text file in UTF-8.

    Args:
        path: What is read.
        longest: Number of bytes that it may have.

    Returns:
        Its text.

    Raises:
        CheckpointError: When it is longer. Foreign errors are left to the caller.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "config.json")
        >>> length = file.write_text('{"n_head": 4}')
        >>> read_text(file)
        '{"n_head": 4}'
    """
    with regular(path) as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        raise CheckpointError(f"{path.name} is longer than {longest:,} bytes, and is not read")
    return data.decode()


def configuration(path: Path) -> Mapping[str, Any] | None:
    """What stands in config.json or config.yaml beside a checkpoint.

    Args:
        path: The checkpoint.

    Returns:
        Names and values, None where there is no such file.

    Raises:
        CheckpointError: When it is damaged, too long, nested too deeply, or no mapping.
        MissingExtra: For YAML without PyYAML.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> length = (folder / "config.json").write_text('{"n_head": 4}')
        >>> configuration(folder / "step_100.safetensors")
        {'n_head': 4}
    """
    beside = [path.with_name(name) for name in NAMES]
    file = next(filter(Path.is_file, beside), None)
    if file is None:
        return None
    kind, parse = _PARSERS[file.suffix]
    with refusing(f"{file.name} beside it is not {kind}"):
        values = parse(file)
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{file.name} beside it must hold names and values, found {type(values).__name__}"
        )
    return values


def _json(file: Path) -> Any:
    return json.loads(read_text(file))


def _yaml(file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtra("pyyaml", "yaml", f"reading {file}") from None
    text = read_text(file, YAML_BYTES)
    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is compiled
    depth = 0
    for event in yaml.parse(text, parser):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > YAML_DEPTH:
            raise CheckpointError(f"{file.name} beside it is nested deeper than {YAML_DEPTH}")
        if isinstance(event, yaml.AliasEvent):  # a few of them can stand for any length
            raise CheckpointError(
                f"{file.name} beside it refers to itself by *{event.anchor}; write the value out"
            )
    return yaml.load(text, parser)


_PARSERS = {".json": ("JSON", _json), ".yaml": ("YAML", _yaml), ".yml": ("YAML", _yaml)}
