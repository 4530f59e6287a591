"""Small text files: the configuration beside a checkpoint, and the text of a dialect.

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

JSON_BYTES = 2**20  # parsed within ten milliseconds
YAML_BYTES = 2**17  # parsed within a second: PyYAML is slower than JSON by far
YAML_DEPTH = 64
NAMES = ("config.json", "config.yaml", "config.yml")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # in the layout of PEFT
ADAPTER_SETTINGS = "adapter_config.json"


def read_text(path: Path, longest: int = JSON_BYTES) -> str:
    """A text file in UTF-8.

    Args:
        path: Path of the file.
        longest: Largest number of bytes that the file may have.

    Returns:
        The text of the file.

    Raises:
        CheckpointError: When the file is longer. Foreign errors are left to the caller.

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
    return data.decode("utf-8-sig")  # editors on Windows write a mark of the encoding


def is_adapter(path: Path) -> bool:
    """Whether a file holds an adapter, which says nothing without its base.

    Args:
        path: Path of a checkpoint.

    Returns:
        True for the names of PEFT with a configuration of an adapter beside.

    Example:
        >>> is_adapter(Path("adapter_model.safetensors"))
        False
    """
    return path.name in ADAPTERS and path.with_name(ADAPTER_SETTINGS).is_file()


def configuration(path: Path) -> Mapping[str, Any] | None:
    """The contents of config.json or config.yaml beside a checkpoint.

    Args:
        path: Path of the checkpoint.

    Returns:
        Names and values, None where there is no such file.

    Raises:
        CheckpointError: When the file is damaged, too long, nested too deeply, or no mapping.
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


def _read_json(file: Path) -> Any:
    return json.loads(read_text(file))


def _read_yaml(file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtra("pyyaml", "yaml", f"reading {file}") from None
    text = read_text(file, YAML_BYTES)
    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # `CSafeLoader` is compiled
    nested = f"{file.name} beside it is nested deeper than {YAML_DEPTH}"
    depth = 0
    try:
        for event in yaml.parse(text, parser):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > YAML_DEPTH:
                raise CheckpointError(nested)
            if isinstance(event, yaml.AliasEvent):  # a few aliases can stand for any length
                raise CheckpointError(
                    f"{file.name} beside it refers to itself by *{event.anchor}; write it out"
                )
    except yaml.YAMLError as error:
        if "maximum nesting depth" in str(error):  # the parser's own, which reads ahead
            raise CheckpointError(nested) from error
        raise
    return yaml.load(text, parser)


_PARSERS = {
    ".json": ("JSON", _read_json),
    ".yaml": ("YAML", _read_yaml),
    ".yml": ("YAML", _read_yaml),
}
