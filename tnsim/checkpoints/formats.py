"""File formats: inventories of tensors that are read when asked for, and small text files.

The sizes that a file declares are compared with the size of the file before any number is read, and
the lengths of its lists of names have limits. Nothing is unpickled but plain weights.

*Pickles.* PyTorch's reader of plain weights calls a few dozen functions that PyTorch considers
harmless, since none of them runs code of the file. Some of them however take as much memory as a
number in the file says, `bytearray(2**31)` or `torch.FloatTensor(2**31)` in 300 bytes, and codecs
other than latin1 take quadratic time. So the instructions are followed here first, on a stack that
knows numbers, texts and tuples only, and each call is checked before PyTorch makes it.

*Text files*, the configuration beside a checkpoint or the text of a dialect, have a limit of
length, as parsers of nested text take much more time and memory than the text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from tnsim.errors import CheckpointError, MissingExtra, naming, refusing, require
from tnsim.files import regular

JSON_BYTES = 2**20  # parsed within ten milliseconds
YAML_BYTES = 2**17  # parsed within a second: PyYAML is slower than JSON by far
YAML_DEPTH = 64
NAMES = ("config.json", "config.yaml", "config.yml")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # in the layout of PEFT
ADAPTER_SETTINGS = "adapter_config.json"


_PUSHED = ("BININT", "BININT1", "BININT2", "BINUNICODE", "LONG1", "SHORT_BINSTRING")
"""Instructions whose argument is the value."""
_OTHERS = ("BINFLOAT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "NEWFALSE", "NEWTRUE", "NONE")
"""Instructions that give a value of which nothing is to be known."""
_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_UNKNOWN = object()

SMALL = 2**25  # bytes of tensors that any file may declare
EXPANSION = 16  # a file may declare at most so many times its size: weights hardly compress
SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".ckpt")
LFS_POINTER = b"version https://git-lfs"
INDEX = "model.safetensors.index.json"  # index of a model in several files
OLD_INDEX = "pytorch_model.bin.index.json"  # the same of pickles, in older repositories
TORCH_VERSION = (2, 10)  # the first that reads untrusted files safely
# Bytes of names, shapes and offsets: enough for ten thousand tensors, and read within a second.
HEADER_BYTES = 2**22  # safetensors
DIRECTORY_BYTES = 2**20  # zip archives
# PyTorch, without the numbers. PyTorch's reader is written in Python: so many bytes of empty lists
# take 0.8 s, of tensors that share their numbers 1.6 s and 60 MB, and four times as many 7 s.
PICKLE_BYTES = 2**19
WEIGHTS_ALONE = (
    "save the state_dict alone where the module is at home, "
    'torch.save(module.state_dict(), "weights.pt"), or as safetensors'
)
FLOAT8 = {  # by the names of safetensors
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
SAFETENSORS = FLOAT8 | {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
_STRANGE = {  # attributes of PyTorch's tensors that have no numbers one by one
    "is_meta": "a meta tensor, which has a shape and no numbers",
    "is_quantized": "quantised",
    "is_nested": "a nested tensor",
}


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


def configuration(path: Path, names: Sequence[str] = NAMES) -> Mapping[str, Any] | None:
    """The contents of config.json or config.yaml beside a checkpoint.

    Args:
        path: Path of the checkpoint.
        names: Names of the file, of which the first that is there is read.

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
    beside = [path.with_name(name) for name in names]
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
    ".json": ("JSON", lambda file: json.loads(read_text(file))),
    ".yaml": ("YAML", _read_yaml),
    ".yml": ("YAML", _read_yaml),
}


class _Function(NamedTuple):
    """A function or a class, of which the name says enough."""

    name: str


def check_pickle(data: bytes) -> None:
    """Refuse a pickle that would take memory or time out of proportion.

    An instruction that is unknown here is left to PyTorch's reader, which refuses the whole file.

    Args:
        data: The bytes of the pickle.

    Raises:
        CheckpointError: When a call, which the message names, is out of proportion, or when the
            pickle ends within an instruction or takes values that the stack does not have.

    Example:
        >>> import pickle
        >>> check_pickle(pickle.dumps({"bias": [1.0]}, 2))
        >>> check_pickle(b"\\x80\\x02cbuiltins\\nbytearray\\nJ\\0\\0\\0\\x7f\\x85R.")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: its pickle asks for bytearray of 2130706432 bytes, which no...
    """
    with refusing("its pickle is damaged"):
        _follow_pickle(data)


def _follow_pickle(data: bytes) -> None:
    """Go through the instructions up to the last, or up to the first that no weights need."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # stacks that marks have saved
    memo: dict[int, Any] = {}
    value: Any
    for instruction, value, _ in pickletools.genops(data):
        match instruction.name:
            case name if name in _PUSHED:
                stack.append(value)
            case name if name in _OTHERS:
                stack.append(_UNKNOWN)
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "BINPUT" | "LONG_BINPUT":
                # A value may be used again by its number in the memo.
                memo[value] = stack[-1]
            case "MARK":
                # A mark begins an inner stack, which the instructions on several values take whole.
                outer.append(stack)
                stack = []
            case "TUPLE":
                items, stack = tuple(stack), outer.pop()
                stack.append(items)
            case name if name in _SIZES:
                place = len(stack) - _SIZES[name]
                if place < 0:
                    raise ValueError("it takes what is not there")
                stack[place:] = [tuple(stack[place:])]
            case "GLOBAL":
                stack.append(_Function(value.rpartition(" ")[2]))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                # The call itself is never made here.
                _check_call(function, arguments)
                # A function that encodes gives bytes, of which others may be made.
                encodes = isinstance(function, _Function) and function.name == "encode"
                stack.append(b"" if encodes else _UNKNOWN)
            case "APPEND" | "BUILD":
                stack.pop()
            case "SETITEM":
                del stack[-2:]
            case "APPENDS" | "SETITEMS":
                # The items go into a container, whose contents do not matter.
                stack = outer.pop()
            case "BINPERSID":
                stack[-1] = _UNKNOWN  # the numbers of a tensor, which lie in the file
            case "PROTO":
                pass
            case _:
                return  # the end, or an instruction that the reader refuses


def _check_call(function: Any, arguments: Any) -> None:
    """Refuse a call that takes memory or time out of proportion."""
    if not isinstance(function, _Function):
        return  # refused by the reader, or a function that the caller has allowed
    name = function.name
    # The reader takes lists, dictionaries and what functions return for arguments as well, of which
    # the stack here knows nothing.
    if not isinstance(arguments, tuple):
        _refuse(f"{name} of arguments that are no tuple")
    # This function calls another, whose arguments are its third.
    if name == "_rebuild_from_type_v2" and len(arguments) > 2:
        _check_call(arguments[0], arguments[2])
    if name == "bytearray":
        for argument in arguments:
            if isinstance(argument, int):
                _refuse(f"bytearray of {argument} bytes")
            if not isinstance(argument, (bytes, str)):  # a tensor of one number is a number, too
                _refuse("bytearray of something else than bytes")
    if name == "encode" and arguments[1:] != ("latin1",):
        _refuse("text in another encoding than latin1")
    # Plain weights rebuild tensors from storages in the file, and never make one themselves.
    if name.endswith(("Tensor", "Storage")):
        _refuse(f"{name} of a size alone")


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(
        f"its pickle asks for {what}, which no weights need; save them again by torch.save"
    )


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file.

    Attributes:
        name: Name of the tensor as the file spells it.
        dtype: Type of the numbers by NumPy's name, else by the name in the file.
        nbytes: Memory that the numbers take as stored.
        read: Function that reads the tensor.

    Example:
        >>> import numpy as np
        >>> stored = Stored("weight", "float32", 16, lambda: np.zeros((2, 2), np.float32))
        >>> stored.tensor.shape
        (2, 2)
    """

    name: str
    dtype: str
    nbytes: int
    read: Callable[[], Any]

    @functools.cached_property
    def tensor(self) -> Any:
        """The numbers, read once.

        Returns:
            An array of NumPy, or a tensor of PyTorch for a file of PyTorch.

        Raises:
            CheckpointError: Where the tensor, which the message names, cannot be read.
        """
        with refusing(f"tensor {self.name!r} cannot be read"):
            return self.read()


class Contents(NamedTuple):
    """The inventory of a file.

    Attributes:
        state: Tensors by name, in PyTorch's files also mappings of tensors and other objects.
        tensors: All tensors, at any depth of `state`.
        metadata: Texts of the file by name.
    """

    state: Mapping[Any, Any]
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]

    @classmethod
    def flat(cls, tensors: list[Stored], metadata: Mapping[str, str] | None = None) -> Contents:
        """The inventory of a file that holds nothing but named tensors.

        Args:
            tensors: All tensors of the file.
            metadata: Texts of the file by name.

        Returns:
            The contents.

        Raises:
            CheckpointError: Where two tensors have the same name, so that the name is ambiguous.

        Example:
            >>> Contents.flat([Stored("weight", "float32", 16, lambda: None)]).dtypes
            ('float32',)
        """
        named: dict[str, Stored] = {}
        for tensor in tensors:
            if named.setdefault(tensor.name, tensor) is not tensor:
                raise CheckpointError(f"holds two tensors of the name {tensor.name!r}")
        return cls(named, tuple(tensors), metadata or {})

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the numbers, each once, in order of their names."""
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))


def check_declared(tensors: tuple[Stored, ...], size: int) -> None:
    """Refuse a file that would take much more memory than it takes disk.

    Args:
        tensors: All tensors that the file declares.
        size: Size of the file in bytes.

    Raises:
        CheckpointError: When the tensors add up to more than `EXPANSION` times the size, and more
            than `SMALL`.

    Example:
        >>> check_declared((Stored("weight", "float32", 2**30, lambda: None),), size=1000)
        Traceback (most recent call last):
            ...
        tnsim.errors.CheckpointError: declares 1,073,741,824 bytes of tensors in a file of 1,000...
    """
    # A few bytes can declare any shape, before a number is read.
    declared = sum(tensor.nbytes for tensor in tensors)
    if declared > max(SMALL, EXPANSION * size):
        raise CheckpointError(
            f"declares {declared:,} bytes of tensors in a file of {size:,}, "
            f"more than {EXPANSION} times its size; if that is meant, save it uncompressed"
        )


def contents(path: Path) -> Contents:
    """Read the inventory of a checkpoint file.

    Args:
        path: A file that ends in any of `SUFFIXES` or in .bin, an `INDEX` or an `OLD_INDEX`.

    Returns:
        Names and unread tensors.

    Raises:
        CheckpointError: When the file is missing, may not be read, is damaged, or declares tensors
            out of proportion to its size.
        MissingExtra: For a PyTorch file without PyTorch.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "step_100.npz")
        >>> np.savez(file, weight=np.ones((2, 3), np.float32))
        >>> contents(file).state["weight"].nbytes
        24
    """
    readers = {
        ".safetensors": ("safetensors", _safetensors),
        ".npz": ("npz", _npz),
        # `.ckpt` is Lightning's, `.bin` that of Hugging Face's libraries, in `folders.OLD`.
        **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), ("PyTorch", _torch)),
    }
    # The parts of an index are checked one by one, by their own sizes.
    if path.name in (INDEX, OLD_INDEX):
        return _part_contents(path)
    if not path.exists():
        raise CheckpointError("no such file")
    if not path.is_file():
        raise CheckpointError("is no regular file")
    if path.suffix not in readers:
        raise CheckpointError(
            f"unknown format {path.suffix or 'without suffix'!r}; readable are {', '.join(readers)}"
        )
    with path.open("rb") as file:  # refused where permission is missing, in the same words for all
        start = file.read(len(LFS_POINTER))
    if not start:
        raise CheckpointError("is empty")
    if start == LFS_POINTER:
        raise CheckpointError(
            "is a pointer of Git LFS to a file that was not downloaded: run  git lfs pull"
        )
    name, reader = readers[path.suffix]
    with refusing(f"not a readable {name} file, or truncated"):
        inventory = reader(path)
    check_declared(inventory.tensors, path.stat().st_size)
    return inventory


# safetensors: 8 bytes that give the length of a header in JSON, the header, the numbers
def _safetensors(path: Path) -> Contents:
    from safetensors import safe_open

    with path.open("rb") as start:
        length = int.from_bytes(start.read(8), "little")
    # A length beyond the file is left to the reader, which calls the file truncated.
    if HEADER_BYTES < length < path.stat().st_size:
        raise CheckpointError(
            f"its header has {length:,} bytes, over the limit of {HEADER_BYTES:,}"
        )
    file = safe_open(path, framework="numpy")
    tensors = [_safetensor(path, file, name) for name in file.keys()]  # noqa: SIM118  no mapping
    return Contents.flat(tensors, file.metadata())


def _safetensor(path: Path, file: Any, name: str) -> Stored:
    declared = file.get_slice(name)
    dtype = declared.get_dtype()
    if dtype not in SAFETENSORS:
        # The file is readable as long as nobody asks for this tensor.
        return Stored(name, dtype, 0, functools.partial(_refuse_dtype, name, dtype))
    numbers = np.dtype(SAFETENSORS[dtype])
    if dtype in FLOAT8:
        read = functools.partial(_float8, path, name, numbers)
    else:
        read = functools.partial(file.get_tensor, name)
    return Stored(name, numbers.name, math.prod(declared.get_shape()) * numbers.itemsize, read)


def _refuse_dtype(name: str, dtype: str) -> None:
    raise CheckpointError(f"tensor {name!r} holds {dtype}, which is not read; convert it to F32")


def _float8(path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor of eight-bit floats, read from its bytes: safetensors asks NumPy, which has none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        declared = json.loads(file.read(length))[name]
        begin, end = declared["data_offsets"]
        file.seek(8 + length + begin)
        return np.frombuffer(file.read(end - begin), dtype).reshape(declared["shape"])


def places_in(index: Path) -> dict[str, str]:
    """The names of the files in which an index says that tensors lie, by tensor.

    Args:
        index: An `INDEX` or an `OLD_INDEX`.

    Returns:
        Names of files beside the index, which need not exist.

    Raises:
        CheckpointError: The index is damaged, or leads elsewhere.

    Example:
        >>> import tempfile
        >>> index = Path(tempfile.mkdtemp(), INDEX)
        >>> _ = index.write_text('{"weight_map": {"w": "model-1.safetensors"}}')
        >>> places_in(index)
        {'w': 'model-1.safetensors'}
    """
    end = Path(index.name.removesuffix(".index.json")).suffix
    with refusing(f"not a readable index of {end} files"):
        places = json.loads(read_text(index))["weight_map"]
        files = sorted(set(places.values()))
        # An index must not lead out of its folder.
        if not all(Path(name).name == name and name.endswith(end) for name in files):
            raise CheckpointError(f"its parts must lie beside it as {end}, found {files[:4]}")
    return places


def _part_contents(index: Path) -> Contents:
    """All tensors of a model in several files; the size of each file limits its own tensors."""
    places = places_in(index)
    tensors: list[Stored] = []
    for name in sorted(set(places.values())):
        with naming(f"its part {name}"):
            part = contents(index.with_name(name))
        # A part may hold more tensors than the index gives it.
        tensors += [tensor for tensor in part.tensors if places.get(tensor.name) == name]
    if missing := sorted(set(places) - {tensor.name for tensor in tensors}):
        raise CheckpointError(f"its parts lack {', '.join(missing[:8])}")
    return Contents.flat(tensors)


# npz: a zip archive of npy files
def _npz(path: Path) -> Contents:
    archive = _open_archive(path)
    with contextlib.ExitStack() as refused:
        refused.callback(archive.close)
        found = Contents.flat([_npy(archive, member) for member in archive.infolist()])
        refused.pop_all()  # tensors are read when they are asked for
    return found


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stored:
    name = member.filename.removesuffix(".npy")
    if member.flag_bits & 1:
        raise CheckpointError(f"{name!r} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(
            f"{name!r} is compressed by method {member.compress_type}, which NumPy never writes"
        )
    with archive.open(member) as file:
        shape, dtype = _npy_header(file)
        # Declared and held bytes are compared, as an array is allocated by its shape.
        held = member.file_size - file.tell()
    if dtype.hasobject:
        raise CheckpointError(f"{name!r} holds Python objects, which are not read")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != held:
        raise CheckpointError(
            f"tensor {name!r} declares shape {shape} of {dtype}, "
            f"which is {nbytes:,} bytes, and holds {held:,}"
        )
    return Stored(name, dtype.name, nbytes, functools.partial(_npy_array, archive, member))


def _npy_header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise CheckpointError(f"holds an npy file of version {version}, which numbers do not need")
    shape, _, dtype = readers[version](file)
    return shape, dtype


def _npy_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:  # reading to the end checks the checksum
        return np.lib.format.read_array(file, allow_pickle=False)


def _open_archive(path: Path, at_end: bool = False) -> zipfile.ZipFile:
    """The zip archive of a file, unless the directory of the archive is too long to be read.

    Args:
        path: The file.
        at_end: Whether the directory has to be the last of the file. PyTorch takes places in the
            file as they are stated, and `zipfile` looks for them right before the end: both find
            the same directory where it is there and the file ends with the archive.
    """
    length, is_last = _directory_of(path)
    if length > DIRECTORY_BYTES:
        raise CheckpointError(
            f"its directory has {length:,} bytes, over the limit of {DIRECTORY_BYTES:,}"
        )
    if at_end and not is_last:
        raise CheckpointError(
            "its directory is not at its end, where torch.save writes it; save it again"
        )
    return zipfile.ZipFile(path)


def _directory_of(path: Path) -> tuple[int, bool]:
    """Length of a zip archive's directory, and whether the file ends with it.

    The length is read from the record at the end of the archive, which has 22 bytes and a comment
    of at most 2^16, by the rules of `zipfile`. In a large archive a record of 56 bytes and a
    pointer of 20 to it stand before it.
    """
    with path.open("rb") as file:
        # The record is searched for in the last bytes alone, and the directory is never read before
        # its length is known.
        start = file.seek(max(0, path.stat().st_size - 22 - 2**16 - 76))
        tail = file.read()
    is_last = tail[-22:].startswith(b"PK\5\6") and tail.endswith(b"\0\0")
    end = len(tail) - 22 if is_last else tail.rfind(b"PK\5\6")
    if end < 0:
        raise zipfile.BadZipFile("the end of the archive is missing")
    length, place = struct.unpack("<LL", tail[end + 12 : end + 20])
    large = tail[max(0, end - 76) : end]
    if large[-20:].startswith(b"PK\6\7"):  # the pointer
        end -= 76
        is_last &= large.startswith(b"PK\6\6") and large[64:72] == struct.pack("<Q", start + end)
        if large.startswith(b"PK\6\6"):
            length, place = struct.unpack("<QQ", large[40:56])
    return length, is_last and place + length == start + end


# PyTorch: a zip archive of a pickle, and the numbers of each tensor
def _torch(path: Path) -> Contents:
    torch = _import_torch(path)
    with path.open("rb") as file:
        if file.read(1) == b"\x80":  # a pickle, as every file was before PyTorch 1.6
            raise CheckpointError(
                "not plain weights: it holds Python objects, or is older than PyTorch 1.6; "
                f"{WEIGHTS_ALONE}"
            )
    _check_records(_open_archive(path, at_end=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings are on pickle protocols alone
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnicodeEncodeError as error:
        raise CheckpointError("PyTorch opens no file whose path is not UTF-8: rename it") from error
    except pickle.UnpicklingError as error:
        # The name of the class tells users what they saved.
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(error))
        example = f", such as {forbidden[1]}" if forbidden else ""
        raise CheckpointError(
            "not plain weights: it holds Python objects, which are refused because unpickling "
            f"runs code{example}; {WEIGHTS_ALONE}"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state_dict, found {type(state).__name__}")
    tensors: list[Stored] = []
    return Contents(_without_numbers(state, torch.Tensor, tensors, {}), tuple(tensors), {})


def _import_torch(path: Path) -> Any:
    require("torch", "torch", f"reading {path}")
    import torch

    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < TORCH_VERSION:
        raise CheckpointError(
            f"torch {torch.__version__} cannot read untrusted files safely (CVE-2026-24747); "
            "install torch>=2.10"
        )
    return torch


def _check_records(archive: zipfile.ZipFile) -> None:
    """Check the assumptions that PyTorch leaves unchecked when it maps a file into memory.

    Raises:
        CheckpointError: When records are compressed or damaged or have one name, the pickle is long
            or asks for memory that it does not fill, or the archive is a program.
    """
    with archive:
        members = archive.infolist()
        # PyTorch takes the first of several records of a name, in whatever case they are written.
        names = [member.orig_filename.lower() for member in members]
        if len(set(names)) < len(names) or any("\0" in name for name in names):
            raise CheckpointError("has several records of one name; save it again with torch.save")
        if any(member.filename.endswith("/constants.pkl") for member in members):
            raise CheckpointError("is a TorchScript program; save its state_dict with torch.save")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError("its records are compressed; save it again with torch.save")
        # Everything but the numbers is read by the unpickler.
        pickled = sum(member.file_size for member in members if "/data/" not in member.filename)
        if pickled > PICKLE_BYTES:
            raise CheckpointError(
                f"has {pickled:,} bytes beside the tensors, over the limit of {PICKLE_BYTES:,}; "
                'save the model alone, as by torch.save(model.state_dict(), "model.pt")'
            )
        if damaged := archive.testzip():
            raise CheckpointError(f"its record {damaged!r} is damaged: the checksum is another")
        for name, member in zip(names, members, strict=True):
            if name.endswith(".pkl"):
                check_pickle(archive.read(member))


def _without_numbers(
    state: Mapping, tensor_type: type, tensors: list[Stored], seen: dict[int, Any]
) -> dict[Any, Any]:
    """A mapping, which may hold itself, with its tensors as `Stored`, collected in `tensors`."""
    # Pickles may refer to themselves.
    if id(state) in seen:
        return seen[id(state)]
    unread = seen[id(state)] = {}
    for name, value in state.items():
        unread[name] = value
        if isinstance(value, Mapping):
            unread[name] = _without_numbers(value, tensor_type, tensors, seen)
        elif isinstance(value, tensor_type) and strange(value) is None:  # else refused when read
            unread[name] = stored_tensor(name, value)
            tensors.append(unread[name])
    return unread


def strange(tensor: Any) -> str | None:
    """What a tensor of PyTorch is that does not store its numbers one by one, and what to do.

    Args:
        tensor: A tensor, or an array of another library.

    Returns:
        The end of a sentence; None for plain tensors and for arrays.

    Example:
        >>> strange(np.ones(2)) is None
        True
    """
    for attribute, kind in _STRANGE.items():
        if getattr(tensor, attribute, False):
            return f"is {kind}; store it as plain numbers"
    # Sparse tensors of PyTorch have a layout; arrays of other libraries have none.
    layout = str(getattr(tensor, "layout", "torch.strided"))
    return None if layout == "torch.strided" else f"is sparse ({layout}); store it with to_dense()"


def stored_tensor(name: Any, tensor: Any) -> Stored:
    """A tensor of PyTorch as `Stored`, copied when read, as its mapped file may be overwritten."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored(str(name), dtype, tensor.numel() * tensor.itemsize, tensor.detach().clone)
