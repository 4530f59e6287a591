"""Damaged and hostile files, made by changing a few sound ones; replayable, nothing is stored.

Every input is a small folder: a checkpoint, perhaps a configuration beside it, perhaps a dialect.
"""

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save as serialise

from tnsim.checkpoints.dialects import Rule

try:
    import torch
except ImportError:
    torch = None

DEEP = 50_000
CONTROL = "\x1b[2J\x07\u202e"
ODD = [None, True, False, 0, -1, 1.5, float("inf"), float("nan"), "", "x", "config:a", CONTROL]
ODD += [[], [1], [[]], {}, {"a": 1}, 10**400]
VALUES = [json.dumps(value) for value in ODD]  # in place of any value of a text
VALUES += ["1" * 5000, "[" * DEEP, '{"a":' * DEEP, f'"{"n" * 10**6}"']


class Input(NamedTuple):
    """One hostile input: what kind it is of, its files by name, and which are the arguments."""

    kind: str
    files: dict[str, bytes]
    target: str
    dialect: str | None = None

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def inputs() -> Iterator[Input]:
    """All of them, in the same order each time."""
    yield from safetensors_headers()
    yield from architectures()
    yield from damaged()
    yield from archives()
    yield from npy_headers()
    yield from bombs()
    yield from configurations()
    yield from dialects()
    yield from names()
    if torch is not None:
        yield from pickles()
        yield from torch_tensors()


# sound ones


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


# what is done to them


def replaced(data, values=VALUES) -> Iterator[str]:
    """JSON texts of `data` with each value in turn replaced by each of `values`."""
    marker = "<here>"

    def places(node) -> Iterator[str]:
        yield json.dumps(marker)
        items = ()
        if isinstance(node, dict):
            items = node.items()
        elif isinstance(node, list):
            items = enumerate(node)
        for key, child in items:
            for text in places(child):
                changed = dict(node) if isinstance(node, dict) else list(node)
                changed[key] = json.loads(text)
                yield json.dumps(changed)

    for text in places(data):
        for value in values:
            yield text.replace(json.dumps(marker), value)


def safetensors(
    header: str | bytes, numbers: bytes = bytes(64), length: int | None = None
) -> bytes:
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + numbers


def safetensors_headers() -> Iterator[Input]:
    def one(data: bytes) -> Input:
        return Input("safetensors: header", {"a.safetensors": data}, "a.safetensors")

    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = {"__metadata__": {"a": "b"}, "W_l": entry}
    for text in replaced(header):
        yield one(safetensors(text, bytes(16)))
    yield one(safetensors("{}", b"", length=2**63))
    yield one(safetensors("{}", b"", length=0))
    yield one(safetensors(b'{"\xff": 1}'))
    yield one(safetensors("{}" + " " * 2**23))
    many = {f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}
    yield one(safetensors(json.dumps(many, separators=(",", ":")), b""))
    width = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F16": 16, "BF16": 16, "C64": 64, "F64": 64}
    others = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U8", "BOOL", "F99")
    for dtype in (*width, *others):
        size = 8 * width.get(dtype, 8) // 8
        layer = {"W_l": (0, [4, 2]), "W_r": (1, [4, 2]), "W_p": (2, [2, 4])}
        header = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [n * size, (n + 1) * size]}
            for name, (n, shape) in layer.items()
        }
        yield one(safetensors(json.dumps(header), bytes([56]) * 3 * size))


def architectures() -> Iterator[Input]:
    tensors, architecture = native()
    for text in replaced(architecture):
        data = serialise(tensors, {"tnsim": text})
        yield Input("safetensors: tnsim's metadata", {"a.safetensors": data}, "a.safetensors")


def damaged() -> Iterator[Input]:
    """Bits flipped, ends cut off, the wrong suffix."""
    chance = random.Random(0)
    for name, data in sound().items():
        for _ in range(30):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            yield Input("one bit flipped", {name: bytes(changed)}, name)
        for part in range(12):
            yield Input("truncated", {name: data[: len(data) * part // 12]}, name)
        yield Input("truncated", {name: data[:-1]}, name)
        for suffix in ("npz", "safetensors", "pt", "pth", "bin", "json"):
            yield Input("wrong suffix", {f"b.{suffix}": data}, f"b.{suffix}")


# archives


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


def archives() -> Iterator[Input]:
    def one(**changes) -> Input:
        members = [Member(f"{name}.npy", npy(x)) for name, x in readout().items()]
        members[0] = members[0]._replace(**changes)
        return Input("npz: directory", {"a.npz": archive(members)}, "a.npz")

    for method in (1, 8, 9, 12, 14, 93, 95, 98, 99, 65535):
        yield one(method=method)
    for flags in (1, 8, 32, 64, 2048, 8192, 65535):
        yield one(flags=flags)
    for size in (0, 1, 127, 200, 2**31, 2**32 - 2, 2**40, 2**63, 2**64 - 1):
        yield one(size=size)
    for name in ("", ".npy", "W_r.npy", "../W_l.npy", "/W_l.npy", "W_l", "a" * 60_000, CONTROL):
        yield one(name=name)
    yield one(checksum=1)
    for data in (b"", b"\x93NUMPY", b"text", npz(readout()), pickle.dumps([1])):
        yield one(data=data)
    lzma = zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2
    for method in lzma:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as target:
            target.writestr("W_l.npy", npy(readout()["W_l"]))
        yield Input("npz: directory", {"a.npz": file.getvalue()}, "a.npz")
    many = [Member(f"{n}.npy", b"") for n in range(25_000)]
    yield Input("npz: directory", {"a.npz": archive(many)}, "a.npz")


def npy_headers() -> Iterator[Input]:
    def one(text: str, version: bytes = b"\1\0", numbers: bytes = bytes(24)) -> Input:
        size = struct.pack("<H" if version == b"\1\0" else "<L", len(text.encode()) % 2**16)
        data = b"\x93NUMPY" + version + size + text.encode() + numbers
        members = [Member(f"{name}.npy", npy(x)) for name, x in readout().items()]
        members[0] = Member("W_l.npy", data)
        return Input("npz: header of an array", {"a.npz": archive(members)}, "a.npz")

    def header(descr="'<f4'", order="False", shape="(3, 2)") -> str:
        return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"

    odd = ["None", "-1", "1.5", "''", "'x'", "[]", "{}", "True", "()", "(" * 500, "9" * 400]
    for value in odd:
        yield one(header(descr=value))
        yield one(header(order=value))
        yield one(header(shape=value))
    for shape in ("(-1,)", "(3, -2)", "(10**9,)", f"({2**62}, {2**62})", "(6, True)", "(0, 2)"):
        yield one(header(shape=shape))
    for kind in (">f4", "<f2", "<i4", "<c8", "|O", "|V4", "<U1", "<M8[s]", "<f16", "|b1", "<e"):
        yield one(header(descr=f"'{kind}'"))
    yield one(header(descr="[('a', '<f4'), ('b', '|O')]"))
    yield one(header(), order := b"\3\0")
    yield one(header(), order.replace(b"\3", b"\x09"))
    yield one(header() + " " * 60_000)


def zeros(size: int) -> bytes:
    """A deflated stream of so many zero bytes (a multiple of 2**20) after a header to be put before."""
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


def bombs() -> Iterator[Input]:
    def one(members: list[Member]) -> Input:
        return Input("bomb", {"a.npz": archive(members)}, "a.npz")

    small = [Member(f"{name}.npy", npy(x)) for name, x in readout().items()]
    yield one([zero_member("W_l", (2**15, 2**15)), *small[1:]])
    unasked = [zero_member(f"extra_{n}", (100 * 2**20,)) for n in range(30)]
    yield one([*small, *unasked])
    yield one([zero_member("W_l", (2**28, 2), "f8"), zero_member("W_r", (2**28, 2), "f8")])
    rank = 2**16  # a layer without readout: an identity would take 16 GiB
    fused = npz({"embed.weight": np.ones((1, 1), "f4"), "blocks.0.weight": np.ones((rank, 1), "f4"),
                 "head.weight": np.ones((1, rank // 2), "f4")})  # fmt: skip
    yield Input("bomb", {"a.npz": fused}, "a.npz")
    nan = npz({name: np.full_like(x, np.nan) for name, x in readout().items()})
    yield Input("bomb", {"a.npz": nan}, "a.npz")


# text


def configurations() -> Iterator[Input]:
    data = npz(attention())

    def one(name: str, text: bytes) -> Input:
        kind = "configuration: JSON" if name.endswith("json") else "configuration: YAML"
        return Input(kind, {"a.npz": data, name: text}, "a.npz", "quadratic-attention")

    for text in replaced(CONFIG):
        yield one("config.json", text.encode())
    yield one("config.json", b"")
    yield one("config.json", b"\xff\xfe")
    yield one("config.json", b" " * 2**21)
    entry = "model:\n  n_head: 2\n  attn_scale: 0.5\n  rope_base: "
    values = ("", "~", "2020-01-01", "2020-99-99", ".inf", "0x" + "f" * 5000, "1" * 5000, "1:2:3",
              "'x'", "[1]", "*a", "&a [*a]", "!!python/object/apply:os.getpid []", "!!binary x",
              "[" * 50_000, "{a: " * 50_000, "\x1b", "!!set {a}", "&a {<<: *a}", "1e400", "{[]: 1}")  # fmt: skip
    for value in values:
        yield one("config.yaml", (entry + value).encode())
    for text in (
        "",
        "- 1",
        "a: &a [1,1]\nb: &b [*a,*a]\nc: [*b,*b]",
        "a: 1\n" * 50_000,
        "a: b: c",
        "\t",
    ):
        yield one("config.yaml", text.encode())
    merged = "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 40))
    yield one("config.yml", ("m0: &m0 {a: 1}\n" + merged).encode())
    yield one("config.yml", b"\xff\xfe\x00")


def dialects() -> Iterator[Input]:
    data = npz(readout())

    def one(text: str | bytes) -> Input:
        text = text if isinstance(text, bytes) else text.encode()
        return Input("dialect", {"a.npz": data, "d.json": text}, "a.npz", "d.json")

    for text in replaced(DIALECT):
        yield one(text)
    rule = DIALECT["layers"][0]
    for field in Rule.__dataclass_fields__:
        for value in ODD:
            yield one(json.dumps(DIALECT | {"layers": [rule | {field: value}]}))
    for field in ("nested", "ignore", "description", "unknown"):
        for value in ODD:
            yield one(json.dumps(DIALECT | {field: value}))
    yield one(json.dumps(DIALECT | {"layers": [rule | {"repeat": True}]}))
    yield one(json.dumps(DIALECT | {"layers": [rule] * 5000}))
    yield one(json.dumps(DIALECT | {"ignore": ["*a" * 1000 + "b"]}))
    for text in (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * DEEP, b" " * 2**21, b"{} {}"):
        yield one(text)
    norm = {"kind": "linear", "weight": "w", "norm_energy": "e"}
    for energy in ([1.0, 2.0], [], [[1.0]], [-1.0], [np.nan], ["x"]):
        state = npz({"w": np.ones((2, 2)), "e": np.array(energy)})
        text = json.dumps(DIALECT | {"layers": [norm]}).encode()
        yield Input("dialect", {"a.npz": state, "d.json": text}, "a.npz", "d.json")


def names() -> Iterator[Input]:
    long, strange = "n" * 10**6, f"layers.0.attn{CONTROL}\n"
    for name in (long, strange, f"norm.{long}", f"norm.{CONTROL}", "\ud800", ""):
        data = safetensors(
            json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), bytes(4)
        )
        yield Input("names", {"a.safetensors": data}, "a.safetensors")
    for name in (long, CONTROL):
        text = json.dumps(DIALECT | {"name": name, "description": name}).encode()
        yield Input("names", {"a.npz": npz(readout()), "d.json": text}, "a.npz", "d.json")
        key = {"kind": "linear", "weight": name}
        text = json.dumps(DIALECT | {"layers": [key]}).encode()
        yield Input("names", {"a.npz": npz(readout()), "d.json": text}, "a.npz", "d.json")
    for name in (f"{CONTROL}.npz", "\udcff.npz"):
        yield Input("names", {name: b"x"}, name)
        yield Input("names", {name: npz(readout())}, name)


# PyTorch


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


def pickles() -> Iterator[Input]:
    def one(data: bytes) -> Input:
        return Input("PyTorch: pickle", {"a.pt": data}, "a.pt")

    chance = random.Random(0)
    state = {name: torch.tensor(x) for name, x in readout().items()}
    sound_file = pt(state)
    with zipfile.ZipFile(io.BytesIO(sound_file)) as file:
        sound_pickle = file.read("archive/data.pkl")
    for _ in range(150):
        changed = bytearray(sound_pickle)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield one(rezipped(sound_file, data=bytes(changed)))
    for part in range(8):
        cut = sound_pickle[: len(sound_pickle) * part // 8]
        yield one(rezipped(sound_file, data=cut))
    start = b"\x80\x02"
    for repeated in (b"]", b"(", b"}", b"N0", b"]q\0h\0a", b"(t", b"K\1\x85"):
        for length in (2**19 - 500, 2**22):
            endless = start + repeated * (length // len(repeated)) + b"."
            yield one(rezipped(sound_file, data=endless))
    values = [[1], 1, None, "x", {1}, b"x", (1,), {"W_l": 1}, {}, Touch(), [Touch()], 2**2000]
    for value in values:
        yield one(rezipped(sound_file, data=pickle.dumps(value, protocol=2)))
        yield one(pickle.dumps(value))
    key = b"X" + struct.pack("<L", len("model_state_dict")) + b"model_state_dict"
    deep = start + (b"}" + key) * 5000 + b"}" + b"s" * 5000 + b"."
    yield one(rezipped(sound_file, data=deep))
    itself: dict = {"W_l": state["W_l"]}
    itself["model_state_dict"] = itself
    yield one(pt(itself))
    yield one(rezipped(sound_file, zipfile.ZIP_DEFLATED))
    yield one(rezipped(sound_file, constants=b"x"))
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), program)
    yield one(program.getvalue())
    old = io.BytesIO()
    torch.save(state, old, _use_new_zipfile_serialization=False)
    yield one(old.getvalue())
    yield one(npz(readout()))


def torch_tensors() -> Iterator[Input]:
    def one(tensor, key="W_l") -> Input:
        state = {name: torch.tensor(x) for name, x in readout().items()} | {key: tensor}
        return Input("PyTorch: tensors", {"a.pt": pt(state)}, "a.pt")

    plain = torch.ones(3, 2)
    for key in (1, None, 1.5, b"W_l", ("W_l",), True):
        yield one(plain, key)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "half", "complex64",
                 "int8", "bool", "uint16", "uint64"):  # fmt: skip
        yield one(plain.to(getattr(torch, name)))
    yield one(torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    yield one(torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8))
    yield one(torch.quantize_per_channel(plain, torch.ones(3), torch.zeros(3), 0, torch.qint8))
    for layout in ("sparse", "sparse_csr", "sparse_csc"):
        yield one(getattr(plain, f"to_{layout}")())
    yield one(plain.to("meta"))
    yield one(torch.nested.nested_tensor([plain[0], plain[1]]))
    yield one(torch.nn.Parameter(plain))
    yield one(plain.T.contiguous().T)
    yield one(torch.zeros(1).expand(2**15, 2**15))
    yield one(torch.zeros(1).expand(2**40))
    yield one(torch.zeros(2**20, 2)[:3])
    yield one(torch.ones(()))
    yield one(torch.empty(0, 2))
    yield one(torch.view_as_complex(plain).conj())
    for value in (None, "x", [1.0], 1.0, {"a": plain}, plain.tolist()):
        yield one(value)
