"""The part of the corpus that PyTorch writes; empty of names where it is not installed."""

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator

import corpus_files as files
from corpus_files import torch


def pickles() -> Iterator[files.Input]:
    def one(data: bytes) -> files.Input:
        return files.Input("PyTorch: pickle", {"a.pt": data}, "a.pt")

    chance = random.Random(0)
    state = {name: torch.tensor(x) for name, x in files.readout().items()}
    sound_file = files.pt(state)
    with zipfile.ZipFile(io.BytesIO(sound_file)) as file:
        sound_pickle = file.read("archive/data.pkl")
    for _ in range(150):
        changed = bytearray(sound_pickle)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield one(files.rezipped(sound_file, data=bytes(changed)))
    for part in range(8):
        cut = sound_pickle[: len(sound_pickle) * part // 8]
        yield one(files.rezipped(sound_file, data=cut))
    start = b"\x80\x02"
    for repeated in (b"]", b"(", b"}", b"N0", b"]q\0h\0a", b"(t", b"K\1\x85"):
        for length in (2**19 - 500, 2**22):
            endless = start + repeated * (length // len(repeated)) + b"."
            yield one(files.rezipped(sound_file, data=endless))
    yield from map(one, calls(sound_file))
    values = [[1], 1, None, "x", {1}, b"x", (1,), {"W_l": 1}, {}, 2**2000]
    values += [files.Touch(), [files.Touch()]]
    for value in values:
        yield one(files.rezipped(sound_file, data=pickle.dumps(value, protocol=2)))
        yield one(pickle.dumps(value))
    key = b"X" + struct.pack("<L", len("model_state_dict")) + b"model_state_dict"
    deep = start + (b"}" + key) * 5000 + b"}" + b"s" * 5000 + b"."
    yield one(files.rezipped(sound_file, data=deep))
    itself: dict = {"W_l": state["W_l"]}
    itself["model_state_dict"] = itself
    yield one(files.pt(itself))
    yield one(files.rezipped(sound_file, zipfile.ZIP_DEFLATED))
    yield one(files.rezipped(sound_file, constants=b"x"))
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), program)
    yield one(program.getvalue())
    old = io.BytesIO()
    torch.save(state, old, _use_new_zipfile_serialization=False)
    yield one(old.getvalue())
    yield one(files.npz(files.readout()))


def calls(sound_file: bytes) -> Iterator[bytes]:
    """Files whose pickle calls a function that PyTorch allows, with a number or a text that is too
    large."""
    largest = b"J" + struct.pack("<i", 2**31 - 1)
    accents = "\u00e9".encode() * 200_000
    text = b"X" + struct.pack("<L", len(accents)) + accents

    def named(name: str) -> bytes:
        module, _, last = name.rpartition(".")
        return f"c{module}\n{last}\n".encode()

    allocating = [
        "builtins.bytearray",
        "__builtin__.bytearray",
        "torch.Tensor",
        "torch.FloatTensor",
    ]
    allocating += ["torch.storage.UntypedStorage", "torch.storage.TypedStorage"]
    allocating += ["torch.FloatStorage", "torch.Size", "torch.nn.parameter.Parameter"]
    found = []
    for name in allocating:
        for call in (b"R", b"\x81"):
            found.append(named(name) + largest + b"\x85" + call)
    nested = named("builtins.bytearray") * 2 + largest + b"\x85}"
    found.append(named("torch._tensor._rebuild_from_type_v2") + b"(" + nested + b"tR")
    for name in (b"punycode", b"idna", b"unicode_escape"):
        encoding = b"X" + struct.pack("<L", len(name)) + name
        found.append(named("_codecs.encode") + text + encoding + b"\x86R")
    for name in ("torch.device", "builtins.complex", "collections.Counter"):
        found.append(named(name) + text + b"\x85R")
    sizes = b"(" + largest + largest + b"t(" + largest + b"K\1t"
    for name in ("_rebuild_meta_tensor_no_storage", "_rebuild_tensor_v2", "_rebuild_qtensor"):
        given = b"(" + named("torch.float32") + sizes + b"\x89tR"
        found.append(named(f"torch._utils.{name}") + given)
    for call in found:
        yield files.rezipped(sound_file, data=b"\x80\2}X\1\0\0\0a" + call + b"s.")


def tensors() -> Iterator[files.Input]:
    def one(tensor, key="W_l") -> files.Input:
        state = {name: torch.tensor(x) for name, x in files.readout().items()} | {key: tensor}
        return files.Input("PyTorch: tensors", {"a.pt": files.pt(state)}, "a.pt")

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
