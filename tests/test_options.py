"""Every option of every public name with values of other kinds: an error of tnsim, or a result."""

import inspect
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import bilinear, linear
from refusals import refused

import tnsim

torch = pytest.importorskip("torch", reason="needs the torch extra")
WRONG = {
    "None": None,
    "a number": 3,
    "a fraction": 1.5,
    "NaN": float("nan"),
    "a negative number": -1,
    "a huge number": 10**400,
    "a complex number": 1j,
    "a text": "x",
    "an empty text": "",
    "bytes": b"a",
    "a path": Path("/no/such/file"),
    "an empty list": [],
    "a list of None": [None],
    "lists of two lengths": [[1], [2, 3]],
    "an array": np.ones((2, 2)),
    "an array of texts": np.array(["a", "b"]),
    "an array of a number": np.array(2),
    "a mapping": {},
    "an object": object(),
}
RESULTS = {"Change", "Number", "Pairwise", "Parts", "Paths", "Session"}
"""Classes of results, which tnsim makes; sessions take plain numbers, see below."""
OTHERS = {"Metric", "session", "using"}
"""A protocol, and what takes no options."""


BASELINES = ("agreement", "cka", "js_divergence", "mean_cosine", "output_cosine")
OF_LABELS = ("edges", "layers_and_heads", "shares")
READERS = ("dendrogram", "mds", "spectrum", "trajectory")


def calls(tmp_path):
    """A right call of every public function and class: the callable and its arguments."""
    rng = np.random.default_rng(0)
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 3), linear(rng, 3, 2)]) for _ in range(2))
    files = [tmp_path / "step_1.safetensors", tmp_path / "step_2.safetensors"]
    for model, file in zip((a, b), files, strict=True):
        tnsim.save(model, file)
    store = tmp_path / "store"
    run = tnsim.pairwise([a, b], store=store)
    x, one, eye = rng.normal(size=(20, 3)), np.ones((2, 3)), np.eye(2)
    torch.manual_seed(0)
    net, other = (
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        for _ in range(2)
    )
    line = torch.nn.Linear(3, 2)
    hidden = tnsim.Model([linear(rng, 3, 4), tnsim.Elementwise("tanh"), linear(rng, 4, 2)])
    square = np.ones((4, 4))
    attention = tnsim.Attention(*[rng.normal(size=(4, 4)) for _ in range(6)], n_heads=2)
    ends = linear(rng, 5, 4), linear(rng, 4, 5)
    tokens = tnsim.Model([ends[0], tnsim.Residual(attention), ends[1]], n_ctx=3)
    tanh = tnsim.Activation(jnp.tanh, strip=1.5)
    relu = {"kinks": (0.0,), "pieces": ((0.0,), (0.0, 1.0))}
    two = {"a": a, "b": b}
    rule = tnsim.dialects.LinearRule(weight="w")
    return {
        **{verb: two for verb in ("similarity", "inner", "log_inner", "slices", "plan")},
        **{verb: two for verb in ("change", "paths")},
        "check": two | {"samples": 64},
        "components": {"model": a},
        "compare_forward": {"model": a, "forward": a, "samples": 4},
        "composition": {"model": tokens},
        "heads": {"a": tokens, "b": tokens},
        "parts": {"checkpoint": tokens},
        "from_function": {"function": lambda w, x: x @ w.T, "params": one, "x": x},
        "from_module": {"module": line},
        "from_state_dict": {"state": line.state_dict(), "dialect": line},
        "load": {"path": files[0]},
        "Series": {"source": files},
        "save": {"model": a, "path": tmp_path / "saved.safetensors"},
        "hidden_states": {"model": net, "inputs": x},
        "inputs_of": {"module": net, "path": "1", "inputs": x},
        "layer_similarity": {"a": net, "b": other, "inputs": x},
        "pairwise": {"models": [a, b]},
        "plan_pairwise": {"models": [a, b]},
        "open_pairwise": {"path": store},
        "polynomial": {"model": hidden, "degree": 1, "samples": 64},
        "Activation": relu,
        "Elementwise": {"activation": tanh},
        "Gated": {"gate": one, "up": one, "down": np.ones((1, 2)), "activation": tanh},
        "Linear": {"weight": one},
        "Bilinear": {"left": one, "right": one, "down": np.ones((1, 2))},
        "Multilinear": {"legs": [one] * 3, "down": np.ones((1, 2))},
        "Residual": {"layer": tnsim.Linear(np.eye(2))},
        "Attention": dict.fromkeys(("q1", "k1", "q2", "k2", "v", "o"), square) | {"n_heads": 2},
        "Model": {"layers": a.layers},
        "Combination": {"weighted": [(1.0, a), (2.0, b)]},
        "Dialect": {"name": "mine", "layers": (rule,)},
        "Budget": {},
        "Categorical": {},
        "Empirical": {"inputs": x},
        "Frobenius": {},
        "Gaussian": {},
        "GaussianClosure": {},
        "Product": {"marginals": "uniform"},
        "Symmetric": {},
        "TreeSymmetric": {},
        "Empirical.normal": {"mean": np.zeros(3), "samples": 64},
        "Gaussian.fit": {"samples": x},
        **{f"baselines.{name}": {"models": [net, other], "inputs": x} for name in BASELINES},
        "baselines.weight_cosine": {"models": [net, other]},
        "baselines.weight_slices": {"models": [net, other]},
        "figures.contributions": {"values": np.eye(2), "bra": ["a", "b"], "ket": ["a", "b"]},
        "figures.curves_over_training": {"result": run, "strips": ["log_norm_a"]},
        "figures.depth": {"rows": []},
        "figures.draw": {"network": tnsim.tensor_networks.network(a)},
        "figures.heatmap": {"matrix": np.eye(2), "labels": ["a", "b"]},
        "figures.layer_by_layer": {"matrix": tnsim.layer_similarity(net, other, inputs=x)},
        "figures.new_figure": {},
        "figures.pairwise": {"result": run},
        "figures.scatter_grid": {"panels": {"a": (eye, eye)}, "x_label": "x", "y_label": "y"},
        "figures.shares_over_training": {"checkpoints": [0, 1], "paths": ["a", "b"], "table": eye},
        **{f"figures.{name}": {"labels": ["a", "b"], "values": np.ones(2)} for name in OF_LABELS},
        **{f"reading.{name}": {"result": run.similarity} for name in READERS},
        "reading.against_control": {"similarity": eye, "control": eye, "change_points": [1]},
        "reading.block_score": {"similarity": eye, "change_points": [1]},
        "reading.correlation": {"first": run, "second": run},
        "reading.group_score": {"similarity": run, "groups": [0, 1]},
        "reading.last_block_score": {"similarity": eye, "change_points": [1]},
        "reading.phase_of_rows": {"change_points": [1], "count": 2},
        "reading.segment": {"similarity": run.similarity, "phases": 1},
        "reading.segmentations": {"similarity": run.similarity, "up_to": 1},
        "report.write": {"result": run, "path": tmp_path / "page.html"},
        "tensor_networks.network": {"model": a},
        "tensor_networks.networks": two,
        "tensor_networks.contract": {"networks": tnsim.tensor_networks.network(a)},
        "tensor_networks.contract_expression": {"networks": tnsim.tensor_networks.network(a)},
        "torch.similarity": {"a": net, "b": net, "metric": tnsim.Empirical(x)},
        "torch.Monitor": {},
    }


def test_every_public_name_is_crossed(tmp_path):
    modules = {name for name in tnsim.__all__ if inspect.ismodule(getattr(tnsim, name))}
    classes = {name for name in tnsim.__all__ if inspect.isclass(getattr(tnsim, name))}
    errors = {name for name in classes if issubclass(getattr(tnsim, name), (Exception, Warning))}
    known = calls(tmp_path)
    crossed = {name for name in known if "." not in name}
    assert crossed == set(tnsim.__all__) - modules - errors - RESULTS - OTHERS
    for module in ("baselines", "figures", "reading", "tensor_networks"):
        public = getattr(tnsim, module)
        functions = {name for name in public.__all__ if inspect.isfunction(getattr(public, name))}
        assert functions == {name.split(".")[1] for name in known if name.startswith(f"{module}.")}


WHAT_RUNS = {"params"}
"""Arguments that reach the user's own function, whose errors are the user's."""
OPEN = {"drawing": "figsize"}
"""An option of those that a function takes by `**options`, by the name of these."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_no_option_raises_what_is_no_error_of_tnsim(tmp_path, monkeypatch):
    """A raw error of Python says neither what was asked nor what to do."""
    monkeypatch.chdir(tmp_path)
    raw = []
    for name, arguments in calls(tmp_path).items():
        called = tnsim
        for part in name.split("."):
            called = getattr(called, part)
        for option, parameter in inspect.signature(called).parameters.items():
            if option in WHAT_RUNS or (
                parameter.kind is parameter.VAR_KEYWORD and option not in OPEN
            ):
                continue
            option = OPEN.get(option, option)
            for what, value in WRONG.items():
                if what == "a huge number" and option in ("samples", "inputs"):
                    continue  # draws without end
                try:
                    called(**{**arguments, option: value})
                except tnsim.TnsimError:
                    continue
                except Exception as error:  # whatever Python raised
                    raw.append(f"{name}({option}={what}): {type(error).__name__}: {error}")
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: tnsim.paths(a, within=3), "within of paths must be a list of texts or None.* 3"),
        (lambda a: tnsim.save(a, None), "path of save must be a text or a path, found None"),
        (lambda a: tnsim.Budget(memory_bytes="a"), "memory_bytes of Budget must be a number or"),
        (lambda a: tnsim.Budget(float("nan")), "memory_bytes of Budget must be a number or"),
        (lambda a: tnsim.similarity(a, a, centred="no"), "must be True or False, found 'no'"),
        (lambda a: tnsim.layer_similarity(a, a, 4, layers=3), "layers of layer_similarity must be"),
        (lambda a: tnsim.polynomial(a, degree="x"), "degree of polynomial must be an integer"),
        (lambda a: tnsim.pairwise([a], store=1.5), "store of pairwise must be a text, a path or"),
        (lambda a: tnsim.Session(results="many"), "results of Session must be an integer"),
        (lambda a: tnsim.similarity(int, a), "found type"),
        (lambda a: tnsim.hidden_states(a, 3), "inputs are a batch, .* found 3"),
        (lambda a: tnsim.figures.shares(["x"], np.ones(2)), r"shape \(2,\) for 1 names"),
        (lambda a: tnsim.figures.shares(["x"], "x"), "must be an array of numbers with an axis"),
        (lambda a: tnsim.figures.draw(3), "must be a TensorNetwork of quimb, found 3"),
        (lambda a: tnsim.figures.heatmap(np.eye(1), ["x"], figsize=3), "a width and a height in"),
        (lambda a: tnsim.tensor_networks.contract([], shared_tags=3), "tags are texts, .* found 3"),
        (lambda a: tnsim.reading.group_score(np.eye(2), [0]), "2 models need a group each"),
        (lambda a: tnsim.paths(a).through(3), "no path goes through 3; components are"),
    ],
)
def test_what_was_asked_and_found_is_said(call, message, rng):
    model = tnsim.Model([bilinear(rng, 3, 4, 2)])
    with refused(message, (tnsim.ModelError, tnsim.errors.ResultError)):
        call(model)


def test_numbers_of_numpy_are_numbers(rng):
    a = tnsim.Model([linear(rng, 3, 4), bilinear(rng, 4, 4, 2)])
    assert tnsim.paths(a, order=np.int64(1), top=np.int32(1)).share.shape == (1,)
    assert tnsim.similarity(a, a, centred=np.bool_(True)) == tnsim.similarity(a, a, centred=True)
    assert tnsim.Model([linear(rng, 3, 4)], n_ctx=np.int64(2)).n_ctx == 2
    assert tnsim.Budget(np.float32(8)).memory_bytes == 8
    assert tnsim.polynomial(a, np.int64(2)) is a
    assert isinstance(tnsim.Elementwise("relu", width=np.int64(3)).width, int)


def test_signatures_and_types_stay():
    assert list(inspect.signature(tnsim.similarity).parameters)[:3] == ["a", "b", "metric"]
    assert isinstance(tnsim.similarity, types.FunctionType) and isinstance(tnsim.Budget, type)
