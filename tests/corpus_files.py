"""Sound checkpoint files in few lines, and archives that lie, for tests of reading."""

import io
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save as serialise

try:
    import torch
except ImportError:
    torch = None


class Input(NamedTuple):
    """One hostile input: what kind it is of, its files by name, and which are the arguments."""

    kind: str
    files: dict[str, bytes]
    target: str
    dialect: str | None = None

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def readout(dtype="f4") -> dict[str, np.ndarray]:
    """One bilinear layer in the layout of the preset bilinear-readout."""
    rng = np.random.default_rng(0)
    shapes = {"W_l": (3, 2), "W_r": (3, 2), "W_p": (2, 3)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def attention() -> dict[str, np.ndarray]:
    """One attention layer in the layout of the preset quadratic-attention."""
    rng = np.random.default_rng(0)
    names = [f"layers.0.{role}.weight" for role in "qkvo"]
    names += ["embed.weight", "unembed.weight"]
    state = {name: rng.normal(size=(4, 4)).astype("f4") for name in names}
    return state | {"final_norm.running_mean_energy": np.array([2.0], "f4")}


CONFIG = {"model": {"n_head": 2, "attn_scale": 0.5, "rope_base": 100.0}}


DIALECT = {
    "format": 1,
    "name": "d",
    "layers": [{"kind": "bilinear", "left": "W_l", "right": "W_r", "down": "W_p"}],
}


def npz(state: dict, save=np.savez) -> bytes:
    file = io.BytesIO()
    save(file, **state)
    return file.getvalue()


def native() -> tuple[dict[str, np.ndarray], dict]:
    """Tensors and architecture of a model in tnsim's own format."""
    state = readout("f8")
    tensors = {f"layers.0.{role}": state[name] for role, name in zip(
        ("left", "right", "down"), state, strict=True
    )}  # fmt: skip
    layer = {"kind": "Residual", "skip": 1.0, "scale": 0.5, "layer": {"kind": "Bilinear"}}
    return tensors, {"format": 1, "layers": [layer], "n_ctx": None}


def pt(state) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def sound() -> dict[str, bytes]:
    """A file of every format, all of which load."""
    tensors, architecture = native()
    files = {
        "a.safetensors": serialise(readout()),
        "own.safetensors": serialise(tensors, {"tnsim": json.dumps(architecture)}),
        "a.npz": npz(readout()),
        "b.npz": npz(readout(), np.savez_compressed),
    }
    if torch is not None:
        files["a.pt"] = pt({name: torch.tensor(x) for name, x in readout().items()})
    return files


def safetensors(
    header: str | bytes, numbers: bytes = bytes(64), length: int | None = None
) -> bytes:
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + numbers


class Member(NamedTuple):
    """An entry of a zip archive, with whatever is to be told of it."""

    name: str
    data: bytes
    size: int | None = None
    method: int = 0
    flags: int = 0
    checksum: int | None = None


def archive(members: list[Member]) -> bytes:
    """A zip archive written by hand, so that it may lie."""
    body, directory = b"", b""
    for member in members:
        size = len(member.data) if member.size is None else member.size
        checksum = zlib.crc32(member.data) if member.checksum is None else member.checksum
        sizes = (len(member.data), min(size, 2**32 - 1))
        name, extra = member.name.encode(), b""
        if size >= 2**32 - 1:
            extra = struct.pack("<HHQ", 1, 8, size)
        common = (20, member.flags, member.method, 0, 0, checksum, *sizes, len(name), len(extra))
        offset = len(body)
        body += struct.pack("<4s5H3L2H", b"PK\3\4", *common) + name + extra + member.data
        place = (0, 0, 0, 0, offset)
        directory += struct.pack("<4s6H3L2H3H2L", b"PK\1\2", 20, *common, *place) + name + extra
    counts = (0, 0, len(members), len(members), len(directory), len(body), 0)
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", *counts)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def readout_members() -> list[Member]:
    """Of an npz that is sound, to be changed."""
    return [Member(f"{name}.npy", npy(array)) for name, array in readout().items()]


def zeros(size: int) -> bytes:
    """A deflated stream of so many zero bytes, a multiple of 2**20, to follow other blocks."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(2**20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    return block * (size // 2**20) + b"\3\0"


def zero_member(name: str, shape: tuple[int, ...], dtype: str = "f4") -> Member:
    """A member of an npz that unfolds to zeros, a thousand times its own size."""
    file = io.BytesIO()
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    start = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = start.compress(file.getvalue()) + start.flush(zlib.Z_FULL_FLUSH)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Member(f"{name}.npy", head + zeros(size), size + file.tell(), zipfile.ZIP_DEFLATED)


def rezipped(source: bytes, method: int = zipfile.ZIP_STORED, **changes: bytes) -> bytes:
    """A PyTorch file whose records are written again, some with other bytes, checksums right."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(target, "w", method) as new:
        for member in old.infolist():
            record = member.filename.rpartition("/")[2].partition(".")[0]
            new.writestr(member.filename, changes.get(record, old.read(member)))
        if "constants" in changes:
            new.writestr("archive/constants.pkl", changes["constants"])
    return target.getvalue()


class Touch:
    """What a hostile pickle would run: it makes a folder called `owned`."""

    def __reduce__(self):
        return os.mkdir, ("owned",)
