"""Programs on disk: what is read is sound and the user's own, and gives the same bits."""

import os
import pickle
import stat
import subprocess
import sys

import backends
import jax
import numpy as np
import pytest
from processes import python, started

import tnsim
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime import binding, compiling, execution
from tnsim.engine.runtime.compiling import Wanted

pytestmark = [
    backends.compiled,
    pytest.mark.skipif(sys.platform != "linux", reason="files and modes as Linux has them"),
]
OUTER = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
TWICE = Operation("sum", (2,), ((0, 1),), (0, 1), (2.0,))
PROGRAM = Program(((2, 3), (3, 4)), (OUTER, TWICE), (3,))
INPUTS = [np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of programs of the test's own, not there yet."""
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(tmp_path))
    return tmp_path / "programs"


def made(program=PROGRAM, dtype="float64"):
    """The program of a program, forgotten by the process before."""
    tnsim.session().clear()
    with execution.precision():
        (compiled,) = compiling.ready([Wanted(program, None, dtype)], execution.stage_function)
    return compiled


def value(compiled, dtype="float64"):
    with execution.precision():
        (output,), _ = compiled([x.astype(dtype) for x in INPUTS])
        return np.asarray(output)


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows with every program that is not read."""
    found = []
    compile_ = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda *a: found.append(1) or compile_(*a))
    return found


def test_a_kept_program_is_not_traced_and_gives_the_same_bits(folder, monkeypatch):
    fresh = value(made())
    np.testing.assert_array_equal(fresh, 2 * INPUTS[0] @ INPUTS[1])
    monkeypatch.setattr(binding.BoundStage, "__call__", lambda *a: pytest.fail("traced again"))
    np.testing.assert_array_equal(value(made()), fresh)


def test_the_folder_is_the_users_alone(folder):
    made()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1


def truncations(content):
    yield from (content[:length] for length in (0, 1, 31, 32, 33, len(content) - 1))


def bit_flips(content):
    for at in range(0, len(content), len(content) // 10):
        yield content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def others(content):
    """Whole by their digest, but no program."""
    device = compiling.default_device()
    with execution.precision():
        files = compiling.Files.here(device, compiling._settings())
    for other in (b"", pickle.dumps(3), pickle.dumps((b"", 1, 2)), b"no pickle"):
        sealed = files._sealed(repr(Wanted(PROGRAM, None, "float64")), other)
        assert files._opened(repr(Wanted(PROGRAM, None, "float64")), sealed) == other
        yield sealed


@pytest.mark.slow
@pytest.mark.parametrize("damages", [truncations, bit_flips, others])
def test_a_damaged_file_is_compiled_again_and_replaced(damages, folder, compilations):
    fresh = value(made())
    (file,) = folder.iterdir()
    content = file.read_bytes()
    for count, damaged in enumerate(damages(content), 2):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(value(made()), fresh)
        assert len(compilations) == count
        made()  # reads what has taken its place
        assert len(compilations) == count


@pytest.mark.slow
def test_a_program_never_answers_for_another(folder, compilations):
    """Files exchanged among programs of equal and of other shapes, dtypes included."""
    other_weights = Program(PROGRAM.shapes, (OUTER, TWICE._replace(weights=(3.0,))), (3,))
    transposed = Operation("contract", (0, 1), ((0, 1), (1, 2)), (2, 0))
    other_shape = Program(PROGRAM.shapes, (transposed,), (2,))
    wanted = [(PROGRAM, "float64"), (other_weights, "float64"), (other_shape, "float64")]
    wanted.append((PROGRAM, "float32"))
    known: dict = {}
    expected = []
    for program, dtype in wanted:
        expected.append(value(made(program, dtype), dtype))
        (new,) = set(folder.iterdir()) - set(known)
        known[new] = new.read_bytes()
    found = list(known.items())
    for turn in range(1, len(found)):
        for (file, _), (_, content) in zip(found, found[turn:] + found[:turn], strict=True):
            file.write_bytes(content)
        for (program, dtype), number in zip(wanted, expected, strict=True):
            np.testing.assert_array_equal(value(made(program, dtype), dtype), number)
        assert len(compilations) == len(wanted) * (turn + 1)
        assert set(folder.iterdir()) == known.keys()


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "of another user"])
def test_a_folder_of_others_is_neither_read_nor_written(kind, folder, compilations, monkeypatch):
    fresh = value(made())
    before = {file: file.read_bytes() for file in folder.iterdir()}
    if kind == "open to others":
        folder.chmod(0o750)
    elif kind == "a link":
        folder.rename(folder.parent / "elsewhere")
        folder.symlink_to(folder.parent / "elsewhere")
    elif kind == "a file":
        folder.rename(folder.parent / "elsewhere")
        folder.write_text("")
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for count in (2, 3):
        np.testing.assert_array_equal(value(made()), fresh)
        assert len(compilations) == count
    if folder.is_dir():
        assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_switched_off(folder, compilations, monkeypatch):
    monkeypatch.setenv("TNSIM_PROGRAM_CACHE", "off")
    made(), made()
    assert len(compilations) == 2 and not folder.exists()
    monkeypatch.delenv("TNSIM_PROGRAM_CACHE")
    monkeypatch.setenv("TNSIM_CACHE_DIR", "")
    made()
    assert len(compilations) == 3 and not folder.exists()


def test_a_folder_that_one_may_not_look_into(folder, compilations, monkeypatch):
    """Root may, so that the refusal is that of a name which is too long."""
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(folder.parent / ("x" * 300)))
    np.testing.assert_array_equal(value(made()), value(made()))
    assert len(compilations) == 2


def test_whatever_a_program_depends_on_tells_it_apart(folder, compilations, monkeypatch):
    """Another dtype, program, processor, version, code or flag is another program."""
    made()
    single = made(dtype="float32")
    assert value(single, "float32").dtype == "float32"
    thrice = Program(PROGRAM.shapes, (OUTER, TWICE._replace(weights=(3.0,))), (3,))
    np.testing.assert_array_equal(value(made(thrice)), 3 * INPUTS[0] @ INPUTS[1])
    assert len(compilations) == 3
    for name in ("host", "_code", "_versions"):
        with monkeypatch.context() as patched:
            patched.setattr(compiling, name, lambda *a: ("another",))
            made()
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--another")
        made()
    assert len(compilations) == 7
    made(), made(dtype="float32"), made(thrice)
    assert len(compilations) == 7


def test_what_was_not_used_for_longest_goes_first(folder):
    files = compiling.Files(folder, None, ())
    made()
    (first,) = folder.iterdir()
    made(dtype="float32")
    (second,) = set(folder.iterdir()) - {first}
    os.utime(first, (1, 1))
    made()  # read, so used
    assert first.stat().st_mtime > 1
    os.utime(second, (1, 1))
    files.trim(first.stat().st_size)
    assert list(folder.iterdir()) == [first]
    files.trim(0)
    assert not list(folder.iterdir())


def jax_settings():
    names = [name for name in jax.config.values if "compilation_cache" in name]
    return {name: jax.config.values[name] for name in names}


def test_jax_is_left_as_the_caller_has_it(folder):
    before = jax_settings()
    assert before
    made(), made()
    assert jax_settings() == before


TWO = """
import numpy as np, tnsim
g = np.random.default_rng(0)
models = [tnsim.Model([tnsim.Bilinear(*g.normal(size=(3, 4, 4)))] * 2) for _ in range(2)]
with tnsim.using(tnsim.Session(tier="compile")):
    print(float(tnsim.similarity(*models, tnsim.GaussianClosure())).hex())
"""


@pytest.mark.slow
def test_processes_that_write_at_once(folder):
    """All compile, all write, and a later one reads: the same bits from each."""
    at_once = [started(TWO, stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[0] for process in at_once]
    said.append(python(TWO)[0])
    assert said[0] and len(set(said)) == 1
    assert all(file.suffix == ".program" for file in folder.iterdir())


@pytest.mark.slow
def test_programs_in_the_cache_of_jax_are_kept_there_alone(folder, tmp_path, monkeypatch):
    """What comes out of JAX's cache and is serialised once more does not run where it is read."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # XLA's own level, at which code has the kernels that were not found.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    said = {python(TWO.replace("3, 4, 4", "3, 64, 64"))[0] for _ in "123"}
    assert len(said) == 1 and "0x" in said.pop()
    assert any((tmp_path / "jax").iterdir()) and not folder.exists()


def test_progress_is_told(folder):
    told = []
    tnsim.session().clear()
    wanted = [Wanted(PROGRAM, None, dtype) for dtype in ("float64", "float32")]
    with execution.precision(), compiling.reporting(lambda *counts: told.append(counts)):
        compiling.ready(wanted, execution.stage_function)
        compiling.ready(wanted, execution.stage_function)
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_products_of_many_axes_are_summed():
    """jaxlib 0.10.2 hands such sums to a library that ends the process, unless told not to."""
    ones = np.ones((3, 1, 2, 2, 8, 8, 8), np.float32)
    summed = jax.jit(
        lambda x, y: (x * y).sum(axis=3), compiler_options=compiling.compiler_options()
    )
    assert float(summed(ones, ones).sum()) == ones.sum()


def test_options_that_this_xla_does_not_know_are_left_out():
    known = {"xla_backend_optimization_level": 1}
    assert compiling.known_options({**known, "xla_of_another_year": True}) == known
    chosen = compiling.compiler_options()
    assert chosen is None or compiling.known_options(chosen) == chosen
