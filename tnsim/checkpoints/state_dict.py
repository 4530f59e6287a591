"""State dicts into models. In: named arrays, a dialect. Out: a `Model`, or the dialect that fits."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tnsim.checkpoints.dialects import PROJECTIONS, Dialect, Rule, is_finite
from tnsim.checkpoints.guard import refusing
from tnsim.checkpoints.inventory import EXPANSION, Stored
from tnsim.checkpoints.presets import PRESETS
from tnsim.errors import CheckpointError, ModelError, TnsimError, UnsupportedLayer, printable
from tnsim.models.arrays import host_array, rename_errors
from tnsim.models.attention import Attention
from tnsim.models.layers import Bilinear, Linear, Residual
from tnsim.models.model import Model

LARGEST_IDENTITY = 2**24  # entries

_STRANGE = {  # attributes of PyTorch's tensors that have no numbers one by one
    "is_meta": "a meta tensor, which has a shape and no numbers",
    "is_quantized": "quantised",
    "is_nested": "a nested tensor",
}

_NORM = re.compile(r"(^|[._])(layer_?norm|rms_?norm|batch_?norm|norm|ln)(_|\d|\.|$)", re.IGNORECASE)
_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|q1|k1|q2|k2|attn|attention|q_proj|k_proj)([._]|$)", re.IGNORECASE
)


class KeysDiffer(CheckpointError):
    """The keys of a file are not those of a dialect."""


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
            raise KeysDiffer(
                f"dialect {dialect.name} repeats {rule.main_key}, "
                f"but no such tensor is there{_listing(state)}"
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
    found, errors = [], []
    for dialect in PRESETS.values():
        try:
            model_from_state(state, dialect, config=config)
            found.append(dialect)
        except TnsimError as error:
            errors.append(error)
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"the dialects {', '.join(d.name for d in found)} all fit these keys "
            "but mean different functions; name one"
        )
    closest = {str(error): error for error in errors if not isinstance(error, KeysDiffer)}
    if len(closest) == 1:
        raise closest.popitem()[1]
    if attention := [k for k in map(str, state) if _ATTENTION.search(k)]:
        raise UnsupportedLayer(
            f"{attention[0]} belongs to an attention layer of no known layout; "
            "bilinear attention is read with a dialect of its own, softmax attention is no polynomial"
        )
    raise CheckpointError(
        f"no dialect is known for these keys{_listing(state)}; "
        f"presets: {', '.join(PRESETS)}; or write one as JSON"
    )


class _Reader:
    """Looks keys up in a state dict, remembers which were used."""

    def __init__(self, state: Mapping[str, Any], config: Mapping[str, Any] | None):
        self.state, self.config, self.used = state, config, set()

    def has(self, rule: Rule, i: int) -> bool:
        return rule.main_key.replace("{i}", str(i)).rstrip("?") in self.state

    def get(self, key: str | None, i: int) -> Any:
        if key is None:
            return None
        name = key.replace("{i}", str(i)).rstrip("?")
        if name not in self.state:
            if key.endswith("?"):
                return None
            raise KeysDiffer(f"tensor {name!r} is missing{_listing(self.state)}")
        self.used.add(name)
        return to_numpy(self.state[name], name)

    def matrix(self, key: str | None, i: int, transpose: bool) -> Any:
        array = self.get(key, i)
        if array is not None and array.ndim != 2:
            raise ModelError(
                f"tensor {key.replace('{i}', str(i))!r} must be a matrix, found shape {array.shape}"
            )
        return array.T if transpose and array is not None else array

    def number(self, value: Any, what: str, i: int, optional: bool = False) -> Any:
        """A number as it stands, from the configuration ("config:a.b"), or a tensor of one entry."""
        if isinstance(value, str) and value.startswith("config:"):
            value = self.configured(value.removeprefix("config:"), what)
        elif isinstance(value, str):
            value = self.single(value, i)
        if value is None and optional:
            return None
        if not is_finite(value):
            raise ModelError(f"the {what} must be a finite number, found {value!r}")
        return value

    def configured(self, name: str, what: str) -> Any:
        """The entry of the configuration that has such a path."""
        if self.config is None:
            raise ModelError(
                f"the {what} is {name} of config.json or config.yaml, and none is beside it"
            )
        entry: Any = self.config
        for key in name.split("."):
            if not isinstance(entry, Mapping) or key not in entry:
                raise ModelError(f"the {what} is {name} of the configuration, which has no {key!r}")
            entry = entry[key]
        return entry

    def single(self, key: str | None, i: int) -> float | None:
        """The number in a tensor of one entry, None where it may be absent and is."""
        array = self.get(key, i)
        if array is None:
            return None
        if array.size != 1:
            raise ModelError(f"tensor {key!r} must hold one number, found shape {array.shape}")
        return float(array.reshape(()))

    def attention(self, rule: Rule, i: int) -> Attention:
        """Any convention in that of `Attention`: rows are reordered, signs and scales moved into queries and keys."""
        heads = self.number(rule.n_heads, "number of heads", i)
        arrays = {role: self.matrix(getattr(rule, role), i, rule.transpose) for role in PROJECTIONS}
        arrays |= {
            f"{role}_bias": self.get(getattr(rule, f"{role}_bias"), i) for role in PROJECTIONS
        }
        base = self.number(rule.rope_base, "RoPE base", i, optional=True)
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
            if arrays[name].shape[0] != rows:
                raise ModelError(
                    f"{name} has shape {arrays[name].shape}, axis 0 must be {rows} as in q1"
                )
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
            energy = self.single(rule.norm_energy, i)
            if energy is not None:
                square = energy + rule.norm_epsilon
                if not square > 0:
                    raise ModelError(f"{rule.norm_energy} must be above 0, found {energy}")
                # the norm stands before the layer: W (x / s) + b
                weight = weight / np.sqrt(np.float64(square))
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
        down = _identity(left) if down is None else down
        return Bilinear(left, right, down, left_bias, right_bias, get(rule.down_bias))

    @staticmethod
    def halves(array: Any, rule: Rule) -> tuple[Any, Any]:
        if array.shape[0] % 2:
            raise ModelError(f"{rule.fused} should stack two halves, found shape {array.shape}")
        first, second = np.split(array, 2)
        return (first, second) if rule.fused_order == "left-right" else (second, first)


def to_numpy(value: Any, name: str) -> np.ndarray:
    """A tensor of a file or of any library as NumPy, in this machine's order of bytes.

    Args:
        value: what is stored under a name.
        name: for messages.

    Raises:
        CheckpointError: when it does not hold real numbers one by one.
    """
    if isinstance(value, Stored):
        value = value.tensor
    for attribute, kind in _STRANGE.items():
        if getattr(value, attribute, False):
            raise CheckpointError(f"tensor {name!r} is {kind}; store it as plain numbers")
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise CheckpointError(f"tensor {name!r} is sparse ({layout}); store it with to_dense()")
    with refusing(f"tensor {name!r} cannot be turned into numbers"):
        array = host_array(value)
    if array.dtype.kind not in "fiub":
        raise CheckpointError(f"tensor {name!r} holds {array.dtype}, not real numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _identity(left: np.ndarray) -> np.ndarray:
    """The readout of a layer without one, unless it were much larger than the layer."""
    rank = left.shape[0]
    if rank**2 > max(LARGEST_IDENTITY, EXPANSION * left.size):
        raise ModelError(f"{rank:,} hidden units without down would need an identity of that size")
    return np.eye(rank, dtype=left.dtype)


def _descend(state: Any, dialect: Dialect) -> Mapping[str, Any]:
    for name in dialect.nested:
        key = name.removesuffix("?")
        if key != name and isinstance(state, Mapping) and key not in state:
            continue
        if not isinstance(state, Mapping) or key not in state:
            raise KeysDiffer(
                f"dialect {dialect.name} looks under {key!r}, which is not there{_listing(state)}"
            )
        state = state[key]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected named tensors, found {type(state).__name__}")
    if strange := [key for key in state if not isinstance(key, str)]:
        raise CheckpointError(f"names of tensors must be text, found {strange[0]!r}")
    return state


def _listing(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f" (found {type(state).__name__})"
    names = [printable(str(name), 60) for name in itertools.islice(state, 8)]
    more = f" and {len(state) - 8} more" if len(state) > 8 else ""
    return f" (found {', '.join(names)}{more})"


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    if norms := [k for k in surplus if _NORM.search(k)]:
        return UnsupportedLayer(
            f"{norms[0]} is a normalisation: one that depends on the input is no polynomial. "
            "A constant one can be folded with norm_energy, or listed under ignore if it is unused"
        )
    names = ", ".join(surplus[:8])
    return KeysDiffer(
        f"dialect {dialect.name} does not account for {names}; extend it or list them under ignore"
    )
