"""State dicts into models. In: named arrays, a dialect. Out: a `Model`, or the dialect that fits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tnsim.checkpoints.dialects import PROJECTIONS, Dialect, Rule
from tnsim.checkpoints.presets import PRESETS
from tnsim.errors import CheckpointError, ModelError, TnsimError, UnsupportedLayer
from tnsim.models.layers import Attention, Bilinear, Linear, Residual, host_array, rename_errors
from tnsim.models.model import Model

_NORM = re.compile(r"(^|[._])(layer_?norm|rms_?norm|batch_?norm|norm|ln)(_|\d|\.|$)", re.IGNORECASE)
_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|q1|k1|q2|k2|attn|attention|q_proj|k_proj)([._]|$)", re.IGNORECASE
)


def model_from_state(
    state: Mapping[str, Any],
    dialect: Dialect,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """Read a model out of named arrays, with the numbers of `config` where the dialect asks for them.

    Raises `CheckpointError` on missing or surplus keys, naming them,
    `UnsupportedLayer` when what is left over is a norm, `ModelError` when the arrays make no model.
    """
    state = _descend(state, dialect)
    reader = _Reader(state, config)
    layers = []
    for rule in dialect.layers:
        count = len(layers)
        while not rule.repeat or reader.has(rule, len(layers) - count):
            n = len(layers)
            layers.append(
                rename_errors(f"layer {n}", lambda rule=rule, i=n - count: reader.layer(rule, i))
            )
            if not rule.repeat:
                break
        if rule.repeat and len(layers) == count:
            raise CheckpointError(
                f"dialect {dialect.name} repeats {_main_key(rule)}, but no such tensor is there{_listing(state)}"
            )
    surplus = [
        k
        for k in state
        if k not in reader.used and not any(fnmatch.fnmatch(k, p) for p in dialect.ignore)
    ]
    if surplus:
        raise _unexpected(surplus, dialect)
    return Model(layers, n_ctx)


def detect(state: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Dialect:
    """The one preset that accounts for every key. Raises when there is none, or more than one."""
    found, errors = [], {}
    for dialect in PRESETS.values():
        try:
            model_from_state(state, dialect, config=config)
            found.append(dialect)
        except TnsimError as error:
            errors[dialect.name] = error
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"the dialects {', '.join(d.name for d in found)} all fit these keys but mean different functions; name one"
        )
    closest = {
        name: error for name, error in errors.items() if not isinstance(error, CheckpointError)
    }
    if len(closest) == 1:
        raise next(iter(closest.values()))
    if attention := [k for k in state if _ATTENTION.search(k)]:
        raise UnsupportedLayer(
            f"{attention[0]} belongs to an attention layer of no known layout; bilinear attention is read with a dialect of its own, "
            "softmax attention is no polynomial"
        )
    raise CheckpointError(
        f"no dialect is known for these keys{_listing(state)}; presets: {', '.join(PRESETS)}; or write one as JSON"
    )


class _Reader:
    """Looks keys up in a state dict, remembers which were used."""

    def __init__(self, state: Mapping[str, Any], config: Mapping[str, Any] | None):
        self.state, self.config, self.used = state, config, set()

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
            raise ModelError(
                f"tensor {key.replace('{i}', str(i))!r} must be a matrix, found shape {array.shape}"
            )
        return array.T if transpose and array is not None else array

    def number(self, value: float | str | None, what: str, i: int) -> Any:
        """A number as it stands, from the configuration ("config:a.b"), or a tensor of one entry."""
        if not isinstance(value, str):
            return value
        if not value.startswith("config:"):
            return float(self.get(value, i).reshape(()))
        found: Any = self.config
        if found is None:
            raise ModelError(
                f"the {what} is {value.removeprefix('config:')} of config.json or config.yaml, and none is beside it"
            )
        for key in value.removeprefix("config:").split("."):
            if not isinstance(found, Mapping) or key not in found:
                raise ModelError(
                    f"the {what} is {value.removeprefix('config:')} of the configuration, which has no {key!r}"
                )
            found = found[key]
        return found

    def attention(self, rule: Rule, i: int) -> Attention:
        """Any convention in that of `Attention`: rows are reordered, signs and scales moved into queries and keys."""
        heads = self.number(rule.n_heads, "number of heads", i)
        arrays = {role: self.matrix(getattr(rule, role), i, rule.transpose) for role in PROJECTIONS}
        arrays |= {
            f"{role}_bias": self.get(getattr(rule, f"{role}_bias"), i) for role in PROJECTIONS
        }
        base = self.number(rule.rope_base, "RoPE base", i)
        rows = arrays["q1"].shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % heads:
            raise ModelError(f"{rows} query rows cannot be {heads!r} heads")
        width = rows // heads
        order = (
            np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
            if rule.rope_layout == "interleaved"
            else np.arange(width)
        )
        sign = np.where(np.arange(width) >= width // 2, rule.rope_direction, 1)
        for name in [
            n for role in PROJECTIONS[:4] for n in (role, f"{role}_bias") if arrays[n] is not None
        ]:
            array = arrays[name].reshape(heads, width, -1)
            array = array[:, order] * sign[:, None] if base else array
            arrays[name] = (
                array * (width ** (2 - rule.score_power) if name.startswith("q1") else 1)
            ).reshape(arrays[name].shape)
        weights, biases = (
            tuple(arrays[f"{role}{end}"] for role in PROJECTIONS) for end in ("", "_bias")
        )
        return Attention(
            *weights,
            heads,
            *biases,
            mask=rule.mask,
            rope_base=None if base is None else float(base),
        )

    def layer(self, rule: Rule, i: int) -> Any:
        get: Callable[[str | None], Any] = lambda key: self.get(key, i)  # noqa: E731
        if rule.kind == "linear":
            weight, bias = self.matrix(rule.weight, i, rule.transpose), get(rule.bias)
            energy = get(rule.norm_energy)
            if energy is not None:
                # the norm stands before the layer: W (x / s) + b
                weight = weight / np.sqrt(np.float64(energy.reshape(())) + rule.norm_epsilon)
            return Linear(weight, bias)
        layer = self.attention(rule, i) if rule.kind == "attention" else self.bilinear(rule, i)
        if rule.residual is None:
            return layer
        scale = float(self.number(rule.scale, "residual scale", i))
        return Residual(
            layer, skip=1.0 if rule.residual == "additive" else 1.0 - scale, scale=scale
        )

    def bilinear(self, rule: Rule, i: int) -> Bilinear:
        get: Callable[[str | None], Any] = lambda key: self.get(key, i)  # noqa: E731
        left, right = (
            self.matrix(rule.left, i, rule.transpose),
            self.matrix(rule.right, i, rule.transpose),
        )
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
        return Bilinear(left, right, down, left_bias, right_bias, get(rule.down_bias))

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


def _main_key(rule: Rule) -> str:
    return rule.weight or rule.fused or rule.left or rule.q1 or ""


def _descend(state: Any, dialect: Dialect) -> Mapping[str, Any]:
    for name in dialect.nested:
        key = name.removesuffix("?")
        if key != name and isinstance(state, Mapping) and key not in state:
            continue
        if not isinstance(state, Mapping) or key not in state:
            raise CheckpointError(
                f"dialect {dialect.name} looks under {key!r}, which is not there{_listing(state)}"
            )
        state = state[key]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected named tensors, found {type(state).__name__}")
    return state


def _listing(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f" (found {type(state).__name__})"
    names = list(map(str, state))
    return (
        f" (found {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''})"
    )


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    if norms := [k for k in surplus if _NORM.search(k)]:
        return UnsupportedLayer(
            f"{norms[0]} is a normalisation: one that depends on the input is no polynomial. "
            "A constant one can be folded with norm_energy, or listed under ignore if it is unused"
        )
    names = ", ".join(surplus[:8])
    return CheckpointError(
        f"dialect {dialect.name} does not account for {names}; extend it or list them under ignore"
    )
