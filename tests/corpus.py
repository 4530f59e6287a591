"""Damaged and hostile files, made by changing a few sound ones; the same ones each time.

Every input is a small folder: a checkpoint, perhaps a configuration beside it, perhaps a dialect.
"""

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator

import corpus_files as files
import corpus_torch
import numpy as np
from safetensors.numpy import save as serialise

from tnsim.checkpoints.rules import KINDS

DEEP = 50_000
CONTROL = "\x1b[2J\x07\u202e"
ODD = [None, True, False, 0, -1, 1.5, float("inf"), float("nan"), "", "x", "config:a", CONTROL]
ODD += [[], [1], [[]], {}, {"a": 1}, 10**400]
VALUES = [json.dumps(value) for value in ODD]  # in place of any value of a text
VALUES += ["1" * 5000, "[" * DEEP, '{"a":' * DEEP, f'"{"n" * 10**6}"']


def inputs() -> Iterator[files.Input]:
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
    if files.torch is not None:
        yield from corpus_torch.pickles()
        yield from corpus_torch.tensors()


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


def safetensors_headers() -> Iterator[files.Input]:
    def one(data: bytes) -> files.Input:
        return files.Input("safetensors: header", {"a.safetensors": data}, "a.safetensors")

    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = {"__metadata__": {"a": "b"}, "W_l": entry}
    for text in replaced(header):
        yield one(files.safetensors(text, bytes(16)))
    yield one(files.safetensors("{}", b"", length=2**63))
    yield one(files.safetensors("{}", b"", length=0))
    yield one(files.safetensors(b'{"\xff": 1}'))
    yield one(files.safetensors("{}" + " " * 2**23))
    many = {f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}
    yield one(files.safetensors(json.dumps(many, separators=(",", ":")), b""))
    width = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F16": 16, "BF16": 16, "C64": 64, "F64": 64}
    others = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U8", "BOOL", "F99")
    for dtype in (*width, *others):
        size = 8 * width.get(dtype, 8) // 8
        layer = {"W_l": (0, [4, 2]), "W_r": (1, [4, 2]), "W_p": (2, [2, 4])}
        header = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [n * size, (n + 1) * size]}
            for name, (n, shape) in layer.items()
        }
        yield one(files.safetensors(json.dumps(header), bytes([56]) * 3 * size))


def architectures() -> Iterator[files.Input]:
    tensors, architecture = files.native()
    for text in replaced(architecture):
        data = serialise(tensors, {"tnsim": text})
        yield files.Input("safetensors: tnsim's metadata", {"a.safetensors": data}, "a.safetensors")


def damaged() -> Iterator[files.Input]:
    """Bits flipped, ends cut off, the wrong suffix."""
    chance = random.Random(0)
    for name, data in files.sound().items():
        for _ in range(30):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            yield files.Input("one bit flipped", {name: bytes(changed)}, name)
        for part in range(12):
            yield files.Input("truncated", {name: data[: len(data) * part // 12]}, name)
        yield files.Input("truncated", {name: data[:-1]}, name)
        for suffix in ("npz", "safetensors", "pt", "pth", "bin", "json"):
            yield files.Input("wrong suffix", {f"b.{suffix}": data}, f"b.{suffix}")


# archives


def archives() -> Iterator[files.Input]:
    def one(**changes) -> files.Input:
        members = files.readout_members()
        members[0] = members[0]._replace(**changes)
        return files.Input("npz: directory", {"a.npz": files.archive(members)}, "a.npz")

    for method in (1, 8, 9, 12, 14, 93, 95, 98, 99, 65535):
        yield one(method=method)
    for flags in (1, 8, 32, 64, 2048, 8192, 65535):
        yield one(flags=flags)
    for size in (0, 1, 127, 200, 2**31, 2**32 - 2, 2**40, 2**63, 2**64 - 1):
        yield one(size=size)
    for name in ("", ".npy", "W_r.npy", "../W_l.npy", "/W_l.npy", "W_l", "a" * 60_000, CONTROL):
        yield one(name=name)
    yield one(checksum=1)
    for data in (b"", b"\x93NUMPY", b"text", files.npz(files.readout()), pickle.dumps([1])):
        yield one(data=data)
    lzma = zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2
    for method in lzma:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as target:
            target.writestr("W_l.npy", files.npy(files.readout()["W_l"]))
        yield files.Input("npz: directory", {"a.npz": file.getvalue()}, "a.npz")
    many = [files.Member(f"{n}.npy", b"") for n in range(25_000)]
    yield files.Input("npz: directory", {"a.npz": files.archive(many)}, "a.npz")


def npy_headers() -> Iterator[files.Input]:
    def one(text: str, version: bytes = b"\1\0", numbers: bytes = bytes(24)) -> files.Input:
        size = struct.pack("<H" if version == b"\1\0" else "<L", len(text.encode()) % 2**16)
        data = b"\x93NUMPY" + version + size + text.encode() + numbers
        members = files.readout_members()
        members[0] = files.Member("W_l.npy", data)
        return files.Input("npz: header of an array", {"a.npz": files.archive(members)}, "a.npz")

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


def bombs() -> Iterator[files.Input]:
    def one(members: list[files.Member]) -> files.Input:
        return files.Input("bomb", {"a.npz": files.archive(members)}, "a.npz")

    small = files.readout_members()
    yield one([files.zero_member("W_l", (2**15, 2**15)), *small[1:]])
    unasked = [files.zero_member(f"extra_{n}", (100 * 2**20,)) for n in range(30)]
    yield one([*small, *unasked])
    yield one([files.zero_member(name, (2**28, 2), "f8") for name in ("W_l", "W_r")])
    rank = 2**16  # a layer without readout: an identity would take 16 GiB
    shapes = {"embed.weight": (1, 1), "blocks.0.weight": (rank, 1), "head.weight": (1, rank // 2)}
    fused = files.npz({name: np.ones(shape, "f4") for name, shape in shapes.items()})
    yield files.Input("bomb", {"a.npz": fused}, "a.npz")
    nan = files.npz({name: np.full_like(x, np.nan) for name, x in files.readout().items()})
    yield files.Input("bomb", {"a.npz": nan}, "a.npz")


# text


def configurations() -> Iterator[files.Input]:
    data = files.npz(files.attention())

    def one(name: str, text: bytes) -> files.Input:
        kind = "configuration: JSON" if name.endswith("json") else "configuration: YAML"
        return files.Input(kind, {"a.npz": data, name: text}, "a.npz", "quadratic-attention")

    for text in replaced(files.CONFIG):
        yield one("config.json", text.encode())
    yield one("config.json", b"")
    yield one("config.json", b"\xff\xfe")
    yield one("config.json", b" " * 2**21)
    entry = "model:\n  n_head: 2\n  attn_scale: 0.5\n  rope_base: "
    values = ("", "~", "2020-01-01", "2020-99-99", ".inf", "0x" + "f" * 5000, "1" * 5000, "1:2:3",
              "'x'", "[1]", "*a", "&a [*a]", "!!python/object/apply:os.getpid []", "!!binary x",
              "[" * 50_000, "{a: " * 50_000, "\x1b", "!!set {a}", "&a {<<: *a}", "1e400",
              "{[]: 1}")  # fmt: skip
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


def dialects() -> Iterator[files.Input]:
    data = files.npz(files.readout())

    def one(text: str | bytes) -> files.Input:
        text = text if isinstance(text, bytes) else text.encode()
        return files.Input("dialect", {"a.npz": data, "d.json": text}, "a.npz", "d.json")

    for text in replaced(files.DIALECT):
        yield one(text)
    rule = files.DIALECT["layers"][0]
    fields = {name for kind in KINDS.values() for name in kind.__dataclass_fields__}
    for field in sorted({"kind", *fields}):
        for value in ODD:
            yield one(json.dumps(files.DIALECT | {"layers": [rule | {field: value}]}))
    for field in ("nested", "ignore", "description", "unknown"):
        for value in ODD:
            yield one(json.dumps(files.DIALECT | {field: value}))
    yield one(json.dumps(files.DIALECT | {"layers": [rule | {"repeat": True}]}))
    yield one(json.dumps(files.DIALECT | {"layers": [rule] * 5000}))
    yield one(json.dumps(files.DIALECT | {"ignore": ["*a" * 1000 + "b"]}))
    for text in (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * DEEP, b" " * 2**21, b"{} {}"):
        yield one(text)
    norm = {"kind": "linear", "weight": "w", "norm_energy": "e"}
    for energy in ([1.0, 2.0], [], [[1.0]], [-1.0], [np.nan], ["x"]):
        state = files.npz({"w": np.ones((2, 2)), "e": np.array(energy)})
        text = json.dumps(files.DIALECT | {"layers": [norm]}).encode()
        yield files.Input("dialect", {"a.npz": state, "d.json": text}, "a.npz", "d.json")


def names() -> Iterator[files.Input]:
    long, strange = "n" * 10**6, f"layers.0.attn{CONTROL}\n"
    for name in (long, strange, f"norm.{long}", f"norm.{CONTROL}", "\ud800", ""):
        data = files.safetensors(
            json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), bytes(4)
        )
        yield files.Input("names", {"a.safetensors": data}, "a.safetensors")
    for name in (long, CONTROL):
        text = json.dumps(files.DIALECT | {"name": name, "description": name}).encode()
        yield files.Input(
            "names", {"a.npz": files.npz(files.readout()), "d.json": text}, "a.npz", "d.json"
        )
        key = {"kind": "linear", "weight": name}
        text = json.dumps(files.DIALECT | {"layers": [key]}).encode()
        yield files.Input(
            "names", {"a.npz": files.npz(files.readout()), "d.json": text}, "a.npz", "d.json"
        )
    for name in (f"{CONTROL}.npz", "\udcff.npz"):
        yield files.Input("names", {name: b"x"}, name)
        yield files.Input("names", {name: files.npz(files.readout())}, name)
