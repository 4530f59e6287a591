"""State dicts into models. In: named arrays, a dialect. Out: a model, or the dialect that fits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tnsim.checkpoints import layer_rules
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.named_arrays import KeysDiffer, NamedArrays, listing
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.rules import Rule
from tnsim.errors import CheckpointError, TnsimError, UnsupportedLayer
from tnsim.models.arrays import rename_errors
from tnsim.models.model import Model
from tnsim.models.protocol import Layer

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
    """Read a model out of named arrays.

    Args:
        state: arrays or tensors by name.
        dialect: how they spell a model.
        n_ctx: length of the sequences that the model reads.
        config: numbers by name, for dialects that ask for them.

    Returns:
        The model.

    Raises:
        CheckpointError: on missing or surplus keys, naming them.
        UnsupportedLayer: when what is left over is a norm.
        ModelError: when the arrays make no model.

    Example:
        >>> import numpy as np
        >>> dialect = Dialect("mine", (Rule("linear", weight="w"),))
        >>> model_from_state({"w": np.ones((2, 3))}, dialect).d_in
        3
    """
    named = _descend(state, dialect)
    arrays = NamedArrays(named, config)
    layers: list[Layer] = []
    for rule in dialect.layers:
        before = len(layers)
        for single in _rules(rule, arrays):
            layers.append(_layer(single, arrays, len(layers)))
        if len(layers) == before:
            raise KeysDiffer(
                f"dialect {dialect.name} repeats {rule.main_key}, "
                f"but no such tensor is there{listing(named)}"
            )
    surplus = [name for name in arrays.unused() if not _ignored(name, dialect)]
    if surplus:
        raise _unexpected(surplus, dialect)
    return Model(layers, n_ctx)


def _rules(rule: Rule, arrays: NamedArrays) -> Iterator[Rule]:
    """The rule of each layer that one rule stands for."""
    if not rule.repeat:
        yield rule.numbered(0)
        return
    i = 0
    while (numbered := rule.numbered(i)).main_key in arrays:
        yield numbered
        i += 1


def _layer(rule: Rule, arrays: NamedArrays, n: int) -> Layer:
    return rename_errors(f"layer {n}", lambda: layer_rules.layer(rule, arrays))


def _ignored(name: str, dialect: Dialect) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in dialect.ignore)


def detect(state: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Dialect:
    """The one preset that accounts for every key.

    Args:
        state: arrays or tensors by name.
        config: numbers by name.

    Returns:
        The preset.

    Raises:
        CheckpointError: when there is none, or more than one.
        ModelError, UnsupportedLayer: when one accounts for the keys, and the arrays make no model.

    Example:
        >>> import numpy as np
        >>> shapes = {"W_l": (4, 2), "W_r": (4, 2), "W_p": (3, 4)}
        >>> detect({name: np.ones(shape) for name, shape in shapes.items()}).name
        'bilinear-readout'
    """
    fitting: list[Dialect] = []
    errors: list[TnsimError] = []
    for dialect in PRESETS.values():
        try:
            model_from_state(state, dialect, config=config)
            fitting.append(dialect)
        except TnsimError as error:
            errors.append(error)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(dialect.name for dialect in fitting)
        raise CheckpointError(
            f"the dialects {names} all fit these keys but mean different functions; name one"
        )
    raise _closest(errors) or _unknown(state)


def _closest(errors: list[TnsimError]) -> TnsimError | None:
    """What stands in the way where the keys fit: said in one way only, or else by nobody."""
    reasons = {str(error): error for error in errors if not isinstance(error, KeysDiffer)}
    if len(reasons) == 1:
        return reasons.popitem()[1]
    return None


def _unknown(state: Any) -> TnsimError:
    """That no preset has these keys."""
    attention = next(filter(_ATTENTION.search, map(str, state)), None)
    if attention is not None:
        return UnsupportedLayer(
            f"{attention} belongs to an attention layer of no known layout; "
            "bilinear attention is read with a dialect of its own, "
            "softmax attention is no polynomial"
        )
    return CheckpointError(
        f"no dialect is known for these keys{listing(state)}; "
        f"presets: {', '.join(PRESETS)}; or write one as JSON"
    )


def _descend(state: Any, dialect: Dialect) -> Mapping[str, Any]:
    for name in dialect.nested:
        key = name.removesuffix("?")
        if key != name and isinstance(state, Mapping) and key not in state:
            continue
        if not isinstance(state, Mapping) or key not in state:
            raise KeysDiffer(
                f"dialect {dialect.name} looks under {key!r}, which is not there{listing(state)}"
            )
        state = state[key]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected named tensors, found {type(state).__name__}")
    for name in state:
        if not isinstance(name, str):
            raise CheckpointError(f"names of tensors must be text, found {name!r}")
    return state


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    norm = next(filter(_NORM.search, surplus), None)
    if norm is not None:
        return UnsupportedLayer(
            f"{norm} is a normalisation: one that depends on the input is no polynomial. "
            "A constant one can be folded with norm_energy, or listed under ignore if it is unused"
        )
    names = ", ".join(surplus[:8])
    return KeysDiffer(
        f"dialect {dialect.name} does not account for {names}; extend it or list them under ignore"
    )
