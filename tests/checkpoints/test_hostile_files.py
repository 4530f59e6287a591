"""Files that are damaged or mean harm are refused in one sentence; unusual sound ones are read."""

import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import corpus
import corpus_files as files
import numpy as np
import pytest
from refusals import not_read, refused
from safetensors.numpy import save as serialise

import tnsim
from tnsim import Dialect
from tnsim.all_pairs.sources import sources
from tnsim.checkpoints.formats import contents
from tnsim.checkpoints.load import read
from tnsim.checkpoints.rules import LinearRule

READOUT = files.readout()


@pytest.mark.full
@pytest.mark.slow
def test_the_whole_corpus():
    """Loaded or refused, within two seconds each and 200 MiB, in a process with limits."""
    script = Path(corpus.__file__).with_name("corpus_run.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert sum(sum(kind.values()) for kind in result["kinds"].values()) > 1500
    assert max(result["slowest"].values()) < 2
    assert result["memory"] < 200


# sound, though unusual


def test_npz_in_the_other_order_of_bytes_and_of_axes(tmp_path):
    state = {key: np.asfortranarray(array.astype(">f8")) for key, array in READOUT.items()}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **state)
        checkpoint = read(tmp_path / "a.npz", "bilinear-readout")
        assert checkpoint.dtypes == ("float64",)
        np.testing.assert_array_equal(checkpoint.model.layers[0].left, READOUT["W_l"])
        assert checkpoint.model.layers[0].left.dtype == np.float64
    assert tnsim.from_state_dict(state, "bilinear-readout").layers[0].left.dtype.isnative


def test_a_file_that_is_refused_is_closed(tmp_path):
    np.savez(tmp_path / "a.npz", objects=np.array([None]))
    with pytest.raises(tnsim.CheckpointError, match="Python objects") as caught:
        contents(tmp_path / "a.npz")
    (frame,) = [one for one in caught.traceback if one.name == "_npz"]
    assert frame.locals["archive"].fp is None


def test_only_what_the_dialect_uses_is_read(tmp_path):
    members = files.readout_members()
    damaged = files.Member("epoch.npy", files.npy(np.ones((100, 100))), checksum=1)
    (tmp_path / "a.npz").write_bytes(files.archive([*members, damaged]))
    assert tnsim.load(tmp_path / "a.npz", "bilinear-readout").d_in == 2
    rule = LinearRule(weight="epoch")
    dialect = Dialect("other", (rule,), ignore=("W_*",))
    not_read(tmp_path / "a.npz", "tensor 'epoch' cannot be read: Bad CRC-32", dialect=dialect)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", [name for name in files.sound() if "safetensors" not in name])
def test_no_flipped_bit_changes_a_number_where_there_are_checksums(name, tmp_path):
    data, refusals = files.sound()[name], 0
    for bit in range(0, 8 * len(data), 41):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(changed)
        try:
            (layer,) = tnsim.load(tmp_path / name, "bilinear-readout").layers
        except tnsim.TnsimError:
            refusals += 1
            continue
        for array, expected in zip(
            (layer.left, layer.right, layer.down), READOUT.values(), strict=True
        ):
            np.testing.assert_array_equal(array, expected)
    assert refusals > 50


# PyTorch


def members(listed):
    """An archive of records, whose names may be equal or hold anything."""
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w") as archive:
        warnings.simplefilter("ignore")
        for name, data in listed:
            entry = zipfile.ZipInfo("x")
            entry.filename = entry.orig_filename = name
            archive.writestr(entry, data)
    return target.getvalue()


class TestTorch:
    """PyTorch files; skipped where torch is not installed."""

    @pytest.fixture(autouse=True)
    def torch(self, tmp_path):
        self.torch = pytest.importorskip("torch", reason="reading .pt files needs the torch extra")
        self.path = tmp_path / "a.pt"

    def write(self, **changes):
        state = {key: self.torch.tensor(array) for key, array in READOUT.items()}
        self.path.write_bytes(files.pt(state | changes))

    # PyTorch warns of it once in a process, wherever that is.
    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_tensors_without_plain_numbers_are_named(self):
        torch, ones = self.torch, self.torch.ones(3, 2)
        quantised = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
        four_bits = torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        for tensor, message in {
            quantised: "tensor 'W_l' is quantised; store it as plain numbers",
            ones.to_sparse(): r"tensor 'W_l' is sparse \(torch.sparse_coo\); store it with",
            ones.to("meta"): "tensor 'W_l' is a meta tensor, which has a shape and no numbers",
            four_bits: "tensor 'W_l' cannot be turned into numbers",
            ones.to(torch.complex64): "tensor 'W_l' holds complex64, not real numbers",
        }.items():
            self.write(W_l=tensor)
            not_read(self.path, message)

    def test_a_model_keeps_its_numbers_when_the_file_is_written_again(self):
        self.write()
        model = tnsim.load(self.path, "bilinear-readout")
        with self.path.open("r+b") as file:
            file.write(bytes(self.path.stat().st_size))
        np.testing.assert_array_equal(model.layers[0].left, READOUT["W_l"])

    def test_a_flipped_bit_is_found(self):
        self.write()
        data = bytearray(self.path.read_bytes())
        data[data.index(READOUT["W_l"].tobytes())] ^= 1
        self.path.write_bytes(data)
        not_read(self.path, "its record 'archive/data/0' is damaged: the checksum is another")

    def test_repeated_and_endless_numbers(self):
        self.write(W_l=self.torch.zeros(1).expand(3, 2))
        assert tnsim.load(self.path, "bilinear-readout").d_in == 2
        self.write(W_l=self.torch.zeros(1).expand(2**20, 2**20))
        not_read(self.path, "declares 4,398,046,511,152 bytes of tensors in a file of")

    def test_strange_containers(self):
        ones = self.torch.ones(3, 2)
        self.write(**{"step": ones})
        itself: dict = {"W_l": ones}
        itself["model_state_dict"] = itself
        self.path.write_bytes(files.pt(itself))
        not_read(self.path, r"no dialect is known for these keys \(found W_l, model_state_dict\)")
        self.path.write_bytes(files.pt({0: ones}))
        not_read(self.path, "names of tensors must be text, found 0")
        self.path.write_bytes(files.pt([ones]))
        not_read(self.path, "expected a state_dict, found list")

    def test_what_could_run_code(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        self.write(extra=files.Touch())
        for data in (self.path.read_bytes(), pickle.dumps({"a": files.Touch()})):
            self.path.write_bytes(data)
            said = "a.pt: not plain weights: it holds Python objects"
            assert "weights_only" not in str(not_read(self.path, said))
        program = io.BytesIO()
        self.torch.jit.save(self.torch.jit.script(self.torch.nn.Linear(2, 2)), program)
        self.path.write_bytes(program.getvalue())
        assert "weights_only" not in str(not_read(self.path, "is a TorchScript program"))
        assert not Path("owned").exists()

    def test_compressed_long_and_old(self):
        self.write()
        data = self.path.read_bytes()
        self.path.write_bytes(files.rezipped(data, zipfile.ZIP_DEFLATED))
        not_read(self.path, "its records are compressed; save it again with torch.save")
        self.path.write_bytes(files.pt({"history": list(range(300_000))}))
        not_read(
            self.path, "bytes beside the tensors, over the limit of 524,288; save the model al"
        )
        not_read(self.path, r'alone, as by torch.save\(model.state_dict\(\), "model.pt"\)')
        old = io.BytesIO()
        self.torch.save({}, old, _use_new_zipfile_serialization=False)
        self.path.write_bytes(old.getvalue())
        not_read(self.path, "or is older than PyTorch 1.6; save the state_dict alone")

    LARGE = b"\x80\2}X\1\0\0\0acbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Rs."

    @pytest.mark.parametrize("name", ["DATA.PKL", "Data.pkl", "data.PKL"])
    @pytest.mark.parametrize("folder", ["archive", "data", "a/data"])
    def test_the_case_of_a_record_hides_no_pickle(self, name, folder):
        """PyTorch reads names in any case; a file of 400 bytes took 2 GiB."""
        first = [(f"{folder.partition('/')[0]}/version", b"3\n")]
        self.path.write_bytes(members([*first, (f"{folder}/{name}", self.LARGE)]))
        not_read(self.path, "its pickle asks for bytearray of 2147483647 bytes")

    def test_no_way_of_passing_a_number_makes_it_a_length(self):
        """PyTorch calls a function with a list, a dictionary, or what another function returned."""
        function, number = b"cbuiltins\nbytearray\n", b"J\xff\xff\xff\x7f"
        ways = b"]" + number + b"a", b"](" + number + b"e", b"}" + number + b"Ns"
        ways += (b"ctorch\nSize\n(" + number + b"t\x85R",)
        start = b"\x80\2}X\1\0\0\0a"
        for way in ways:
            for call in (b"R", b"\x81"):
                data = start + function + way + call + b"s."
                self.path.write_bytes(members([("a/version", b"3\n"), ("a/data.pkl", data)]))
                not_read(self.path, "its pickle asks for bytearray of arguments that are no tuple")
        called = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + function + b"N" + number + b"\x85NtR"
        for made, said in (
            (b"ctorch.storage\nUntypedStorage\n)R", "UntypedStorage of a size"),
            (function + b"]\x85R", "bytearray of something"),
            (called, "bytearray of 2147483647 bytes"),
            (b"c_codecs\nencode\nX\1\0\0\0aX\6\0\0\0utf-32\x86R", "text in another encoding"),
        ):
            data = start + made + b"s."
            self.path.write_bytes(members([("a/version", b"3\n"), ("a/data.pkl", data)]))
            not_read(self.path, f"its pickle asks for {said}")
        self.write(extra=self.torch.tensor(2**31 - 1))
        with zipfile.ZipFile(self.path) as file:
            sound = file.read("archive/data.pkl")
        # The tensor of one number, made to be the argument of a call.
        before, key, value = sound.partition(b"X\5\0\0\0extra")
        call = before + key + value[:2] + function + value[2:-2] + b"\x85Ru."
        self.path.write_bytes(files.rezipped(self.path.read_bytes(), data=call))
        not_read(self.path, "its pickle asks for bytearray of something else than bytes")

    def test_bytes_beside_weights_are_read(self):
        given = {"extra": bytearray(b"abc\xff"), "empty": bytearray(), "plain": b"\xff"}
        self.write(**given)
        assert contents(self.path).state.items() >= given.items()

    def test_records_that_readers_tell_apart_in_other_ways_are_refused(self):
        plain = pickle.dumps({"W_l": 1.0}, 2)
        for one, other in [
            ("data.pkl", "data.pkl"),
            ("data.pkl", "DATA.pkl"),
            ("x", "data.pkl\0x"),
        ]:
            records = [(f"a/{one}", plain), ("a/version", b"3\n"), (f"a/{other}", self.LARGE)]
            for listed in (records, records[::-1]):
                self.path.write_bytes(members(listed))
                not_read(self.path, "has several records of one name|its pickle asks for")

    def test_a_second_directory_hides_no_pickle(self):
        """`zipfile` takes the directory before the end, PyTorch the one whose place is stated."""
        version = "a/version", b"3\n"
        hidden = members([("a/data.pkl", self.LARGE), version])
        shown = members([("a/data.pkl", b"\x80\2}.".ljust(len(self.LARGE))), version])
        assert len(shown) == len(hidden)  # so the place stated is that of either directory
        self.write()
        for sound in (shown, self.path.read_bytes()):
            for data in (
                hidden[:-22] + sound,
                sound[:-2] + b"\1\0x",
                sound + b"\0\0",
                sound + hidden,
            ):
                self.path.write_bytes(data)
                not_read(self.path, "its directory is not at its end|its pickle asks for|truncated")


# other formats


def test_a_long_directory_hides_behind_no_record_without_a_pointer(tmp_path):
    """`zipfile` takes the record of 64 bits where a pointer says so, whatever stands before the end."""
    comments = [b"x" * 60_000] * 19 + [b"x" * 60_000 + b"PK\6\6" + bytes(72)]
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for n, comment in enumerate(comments):
            member = zipfile.ZipInfo(f"w{n}.npy")
            member.comment = comment
            archive.writestr(member, b"")
    not_read(tmp_path / "a.npz", "its directory has 1,2.* bytes, over the limit")


def test_safetensors_that_numpy_cannot_hold(tmp_path):
    layout = {"W_l": [4, 2], "W_r": [4, 2], "W_p": [2, 4]}
    header = {
        name: {"dtype": "F4", "shape": shape, "data_offsets": [4 * n, 4 * n + 4]}
        for n, (name, shape) in enumerate(layout.items())
    }
    (tmp_path / "a.safetensors").write_bytes(files.safetensors(json.dumps(header), bytes(12)))
    not_read(
        tmp_path / "a.safetensors", "tensor 'W_l' holds F4, which is not read; convert it to F32"
    )
    (tmp_path / "a.safetensors").write_bytes(files.safetensors("{}" + " " * 2**22))
    not_read(tmp_path / "a.safetensors", "its header has 4,194,306 bytes, over the limit")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"flags": 1}, "'W_l' is encrypted"),
        ({"method": 14}, "'W_l' is compressed by method 14, which NumPy never writes"),
        ({"method": 8}, "not a readable npz file, or truncated"),
        ({"checksum": 1}, "not a readable npz file, or truncated: Bad CRC-32"),
        (
            {"data": files.npy(np.ones((3, 2)))[:-8]},
            r"declares shape \(3, 2\) of float64, which is",
        ),
        ({"data": b"text"}, "not a readable npz file, or truncated"),
    ],
)
def test_npz_with_a_strange_member(changes, message, tmp_path):
    members = files.readout_members()
    members[0] = members[0]._replace(**changes)
    (tmp_path / "a.npz").write_bytes(files.archive(members))
    not_read(tmp_path / "a.npz", message)


@pytest.mark.parametrize("name", ["W_l.npy", "W_l"])
def test_npz_with_two_members_of_one_name(name, tmp_path):
    members = files.readout_members()
    other = members[0]._replace(name=name, data=files.npy(np.ones((3, 2))))
    (tmp_path / "a.npz").write_bytes(files.archive([*members, other]))
    not_read(tmp_path / "a.npz", "holds two tensors of the name 'W_l'")


def test_small_files_that_declare_much_memory(tmp_path):
    for item in corpus.bombs():
        item.write(tmp_path)
        tracemalloc.start()
        with pytest.raises(tnsim.TnsimError):
            tnsim.load(tmp_path / item.target, "bilinear-readout")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**26
    members = [files.zero_member("W_l", (2**15, 2**15))]
    (tmp_path / "a.npz").write_bytes(files.archive(members))
    not_read(tmp_path / "a.npz", "declares 4,294,967,296 bytes of tensors in a file of 4,")


# places


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.npz").mkdir()
    with refused("is a folder without a checkpoint", tnsim.CheckpointError):
        read(tmp_path / "folder.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    not_read(tmp_path / "pipe.npz", "is no regular file")
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    not_read(tmp_path / "loop.npz", "no such file")
    not_read(tmp_path / ("n" * 300 + ".npz"), "cannot be read: File name too long")
    for suffix in ("npz", "safetensors", "pt"):
        (tmp_path / f"empty.{suffix}").touch()
        not_read(tmp_path / f"empty.{suffix}", "is empty")
    with refused("expected a path or several, found 5", tnsim.CheckpointError):
        tnsim.load(5)


def test_permission(tmp_path, monkeypatch):
    """Root may read anything, so that the refusal of the operating system is played."""
    path = tmp_path / "a.npz"
    path.write_bytes(files.npz(READOUT))
    path.chmod(0)
    if os.geteuid() == 0:

        def forbidden(*_, **__):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", forbidden)
    not_read(path, "a.npz: cannot be read: Permission denied$")


def test_names_are_shown_without_what_they_could_do_to_a_terminal(tmp_path):
    path = tmp_path / "a.npz"
    names = [f"w\x1b[2J{n}" for n in range(3)] + ["n" * 50_000]
    np.savez(path, **dict.fromkeys(names, np.ones(1)))
    message = str(not_read(path, "no dialect is known"))
    assert "\\x1b[2J" in message and message.isprintable() and len(message) < 1200
    state = {f"layers.0.{name}": READOUT["W_l"] for name in names}
    path = tmp_path / "own.safetensors"
    path.write_bytes(serialise(state, {"tnsim": '{"format": 1, "layers": []}'}))
    assert str(not_read(path, "does not mention")).isprintable()


def test_labels_that_look_like_numbers(tmp_path):
    for name in ("\u00b2", "1"):
        (tmp_path / f"{name}.npz").write_bytes(files.npz(READOUT))
    series = tnsim.load(tmp_path)
    assert series.labels == ("1", "\u00b2")
    assert [source.label for source in sources(series)] == ["1", "\u00b2"]
