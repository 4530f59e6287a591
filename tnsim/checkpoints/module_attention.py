"""Bilinear attention among the calls of a PyTorch module. In: calls. Out: rules that compute it.

Roles are taken from names (q1, k1, q2, k2, v, o; or q, k, v, o), or are the parts of one linear
layer that stacks all but o. Everything that no name tells is tried: the number of heads, the mask,
the rotation and the power of d_head in the scores. What is returned gives what the module gave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tnsim.checkpoints.layer_rules import layer
from tnsim.checkpoints.module_calls import Call, join
from tnsim.checkpoints.named_arrays import NamedArrays
from tnsim.checkpoints.rules import PROJECTIONS, Rule

FITS = 1e-5  # of the size of what is given: tables of a rotation are often of float32
POWERS = (2, 1, 0)
BASES = re.compile(r"rope|theta|base")
_ROLE = re.compile(r"^(?:w_?)?([qkvo][12]?|out)(?:_?proj)?$", re.IGNORECASE)


def attention_rules(
    module: Any, run: Sequence[Call], arrays: Mapping[str, Any]
) -> Iterator[tuple[int, Rule]]:
    """The rule of an attention layer with which calls begin.

    Args:
        module: The whole module, whose attributes may hold the base of a rotation.
        run: Calls of linear layers.
        arrays: Tensors of the module by name.

    Yields:
        The number of calls and the rule; nothing where there is none that fits.
    """
    if run[0].given.ndim != 3:
        return
    for shape in (*_fused(run), *_apart(run)):
        output = run[shape.calls - 1].result
        for rule in _hypotheses(shape, module):
            power = _power(rule, NamedArrays(arrays, None), run[0].given, output)
            if power is not None:
                yield shape.calls, replace(rule, score_power=power)
                return


class Shape(NamedTuple):
    """Projections of what may be attention.

    Attributes:
        calls: How many.
        keys: Fields of its rule.
        rows: Of queries, and of values.
    """

    calls: int
    keys: dict[str, Any]
    rows: tuple[int, int]


def _apart(run: Sequence[Call]) -> Iterator[Shape]:
    """Projections by linear layers of their own, told by their names."""
    roles = _roles(run)
    if roles is None:
        return
    keys: dict[str, Any] = {}
    for role in PROJECTIONS:
        keys |= _keys(role, roles.get(role) or roles[role[0]])
    query = roles.get("q1") or roles["q"]
    yield Shape(len(roles), keys, (query.result.shape[-1], roles["v"].result.shape[-1]))


def _fused(run: Sequence[Call]) -> Iterator[Shape]:
    """Projections by one linear layer that stacks them, told by the width of what follows."""
    if len(run) < 2:
        return
    for order in ("q-k-v", "q1-k1-q2-k2-v"):
        rows = run[1].given.shape[-1]
        if run[0].result.shape[-1] == rows * len(order.split("-")):
            keys = _keys("fused", run[0]) | _keys("o", run[1]) | {"fused_order": order}
            yield Shape(2, keys, (rows, rows))


def _keys(role: str, call: Call) -> dict[str, str]:
    """The fields of a rule for the weights of one linear layer."""
    keys = {role: join(call.path, "weight")}
    if call.module.bias is not None:
        keys[f"{role}_bias"] = join(call.path, "bias")
    return keys


def _roles(run: Sequence[Call]) -> dict[str, Call] | None:
    """Calls by role, where names and inputs are those of attention."""
    roles: dict[str, Call] = {}
    for call in run:
        named = _ROLE.match(call.path.rpartition(".")[2])
        if named is None:
            break
        role = named[1].lower()
        if role == "out":
            role = "o"
        roles[role] = call
        if role == "o":
            break
        if call.given is not run[0].given and not np.array_equal(call.given, run[0].given):
            return None
    if set(roles) in ({"q1", "k1", "q2", "k2", "v", "o"}, {"q", "k", "v", "o"}):
        return roles
    return None


def _hypotheses(shape: Shape, module: Any) -> Iterator[Rule]:
    """Rules for every number of heads, mask and rotation, the plainest first."""
    rows = shape.rows
    heads = [n for n in range(1, rows[0] + 1) if rows[0] % n == rows[1] % n == 0]
    bases = (None, *dict.fromkeys((*_bases(module), 10_000.0)))
    for base, n_heads, mask in itertools.product(bases, heads, ("causal", "none")):
        rule = Rule("attention", **shape.keys, n_heads=n_heads, mask=mask, rope_base=base)
        if base is None:
            yield rule
        elif rows[0] // n_heads % 2 == 0:
            for layout, turn in itertools.product(("half", "interleaved"), (1, -1)):
                yield replace(rule, rope_layout=layout, rope_direction=turn)


def _bases(module: Any) -> Iterator[float]:
    """Numbers that submodules keep under a name that a rotation's base may have."""
    for child in module.modules():
        for name, value in vars(child).items():
            if BASES.search(name) and isinstance(value, (int, float)) and value > 1:
                yield float(value)


def _power(rule: Rule, arrays: NamedArrays, x: np.ndarray, expected: np.ndarray) -> int | None:
    """The power of d_head by which scores are divided, where a rule gives what the module gave."""
    attention: Any = layer(rule, arrays)
    bias = 0.0 if attention.o_bias is None else attention.o_bias
    squared = attention(x) - bias
    for power in POWERS:
        given = squared * attention.d_head ** (2 - power) + bias
        if np.allclose(given, expected, rtol=0, atol=FITS * np.abs(expected).max()):
            return power
    return None
