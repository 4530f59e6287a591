"""State dicts into models: a dialect is applied to named arrays, and every array is accounted for.

Training code wraps weights: `{"model": ..., "optimizer": ...}` of a training loop, `state_dict` and
`net.` of Lightning, `module.` of DistributedDataParallel and `_orig_mod.` of torch.compile change
no number, before all names or inside of those of single blocks. Names tell where the weights are
(`place_of`): a place is taken only where every required name lies, and only where no other place
has all of them.

Some tensors are used by no rule (`check_unused`). A dialect may *ignore* a tensor that is no part
of the function, such as a step counter, and *leave out* a tensor that is: the model is then another
function than the network, and every result says so. Weights that the forward pass does not use are
listed as *unused*.

`model_from_state` applies a given dialect, and `unnamed` refuses arrays for which none is given:
names of tensors are no proof of a function.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tnsim.checkpoints import layer_rules
from tnsim.checkpoints.dialects import PRESETS, Dialect, is_pattern
from tnsim.checkpoints.formats import Stored
from tnsim.checkpoints.layer_rules import KeysDiffer, NamedArrays, listing, to_numpy, valued
from tnsim.checkpoints.norms import Normed, fold
from tnsim.checkpoints.rules import Rule
from tnsim.errors import (
    BY_PARTS,
    ON_INPUTS,
    CaveatWarning,
    CheckpointError,
    ModelError,
    TnsimError,
    UnsupportedLayer,
    printable,
    warn,
)
from tnsim.models.arrays import detached, rename_errors, requires_grad
from tnsim.models.functions import input_rows
from tnsim.models.layers import Layer, has_width
from tnsim.models.model import Model, Origin

DEEPEST = 3  # levels of mappings inside one another that are searched for weights
NORM = re.compile(
    r"(^|[._])((layer|rms|batch|group)_?norm|norm|ln)(_|\d|\.|$)|norm\d*(\.|$)", re.IGNORECASE
)
BIAS = re.compile(r"(^|[._])bias(_|\d|\.|$)|(^|\.)b(_\w+|\d*)$", re.IGNORECASE)
OF_A_FILE = "Load what no dialect describes into the module that it belongs to."
_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|q1|k1|q2|k2|attn|attention|q_proj|k_proj)([._]|$)", re.IGNORECASE
)
_INNER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names of blocks that were compiled, sharded or checkpointed one by one."""
_QUANTISED = re.compile(
    r"(?:^|[._])(?:_packed_params|SCB|qweight|qzeros|absmax|quant_map|quant_state|weight_packed|"
    r"weight_scale(?:_inv)?)(?:\.|$)"
)
"""Names beside quantised weights: of PyTorch, bitsandbytes, GPTQ and AWQ, compressed tensors."""


class Place(NamedTuple):
    """The place of weights in nested mappings.

    Attributes:
        way: Keys of the mappings that lead to the place.
        prefix: Prefix of the names of the weights.
        without: Parts of wrappers inside of names, which are read without them.
    """

    way: tuple[str, ...] = ()
    prefix: str = ""
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"under {' / '.join(map(repr, self.way))}"] if self.way else []
        if self.prefix:
            said.append(f"behind {self.prefix!r}")
        if self.without:
            said.append(f"without {', '.join(map(repr, self.without))} in their names")
        return " ".join(said) or "at the top"


def place_of(state: Mapping[str, Any], names: Sequence[str]) -> Place:
    """The place at which the weights of some names lie.

    Args:
        state: Arrays by name, or mappings of arrays.
        names: Required names, none for a network without weights.

    Returns:
        The top where the names are at the top or nowhere; else the one place that has all names.
        Names are looked up without the parts of wrappers inside of them, where these are in the
        way.

    Raises:
        KeysDiffer: Where more than one place has all names.

    Example:
        >>> place_of({"model": {"module.w": 1, "module.b": 2}, "step": 3}, ["w", "b"])
        Place(way=('model',), prefix='module.', without=())
        >>> str(place_of({"0._orig_mod.w": 1}, ["0.w"]))
        "without '_orig_mod.' in their names"
    """
    if not names:
        return Place()
    place = _place_among(state, names, False)
    named = inside(state, place)
    if all(name in named for name in names) and not _inner_parts(named):
        return place
    bare = _place_among(state, names, True)
    # Names that are nowhere are told as the file has them.
    return bare if all(name in inside(state, bare) for name in names) else place


def _inner_parts(named: Mapping[Any, Any]) -> tuple[str, ...]:
    """The parts of wrappers inside of names."""
    texts = (name for name in named if isinstance(name, str))
    return tuple(sorted({part for name in texts for part in _INNER.findall(name)}))


def _without_parts(named: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Weights by names without parts of wrappers; as they are where two names would become one."""
    short = {
        _INNER.sub("", name) if isinstance(name, str) else name: value
        for name, value in named.items()
    }
    return short if len(short) == len(named) else named


def _place_among(state: Mapping[str, Any], names: Sequence[str], bare: bool) -> Place:
    """The place of weights, see `place_of`, by their names with or without parts of wrappers."""
    places = list(_places(state, names, (), set(), bare))
    whole = [place for place in places if not (place.way or place.prefix)]
    if whole:
        return whole[0]
    if len(places) > 1:
        shown = "; ".join(map(str, places[:4]))
        nested = f"by nested, such as {list(places[0].way)}, and " if places[0].way else ""
        raise KeysDiffer(
            f"the weights are there more than once: {shown}. Say in a dialect which are meant, "
            f"{nested}by names with what stands before them; for a module take one mapping of the "
            "file, tnsim.from_state_dict(mapping, net)"
        )
    return places[0] if places else Place()


def inside(state: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The mapping at a place, its names without the prefix of the place.

    Args:
        state: Nested mappings, as for `place_of`.
        place: A place that `place_of` found.

    Returns:
        Arrays by name. Names without the prefix stay as they are.

    Raises:
        KeysDiffer: Where a name exists both with the prefix and without.

    Example:
        >>> inside({"model": {"module.w": 1}}, Place(("model",), "module."))
        {'w': 1}
    """
    for key in place.way:
        state = state[key]
    if place.without:
        state = _without_parts(state)
    if not place.prefix:
        return state
    # Names of other tensors, such as counters outside the wrapper, stay.
    named = {name.removeprefix(place.prefix): value for name, value in state.items()}
    if len(named) < len(state):
        twice = next(name for name in state if place.prefix + name in state)
        raise KeysDiffer(f"{twice!r} is there with {place.prefix!r} before it and without")
    return named


def _places(
    state: Mapping[Any, Any], names: Sequence[str], way: tuple[str, ...], seen: set[int], bare: bool
) -> Iterator[Place]:
    """Every place that has all names, in a mapping and the mappings inside it, itself perhaps."""
    seen.add(id(state))
    named = _without_parts(state) if bare else state
    without = () if named is state else _inner_parts(state)
    for name in named:
        # One name finds the candidates; all others are then looked up.
        if not isinstance(name, str) or not name.endswith(names[0]):
            continue
        prefix = name.removesuffix(names[0])
        # A prefix ends with a dot, so that `w` is not found inside `raw`.
        if prefix[-1:] in ("", ".") and all(prefix + other in named for other in names):
            yield Place(way, prefix, without)
    if len(way) == DEEPEST:
        return
    for key, value in state.items():
        if isinstance(value, Mapping) and isinstance(key, str) and id(value) not in seen:
            yield from _places(value, names, (*way, key), seen, bare)


def check_unused(
    arrays: NamedArrays, dialect: Dialect, layers: Sequence[Layer]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Account for the tensors that the rules of a dialect do not use.

    Args:
        arrays: Arrays of the file, after all layers were read.
        dialect: Dialect with patterns to ignore and to leave out.
        layers: Layers that were read.

    Returns:
        Names of the ignored tensors, and names of the tensors that are left out.

    Raises:
        CheckpointError: Where a rule reads what is to be left out.
        KeysDiffer: Where the dialect does not account for a tensor.
        UnsupportedLayer: Where this tensor is a norm, or where the dialect ignores a norm or a
            bias.

    Example:
        >>> import numpy as np
        >>> from tnsim.checkpoints.rules import LinearRule
        >>> dialect = Dialect("mine", (LinearRule(weight="w"),), ignore=("step",))
        >>> check_unused(NamedArrays({"step": np.array(3)}, None), dialect, [])
        (('step',), ())
    """
    known = filter(has_width, layers)
    # A vector as long as a width of the model may be a bias under any name.
    widths = {size for layer in known for size in (layer.d_in, layer.d_out)}
    ignored: list[str] = []
    left_out: list[str] = []
    surplus: list[str] = []
    to_leave, unused, to_ignore = map(Patterns, (dialect.leave_out, dialect.unused, dialect.ignore))
    if read := [name for name in arrays.state if name in arrays.used and name in to_leave]:
        raise CheckpointError(
            f"leave_out names {', '.join(read[:8])}, which the dialect {dialect.name} reads: give "
            "a dialect without it"
        )
    for name in arrays.unused():
        # Leaving out comes first, as it is the weaker claim about a tensor.
        if name in to_leave:
            left_out.append(name)
        elif name in unused:
            ignored.append(name)
        elif name in to_ignore:
            _check_ignored(name, arrays.state[name], widths, dialect)
            ignored.append(name)
        else:
            surplus.append(name)
    if surplus:
        raise _unexpected(surplus, dialect)
    return tuple(ignored), tuple(left_out)


class Patterns:
    """A set of names and patterns of names; the patterns are one regular expression."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names = {pattern for pattern in patterns if not is_pattern(pattern)}
        several = dict.fromkeys(pattern for pattern in patterns if is_pattern(pattern))
        # One expression for all patterns, so that long lists take no longer per name.
        self._form = re.compile("|".join(map(fnmatch.translate, several)) or r"(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._names or self._form.match(name) is not None


def warn_of_unfitting(leave_out: Sequence[str], names: Iterable[str]) -> None:
    """Warn of patterns of a call that leave nothing out, such as those with a slip.

    Args:
        leave_out: Patterns.
        names: Names of the tensors of a file.

    Warns:
        CaveatWarning: A pattern fits no name.

    Example:
        >>> warn_of_unfitting(["*.bias"], ["0.weight", "0.bias"])
    """
    names = list(names)
    for pattern in leave_out:
        if not any(map(Patterns([pattern]).__contains__, names)):
            warn(f"leave_out fits no tensor by {printable(pattern, 80)!r}", CaveatWarning)


def _check_ignored(name: str, value: Any, widths: set[int], dialect: Dialect) -> None:
    """Raise `UnsupportedLayer` where a tensor is a norm or a bias, by its name or its role."""
    try:
        array = to_numpy(value, name)
    except CheckpointError:
        return  # text, or a mapping: no numbers that a layer could use
    if array.dtype.kind != "f":
        return  # a counter or a mask
    if NORM.search(name):
        role = "is a normalisation, by its name"
    elif BIAS.search(name):
        role = "is a bias, by its name"
    elif array.ndim == 1 and array.size > 1 and array.size in widths:
        role = f"has {array.size} numbers, one per coordinate: a bias or the gain of a norm"
    else:
        return
    raise UnsupportedLayer(
        f"dialect {dialect.name} ignores {name}, which {role}; "
        f"without it the model is another function. {_choices(name)}"
    )


def _choices(name: str) -> str:
    use = "Name it in the rule of its layer"
    if NORM.search(name):
        use = (
            "Name it in the rule of the layer behind it (norm, norm_weight, norm_bias) and give "
            "norm_inputs=inputs, or where it is constant norm_energy"
        )
    return (
        f"{use}; or leave it out knowingly: leave_out in the dialect or in the call; or, where the "
        "forward pass does not use it, list it under unused"
    )


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    norm = next(filter(NORM.search, surplus), None)
    if norm is not None:
        return UnsupportedLayer(
            f"{norm} is a normalisation: one that depends on the input is no polynomial. "
            f"{_choices(norm)}"
        )
    names = ", ".join(surplus[:8])
    return KeysDiffer(
        f"dialect {dialect.name} does not account for {names}; extend it, or list them under "
        "ignore where they are no part of the function"
    )


def model_from_state(
    state: Mapping[str, Any],
    dialect: Dialect,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
    norm_inputs: Any = None,
) -> Model:
    """Read a model out of named arrays.

    Args:
        state: Arrays or tensors by name.
        dialect: Dialect of the names.
        n_ctx: Length of the sequences that the model reads.
        config: Numbers by name, for dialects that take numbers from a configuration.
        leave_out: Patterns of keys to leave out in addition to the patterns of the dialect.
        norm_inputs: Inputs at whose mean energy norms are folded.

    Returns:
        The model; its `origin` lists the assumptions and the tensors that were ignored or left out.

    Raises:
        CheckpointError: On missing or surplus keys, which the message names.
        UnsupportedLayer: For a norm without `norm_inputs`, and when a norm or a bias is left over.
        ModelError: When the arrays make no model.

    Example:
        >>> import numpy as np
        >>> from tnsim.checkpoints.rules import LinearRule
        >>> dialect = Dialect("mine", (LinearRule(weight="w"),))
        >>> model_from_state({"w": np.ones((2, 3))}, dialect).d_in
        3
    """
    named = _descend(state, dialect)
    keys = [rule.numbered(0).main_key for rule in dialect.layers]
    place = place_of(named, [key for key in keys if key])  # an elementwise rule has no array
    named = inside(named, place)
    arrays = NamedArrays(named, config)
    layers: list[Normed] = []
    runs: list[tuple[Rule, ...]] = []  # rules of single layers, with the numbers of the file
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
    warn_of_unfitting(leave_out, arrays.state)
    # Patterns of the call are part of what the origin tells.
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
    )
    return assembled(layers, norm_inputs, n_ctx, origin)


def assembled(
    layers: Sequence[Normed], norm_inputs: Any, n_ctx: int | None, origin: Origin
) -> Model:
    """A model of layers, with the norms before them as constants.

    Args:
        layers: Layers from the input up, each with the norm before it.
        norm_inputs: Inputs on which norms are measured, None for no inputs.
        n_ctx: Length of the sequences that the model reads.
        origin: Origin of the model, to which folded norms add assumptions and a caveat.

    Returns:
        The model with its origin.

    Raises:
        UnsupportedLayer: Where there are norms and no inputs.
        ModelError: Where the inputs do not fit, or there is no norm for them.
    """
    places = ", ".join(str(n) for n, normed in enumerate(layers) if normed.norm)
    if not places:
        check_no_norm_inputs(norm_inputs)
        return Model([normed.layer for normed in layers], n_ctx, origin)
    if norm_inputs is None:
        raise UnsupportedLayer(
            f"a norm stands before layer {places}: it depends on the input and is no polynomial. "
            "Give norm_inputs=inputs (--norm-inputs FILE) to fold it at its mean energy on them, "
            "which says how far off that is; or compare the network as it is by its outputs, "
            "metric tnsim.Empirical(inputs)"
        )
    inputs = input_rows(norm_inputs)
    folded = fold(layers, inputs, n_ctx)
    said = [
        f"norm before layer {n}: mean energy {energy:.6g}"
        for n, energy in enumerate(folded.energies)
        if energy is not None
    ]
    caveat = (
        f"norms before layer {places} at their mean energy on {len(inputs)} inputs, "
        f"where outputs differ by {folded.error:.2%} of their size"
    )
    origin = dataclasses.replace(
        origin,
        assumptions=(*origin.assumptions, *said),
        caveats=(*origin.caveats, caveat),
        error=folded.error,
    )
    return Model(folded.model.layers, n_ctx, origin)


def check_no_norm_inputs(norm_inputs: Any) -> None:
    """Refuse inputs for norms where a network has none.

    Raises:
        ModelError: There are inputs, on which nothing would be measured.

    Example:
        >>> check_no_norm_inputs(None)
    """
    if norm_inputs is not None:
        raise ModelError(
            "norm_inputs= (--norm-inputs FILE) measures norms, and this network has none before a "
            "layer: leave it out"
        )


def _rules(rule: Rule, arrays: NamedArrays) -> Iterator[Rule]:
    """The rule of each layer that one rule stands for."""
    if not rule.repeat:
        yield rule.numbered(0)
        return
    i = 0
    # A run goes on as long as its main key exists.
    while (numbered := rule.numbered(i)).main_key in arrays:
        yield numbered
        i += 1


def _layer(rule: Rule, arrays: NamedArrays, n: int) -> tuple[Normed, Rule]:
    """Layer n, and its rule with the numbers that were found."""

    def build() -> tuple[Normed, Rule]:
        values = valued(rule, arrays)
        told: dict[str, Any] = {}
        if requires_grad(values.scale):
            told["scale"] = float(detached(values.scale))
        if (energy := arrays.single(values.norm_energy)) is not None:
            told["norm_energy"] = f"{energy:.6g}"
        return layer_rules.normed(values, arrays), dataclasses.replace(values, **told)

    return rename_errors(f"layer {n}", build)


def unnamed(
    state: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> TnsimError:
    """The refusal of arrays that nobody gave a dialect or a module for.

    Names of tensors are no proof of a function: an activation, a softmax or a residual connection
    leaves no tensor in a file. A preset that accounts for every key is named, never taken.

    Args:
        state: Arrays or tensors by name.
        config: Numbers by name.
        leave_out: Patterns of keys that no preset need account for.

    Returns:
        A `CheckpointError` that names the presets which fit, or says what to give where none does;
        the reason of the arrays themselves where a preset has the keys and the arrays make no
        model.

    Example:
        >>> import numpy as np
        >>> shapes = {"W_l": (4, 2), "W_r": (4, 2), "W_p": (3, 4)}
        >>> print(unnamed({name: np.ones(shape) for name, shape in shapes.items()}))
        names of tensors, which show no activation, fit the dialect bilinear-readout: where it ...
    """
    fitting: list[Dialect] = []
    errors: list[TnsimError] = []
    for dialect in PRESETS.values():
        to_leave = (*dialect.leave_out, *leave_out)
        try:
            model_from_state(state, dataclasses.replace(dialect, leave_out=to_leave), config=config)
            fitting.append(dialect)
        except TnsimError as error:
            errors.append(error)
    if not fitting:
        return _closest(errors) or _unknown(state)
    names = ", ".join(dialect.name for dialect in fitting)
    several = (
        f"dialects {names}, which mean different functions" if fitting[1:] else f"dialect {names}"
    )
    return CheckpointError(
        f"names of tensors, which show no activation, fit the {several}: where it is right, name "
        f'it, dialect="{fitting[0].name}" (--dialect), else give the module, '
        "tnsim.load(path, net) (--model FILE.py:NAME)"
    )


def check_unquantised(state: Mapping[str, Any], refused: Exception) -> None:
    """Raise where names that were refused are those of quantised weights.

    Args:
        state: Arrays by name, also within what training code puts around them.
        refused: The refusal, which becomes the cause.

    Raises:
        CheckpointError: A name belongs to quantised weights.

    Example:
        >>> check_unquantised({"0.weight": None}, KeyError())
    """
    levels = [state] if isinstance(state, Mapping) else []
    levels += [value for level in levels for value in level.values() if isinstance(value, Mapping)]
    for name in itertools.chain.from_iterable(levels):
        if _QUANTISED.search(str(name)):
            raise CheckpointError(
                f"{name} belongs to quantised weights, which are integers with scales: give the "
                "checkpoint before quantisation, or dequantise it and save that state dict "
                "(model.dequantize() of transformers)"
            ) from refused


def _closest(errors: list[TnsimError]) -> TnsimError | None:
    """The one reason against the presets whose keys fit, None where reasons differ or none fits."""
    # Presets with other keys say nothing about this file.
    reasons = {str(error): error for error in errors if not isinstance(error, KeysDiffer)}
    if len(reasons) == 1:
        return reasons.popitem()[1]
    return None


def _unknown(state: Mapping[str, Any]) -> TnsimError:
    """The refusal of keys that no preset has."""
    state = weights_within(state)
    attention = next(filter(_ATTENTION.search, map(str, state)), None)
    if attention is not None:
        # Names of Hugging Face's layouts, of which parts are known.
        layouts = ("c_attn", "q_proj", "query_key_value")
        known = any(each in str(name) for name in state for each in layouts)
        parts = f"{BY_PARTS}, or tnsim.parts(path), --parts qk,ov,mlp. " if known else ""
        return UnsupportedLayer(
            f"{attention} belongs to an attention layer, which no dialect describes unless it is "
            "named: bilinear attention is read with a dialect of its own, softmax attention is no "
            f"polynomial. {parts}{OF_A_FILE} {ON_INPUTS}"
        )
    return CheckpointError(
        f"no dialect is known for these keys{listing(state)}. With the nn.Module at hand, give it: "
        "tnsim.load(path, net), tnsim.pairwise(paths, dialect=net); on the command line "
        "--model FILE.py:NAME, of the code that makes it. Weights of a function of JAX go with it "
        "to tnsim.from_function(f, params, x). Else write down in a dialect what the keys mean, or "
        f"name a preset: {', '.join(PRESETS)}"
    )


def weights_within(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The single inner mapping of weights, of mappings without one and with several themselves.

    Args:
        state: Arrays by name, or mappings of arrays.

    Example:
        >>> import numpy as np
        >>> weights_within({"model": {"w": np.ones(2)}, "optimizer": {"state": {}}, "step": 3})
        {'w': array([1., 1.])}
    """
    inner = [value for value in state.values() if isinstance(value, Mapping) and value]
    # States of optimisers are mappings too, and hold no arrays at once.
    named = [
        one
        for one in inner
        if all(isinstance(x, Stored) or hasattr(x, "shape") for x in one.values())
    ]
    return weights_within(named[0]) if len(named) == 1 else state


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
