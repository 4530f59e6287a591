"""State dicts into models. In: named arrays, a dialect. Out: a model, or the dialect that fits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tnsim.checkpoints import layer_rules
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.named_arrays import KeysDiffer, NamedArrays, listing
from tnsim.checkpoints.named_numbers import valued
from tnsim.checkpoints.norms import Normed, fold
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.rules import Rule
from tnsim.checkpoints.unused import check_unused
from tnsim.checkpoints.wrappings import Place, inside, place_of
from tnsim.errors import ON_INPUTS, CheckpointError, TnsimError, UnsupportedLayer
from tnsim.models.arrays import rename_errors
from tnsim.models.gradients import detached, requires_grad
from tnsim.models.model import Model
from tnsim.models.origin import Origin

OF_A_FILE = "Load what no dialect describes into the module that it belongs to."
_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|q1|k1|q2|k2|attn|attention|q_proj|k_proj)([._]|$)", re.IGNORECASE
)


def model_from_state(
    state: Mapping[str, Any],
    dialect: Dialect,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
    norms: Any = None,
) -> Model:
    """Read a model out of named arrays.

    Args:
        state: Arrays or tensors by name.
        dialect: How they spell a model.
        n_ctx: Length of the sequences that the model reads.
        config: Numbers by name, for dialects that ask for them.
        leave_out: Patterns of keys, beside those of the dialect.
        norms: Inputs at whose mean energy norms are folded.

    Returns:
        The model, whose `origin` says what was assumed, ignored and left out.

    Raises:
        CheckpointError: On missing or surplus keys, naming them.
        UnsupportedLayer: For a norm without `norms`, and when a norm or a bias is left over.
        ModelError: When the arrays make no model.

    Example:
        >>> import numpy as np
        >>> dialect = Dialect("mine", (Rule("linear", weight="w"),))
        >>> model_from_state({"w": np.ones((2, 3))}, dialect).d_in
        3
    """
    named = _descend(state, dialect)
    place = place_of(named, [rule.numbered(0).main_key for rule in dialect.layers])
    named = inside(named, place)
    arrays = NamedArrays(named, config)
    layers: list[Normed] = []
    runs: list[tuple[Rule, ...]] = []  # with the numbers that were found
    for rule in dialect.layers:
        run: list[Rule] = []
        for single in _rules(rule, arrays):
            normed, told = _layer(single, arrays, len(layers))
            layers.append(normed)
            run.append(told)
        runs.append(tuple(run))
        if not run:
            raise KeysDiffer(
                f"dialect {dialect.name} repeats {rule.main_key}, "
                f"but no such tensor is there{listing(named)}"
            )
    dialect = dataclasses.replace(dialect, leave_out=(*dialect.leave_out, *leave_out))
    ignored, left_out = check_unused(arrays, dialect, [normed.layer for normed in layers])
    assumed = dialect.assumptions(runs)
    if place != Place():
        assumed.append(f"weights found {place}")
    origin = Origin(
        "a state dict",
        tuple(assumed),
        tuple(f"left out: {name}" for name in left_out),
        ignored,
        dialect=dialect,
        guesses=dialect.open_guesses(),
    )
    return assembled(layers, norms, n_ctx, origin)


def assembled(layers: Sequence[Normed], norms: Any, n_ctx: int | None, origin: Origin) -> Model:
    """A model of layers, with the norms before them as constants.

    Args:
        layers: From the input up.
        norms: Inputs to measure norms on, None for none.
        n_ctx: Of the model.
        origin: Without what the norms add to it.

    Returns:
        The model with its origin.

    Raises:
        UnsupportedLayer: Where there are norms, and no inputs.
        ModelError: Where the inputs do not fit.
    """
    if not any(normed.norm for normed in layers):
        return Model([normed.layer for normed in layers], n_ctx, origin)
    if norms is None:
        raise _unfolded(layers)
    return _folded(layers, norms, n_ctx, origin)


def _rules(rule: Rule, arrays: NamedArrays) -> Iterator[Rule]:
    """The rule of each layer that one rule stands for."""
    if not rule.repeat:
        yield rule.numbered(0)
        return
    i = 0
    while (numbered := rule.numbered(i)).main_key in arrays:
        yield numbered
        i += 1


def _layer(rule: Rule, arrays: NamedArrays, n: int) -> tuple[Normed, Rule]:
    """Layer n, and its rule with the numbers that were found."""

    def build() -> tuple[Normed, Rule]:
        found = valued(rule, arrays)
        return layer_rules.normed(found, arrays), told(found, arrays)

    return rename_errors(f"layer {n}", build)


def told(rule: Rule, arrays: NamedArrays) -> Rule:
    """A rule with the value of its constant energy and of its scale, to be shown.

    Args:
        rule: With its other values.
        arrays: Where the energy is looked up.

    Returns:
        The rule, the number in the place of the key.
    """
    if requires_grad(rule.scale):
        rule = dataclasses.replace(rule, scale=float(detached(rule.scale)))
    energy = arrays.single(rule.norm_energy)
    if energy is None:
        return rule
    return dataclasses.replace(rule, norm_energy=f"{energy:.6g}")


def _unfolded(layers: Sequence[Normed]) -> UnsupportedLayer:
    """That there are norms, and no inputs to measure them on."""
    places = ", ".join(str(n) for n, normed in enumerate(layers) if normed.norm)
    return UnsupportedLayer(
        f"a norm stands before layer {places}: it depends on the input and is no polynomial. "
        "Give norms=inputs (--norms FILE) to fold it at its mean energy on them, "
        f"which says how far off that is; or leave it as it is. {ON_INPUTS}"
    )


def _folded(layers: Sequence[Normed], norms: Any, n_ctx: int | None, origin: Origin) -> Model:
    """The model with its norms as constants, and what that costs."""
    folded = fold(layers, norms, n_ctx)
    said = [
        f"norm before layer {n}: mean energy {energy:.6g}"
        for n, energy in enumerate(folded.energies)
        if energy is not None
    ]
    places = ", ".join(str(n) for n, e in enumerate(folded.energies) if e is not None)
    caveat = (
        f"norms before layer {places} at their mean energy on {len(norms)} inputs, "
        f"where outputs differ by {folded.error:.2%} of their size"
    )
    origin = dataclasses.replace(
        origin,
        assumptions=(*origin.assumptions, *said),
        caveats=(*origin.caveats, caveat),
        error=folded.error,
    )
    return Model(folded.model.layers, n_ctx, origin)


def detect(
    state: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> Dialect:
    """The one preset that accounts for every key.

    Args:
        state: Arrays or tensors by name.
        config: Numbers by name.
        leave_out: Patterns of keys that no preset need account for.

    Returns:
        The preset.

    Raises:
        CheckpointError: When there is none, or more than one.
        ModelError, UnsupportedLayer: When one accounts for the keys, and the arrays make no model.

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
            model_from_state(state, dialect, config=config, leave_out=leave_out)
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


def _unknown(state: Mapping[str, Any]) -> TnsimError:
    """That no preset has these keys, or those of the one mapping inside that holds weights."""
    inner = [value for value in state.values() if isinstance(value, Mapping)]
    if len(inner) == 1 and len(inner[0]) > len(state):
        return _unknown(inner[0])
    attention = next(filter(_ATTENTION.search, map(str, state)), None)
    if attention is not None:
        return UnsupportedLayer(
            f"{attention} belongs to an attention layer of no known layout; "
            "bilinear attention is read with a dialect of its own, "
            f"softmax attention is no polynomial. {OF_A_FILE} {ON_INPUTS}"
        )
    return CheckpointError(
        f"no dialect is known for these keys{listing(state)}. Write down what they mean, begun by: "
        "tnsim dialect suggest FILE > mine.json, confirm its guesses, and give it as "
        '--dialect mine.json or dialect="mine.json"; or have the nn.Module, and '
        "tnsim.from_module(net).origin.dialect "
        f"reads its files; or name a preset: {', '.join(PRESETS)}. {ON_INPUTS}"
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
