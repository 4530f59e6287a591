"""Modules of every kind, each read as a module, from files of other weights, in a series and by `pairwise`.

The truth is the module itself, at inputs of size 1e-3 to 1e4 and at those at which something rare happens. A module is
read rightly or refused by an error that names what stands in the way; it is never read wrongly in silence.
"""

import copy
import re
from functools import partial
from typing import Any

import hypothesis
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import strategies as st
from refusals import refused

import tnsim

torch = pytest.importorskip("torch")
import module_cases as cases  # noqa: E402
import module_programs as programs  # noqa: E402

LENGTHS = (3, 5, 12)
load: Any = tnsim.load  # a model of a file, a series of a folder


def asked(case, read, length):
    """What a user reads: at a length, and with an example where the refusal asks for one."""
    if not length:
        return read() if case.inputs is None else read(inputs=case.inputs)
    try:
        return read(n_ctx=length)
    except tnsim.TnsimError as refused:
        if "inputs=" not in str(refused) or case.tokens:
            raise
    return read(inputs=torch.zeros(2, length, 2, dtype=torch.float64))


def read_or_refused(case, read, length):
    """What was read; None where a refusal is right and says why."""
    try:
        return asked(case, read, length)
    except tnsim.TnsimError as refused:
        assert case.refused is not None, f"refused, and should be read: {refused}"
        assert re.search(case.refused, str(refused), re.IGNORECASE), (
            f"refused without the reason: {refused}"
        )
    return None


def with_file(net, path):
    """A copy of the module that has loaded a file, which is what its weights in the file mean."""
    module = copy.deepcopy(net)
    module.load_state_dict(torch.load(path))
    return module


def compare(case, read, module, length):
    model = read_or_refused(case, read, length)
    if model is not None:
        assert re.search(case.layers, repr(model)), model
        cases.assert_computes(model, module, case, length)


def saved(module, path):
    torch.save(module.state_dict(), path)
    return path


def saved_series(case, folder):
    """A module, and others of its class by the labels under which the folder holds their weights."""
    *_, net = case.modules()
    each = {
        "0": net,
        "1": cases.with_active_weights(case, net),
        "2": cases.with_active_weights(case, net, 6),
    }
    paths = {label: saved(module, folder / f"step_{label}.pt") for label, module in each.items()}
    return net, {label: with_file(net, path) for label, path in paths.items()}


def by_module(case, folder, length):
    for net in case.modules():
        for module in (net, cases.with_active_weights(case, net)):
            compare(case, partial(tnsim.from_module, module), module, length)


def by_file(case, folder, length):
    for net in case.modules():
        path = saved(cases.with_active_weights(case, net), folder / "other.pt")
        compare(case, partial(load, path, net), with_file(net, path), length)


def by_series(case, folder, length):
    net, each = saved_series(case, folder)
    for label, module in each.items():
        compare(case, lambda label=label, **asks: load(folder, net, **asks)[label], module, length)


def by_pairwise(case, folder, length):
    """Cosines over inputs are those of the outputs of the modules on them."""
    net, each = saved_series(case, folder)

    def read(**asks):
        series = load(folder, net, **asks)
        return series, next(iter(series))

    found = read_or_refused(case, read, length)
    if found is None:
        return
    series, first = found
    x = cases.inputs_for(case, length)[-1 if case.tokens else 3]
    inputs = cases.as_read(first, case, x, length)
    try:
        result = tnsim.pairwise(series, tnsim.Empirical(inputs)).similarity.values
    except tnsim.TnsimError as refused:
        # Each file is read for itself: what is inert in one may make another no model.
        assert re.search(rf"position|{case.refused}", str(refused)), refused
        return
    with torch.no_grad():
        outputs = np.stack([module(x).numpy().ravel() for module in each.values()])
    outputs /= np.linalg.norm(outputs, axis=1, keepdims=True)
    assert_close(result, outputs @ outputs.T, scale=1.0)


def by_any_length(case, folder, length):
    """A model that claims no length is right at each, and a module without one says so."""
    for net in case.modules():
        try:
            model = tnsim.from_module(net)
        except tnsim.TnsimError as refused:
            words = rf"n_ctx|length|inputs=|position|{case.refused}"
            assert re.search(words, str(refused), re.IGNORECASE), (
                f"refused without the reason: {refused}"
            )
            continue
        assert model.n_ctx is None
        for positions in LENGTHS:
            cases.assert_computes(model, net, case, positions)
        if not any(16 in tensor.shape for tensor in net.state_dict().values()):  # longest of tables
            cases.assert_computes(model, net, case, 129)


WAYS = {"module": by_module, "file": by_file, "series": by_series, "pairwise": by_pairwise}


def crossed():
    """Every single case in every way."""
    for name in cases.SINGLE:
        for way in WAYS:
            marks = [] if way == "file" else [pytest.mark.slow]
            yield pytest.param(name, way, id=f"{name}-{way}", marks=marks)


@pytest.mark.sampled(quick=16, slow=32)
@pytest.mark.parametrize(("name", "way"), crossed())
def test_single_modules(name, way, tmp_path):
    WAYS[way](cases.SINGLE[name], tmp_path, 0)


LENGTH_WAYS = [("module", length) for length in LENGTHS] + [
    ("file", 12),
    ("series", 3),
    ("pairwise", 3),
    ("any length", 0),
]


def crossed_sequences():
    """Every case of sequences in every way."""
    for name in cases.SEQUENCES:
        for way, length in LENGTH_WAYS:
            if way == "any length" and name in cases.POSITION_WISE:
                continue  # a batch of vectors is no sequence to these, whatever its shape
            at = f"{way} {length}" if length else way
            marks = [] if way == "file" else [pytest.mark.slow]
            yield pytest.param(name, way, length, id=f"{name}-{at}", marks=marks)


@pytest.mark.sampled(quick=3, slow=9)
@pytest.mark.parametrize(("name", "way", "length"), crossed_sequences())
def test_sequences(name, way, length, tmp_path):
    """At the length asked for; without one, a model that claims no length is right at each."""
    read = by_any_length if way == "any length" else WAYS[way]
    read(cases.SEQUENCES[name], tmp_path, length)


@pytest.mark.slow
def test_origins_say_what_was_read(tmp_path):
    (net,) = cases.SEQUENCES["causal"].modules()
    path = saved(net, tmp_path / "attention.pt")
    module: Any = tnsim.from_module(net, n_ctx=7)
    for model in (module, load(path, net, n_ctx=7)):
        (said,) = model.origin.assumptions
        assert "read by the graph of Module at n_ctx 7 and compared" in said
    (said,) = load(path, net).origin.assumptions
    assert "at n_ctx 5, compared at 1, 2, 12, 33 positions" in said


def test_files_of_tied_tensors(tmp_path):
    """Safetensors holds a tensor of two names once; a file with two tensors is one of another module."""
    safetensors = pytest.importorskip("safetensors.torch")
    case = cases.SINGLE["tied heads"]
    (net,) = case.modules()
    other = cases.with_active_weights(case, net)
    safetensors.save_model(other, str(tmp_path / "tied.safetensors"))
    model = load(tmp_path / "tied.safetensors", net)
    cases.assert_computes(model, other, case)
    assert model.origin.ignored == ()
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    state["head.weight"] *= 2
    torch.save(state, tmp_path / "untied.pt")
    with refused(r"embed\.weight and head\.weight are one tensor", tnsim.CheckpointError):
        load(tmp_path / "untied.pt", net)


class Saving(torch.nn.Module):
    """A setting that is saved beside the tensors, within a mapping."""

    def __init__(self, exponent):
        super().__init__()
        self.a, self.exponent = torch.nn.Linear(4, 4), exponent

    def get_extra_state(self):
        return {"exponent": self.exponent}

    def set_extra_state(self, state):
        self.exponent = state["exponent"]

    def forward(self, x):
        return self.a(x) ** self.exponent


def test_what_a_module_saves_beside_tensors_is_read_back(tmp_path):
    net, other = Saving(2).double(), Saving(3).double()
    model = load(saved(other, tmp_path / "other.pt"), net)
    cases.assert_computes(model, other, cases.Case(torch.nn.Identity))


OPERATIONS = tuple(programs.OPERATIONS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
VECTORS = cases.Case(torch.nn.Identity)


def program(steps, dtype=torch.float64):
    """A program in evaluation mode, at whose weights nothing is inert."""
    torch.manual_seed(0)
    return cases.with_active_weights(VECTORS, programs.Program(steps).double()).to(dtype).eval()


def is_read(read, module):
    """Whether a model was read, which computes what the module computes in float64; else it was refused."""
    try:
        model = read()
    except tnsim.TnsimError as refused:
        assert len(str(refused)) > 40, f"does not say what stands in the way: {refused}"
        return False
    cases.assert_computes(model, copy.deepcopy(module).double(), VECTORS)
    return True


def read_as_module(steps, dtype):
    """Also after an edit of the weights, which a model that was read before does not see."""
    net = program(steps, dtype)
    before = copy.deepcopy(net)
    models = []
    asks = {"inputs": torch.zeros(2, 4, dtype=dtype)}

    def read(module):
        models.append(tnsim.from_module(module, **asks))
        return models[-1]

    found = is_read(partial(read, net), net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5).add_(0.25)
    if found:
        cases.assert_computes(models[0], before.double(), VECTORS)
        assert is_read(partial(read, net), net), "refused after an edit of the weights"
    return found


def read_from_file(steps, dtype, folder, inert=False):
    """By a module of other weights, at which masks, gains and statistics may be inert."""
    net = program(steps, dtype)
    torch.manual_seed(1)
    given = (
        programs.Program(steps).to(dtype).eval()
        if inert
        else cases.with_active_weights(VECTORS, net, 6)
    )
    path = saved(net, folder / "program.pt")
    return is_read(partial(load, path, given, inputs=torch.zeros(2, 4, dtype=dtype)), net)


def read_all(check, operations, count, longest=4, phases=tuple(hypothesis.Phase)):
    """The share of random programs that are read; a silent difference or another error fails."""
    found = []

    @hypothesis.settings(
        max_examples=count,
        phases=phases,
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs.programs(operations, longest), st.sampled_from(DTYPES))
    def each(steps, dtype):
        found.append(check(steps, dtype))

    each()
    return sum(found) / len(found)


@pytest.mark.slow
def test_programs(tmp_path):
    assert read_all(read_as_module, OPERATIONS, 10, longest=3) > 0.8
    assert read_all(partial(read_from_file, folder=tmp_path), OPERATIONS, 10, longest=3) > 0.8


@pytest.mark.full
@pytest.mark.slow
def test_many_programs(tmp_path):
    assert read_all(read_as_module, OPERATIONS, 150) > 0.8
    assert read_all(partial(read_from_file, folder=tmp_path), OPERATIONS, 150) > 0.8


@pytest.mark.full
@pytest.mark.slow
def test_programs_beyond_layers():
    """What no layer describes is refused, wherever it stands, or does not reach the output."""
    read_all(read_as_module, (*OPERATIONS, *programs.NO_LAYER), 60)


@pytest.mark.slow
def test_files_of_programs_that_show_nothing(tmp_path):
    read = partial(read_from_file, folder=tmp_path, inert=True)
    assert read_all(read, OPERATIONS, 60) > 0.8
