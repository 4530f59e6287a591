"""Plans as text and cache files under attack: what was changed never runs."""

import copy
import json
import os
import stat

import numpy as np
import pytest
from oracles import bilinear
from refusals import refused

import tnsim
import tnsim.engine.plan
from tnsim.engine import planner
from tnsim.engine.ir.plan_json import opened, plan_from_data, sealed
from tnsim.engine.ir.program import Operation, PlanStage, Program

WRONG = (None, True, -1, 10**30, float("nan"), "x", [], {})


def models(rng):
    """Two with biases, so that plans have sums with weights."""
    return [tnsim.Model([bilinear(rng, 2, 2, 1)]) for _ in range(2)]


def looped_plan(rng):
    """sum_i (sum_j x_ij y_ij), the sum over i as a loop."""
    body = Program(((2,), (2,)), (Operation("contract", (0, 1), ((0,), (0,)), ()),), (2,))
    loop = Operation("loop", (0, 1), ((0, 1), (0, 1)), (), (), (0,), body)
    program = Program(((3, 2), (3, 2)), (loop,), (2,), ((0, 1),), (((0, 1),),), 6)
    stage = PlanStage(0, ("x", "y"), ("xy",), ("xy",), (("xy", 1),))
    shapes = {"x": (3, 2), "y": (3, 2)}
    scales = {"xy": (("xy", 1),)}
    return tnsim.engine.plan.Plan(
        "tree", True, "float64", 1, (program,), (stage,), shapes, ("xy",), scales
    )


PLANS = {
    "sum": lambda rng: tnsim.plan(*models(rng), tnsim.GaussianClosure()).contraction,
    "loop": looped_plan,
}


def places(data, path=()):
    """The path of every value in nested data, containers too."""
    yield path
    if isinstance(data, dict | list):
        for key, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(item, (*path, key))


def changed(data, path, change):
    """A copy with the value at `path` changed."""
    if not path:
        return change(data)
    result = copy.copy(data)
    result[path[0]] = changed(data[path[0]], path[1:], change)
    return result


def changes(value):
    """What may stand in a value's place, alike and unlike."""
    yield from WRONG
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, -value)
    elif isinstance(value, str):
        yield from (value + "'", "")
    elif isinstance(value, list) and value:
        yield from (value[1:], value[:-1], [*value, value[-1]], value[::-1])
    elif isinstance(value, dict) and value:
        first, *others = value.items()
        yield from (dict(others), {**value, "more": 1}, dict([*others, (first[0], None)]))


def damaged(data):
    """The data with every value of it changed in every way."""
    for path in places(data):
        value = data
        for key in path:
            value = value[key]
        for other in changes(value):
            yield changed(data, path, lambda _, other=other: other)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_changed_plan_is_an_error_or_the_same_plan(name, rng):
    """Every field of the document, changed in every way: no number comes out of another plan."""
    plan = PLANS[name](rng)
    assert any(op.kind == name for program in plan.programs for op in program.operations)
    refused = 0
    for other in damaged(json.loads(plan.to_json())):
        try:
            assert tnsim.engine.plan.Plan.from_json(json.dumps(other)) == plan
        except tnsim.CheckpointError as error:
            assert str(error).startswith("not a tnsim plan in format 3: ")
            refused += 1
    assert refused > 300


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_what_passes_the_checks_can_be_costed_and_written(name, rng):
    """Without the digest: malformed data raise ValueError alone, others make a whole plan."""
    data = opened(PLANS[name](rng).to_json())
    data.pop("format")
    accepted = 0
    for other in damaged(data):
        try:
            read = plan_from_data(other, tnsim.engine.plan.Plan)
        except ValueError:
            continue
        accepted += 1
        assert str(read) and repr(read)
        assert tnsim.engine.plan.Plan.from_json(read.to_json()) == read
    assert accepted  # another weight, another name


def operation(data, n=0):
    return data["programs"][0]["operations"][n]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: operation(d)[1].append(999), "program 0: operation 0: .* arguments"),
        (lambda d: operation(d).__setitem__(0, "eval"), "kind must be one of contract, sum, loop"),
        (lambda d: operation(d)[2][0].append(7), "axes of argument"),
        (lambda d: operation(d).__setitem__(3, [99]), "a label of the output is on no argument"),
        (
            lambda d: d["programs"][0].pop("outputs"),
            r"missing required field `outputs` - at `\$\.programs\[0\]`",
        ),
        (
            lambda d: operation(d)[1].__setitem__(0, -1),
            r"Expected `int` >= 0 - at `\$\.programs\[0\]\.operations\[0\]\[1\]\[0\]`",
        ),
        (lambda d: d["stages"][0].update(program=7), "stage 0: there is no program 7"),
        (lambda d: d["stages"][0]["inputs"].__setitem__(0, "?"), "nothing gives its input '[?]'"),
        (lambda d: d["outputs"].append("?"), "no stage leaves the output '[?]'"),
        (
            lambda d: d.update(dtype="int8"),
            "dtype must be one of float64, float32, complex128, complex64, found 'int8'",
        ),
        (lambda d: d.update(exact=1), r"Expected `bool`, got `int` - at `\$\.exact`"),
    ],
)
def test_what_is_wrong_is_named(damage, message, rng):
    data = opened(PLANS["sum"](rng).to_json())
    damage(data)
    with refused(message, tnsim.CheckpointError):
        tnsim.engine.plan.Plan.from_json(sealed(data))


def test_text_that_is_no_plan():
    deep = "[" * 100_000 + "]" * 100_000
    for text in ("", "null", "3", "[]", "{}", b"\xff\xfe", deep, None, 3, sealed({"format": 2})):
        with refused(r"not a tnsim plan in format 3: \w", tnsim.CheckpointError):
            tnsim.engine.plan.Plan.from_json(text)


def test_a_changed_weight_is_told_apart_but_not_a_change_of_form(rng):
    plan = PLANS["sum"](rng)
    data = json.loads(plan.to_json())
    pretty = json.dumps(dict(reversed(data.items())), indent=2)
    assert tnsim.engine.plan.Plan.from_json(pretty) == plan
    weights = [op[4] for program in data["programs"] for op in program["operations"] if op[4]]
    weights[0][0] *= 2
    with refused("it was changed after it was written", tnsim.CheckpointError):
        tnsim.engine.plan.Plan.from_json(json.dumps(data))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, not there yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(folder))
    return folder / "plans"


def plan_anew(pair):
    """The plan of two models, forgotten by the process before."""
    tnsim.session().clear()
    return tnsim.plan(*pair, tnsim.GaussianClosure()).contraction


def bit_flips(content):
    for at in range(0, len(content), max(1, len(content) // 40)):
        yield content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


def truncations(content):
    for length in range(0, len(content), max(1, len(content) // 10)):
        yield content[:length]


def rewritten(content):
    """Sealed anew with other values: what no digest tells, the checks for this stage do."""
    data = opened(content)
    for field in ("key", "searched_with", "found"):
        for value in WRONG:
            with_value = {**data, field: value}
            try:
                yield sealed(with_value).encode()
            except ValueError:  # NaN has no canonical form
                yield json.dumps(with_value).encode()
    shapes = copy.deepcopy(data)
    shapes["found"]["shapes"][0][0] += 1
    yield sealed(shapes).encode()


@pytest.mark.parametrize(
    "damages", [pytest.param(bit_flips, marks=pytest.mark.slow), truncations, rewritten]
)
def test_a_damaged_cache_file_is_searched_again_and_replaced(damages, cache, rng):
    pair = models(rng)
    plan = plan_anew(pair)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    for damaged in damages(content):
        file.write_bytes(damaged)
        again = plan_anew(pair)
        assert again.programs == plan.programs and again.stages == plan.stages
        if again.searched_with == plan.searched_with:  # "x" is a name as good as any
            assert file.read_bytes() == content
        file.write_bytes(content)
    assert list(cache.iterdir()) == [file]


def in_place_of(file, kind):
    """Put something else where a cache file was."""
    content = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        beside = file.parent.parent / "elsewhere.json"
        beside.write_bytes(content)
        file.symlink_to(beside)
    elif kind == "dangling link":
        file.symlink_to("nowhere")
    elif kind == "forbidden":
        file.write_bytes(content)
        file.chmod(0)
    elif kind == "large":
        with file.open("wb") as out:
            out.truncate(2**40)


@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "link", "dangling link", "forbidden", "large", "absent"]
)
def test_what_is_no_file_of_the_users_is_not_read(kind, cache, rng):
    """None hangs, is followed or costs memory; all but a folder give way to a sound file."""
    pair = models(rng)
    plan = plan_anew(pair)
    (file,) = cache.iterdir()
    in_place_of(file, kind)
    beside = cache.parent / "elsewhere.json"
    before = beside.read_bytes() if beside.exists() else None
    assert plan_anew(pair) == plan
    assert (beside.read_bytes() if beside.exists() else None) == before
    if kind != "folder":
        assert stat.S_ISREG(file.lstat().st_mode) and file.lstat().st_size < 2**20


def test_files_of_others_are_not_read(cache, rng, monkeypatch):
    pair = models(rng)
    plan = plan_anew(pair)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    searched = []
    search = planner.build_program
    monkeypatch.setattr(planner, "build_program", lambda *a: searched.append(a) or search(*a))
    assert plan_anew(pair) == plan and len(searched) == 1


def test_the_folder_is_the_users_alone(cache, rng):
    plan_anew(models(rng))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_swapped_files_are_not_taken_for_each_other(cache, rng):
    one, other = models(rng), [tnsim.Model([bilinear(rng, 3, 2, 1)]) for _ in range(2)]
    plans = plan_anew(one), plan_anew(other)
    first, second = cache.iterdir()
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert (plan_anew(one), plan_anew(other)) == plans


def test_a_kept_plan_gives_the_same_number(cache, rng):
    """A weight in a cache file changed by hand gave another number, called exact."""
    pair = models(rng)
    tnsim.session().clear()
    value = tnsim.similarity(*pair)
    for file in cache.iterdir():
        data = json.loads(file.read_text())
        for op in data["found"]["operations"]:
            op[4] = [3 * weight for weight in op[4]]
        file.write_text(json.dumps(data))
    tnsim.session().clear()
    np.testing.assert_array_equal(tnsim.similarity(*pair), value)
