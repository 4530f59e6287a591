"""Conversion of a single rule of a dialect, with its named arrays, into a single layer.

Every convention is turned into that of `tnsim.models` here: halves are split, rows of heads are
reordered, signs and scales are moved into the weights.

*Named arrays* are arrays of NumPy. A number of a rule, such as the scale of a residual or the
number of heads, stands in the dialect itself, in a tensor with a single entry, or in the
configuration beside the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from tnsim.checkpoints.formats import EXPANSION, Stored, strange
from tnsim.checkpoints.norms import Norm, Normed, at_energy
from tnsim.checkpoints.rules import (
    PROJECTIONS,
    SECOND_SCORE,
    AttentionRule,
    BilinearRule,
    ElementwiseRule,
    GatedRule,
    LinearRule,
    Rule,
    StackedRule,
    is_finite,
)
from tnsim.errors import CheckpointError, ModelError, cause, printable
from tnsim.models.arrays import detached, host_array, like, requires_grad
from tnsim.models.layers import Attention, Bilinear, Core, Elementwise, Gated, Linear, Residual

LARGEST_IDENTITY = 2**24  # entries that any layer without a readout may need


class KeysDiffer(CheckpointError):
    """The keys of a file are not those of a dialect."""


class NamedArrays:
    """Lookup of the arrays that a dialect names, with a record of the names in use.

    A key that ends in "?" may be absent. A key of None is absent.

    Args:
        state: Arrays, tensors of any library or unread tensors, by name.
        config: Contents of config.json or config.yaml; None where there is no such file.

    Attributes:
        used: Names that were looked up and found.

    Example:
        >>> arrays = NamedArrays({"weight": np.ones((2, 3)), "bias": np.ones(2)}, None)
        >>> arrays.matrix("weight", transpose=True).shape
        (3, 2)
        >>> arrays.unused()
        ['bias']
    """

    def __init__(self, state: Mapping[str, Any], config: Mapping[str, Any] | None):
        self.state = state
        self.config = config
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key.rstrip("?") in self.state

    def unused(self) -> list[str]:
        """Names that were never looked up, in the order of the file."""
        return [name for name in self.state if name not in self.used]

    def get(self, key: str | None) -> Shaped[np.ndarray, "..."] | None:
        """The array of a key.

        Args:
            key: Name of the array.

        Returns:
            The array as it is stored, None where it may be absent and is. A tensor that requires
            grad stays a tensor.

        Raises:
            KeysDiffer: Where the array is missing.
            CheckpointError: Where the array does not hold real numbers.
        """
        if key is None:
            return None
        name = key.rstrip("?")
        if name in self.state:
            # Use is recorded here, so that every tensor is accounted for in the end.
            self.used.add(name)
            value = self.state[name]
            array = to_numpy(value, name)
            # A gradient would be lost in NumPy.
            return value if requires_grad(value) else array
        if key.endswith("?"):
            return None
        raise KeysDiffer(f"tensor {name!r} is missing{listing(self.state)}")

    def matrix(self, key: str | None, transpose: bool = False) -> Any:
        """The matrix of a key.

        Args:
            key: Name of the matrix.
            transpose: Whether the matrix is stored (columns, rows).

        Returns:
            The matrix (rows, columns), None where it may be absent and is.

        Raises:
            ModelError: Where the array is no matrix. Errors of `get` are raised too.
        """
        array = self.get(key)
        if array is None:
            return None
        if array.ndim != 2:
            raise ModelError(f"tensor {key!r} must be a matrix, found shape {tuple(array.shape)}")
        return array.T if transpose else array

    def single(self, key: str | None) -> Any:
        """The number in a tensor of a single entry.

        Args:
            key: Name of the tensor.

        Returns:
            The number, None where it may be absent and is. A tensor that requires grad stays a
            tensor.

        Raises:
            ModelError: Where the tensor has more entries or none. Errors of `get` are raised too.
        """
        array = self.get(key)
        if array is None:
            return None
        if math.prod(array.shape) != 1:
            shape = tuple(array.shape)
            raise ModelError(f"tensor {key!r} must hold one number, found shape {shape}")
        number = array.reshape(())
        return number if requires_grad(number) else float(number)


def to_numpy(value: Any, name: str) -> Shaped[np.ndarray, "..."]:
    """A tensor of a file or of any library as NumPy, in this machine's order of bytes.

    Args:
        value: Tensor that is stored under a name.
        name: Name of the tensor, for messages.

    Returns:
        An array of floats, integers or booleans, of the stored shape.

    Raises:
        CheckpointError: When the tensor does not hold real numbers separately.

    Example:
        >>> to_numpy([[1, 2], [3, 4]], "weight").shape
        (2, 2)
    """
    if isinstance(value, Stored):
        value = value.tensor
    # Such tensors would fail deep inside a conversion, with an error that names no tensor.
    if (said := strange(value)) is not None:
        raise CheckpointError(f"tensor {name!r} {said}")
    try:
        array = host_array(detached(value))
    except Exception as error:  # of tnsim too, which names no tensor
        raise CheckpointError(
            f"tensor {name!r} cannot be turned into numbers: {cause(error)}"
        ) from error
    if array.dtype.kind not in "fiub":
        raise CheckpointError(f"tensor {name!r} holds {array.dtype}, not real numbers")
    # Files from other machines may have the other order of bytes, which JAX refuses.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def listing(state: Any) -> str:
    """The first names in a state dict, for the end of a message.

    Args:
        state: A mapping, or an object in the place of a mapping.

    Returns:
        At most eight names, in brackets, with a space in front.

    Example:
        >>> listing({"weight": 1, "bias": 2})
        ' (found weight, bias)'
    """
    if not isinstance(state, Mapping):
        return f" (found {type(state).__name__})"
    names = [printable(str(name), 60) for name in itertools.islice(state, 8)]
    shown = ", ".join(names)
    if len(state) > 8:
        shown += f" and {len(state) - 8} more"
    return f" (found {shown})"


def valued(rule: Rule, arrays: NamedArrays) -> Rule:
    """A rule with its numbers in the place of the keys under which they are found.

    Args:
        rule: Rule of a checked dialect, for a single layer.
        arrays: Arrays of the file, and its configuration.

    Returns:
        The rule with numbers as `scale`, `n_heads` and `rope_base` (the last may be None), and None
        for keys that are absent.

    Raises:
        ModelError: Where a number is missing. Errors of `NamedArrays.get` are raised too.

    Example:
        >>> from tnsim.checkpoints.rules import BilinearRule
        >>> rule = BilinearRule(left="l", right="r", residual="additive", scale="config:s")
        >>> valued(rule, NamedArrays({}, {"s": 0.5})).scale
        0.5
    """
    values: dict[str, Any] = {}
    if isinstance(rule, AttentionRule):
        heads = number(rule.n_heads, "number of heads", arrays)
        base = optional_number(rule.rope_base, "RoPE base", arrays)
        values["n_heads"] = constant(heads, "number of heads")
        values["rope_base"] = constant(base, "RoPE base")
    if rule.residual is not None:
        values["scale"] = number(rule.scale, "residual scale", arrays)
    for name, key in vars(rule).items():
        # A key that is absent is settled here, so that later readers need not ask again.
        if isinstance(key, str) and key.endswith("?") and key not in arrays:
            values[name] = None
    return dataclasses.replace(rule, **values)


def number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """A number that a dialect gives.

    Args:
        value: The number, "config:a.b" for an entry of the configuration, or else the key of a
            tensor with one entry. "config:a.b|c" is the first of the two entries that exists.
        what: Words for the number in messages.
        arrays: Arrays of the file, and its configuration.

    Returns:
        A finite number.

    Raises:
        ModelError: Where there is no number. Errors of `NamedArrays.get` are raised too.

    Example:
        >>> arrays = NamedArrays({}, {"model": {"n_head": 4}})
        >>> number("config:model.n_head", "number of heads", arrays)
        4
    """
    entry = optional_number(value, what, arrays)
    if entry is None:
        raise ModelError(f"the {what} must be a finite number, found None")
    return entry


def optional_number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """The number as by `number`, or None where the dialect or the configuration gives None."""
    entry: Any = value
    if isinstance(value, str) and value.startswith("config:"):
        entry = _configured_entry(value.removeprefix("config:"), what, arrays.config)
    elif isinstance(value, str):
        entry = arrays.single(value)
    # A tensor with a gradient was checked when it was read.
    if entry is not None and not requires_grad(entry) and not is_finite(entry):
        raise ModelError(f"the {what} must be a finite number, found {entry!r}")
    return entry


def constant(number: Any, what: str) -> Any:
    """A number that has no gradient.

    Args:
        number: Any number, or None.
        what: Words for the number in messages.

    Returns:
        The number.

    Raises:
        ModelError: When the number requires grad.

    Example:
        >>> constant(4, "number of heads")
        4
    """
    if requires_grad(number):
        raise ModelError(
            f"the {what} requires grad, and nothing has a gradient with respect to it: "
            "freeze it with requires_grad_(False)"
        )
    return number


def _configured_entry(name: str, what: str, config: Mapping[str, Any] | None) -> Any:
    """The entry of the configuration at the first of several paths that exists."""
    if config is None:
        first = name.partition("|")[0]
        raise ModelError(
            f"the {what} is {first} of config.json or config.yaml, and none is beside it"
        )
    paths = name.split("|")
    entries = [_config_entry(config, path) for path in paths]
    # None is a value: a configuration may state that there is no rotation.
    for entry, missing in entries:
        if not missing:
            return entry
    first, *others = paths
    missing = entries[0][1]
    nor = "".join(f", nor {path}" for path in others)
    raise ModelError(f"the {what} is {first} of the configuration, which has no {missing!r}{nor}")


def _config_entry(config: Any, path: str) -> tuple[Any, str]:
    """The entry at a path of names, or None and the first name that is missing."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return None, key
        config = config[key]
    return config, ""


def layer(rule: Rule, arrays: NamedArrays) -> Core | Residual:
    """The layer that a rule describes.

    Args:
        rule: Rule of a checked dialect, for a single layer, with the numbers that
            `valued` puts in the place of keys.
        arrays: Arrays in which the keys of the rule are looked up.

    Returns:
        The layer, inside a `Residual` where the rule has a residual.

    Raises:
        CheckpointError: When an array is missing or holds no real numbers.
        ModelError: When the arrays make no such layer.

    Example:
        >>> state = {"l": np.ones((4, 3)), "r": np.ones((4, 3)), "d": np.ones((3, 4))}
        >>> rule = BilinearRule(left="l", right="r", down="d", residual="lerp", scale=0.25)
        >>> layer(rule, NamedArrays(state, None)).skip
        0.75
    """
    inner = _MAKERS[type(rule)](rule, arrays)
    if rule.residual is None:
        return inner
    scale: Any = rule.scale
    # The interpolating rule takes away from the input what it gives to the layer.
    skip = 1.0 - scale if rule.residual == "lerp" else 1.0
    return Residual(inner, skip=skip, scale=scale)


def normed(rule: Rule, arrays: NamedArrays) -> Normed:
    """The layer that a rule describes, and the norm before the layer.

    Args:
        rule: Rule with its numbers, as for `layer`.
        arrays: Arrays in which the keys of the rule are looked up.

    Returns:
        The layer and its norm; the layer alone where the rule has no norm, or where the file has a
        constant energy, which is then part of the layer.

    Raises:
        CheckpointError, ModelError: Raised as by `layer`.

    Example:
        >>> state = {"w": np.ones((1, 2)), "energy": np.array([4.0])}
        >>> rule = LinearRule(weight="w", norm_energy="energy")
        >>> normed(rule, NamedArrays(state, None)).layer.weight
        array([[0.5, 0.5]])
    """
    plain = layer(rule, arrays)
    energy = constant(arrays.single(rule.norm_energy), "energy of a norm")
    if rule.norm is None and energy is None:
        return Normed(plain)
    norm = Norm(
        rule.norm == "layer",
        rule.norm_epsilon,
        _norm_vector(rule.norm_weight, plain.d_in, arrays),
        _norm_vector(rule.norm_bias, plain.d_in, arrays),
    )
    # Without a constant energy, inputs have to tell the energy later.
    if energy is None:
        return Normed(plain, norm)
    return Normed(at_energy(Normed(plain, norm), energy, str(rule.norm_energy)))


def _norm_vector(key: str | None, size: int, arrays: NamedArrays) -> np.ndarray | None:
    """An array with a number for each coordinate that a layer reads, None for no key."""
    array = arrays.get(key)
    if array is not None and array.shape != (size,):
        raise ModelError(
            f"tensor {key!r} of a norm before {size} coordinates has shape {array.shape}"
        )
    return array


def _bilinear(rule: BilinearRule, arrays: NamedArrays) -> Bilinear:
    weights = dict(_weights(rule, arrays, ("left", "right")))
    if rule.lifted:
        # Column 0 multiplies a constant 1, which is a bias.
        for name in ("left", "right"):
            weights |= {name: weights[name][:, 1:], f"{name}_bias": weights[name][:, 0]}
    down = arrays.matrix(rule.down, rule.transpose)
    if down is None:
        # Hidden units are the output, which a readout by the identity says.
        down = _identity_readout(weights["left"])
    return Bilinear(**weights, down=down, down_bias=arrays.get(rule.down_bias))


def _gated(rule: GatedRule, arrays: NamedArrays) -> Gated:
    own: Any = rule.activation
    weights = {"up": None, **dict(_weights(rule, arrays, ("gate", "up")))}
    down = arrays.matrix(rule.down, rule.transpose)
    return Gated(**weights, down=down, activation=own, down_bias=arrays.get(rule.down_bias))


def _weights(
    rule: StackedRule, arrays: NamedArrays, roles: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Matrices and biases of roles, each from an array of its own or cut out of a stacked one."""
    stacked = _unstacked_roles(rule, arrays) if rule.fused else {}
    for role in roles:
        if stacked and role != "o":
            both = role[0]  # the name q or k, shared by both scores
            yield role, stacked.get(role, stacked.get(both))
            yield f"{role}_bias", stacked.get(f"{role}_bias", stacked.get(f"{both}_bias"))
            continue
        key, bias = getattr(rule, role), arrays.get(getattr(rule, f"{role}_bias"))
        if isinstance(rule, AttentionRule) and rule.by_head:
            yield role, _rows_of_heads(key, role, rule, arrays)
            bias = None if bias is None else bias.reshape(-1)
        elif role != "up" or key is not None:  # a gated layer may have no second factor
            yield role, arrays.matrix(key, rule.transpose)
        yield f"{role}_bias", bias


def _unstacked_roles(rule: StackedRule, arrays: NamedArrays) -> dict[str, Any]:
    """Weights and biases by role, cut out of arrays that stack the roles on axis 0."""
    roles = str(rule.fused_order).split("-")
    slices: dict[str, Any] = {}
    matrix = arrays.matrix(rule.fused, rule.transpose)
    # Biases are stacked in the order of the weights.
    for array, ending in ((matrix, ""), (arrays.get(rule.fused_bias), "_bias")):
        if array is None:
            continue
        if array.shape[0] % len(roles):
            raise ModelError(
                f"{rule.fused} should stack {len(roles)} equal parts, found shape {array.shape}"
            )
        rows = array.shape[0] // len(roles)
        for n, role in enumerate(roles):
            slices[f"{role}{ending}"] = array[n * rows : (n + 1) * rows]
    return slices


def _identity_readout(left: np.ndarray) -> np.ndarray:
    """The identity as readout of a layer without `down`; refused where larger than the layer."""
    rank = left.shape[0]
    # The identity is written out, so a small file could ask for a large one.
    if rank**2 > max(LARGEST_IDENTITY, EXPANSION * rank * left.shape[1]):
        raise ModelError(f"{rank:,} hidden units without down would need an identity of that size")
    return np.eye(rank, dtype=host_array(detached(left[:1])).dtype)


def _attention(rule: AttentionRule, arrays: NamedArrays) -> Attention:
    """An attention layer in the convention of `Attention`.

    `Attention` divides scores by d_head^2 and turns halves of heads forward.
    """
    heads: Any = rule.n_heads
    single = rule.scores == 1
    roles = [role for role in PROJECTIONS if not (single and role in SECOND_SCORE)]
    weights = dict(_weights(rule, arrays, roles))
    base: Any = rule.rope_base
    rows = weights["q1"].shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % heads:
        raise ModelError(f"{rows} query rows cannot be {heads!r} heads")
    d_head = rows // heads
    # The file divides by d_head^p, `Attention` by d_head^2.
    factor = d_head ** (2 - rule.score_power)
    for role in ("q1", "k1", "q2", "k2"):
        for name in (role, f"{role}_bias"):
            array = weights.get(name)
            if array is None:
                continue
            if array.shape[0] != rows:
                raise ModelError(f"{name} has shape {array.shape}, axis 0 must be {rows} as in q1")
            # Without a rotation the order of rows inside a head means nothing.
            if base:
                array = _rotary_rows(array, heads, rule)
            if role == "q1" and not single:
                array = array * factor
            weights[name] = array
    if single:
        dtype = host_array(detached(weights["q1"][:1])).dtype
        weights |= constant_score(weights["q1"].shape, heads, factor, dtype)
    if base is not None:
        base = float(base)
    return Attention(**weights, n_heads=heads, mask=rule.mask, rope_base=base)


def constant_score(
    shape: Sequence[int], heads: int, value: Any, dtype: Any = np.float64
) -> dict[str, np.ndarray]:
    """The arrays of a second score that has the same value for every query and key.

    Matrices are zero, and the biases of a head have the value as their inner product.

    Args:
        shape: Shape of the matrix of the queries of all heads.
        heads: Number of heads.
        value: The value, or one for each head.
        dtype: Type of the weights.

    Example:
        >>> made = constant_score((4, 3), 2, [5.0, 6.0])
        >>> made["q2_bias"].tolist(), made["k2_bias"].tolist()
        ([5.0, 0.0, 6.0, 0.0], [1.0, 0.0, 1.0, 0.0])
    """
    first = np.zeros((heads, shape[0] // heads), dtype)
    first[:, 0] = 1.0
    nothing = np.zeros(tuple(shape), dtype)
    queries = first.T * np.asarray(value, dtype)  # in the type of the weights
    return {
        "q2": nothing,
        "k2": nothing,
        "q2_bias": queries.T.reshape(-1),
        "k2_bias": first.reshape(-1),
    }


def _rows_of_heads(key: str, role: str, rule: AttentionRule, arrays: NamedArrays) -> Any:
    """The matrix of a projection that is stored with an axis of heads."""
    array: Any = arrays.get(key)
    if array.ndim != 3 or array.shape[0] != rule.n_heads:
        raise ModelError(
            f"tensor {key!r} must have the shape (heads, in, out) of {rule.n_heads} heads, found "
            f"{tuple(array.shape)}"
        )
    # The values of all heads stand side by side before the output map.
    if role == "o":
        return array.reshape(-1, array.shape[2]).T
    return array.swapaxes(1, 2).reshape(-1, array.shape[1])


def _rotary_rows(array: np.ndarray, heads: int, rule: AttentionRule) -> np.ndarray:
    """Rows of queries or keys in the order and the direction in which `Attention` turns them.

    `Attention` turns coordinates (i, i + d_head / 2) of each head forward. Where the file turns
    (2 i, 2 i + 1), even rows come first and odd ones after them. Turning backward is turning
    forward with the second coordinate of each pair negated, before and after; in the product of a
    query and a key the second negations cancel.
    """
    d_head = array.shape[0] // heads
    order = np.arange(d_head)
    if rule.rope_layout == "interleaved":
        order = np.concatenate([order[::2], order[1::2]])
    # Only the second coordinate of a pair changes its sign.
    sign = np.where(np.arange(d_head) >= d_head // 2, rule.rope_direction, 1)
    by_head = array.reshape(heads, d_head, -1)
    signs = like(sign[:, None], array)
    return (by_head[:, order] * signs).reshape(array.shape)


_MAKERS: dict[type[Rule], Callable[..., Any]] = {
    LinearRule: lambda rule, arrays: Linear(
        arrays.matrix(rule.weight, rule.transpose), arrays.get(rule.bias)
    ),
    BilinearRule: _bilinear,
    AttentionRule: _attention,
    ElementwiseRule: lambda rule, _: Elementwise(rule.activation),  # a name, see `check_rule`
    GatedRule: _gated,
}
