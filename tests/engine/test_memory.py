"""Memory: what is free, what is planned, and that a run within its budget lives under a limit."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear
from processes import python
from refusals import refused

import tnsim
from tnsim.engine import costs
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime import compiling, devices, execution
from tnsim.engine.runtime.compiling import Wanted
from tnsim.problems import features
from tnsim.problems.sequences import expansions

pytestmark = pytest.mark.usefixtures("diagrams")

GIB = 2**30


def files(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def machine(monkeypatch):
    """A machine that can give 16 GiB."""
    told = SimpleNamespace(available=16 * GIB)
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: told)


def version_2(limit: str, usage: int, cache: int) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 7\ninactive_file {cache}\n",
    }


def under(folder: str, texts: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in texts.items()}


@pytest.mark.parametrize("texts", [{"self/cgroup": "0::/\n"}, {}], ids=["Linux", "another system"])
def test_without_limits_the_machine_counts(tmp_path, machine, texts):
    proc = files(tmp_path / "proc", texts)
    assert devices.host_bytes(proc, tmp_path / "none") == 16 * GIB


def test_the_least_limit_over_a_group_counts_version_2(tmp_path, machine):
    """Its own limit, that of the group above, usage taken off, cache that the kernel can drop put
    back."""
    proc = files(tmp_path / "proc", {"self/cgroup": "0::/jobs/mine\n"})
    groups = files(
        tmp_path / "cgroup",
        under("jobs/mine", version_2(str(8 * GIB), 2 * GIB, GIB))
        | under("jobs", version_2("max", 3 * GIB, 0)),
    )
    assert devices.host_bytes(proc, groups) == 7 * GIB
    files(groups, under("jobs", version_2(str(4 * GIB), 3 * GIB, 0)))
    assert devices.host_bytes(proc, groups) == 1 * GIB
    files(groups, under("jobs", version_2(str(2 * GIB), 3 * GIB, 0)))
    assert devices.host_bytes(proc, groups) == 0


@pytest.mark.parametrize("mounted", ["docker/abc", "."])
def test_version_1_also_where_a_container_sees_the_path_of_its_host(tmp_path, machine, mounted):
    lines = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    proc = files(tmp_path / "proc", {"self/cgroup": lines})
    limits = {
        "memory.limit_in_bytes": f"{5 * GIB}\n",
        "memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }
    groups = files(tmp_path / "cgroup", under(f"memory/{mounted}", limits))
    assert devices.host_bytes(proc, groups) == 4 * GIB


@pytest.mark.parametrize(
    "texts", [{}, {"self/cgroup": "nonsense\n"}, {"self/cgroup": "0::/../..\n"}]
)
def test_what_says_nothing_is_passed_over(tmp_path, texts, monkeypatch):
    """As where the system has no control groups, and does not tell of its memory."""

    def untold(*_):
        raise NotImplementedError("no figures here")

    monkeypatch.setattr(devices.psutil, "virtual_memory", untold)
    monkeypatch.setattr(devices.psutil, "Process", untold)
    assert devices.host_bytes(files(tmp_path, texts), tmp_path / "none") is None
    monkeypatch.setattr(devices, "PROC", tmp_path)
    monkeypatch.setattr(devices, "CGROUPS", tmp_path / "none")
    assert jax.default_backend() != "cpu" or devices.available_bytes() is None
    one = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
    assert tnsim.similarity(one, 2.0 * one) == 1


def test_address_space(tmp_path, machine, monkeypatch):
    resource = pytest.importorskip("resource")
    taken = SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=GIB))
    monkeypatch.setattr(devices.psutil, "Process", lambda: taken)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, 4 * GIB))
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 2)
    none = tmp_path / "none"
    assert devices.host_bytes(none, none) == 2 * GIB - 4 * 136 * 2**20
    assert devices.host_bytes(none, none, compiles=False) == 2 * GIB
    monkeypatch.setitem(sys.modules, "resource", None)
    assert devices.host_bytes(none, none) == 16 * GIB


def test_copies_that_a_matrix_product_needs_are_counted():
    """x[b, i, j] y[b, j, k] is one product; its result in another order is copied once more."""
    shapes = ((4, 8, 16), (4, 16, 32))
    straight = Operation("contract", (0, 1), ((0, 1, 2), (0, 2, 3)), (0, 1, 3))
    program = Program(shapes, (straight,), (2,))
    assert costs.peak_elements(program) == 512 + 2048 + 1024
    turned = Operation("contract", (0, 1), ((0, 1, 2), (0, 2, 3)), (3, 0, 1))
    program = Program(shapes, (turned,), (2,))
    assert costs.peak_elements(program) == 512 + 2048 + 2 * 1024


def wide(rng):
    return tnsim.Model([bilinear(rng, 64, 96, 64), bilinear(rng, 64, 96, 8)])


def attending(rng):
    """Of long programs, which XLA orders in its own way; one layer has none beyond 118 operations."""
    square = (rng.normal(size=(16, 16)) for _ in range(6))
    return tnsim.Model([tnsim.Attention(*square, n_heads=2)], n_ctx=24)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the buffers of CPU programs")
@pytest.mark.parametrize(
    "make, metric",
    [(wide, tnsim.Gaussian()), (wide, tnsim.TreeSymmetric()), (attending, tnsim.TreeSymmetric())],
)
def test_planned_arrays_hold_what_xla_allocates(make, metric, rng):
    """XLA's own count of every compiled program of a size that matters."""
    planned = tnsim.plan(make(rng), make(rng), metric, cosine=make is attending).contraction
    large = [program for program in planned.programs if costs.peak_elements(program) > 2**15]
    assert large
    for program in large:
        ratio = 8 * costs.COMPILED * costs.peak_elements(program) / allocated_by_xla(program)
        assert 1 <= ratio < 2.1


def allocated_by_xla(program: Program) -> int:
    """Bytes of a compiled program by XLA's own count."""
    with execution.precision():
        (compiled,) = compiling.ready([Wanted(program, None, "float64")], execution.stage_function)
    sizes = compiled.run.memory_analysis()
    allocated = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return allocated + sizes.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes are Linux's")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what programs take on a CPU")
@pytest.mark.parametrize(
    "row",
    [
        {"layers": [[28, 56, 28], [28, 56, 10]], "metric": "Gaussian"},
        {"layers": [[40, 80, 40], [40, 80, 10]], "bias": True, "metric": "Gaussian"},
        {"models": 60, "layers": [[128, 256, 10]], "slices": True, "metric": "Gaussian"},
    ],
    ids=["plain", "bias", "slices of many"],
)
def test_planned_memory_holds_what_a_process_takes_that_compiled_nothing_before(row):
    """The first program of a process takes more than later ones: XLA itself."""
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    command = [sys.executable, script, "--row", json.dumps(row)]
    ratios = []
    # Stages that may run at once, which the plan counts together, run one by one where the other
    # thread comes late, as on a busy machine: then the process takes less.
    while not ratios or (min(ratios) >= 2 and len(ratios) < 6):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        ratios.append(json.loads(done.stdout.splitlines()[-1])["ratio"])
    assert 1 <= min(ratios) < 2


@pytest.mark.usefixtures("diagrams")
def test_all_runs_are_counted(rng):
    """Two bilinear layers with constants run their plan at five points, three layers at nine."""
    layers = [bilinear(rng, 3, 4, 3), bilinear(rng, 3, 4, 3)]
    constant = [tnsim.Residual(layer) for layer in layers]
    plain, lifted = tnsim.Model(layers), tnsim.Model(constant)
    for model, runs in ((plain, 1), (lifted, 5)):
        planned = tnsim.plan(model, model, cosine=True).contraction
        once = sum(planned.programs[stage.program].multiplications for stage in planned.stages)
        assert planned.runs == runs and planned.multiplications == runs * once
        assert (f"in {runs} runs" in str(planned)) == (runs > 1)
    short = tnsim.Budget(multiplications=planned.multiplications - 1)
    with refused("multiplications here, more than the budget", tnsim.TooLarge):
        tnsim.similarity(
            lifted, tnsim.Model([*constant[:1], tnsim.Residual(layers[0])]), budget=short
        )


def test_plan_of_many_counts_all_runs(rng, monkeypatch):
    pytest.importorskip("xarray")
    monkeypatch.setattr(features, "spaces", lambda *arguments: [])
    layers = [tnsim.Residual(bilinear(rng, 3, 4, 3)) for _ in range(3)]
    models = [tnsim.Model([layers[0], layers[n]]) for n in (1, 2)]
    norm = tnsim.plan(models[0], models[0]).multiplications
    plan = tnsim.plan_pairwise(models)
    assert plan.route == "contractions" and plan.multiplications > 2 * norm


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 5])
@pytest.mark.parametrize("masks", ["cc", "nn", "c-", "cn"])
@pytest.mark.parametrize("relative", [True, False])
def test_positions_are_counted_without_laying_them_out(n_ctx, masks, relative):
    variables = "stS" if "-" in masks else "stST"
    for pattern in expansions.patterns(variables, masks, relative, n_ctx):
        places = [pattern.at(place) for place in range(len(pattern.classes))]
        for name in (pattern.count, *places):
            array = expansions.position_array(name, n_ctx)
            assert expansions.position_shape(name, n_ctx) == array.shape


LIMITED = """
import resource, sys, time
import numpy as np
import tnsim
tnsim.session().tier = "{tier}"
{setup}
one = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
tnsim.similarity(one, tnsim.Model([tnsim.Bilinear(*[np.ones((2, 2))] * 3)]))
def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
before = resident("VmRSS")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {room} * 2**20,) * 2)
start = time.process_time()
try:
    print("value", float(tnsim.{verb}))
except tnsim.TooLarge as error:
    print("refused", error)
print("seconds", time.process_time() - start)
print("growth", resident("VmHWM") - before)
"""
TWO = """
g = np.random.default_rng(0)
layer = lambda o: tnsim.Bilinear(*(g.normal(size=s) for s in ((96, 48), (96, 48), (o, 96))))
a, b = (tnsim.Model([layer(48), layer(8)]) for _ in range(2))
"""
ATTENTION = """
g = np.random.default_rng(0)
layer = lambda: tnsim.Attention(*(g.normal(size=(4, 4)) for _ in range(6)), n_heads=2)
a, b = (tnsim.Model([layer()], n_ctx={n_ctx}) for _ in range(2))
"""


def limited(setup: str, verb: str, room: int, tier: str = "auto") -> dict[str, str]:
    """What a process says that has `room` MiB of address space left.

    Its seconds are the processor's, which others on the machine do not lengthen; a process that
    only waits meets the limit of the clock.
    """
    code = LIMITED.format(setup=setup, verb=verb, room=room, tier=tier)
    return dict(line.split(" ", 1) for line in python(code)[0].splitlines())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
@pytest.mark.parametrize(
    "room",
    [pytest.param(40, marks=pytest.mark.slow), 800, pytest.param(1500, marks=pytest.mark.slow)],
)
def test_under_a_limit_a_run_is_refused_or_completes(room):
    said = limited(TWO, "similarity(a, b)", room, "compile")
    assert ("value" in said) != ("refused" in said)
    if room == 40:
        assert re.search(r"\d+ MiB left, and compiling takes \d+ MiB", said["refused"])
    if room == 1500:
        assert "value" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
def test_interpreting_takes_no_address_space_for_a_compiler():
    # The plan takes 193 MiB. OpenBLAS itself needs some 32 MiB a thread, and ends the process where
    # it does not get them; the C library reserves 64 MiB more for the memory of a thread.
    said = limited(TWO, "similarity(a, b)", 450, "interpret")
    assert "value" in said and float(said["growth"]) < 300


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
@pytest.mark.parametrize("n_ctx", [pytest.param(20_000, marks=pytest.mark.slow), 1_000_000])
def test_sequences_too_long_are_refused_at_once(n_ctx):
    said = limited(ATTENTION.format(n_ctx=n_ctx), "similarity(a, b)", 1500)
    assert "GiB here" in said["refused"] or "multiplications here" in said["refused"]
    assert "n_ctx" in said["refused"] and float(said["seconds"]) < 10
    assert float(said["growth"]) < 300


def test_long_sequences_without_attention_need_no_positions(rng):
    layers = [bilinear(rng, 3, 4, 3)]
    short, long = (tnsim.Model(layers, n_ctx=n) for n in (2, 1_000_000))
    twice = [
        tnsim.Model([*layers, tnsim.Linear(np.diag([1.0, 2, 3]))], n_ctx=m.n_ctx)
        for m in (short, long)
    ]
    first, second = (tnsim.similarity(m, t) for m, t in zip((short, long), twice, strict=True))
    assert_close(first, second, scale=1.0, rtol=1e-12)


def test_tokens_of_long_sequences_are_refused(rng):
    square = [rng.normal(size=(4, 4)) for _ in range(6)]
    model = tnsim.Model([tnsim.Attention(*square, n_heads=2)], n_ctx=20_000)
    metric = tnsim.Categorical(np.full(4, 0.25))
    with refused("cannot be counted, let alone run; draw some of them", tnsim.TooLarge):
        tnsim.similarity(model, model, metric)
    with refused("cannot be counted, let alone run; draw some of them", tnsim.TooLarge):
        tnsim.plan(model, model, metric)


LITTLE = """
import resource, sys, numpy as np, tnsim, xarray
tnsim.session().tier = "compile"
from pathlib import Path
g = np.random.default_rng(0)
wide = [tnsim.Model([tnsim.Bilinear(*(g.normal(size=(4, 4)) for _ in range(3)))]) for _ in "ab"]
units = [tnsim.Model([*model.layers, tnsim.Elementwise("gelu")]) for model in wide]
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
threads = len(list(Path("/proc/self/task").iterdir()))
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]) * 2**20,) * 2)
verbs = {
    "similarity": lambda: tnsim.similarity(*wide),
    "closure": lambda: tnsim.inner(*wide, tnsim.GaussianClosure(), budget=tnsim.Budget(memory_bytes=2**20)),
    "pairwise": lambda: tnsim.pairwise(wide).similarity[0, 1],
    "empirical": lambda: tnsim.similarity(*wide, tnsim.Empirical(np.eye(4))),
    "change": lambda: tnsim.change(*(tnsim.Model(model.layers * 2) for model in wide)).total,
    "weights": lambda: tnsim.change(*units).total,
    "inputs": lambda: tnsim.change(*units, metric=tnsim.Empirical(np.eye(4))).total,
    "device": lambda: tnsim.engine.runtime.devices.device(),
}
for name in sys.argv[2:]:
    try:
        print(name, float(verbs[name]()))
    except tnsim.TooLarge as error:
        print(name, error)
print("threads", len(list(Path("/proc/self/task").iterdir())) - threads)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is Linux's")
@pytest.mark.parametrize(
    "mebibytes",
    [pytest.param(60, marks=pytest.mark.slow), 300, pytest.param(800, marks=pytest.mark.slow)],
)
def test_too_little_address_space_to_compile_is_told(mebibytes):
    """XLA would end the process. Forward passes of few multiplications need no compiler."""
    verbs = "similarity", "closure", "pairwise", "empirical"
    *refused, answered, threads = python(LITTLE, mebibytes, *verbs)[0].splitlines()
    assert len(refused) == 3 and all("compiling takes" in line for line in refused)
    assert -1 <= float(answered.split()[1]) <= 1
    assert threads == "threads 0"  # XLA never began: it ends the process where a thread fails
    if mebibytes >= 300:  # modules that differentiate are imported in no less
        # Where plans are interpreted, derivatives of models are compiled all the same.
        for tier in ("compile", "interpret"):
            code = LITTLE.replace("compile", tier)
            verbs = "change", "weights", "inputs", "device"
            *told, threads = python(code, mebibytes, *verbs)[0].splitlines()
            assert len(told) == 4 and all("compiling takes" in line for line in told)
            assert threads == "threads 0"
