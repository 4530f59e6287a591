"""Suggested dialects: a template for a file, with guesses to confirm.

Names tell roles and shapes tell directions. A fact that neither tells is written down as a `Guess`
with its alternatives. A result of a dialect with guesses is not exact until each guess is
confirmed. Where names or shapes speak of an activation, nothing is suggested (`check_polynomial`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnsim.checkpoints.dialects import FORMAT
from tnsim.checkpoints.named_arrays import to_numpy
from tnsim.checkpoints.rules import CONFIGURED_HEADS, PROJECTIONS
from tnsim.checkpoints.state_dict import BIAS, NORM, Place, common_prefix, inside
from tnsim.errors import CheckpointError, UnsupportedLayer, printable

_GATE = re.compile(
    r"(w_?)?(g|gate|gates|gating)(_?(proj|projection|layer|linear))?|gate_?up(_?proj)?|wi_?[01]"
    r"|fc1_[gx]",
    re.IGNORECASE,
)
_GATED = re.compile(r"(^|[._])(swi|ge|re|se)?glu(_?mlp)?\d*([._]|$)", re.IGNORECASE)
_BY_HAND = (
    "Read the module by tnsim.from_module, which runs it; or, if it is a polynomial after all, "
    'write its rule by hand, {"kind": "bilinear", "left": ..., "right": ..., "down": ...} or '
    '{"kind": "linear", "weight": ...}; or compare outputs, metric tnsim.Empirical(inputs)'
)
_ORDER = (
    "the layers follow one another in this order, and nothing stands before, between or behind "
    "them that leaves no tensor in a file: no activation (ReLU, GELU), no softmax, no norm without "
    "weights, no residual connection around several layers"
)
_STORED = "matrices are stored (out, in), as nn.Linear has them, unless a rule says transpose"
OPEN = "?"
"""Prefix of the name of a field whose value is a guess; the text of the field has alternatives."""
Shapes = Mapping[str, tuple[int, int]]
_ROLES = {  # roles in a bilinear layer, by the last word of a name
    "left": re.compile(r"(w_?)?(l|left|up|1)|up_proj", re.IGNORECASE),
    "right": re.compile(r"(w_?)?(r|right|2)|up_proj", re.IGNORECASE),
    "down": re.compile(r"(w_?)?(d|down|p|proj|projection|3)|down_proj", re.IGNORECASE),
    "fused": re.compile(r"(w_?)?(lr|fused|bi_?linear|12)", re.IGNORECASE),
}
_QKV = re.compile(r"(w_?)?qkv(_?proj)?|c_attn|in_proj|query_key_value", re.IGNORECASE)
_LAST = re.compile(r"unembed|lm_head|head|classifier|readout|logits|output", re.IGNORECASE)
_ATTENTION = re.compile(r"(w_?)?(q1|k1|q2|k2|q|k|v|o|out)(_proj)?", re.IGNORECASE)
_OUTPUT = re.compile(r"(w_?)?(o|out|c)(_?proj)?", re.IGNORECASE)
_EMBEDDING = re.compile(r"(?<!un)emb|wte|tok", re.IGNORECASE)
_POSITION = re.compile(r"(^|[._])(wpe|pos(ition(al|s)?)?)([._]|$)|pos\w*_?emb", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_RESIDUAL = "x + s f(x); null for f(x) alone, lerp for (1 - s) x + s f(x); scale is s, 1 by default"
_NO_RESIDUAL = "f(x) alone; additive for x + s f(x), lerp for (1 - s) x + s f(x), scale is s"
_MULTIPLIED = (
    "left and right are multiplied as they are; with an activation on one of them (SwiGLU, GEGLU, "
    "GLU) the layer is no polynomial"
)


def check_polynomial(
    rules: Sequence[dict[str, Any]], shapes: Shapes, names: Mapping[str, str]
) -> None:
    """Refuse matrices that are no polynomial by their names or shapes.

    A gate is multiplied through an activation in nearly all networks with gates, and linear
    layers in a row would be a single linear layer but for the activations between them. Neither
    leaves a trace in a file.

    Args:
        rules: Rules in order; a rule that is still repeated stands for a run of equal layers.
        shapes: Shapes of the matrices by their names, with {i} in the place of numbers.
        names: Names with {i} by the names of tensors.

    Raises:
        UnsupportedLayer: For a gate or linear layers in a row, which the message names.

    Example:
        >>> rules = [{"kind": "linear", "weight": f"{n}.weight"} for n in (0, 2)]
        >>> check_polynomial(rules, {"0.weight": (4, 3), "2.weight": (2, 4)}, {})
        Traceback (most recent call last):
            ...
        tnsim.errors.UnsupportedLayer: 0.weight and 2.weight are plain linear layers in a row, wh...
    """
    # Names of a gate anywhere are enough to refuse.
    gate = next(filter(_is_gate, shapes), None) or _gate_of_three(shapes)
    if gate is not None:
        raise UnsupportedLayer(
            f"{printable(gate)} is a gate by its name: nearly all networks put it through an "
            "activation (SwiGLU, GEGLU, GLU), which leaves no trace in a file and is no "
            f"polynomial. {_BY_HAND}"
        )
    before: dict[str, Any] | None = None
    for rule in rules:
        linear = rule["kind"] == "linear"
        # A repeated linear rule is a row of layers by itself.
        several = linear and rule.get("repeat") and list(names.values()).count(rule["weight"]) > 1
        # A lookup of tokens is followed by a linear layer without an activation in many networks.
        in_a_row = before is not None and before["kind"] == "linear" and not _is_lookup(before)
        if linear and (several or in_a_row):
            first = rule if before is None or not in_a_row else before
            both = dict.fromkeys((first["weight"], rule["weight"]))
            raise UnsupportedLayer(
                f"{printable(' and '.join(both))} are plain linear layers in a row, which would be "
                "one linear layer but for activations between them (ReLU, GELU): these leave no "
                f"trace in a file and are no polynomials. {_BY_HAND}"
            )
        before = rule


def _is_gate(key: str) -> bool:
    path = key.removesuffix(".weight")
    return bool(_GATE.fullmatch(path.rpartition(".")[2]) or _GATED.search(path))


def _is_lookup(rule: dict[str, Any]) -> bool:
    """Whether a layer looks up the vector of a token, which passes through no activation."""
    return bool(rule.get("transpose") and _EMBEDDING.search(rule["weight"]))


def _gate_of_three(shapes: Shapes) -> str | None:
    """The gate among w1, w2 and w3 where w2 leads back: LLaMA's names of its SwiGLU matrices."""
    for key, (rows, columns) in shapes.items():
        matched = re.fullmatch(r"(.*\b)(w_?)1((\.weight)?)", key)
        if matched is None:
            continue
        second, third = (f"{matched[1]}{matched[2]}{n}{matched[3]}" for n in (2, 3))
        # w1 and w3 lead up and w2 leads back, which shapes can tell unless they are square.
        leads_back = shapes.get(second) == (columns, rows) and rows != columns
        if leads_back and shapes.get(third) == (rows, columns):
            return key
    return None


def guesses_of(layers: Iterable[dict[str, Any]], shapes: Shapes) -> Iterator[dict[str, Any]]:
    """Take the guesses out of rules.

    Args:
        layers: Rules in order; fields whose names begin with `OPEN` are removed.
        shapes: Shapes of the matrices by their names.

    Yields:
        Guesses as a dialect lists them, none of them confirmed.

    Example:
        >>> rules = [{"kind": "linear", "weight": "w", "?residual": "none"}]
        >>> [guess["about"] for guess in guesses_of(rules, {"w": (2, 2)})], rules
        (['layers', 'matrices', 'residual of layer rule 0'], [{'kind': 'linear', 'weight': 'w'}])
    """
    layers = list(layers)
    guesses = [("layers", _ORDER)]
    # Shapes of neighbours tell the direction, unless there is no neighbour or a matrix is square.
    if len(layers) == 1 or any(rows == columns for rows, columns in shapes.values()):
        guesses.append(("matrices", _STORED))
    for n, rule in enumerate(layers):
        # A list, as fields are removed on the way.
        for name in [name for name in rule if name.startswith(OPEN)]:
            guesses.append((f"{name.removeprefix(OPEN)} of layer rule {n}", rule.pop(name)))
    for about, guess in guesses:
        yield {"about": about, "guess": guess, "confirmed": False}


def one_by_one(rules: list[dict[str, Any]], names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rules in order of the layers; several rules of a single block are written out block by block.

    A repeated rule is a run of equal layers, so attention and MLP in turn are written out.

    Args:
        rules: Guessed rules, repeated where their names have numbers.
        names: Names of the tensors, which tell the number of blocks.

    Yields:
        The rules of the dialect.

    Example:
        >>> rules = [{"weight": f"h.{{i}}.{name}", "repeat": True} for name in "ab"]
        >>> names = ["h.0.a", "h.0.b", "h.1.a", "h.1.b"]
        >>> [rule["weight"] for rule in one_by_one(rules, names)]
        ['h.0.a', 'h.0.b', 'h.1.a', 'h.1.b']
    """
    blocks = [_block_name(rule) for rule in rules]
    for block, several in itertools.groupby(rules, key=_block_name):
        run = list(several)
        # A block with a single rule may stay a run.
        if block is None or blocks.count(block) == 1:
            yield from run
            continue
        numbers = {name[len(block) :].split(".")[0] for name in names if name.startswith(block)}
        # The rules of a block follow one another within each block.
        for i in range(len(numbers)):
            for rule in run:
                yield _numbered_rule(rule, i)


def _block_name(rule: dict[str, Any]) -> str | None:
    """The part of a repeated rule's names before the number, None for a single rule."""
    if not rule.get("repeat"):
        return None
    keys = [value for value in rule.values() if isinstance(value, str) and "{i}" in value]
    return keys[0].partition("{i}")[0]


def _numbered_rule(rule: dict[str, Any], i: int) -> dict[str, Any]:
    """The rule of a single layer of a run."""
    fields: dict[str, Any] = {}
    for name, value in rule.items():
        # Comments and guesses are said at the first block alone.
        if name != "repeat" and not (i and name[0] in "#?"):
            fields[name] = value.replace("{i}", str(i)) if isinstance(value, str) else value
    return fields


@dataclass(frozen=True)
class Weight:
    """A matrix of a file, with `{i}` where the numbers of layers stand.

    Attributes:
        scope: Part of the name before the last word.
        word: Last word of the name.
        key: The whole name.
        bias: Name of the bias, None where there is no bias.
        shape: Shape of the matrix in the first layer.
    """

    scope: str
    word: str
    key: str
    bias: str | None
    shape: tuple[int, int]


def suggest(state: Mapping[Any, Any], name: str) -> str:
    """A template of a dialect for the tensors of a file.

    Args:
        state: Arrays or unread tensors by name, or mappings of these.
        name: Name of the dialect.

    Returns:
        JSON with guesses, and with comments under names that begin with #.

    Raises:
        CheckpointError: When there is no matrix.
        UnsupportedLayer: When names are names of gates, or plain linear layers follow each other.

    Example:
        >>> arrays = {"emb.weight": np.ones((4, 3)), "step": np.array(7)}
        >>> json.loads(suggest(arrays, "mine"))["ignore"]
        ['step']
    """
    nested, named = _nested_state(state)
    named = inside(named, Place((), common_prefix(list(named))))
    arrays = {key: array for key, array in _matrix_arrays(named) if array.dtype.kind == "f"}
    keys = _name_templates(arrays)
    weights = sorted(_layer_weights(arrays, keys), key=_place_of_weight)
    if not weights:
        raise CheckpointError("no matrix is there of which a layer could be made")
    rules = list(_guessed_rules(weights))
    _turn_matrices(rules, weights)
    norms = [keys[name] for name in arrays if NORM.search(name)]
    _add_norms(rules, list(dict.fromkeys(norms)))
    layers = list(one_by_one(rules, arrays))
    shapes = {weight.key: weight.shape for weight in weights}
    check_polynomial(layers, shapes, keys)
    used = json.dumps(rules)
    ignore = [key for key in named if key not in arrays or arrays[key].ndim == 0]
    rest = [name for name in arrays if keys[name] not in used and name not in ignore]
    guesses = list(guesses_of(layers, shapes))
    text: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "#": "Guessed from names and shapes. Mend the layers, and set confirmed to true in each of "
        "the guesses that you know to be right; or run your own forward pass beside the model: "
        "tnsim.confirm(model, forward).origin.dialect has all of them confirmed",
        "layers": layers,
        "guesses": guesses,
        "nested": [f"{key}?" for key in nested],
        "ignore": ignore,
    }
    if rest:
        text["# not accounted for"] = rest
    return json.dumps(text, indent=1)


def _nested_state(state: Mapping[Any, Any]) -> tuple[list[str], dict[str, Any]]:
    """The keys that lead to the mapping with most tensors, and the contents of the mapping."""
    mappings = {str(key): value for key, value in state.items() if isinstance(value, Mapping)}
    if not mappings:
        return [], {str(key): value for key, value in state.items()}
    largest = max(
        mappings, key=lambda key: len(list(_matrix_arrays(_nested_state(mappings[key])[1])))
    )
    way, named = _nested_state(mappings[largest])
    if len(list(_matrix_arrays(named))) <= len(list(_matrix_arrays(state))):
        return [], {str(key): value for key, value in state.items()}
    return [largest, *way], named


def _matrix_arrays(named: Mapping[Any, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in named.items():
        if isinstance(value, (Mapping, str, type(None))):
            continue
        try:
            yield str(key), to_numpy(value, str(key))
        except CheckpointError:
            continue


def _name_templates(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Names with {i} for the number in them, where the file has 0, 1, ... without a gap."""
    numbers: dict[str, list[int]] = {}
    keys: dict[str, str] = {}
    for name in arrays:
        keys[name] = name
        if matched := _NUMBER.search(name):
            keys[name] = f"{name[: matched.start()]}{{i}}{name[matched.end() :]}"
            numbers.setdefault(keys[name], []).append(int(matched[0]))
    whole = {
        key for key, matched in numbers.items() if sorted(matched) == list(range(len(matched)))
    }
    return {name: key if key in whole else name for name, key in keys.items()}


def _layer_weights(arrays: Mapping[str, np.ndarray], keys: Mapping[str, str]) -> Iterator[Weight]:
    """The matrices, each run of layers once, in the order of the file."""
    known = set(keys.values())
    seen: set[str] = set()
    for name, array in arrays.items():
        key = keys[name]
        if array.ndim != 2 or key in seen or NORM.search(key) or BIAS.search(key):
            continue
        if _POSITION.search(key):
            continue  # positions are added to the inputs, for which there is no rule
        seen.add(key)
        path = key.removesuffix(".weight")
        scope, _, word = path.rpartition(".")
        bias = f"{path}.bias"
        yield Weight(scope, word, key, bias if bias in known else None, array.shape)


def _place_of_weight(weight: Weight) -> int:
    """The rank of a matrix in the order of layers, as a file may sort its names.

    Embeddings come first and heads last; within a block attention comes before the rest, as in
    nearly all transformers.
    """
    if "{i}" in weight.key:
        attends = re.search(r"attn|attention", weight.key, re.IGNORECASE)
        return 1 if attends else 2
    if _EMBEDDING.search(weight.key):
        return 0
    return 3 if _LAST.search(weight.word) else 2


def _guessed_rules(weights: list[Weight]) -> Iterator[dict[str, Any]]:
    """A rule for each layer, at the place of its first matrix."""
    done: set[str] = set()
    for weight in weights:
        beside = [
            other for other in weights if other.scope == weight.scope and other.key not in done
        ]
        if weight.key in done:
            continue
        rule = _attention_guess(beside) or _bilinear_rule(beside, weight) or _linear_rule(weight)
        done |= {value for value in rule.values() if isinstance(value, str)}
        if "{i}" in weight.key:
            rule["repeat"] = True
        yield rule


def _linear_rule(weight: Weight) -> dict[str, Any]:
    rows, columns = weight.shape
    if "{i}" in weight.key and rows == 2 * columns:
        fused: dict[str, Any] = {"kind": "bilinear", "fused": weight.key}
        if weight.bias:
            fused["fused_bias"] = weight.bias
        return fused | {
            "?fused": "a bilinear layer, as there are twice as many rows as columns; "
            f"{_MULTIPLIED}",
            "residual": None,
            "?residual": _NO_RESIDUAL,
        }
    rule: dict[str, Any] = {"kind": "linear", "weight": weight.key}
    if weight.bias:
        rule["bias"] = weight.bias
    if rows == columns and not _EMBEDDING.search(weight.key):
        rule["?residual"] = _NO_RESIDUAL
    return rule


def _bilinear_rule(beside: list[Weight], first: Weight) -> dict[str, Any] | None:
    """A bilinear layer of the matrices of a scope, None where their names do not fit."""
    roles: dict[str, Weight] = {}
    for weight in beside:
        for role, words in _ROLES.items():
            if role not in roles and words.fullmatch(weight.word):
                roles[role] = weight
                break
    if first not in roles.values() or not ({"left", "right"} <= set(roles) or "fused" in roles):
        return None
    if "fused" not in roles and roles["left"].shape != roles["right"].shape:
        return None  # the hidden units of left and right are multiplied, so shapes must agree
    rule: dict[str, Any] = {"kind": "bilinear"}
    for role, weight in roles.items():
        rule[role] = weight.key
        if weight.bias:
            rule[f"{role}_bias"] = weight.bias
    if "fused" in roles:
        rule["# fused_order"] = "left-right, or right-left: the same function"
    rule["?product"] = _MULTIPLIED
    into = roles.get("left") or roles["fused"]
    given = into.shape[0] // (1 if "left" in roles else 2)
    if "down" in roles:
        given = roles["down"].shape[0]
        if given == into.shape[1]:
            rule |= {"residual": "additive", "?residual": _RESIDUAL}
    elif given == into.shape[1]:
        rule |= {"residual": None, "?residual": _NO_RESIDUAL}
    return rule


def _attention_guess(beside: list[Weight]) -> dict[str, Any] | None:
    """An attention layer of the matrices of a scope, None where their names do not fit."""
    roles: dict[str, Weight] = {}
    fused = next((weight for weight in beside if _QKV.fullmatch(weight.word)), None)
    for weight in beside:
        if matched := _ATTENTION.fullmatch(weight.word):
            word = matched[2].lower()
            roles["o" if word == "out" else word] = weight
        elif fused and _OUTPUT.fullmatch(weight.word):
            roles["o"] = weight
    if fused and "o" in roles:
        return _attention_rule({"fused": fused, "o": roles["o"]}) | {
            "fused_order": "q-k-v",
            "?fused_order": "all queries, then all keys, then all values",
        }
    if not ({"v", "o"} <= set(roles) and ({"q1", "k1", "q2", "k2"} <= set(roles) or "q" in roles)):
        return None
    # A query or key without a number serves both scores.
    matched = {role: roles.get(role) or roles.get(role[0]) for role in PROJECTIONS}
    named = {role: weight for role, weight in matched.items() if weight is not None}
    return _attention_rule(named) if len(named) == len(matched) else None


def _attention_rule(roles: Mapping[str, Weight]) -> dict[str, Any]:
    """An attention layer of these matrices."""
    rule: dict[str, Any] = {"kind": "attention"}
    for role, weight in roles.items():
        rule[role] = weight.key
        if weight.bias:
            rule[f"{role}_bias"] = weight.bias
    return rule | {
        "n_heads": CONFIGURED_HEADS,
        "# n_heads": "of config.json beside the file; or a number",
        "rope_base": None,
        "?rope_base": "null, no rotation; 10000 is usual, then see rope_layout too",
        "mask": "causal",
        "?mask": "causal; none where every position reads all others",
        "score_power": 2,
        "?score_power": "two scores are multiplied as they are and divided by d_head^p, where p "
        "is 2; linear attention has scores 1, without q2 and k2; softmax attention is no "
        "polynomial",
        "residual": "additive",
        "?residual": _RESIDUAL,
    }


def _turn_matrices(rules: list[dict[str, Any]], weights: list[Weight]) -> None:
    """Find which matrices are stored (in, out): widths of neighbours have to agree."""
    shapes = {weight.key: weight.shape for weight in weights}
    for n, rule in enumerate(rules):
        if rule["kind"] != "linear":
            continue
        rows, columns = shapes[rule["weight"]]
        before = _rule_width(rules[n - 1], shapes, -1) if n else None
        after = _rule_width(rules[n + 1], shapes, 0) if n + 1 < len(rules) else None
        stored = (rows, columns)
        looked_up = n == 0 and "bias" not in rule and _EMBEDDING.search(rule["weight"])
        # A square table says nothing about its direction.
        if rows == columns and looked_up:
            rule["transpose"] = True
            rule["?transpose"] = "row t of the square matrix is the vector of token t"
        elif before == rows != columns or (n == 0 and after == columns != rows):
            # Widths agree only the other way round.
            rule["transpose"] = True
            rule["# transpose"] = f"stored as {stored}, which fits its neighbours transposed"


def _rule_width(
    rule: dict[str, Any], shapes: Mapping[str, tuple[int, int]], end: int
) -> int | None:
    """Number of coordinates that a layer reads (end 0) or gives (end -1), by the current rule."""
    if rule["kind"] == "linear":
        rows, columns = shapes[rule["weight"]]
        given = columns if rule.get("transpose") else rows
        return given if end else columns
    first = rule.get("left") or rule.get("fused") or rule["q1"]
    last = rule.get("down") or rule.get("o") or first
    return shapes[last][0] if end else shapes[first][1]


def _add_norms(rules: list[dict[str, Any]], norms: list[str]) -> None:
    """Put norms into the rule of the layer behind them: in their scope, else the last layer."""
    places: dict[str, list[str]] = {}  # scopes of layers, and the norms in each
    for key in norms:
        module, _, word = key.rpartition(".")
        scope = key.partition("{i}")[0] if "{i}" in key else ""
        # A norm without a scope of its own stands before the last layer, as in most transformers.
        inside = [rule for rule in rules if scope and scope in json.dumps(rule)] or rules[-1:]
        modules = places.setdefault(scope, [])
        if module not in modules:
            modules.append(module)
        # The first norm of a block goes to its first layer, the second to the next.
        rule = inside[min(modules.index(module), len(inside) - 1)]
        if "energy" in word:
            rule["norm_energy"] = key
        elif word == "bias":
            rule |= {"norm": "layer", "norm_bias": key}
        else:
            rule |= {"norm": rule.get("norm", "rms"), "norm_weight": key}
        rule.setdefault("norm_epsilon", 1e-5)
        rule["?norm"] = (
            "this norm stands before this layer, with this epsilon; give norm_inputs=inputs"
        )
