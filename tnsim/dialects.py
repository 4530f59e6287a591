"""Dialects: how somebody else's state dict spells a model. In: a mapping of arrays. Out: a `Model`.

A dialect is plain data, readable and writable as JSON. Everything that would change the function if it
were guessed wrong is written down in it: which half of a fused weight is the left one, whether a matrix
is transposed, the residual rule and its scale, a norm that is folded away. `assumptions` says it in words.

Key names may contain `{i}` in a rule with `"repeat": true`, which then stands for layers 0, 1, ... as far
as the file has them; a trailing `?` marks a key that may be absent.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnsim.errors import CheckpointError, ModelError, TnsimError, UnsupportedLayer
from tnsim.layers import Bilinear, Linear, Residual, host_array, rename_errors
from tnsim.model import Model

FORMAT = 1


@dataclass(frozen=True)
class Rule:
    """One layer, or with `repeat` a run of layers, in terms of key names.

    kind: "linear" (weight, bias) or "bilinear" (left, right, down and their biases). `transpose`: matrices
    are stored (in, out). `fused`, `fused_bias`: one array holds left and right stacked on axis 0, in
    `fused_order`. A bilinear rule without `down` writes its hidden units out. `lifted`: column 0 of left and
    right multiplies a constant 1. residual: "additive" (x + scale f) or "lerp" ((1 - scale) x + scale f), with
    `scale` a number or the key of one. `norm_energy`: key of a constant mean square e by which a linear
    layer is divided, weight / sqrt(e + norm_epsilon).
    """

    kind: str
    weight: str | None = None
    bias: str | None = None
    left: str | None = None
    right: str | None = None
    down: str | None = None
    left_bias: str | None = None
    right_bias: str | None = None
    down_bias: str | None = None
    fused: str | None = None
    fused_bias: str | None = None
    fused_order: str = "left-right"
    transpose: bool = False
    lifted: bool = False
    residual: str | None = None
    scale: float | str = 1.0
    norm_energy: str | None = None
    norm_epsilon: float = 0.0
    repeat: bool = False


@dataclass(frozen=True)
class Dialect:
    """A named list of rules; `nested` is the path of keys to the state dict, `ignore` lists key patterns."""

    name: str
    layers: tuple[Rule, ...]
    nested: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    description: str = ""

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        defaults = {f.name: f.default for f in dataclasses.fields(Rule)}
        data["layers"] = [{k: v for k, v in rule.items() if v != defaults[k]} for rule in data["layers"]]
        return json.dumps({"format": FORMAT, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dialect:
        """Raises `CheckpointError` on anything but a dialect, `UnsupportedLayer` for a layer kind without a polynomial."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise ValueError(f'it must be an object with "format": {FORMAT}')
            known = {f.name for f in dataclasses.fields(Rule)}
            rules = []
            for n, rule in enumerate(data.pop("layers")):
                if surplus := set(rule) - known:
                    raise ValueError(f"layer rule {n} has unknown fields {sorted(surplus)}; known are {sorted(known)}")
                rules.append(Rule(**rule))
            found = cls(layers=tuple(rules), **{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"not a dialect: {error}") from None
        _check(found)
        return found

    def assumptions(self) -> list[str]:
        """What reading a file in this dialect takes for granted, one sentence each."""
        found = [f"dialect {self.name}" + (f": {self.description}" if self.description else "")]
        for n, rule in enumerate(self.layers):
            facts = []
            if rule.transpose:
                facts.append("matrices are stored (in, out)")
            if rule.fused:
                facts.append(f"{rule.fused} stacks {' then '.join(rule.fused_order.split('-'))} on axis 0")
            if rule.lifted:
                facts.append("column 0 of left and right is a bias")
            if rule.residual:
                formula = "x + s f(x)" if rule.residual == "additive" else "(1 - s) x + s f(x)"
                facts.append(f"residual {formula} with s = {rule.scale}")
            if rule.norm_energy:
                facts.append(f"weight divided by sqrt({rule.norm_energy} + {rule.norm_epsilon:g})")
            if rule.kind == "bilinear" and not rule.down:
                facts.append("hidden units are the output")
            if not (rule.residual or rule.kind == "linear"):
                facts.append("no residual")
            found.append(f"rule {n}, {rule.kind}{' x n' if rule.repeat else ''}: {'; '.join(facts) or 'W x + b'}")
        return found


PRESETS = {
    d.name: d
    for d in (
        Dialect(
            "bilinear-classifier",
            (
                Rule("linear", weight="embed.weight", bias="embed.bias?"),
                Rule(
                    "bilinear",
                    left="body.left.weight",
                    right="body.right.weight",
                    down="body.down.weight",
                    left_bias="body.left.bias?",
                    right_bias="body.right.bias?",
                    down_bias="body.down.bias?",
                ),
                Rule("linear", weight="head.weight", bias="head.bias?"),
            ),
            description="embed, one bilinear layer called body, head",
        ),
        Dialect(
            "bilinear-readout",
            (Rule("bilinear", left="W_l", right="W_r", down="W_p"),),
            ignore=("epoch", "seed", "accuracy"),
            description="one bilinear layer W_l, W_r with the readout W_p",
        ),
        Dialect(
            "fused-projection",
            (Rule("bilinear", fused="bi_linear.weight", down="projection.weight"),),
            description="one bilinear layer with left and right in one array",
        ),
        Dialect(
            "fused-blocks",
            (
                Rule("linear", weight="embed.weight"),
                Rule("bilinear", fused="blocks.{i}.weight", fused_bias="blocks.{i}.bias?", repeat=True),
                Rule("linear", weight="head.weight"),
            ),
            description="embed, fused bilinear blocks without down-projection or residual, head",
        ),
        Dialect(
            "fused-blocks-residual",
            (
                Rule("linear", weight="embed.weight"),
                Rule("bilinear", fused="blocks.{i}.weight", fused_bias="blocks.{i}.bias?", repeat=True, residual="additive"),
                Rule("linear", weight="head.weight"),
            ),
            description="as fused-blocks, each block added to its input",
        ),
    )
}

_NORM = re.compile(r"(^|[._])(layer_?norm|rms_?norm|batch_?norm|norm|ln)(_|\d|\.|$)", re.IGNORECASE)
_ATTENTION = re.compile(r"(^|[._])(q|k|v|q1|k1|q2|k2|attn|attention|q_proj|k_proj)([._]|$)", re.IGNORECASE)


def model_from_state(state: Mapping[str, Any], dialect: Dialect) -> Model:
    """Read a model out of named arrays. Raises `CheckpointError` on missing or surplus keys, naming them,
    `UnsupportedLayer` when what is left over is a norm, `ModelError` when the arrays make no model.
    """
    state = _descend(state, dialect)
    reader = _Reader(state)
    layers = []
    for rule in dialect.layers:
        count = len(layers)
        while not rule.repeat or reader.has(rule, len(layers) - count):
            n = len(layers)
            layers.append(rename_errors(f"layer {n}", lambda rule=rule, i=n - count: reader.layer(rule, i)))
            if not rule.repeat:
                break
        if rule.repeat and len(layers) == count:
            raise CheckpointError(f"dialect {dialect.name} repeats {_main_key(rule)}, but no such tensor is there{_listing(state)}")
    surplus = [k for k in state if k not in reader.used and not any(fnmatch.fnmatch(k, p) for p in dialect.ignore)]
    if surplus:
        raise _unexpected(surplus, dialect)
    return Model(layers)


def detect(state: Mapping[str, Any]) -> Dialect:
    """The one preset that accounts for every key. Raises when there is none, or more than one."""
    found, errors = [], {}
    for dialect in PRESETS.values():
        try:
            model_from_state(state, dialect)
            found.append(dialect)
        except TnsimError as error:
            errors[dialect.name] = error
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"the dialects {', '.join(d.name for d in found)} all fit these keys but mean different functions; name one")
    closest = {name: error for name, error in errors.items() if not isinstance(error, CheckpointError)}
    if len(closest) == 1:
        raise next(iter(closest.values()))
    if attention := [k for k in state if _ATTENTION.search(k)]:
        raise UnsupportedLayer(f"{attention[0]} belongs to an attention layer; only linear and bilinear layers can be read")
    raise CheckpointError(f"no dialect is known for these keys{_listing(state)}; presets: {', '.join(PRESETS)}; or write one as JSON")


class _Reader:
    """Looks keys up in a state dict, remembers which were used."""

    def __init__(self, state: Mapping[str, Any]):
        self.state, self.used = state, set()

    def has(self, rule: Rule, i: int) -> bool:
        return _main_key(rule).replace("{i}", str(i)).rstrip("?") in self.state

    def get(self, key: str | None, i: int) -> Any:
        if key is None:
            return None
        name = key.replace("{i}", str(i)).rstrip("?")
        if name not in self.state:
            if key.endswith("?"):
                return None
            raise CheckpointError(f"tensor {name!r} is missing{_listing(self.state)}")
        self.used.add(name)
        return to_numpy(self.state[name], name)

    def matrix(self, key: str | None, i: int, transpose: bool) -> Any:
        array = self.get(key, i)
        if array is not None and array.ndim != 2:
            raise ModelError(f"tensor {key.replace('{i}', str(i))!r} must be a matrix, found shape {array.shape}")
        return array.T if transpose and array is not None else array

    def layer(self, rule: Rule, i: int) -> Any:
        get: Callable[[str | None], Any] = lambda key: self.get(key, i)  # noqa: E731
        if rule.kind == "linear":
            weight, bias = self.matrix(rule.weight, i, rule.transpose), get(rule.bias)
            if rule.norm_energy:
                divisor = np.sqrt(np.float64(get(rule.norm_energy).reshape(())) + rule.norm_epsilon)
                weight, bias = weight / divisor, None if bias is None else bias / divisor
            return Linear(weight, bias)
        left, right = self.matrix(rule.left, i, rule.transpose), self.matrix(rule.right, i, rule.transpose)
        left_bias, right_bias = get(rule.left_bias), get(rule.right_bias)
        if rule.fused:
            left, right = self.halves(self.matrix(rule.fused, i, rule.transpose), rule)
            fused_bias = get(rule.fused_bias)
            if fused_bias is not None:
                left_bias, right_bias = self.halves(fused_bias, rule)
        if rule.lifted:
            left, left_bias, right, right_bias = left[:, 1:], left[:, 0], right[:, 1:], right[:, 0]
        down = self.matrix(rule.down, i, rule.transpose)
        down = np.eye(left.shape[0], dtype=left.dtype) if down is None else down
        layer = Bilinear(left, right, down, left_bias, right_bias, get(rule.down_bias))
        if rule.residual is None:
            return layer
        scale = float(get(rule.scale).reshape(())) if isinstance(rule.scale, str) else rule.scale
        return Residual(layer, skip=1.0 if rule.residual == "additive" else 1.0 - scale, scale=scale)

    @staticmethod
    def halves(array: Any, rule: Rule) -> tuple[Any, Any]:
        if array.shape[0] % 2:
            raise ModelError(f"{rule.fused} should stack two halves, found shape {array.shape}")
        first, second = np.split(array, 2)
        return (first, second) if rule.fused_order == "left-right" else (second, first)


def to_numpy(value: Any, name: str) -> np.ndarray:
    """A tensor of any library as NumPy. Raises `CheckpointError` when it holds no numbers."""
    array = host_array(value)
    if array.dtype.kind not in "fiub":
        raise CheckpointError(f"tensor {name!r} holds {array.dtype}, not real numbers")
    return array


def _check(dialect: Dialect) -> None:
    if not dialect.layers:
        raise CheckpointError(f"dialect {dialect.name} has no layer rules")
    for n, rule in enumerate(dialect.layers):
        where = f"dialect {dialect.name}, layer rule {n}"
        if rule.kind not in ("linear", "bilinear"):
            raise UnsupportedLayer(f"{where}: kind {rule.kind!r} is no polynomial layer that can be read; known are linear, bilinear")
        if rule.residual not in (None, "additive", "lerp"):
            raise CheckpointError(f"{where}: residual {rule.residual!r} is unknown, use 'additive' or 'lerp'")
        if rule.fused_order not in ("left-right", "right-left"):
            raise CheckpointError(f"{where}: fused_order {rule.fused_order!r} is unknown, use 'left-right' or 'right-left'")
        complete = rule.weight if rule.kind == "linear" else rule.fused or (rule.left and rule.right)
        if not complete:
            raise CheckpointError(f"{where}: a {rule.kind} rule names {'weight' if rule.kind == 'linear' else 'left and right, or fused'}")
        if rule.kind == "linear" and rule.residual:
            raise CheckpointError(f"{where}: a residual rule needs a bilinear layer")


def _main_key(rule: Rule) -> str:
    return rule.weight or rule.fused or rule.left or ""


def _descend(state: Any, dialect: Dialect) -> Mapping[str, Any]:
    for key in dialect.nested:
        if not isinstance(state, Mapping) or key not in state:
            raise CheckpointError(f"dialect {dialect.name} looks under {key!r}, which is not there{_listing(state)}")
        state = state[key]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected named tensors, found {type(state).__name__}")
    return state


def _listing(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f" (found {type(state).__name__})"
    names = list(map(str, state))
    return f" (found {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''})"


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    if norms := [k for k in surplus if _NORM.search(k)]:
        return UnsupportedLayer(
            f"{norms[0]} is a normalisation: one that depends on the input is no polynomial. "
            "A constant one can be folded with norm_energy, or listed under ignore if it is unused"
        )
    names = ", ".join(surplus[:8])
    return CheckpointError(f"dialect {dialect.name} does not account for {names}; extend it or list them under ignore")
