"""The maps of a standard transformer: heads, MLPs and ends, with norms folded.

A map behind a norm is an affine map of the normalised stream (`checkpoints.norms.Norm.folded`).
Numbers are float64 whatever a file holds, as the folding rounds.

*Layouts.* A layout says under which names a family of models keeps its maps and norms, and how the
maps of queries, keys and values share a tensor. Every tensor of a checkpoint must have a place in
the layout: a tensor without a place may be a norm of queries or an adapter, and is refused.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.formats import Stored
from tnsim.checkpoints.layer_rules import NamedArrays, listing, number
from tnsim.checkpoints.norms import Norm
from tnsim.checkpoints.rules import is_finite
from tnsim.errors import CheckpointError, ModelError, UnsupportedLayer, printable
from tnsim.models.layers import turns

_NORMALISED_QK = "normalises queries and keys, so its scores are no bilinear form"
NOT_POLYNOMIAL: Mapping[str, str] = {
    "gemma2": "caps its scores and logits by tanh (softcaps)",
    "gemma3": _NORMALISED_QK,
    "gemma3_text": _NORMALISED_QK,
    "qwen3": _NORMALISED_QK,
    "qwen3_moe": _NORMALISED_QK,
    "olmo2": _NORMALISED_QK,
    "olmo3": _NORMALISED_QK,
    "bloom": "adds a constant for each distance to its scores (ALiBi)",
    "mpt": "adds a constant for each distance to its scores (ALiBi)",
    "mixtral": "chooses among experts by a softmax of the input",
}
"""Reasons why models of other types are refused."""
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_QK_NORM_ENTRIES = ("use_qk_norm", "qk_layernorm", "qk_norm")
_QK_NORM_NAME = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?_?norm([._]|$)", re.IGNORECASE)


Matrices = Float[np.ndarray, "*heads rows columns"]
Vectors = Float[np.ndarray, "*heads rows"]


class Place(NamedTuple):
    """The place of a tensor in a layout.

    Attributes:
        name: Name by which checkpoints with other prefixes know the tensor as well.
        kinds: Kinds of parts that together hold all of it; empty where no part does.
        layer: Number of its layer; None for both ends.
        of_norm: Whether it belongs to a norm, which parts hold where norms are folded into them.
    """

    name: str
    kinds: tuple[str, ...] = ()
    layer: int | None = None
    of_norm: bool = False


@dataclass(frozen=True)
class Layout:
    """Names and conventions of a family of transformers.

    Names of tensors of a layer stand behind `layer`, other names behind `root`, and the names of
    `unembedding` at the top. Each name stands for a weight and perhaps a bias.

    Args:
        name: The `model_type` of configurations.
        root: Prefix of all names but the unembedding.
        layer: Prefix of the names of layer {i}, behind `root`.
        q, k, v, o: Maps of queries, keys, values and of the output.
        qkv: The map that holds queries, keys and values together; None for three maps.
        interleaved: Whether `qkv` has queries, keys and values of a head side by side, and not
            all queries before all keys before all values.
        transposed: Whether matrices of layers are stored (in, out).
        attention_norm, mlp_norm: Norms before attention and before the MLP.
        norm: Kind of norms: `layer`, `rms`, or `rms+1` for RMS norms of gain 1 + weight.
        norm_weights: Whether norms have weights: an entry of the configuration with its default, or
            a constant.
        qkv_bias, o_bias, mlp_bias: Whether the maps of attention and of the MLP have biases: an
            entry of the configuration with its default, or a constant.
        up, gate, down: Maps of the MLP; `gate` is None for an MLP without a gate.
        embedding: Table of tokens, behind `root`.
        positions: Table of positions, behind `root`; None for rotated queries and keys.
        final_norm: Norm before the unembedding, behind `root`.
        unembedding: Names of the matrix of logits, at the top.
        tied: Whether the table of tokens is the unembedding where the configuration does not say.
        activation: Entry of the configuration with the activation of the MLP.
        eps: Entry of the configuration with the constant of norms; empty where it is fixed.
        default_eps: Constant of norms where the configuration does not say.
        own_heads: Whether the configuration may give the width of heads and the number of heads
            of keys and values, which else follow from the width and the number of heads.
        rotary_share: Share of the coordinates of a head that are rotated where the configuration
            does not say; None where whole heads are rotated whatever it says.
        embedding_by_root_of_width: Whether embeddings are multiplied by the root of the width.
        ignored: Patterns of names, behind `root`, of tensors that are no weights.
    """

    name: str
    root: str
    layer: str
    o: str
    attention_norm: str
    mlp_norm: str
    up: str
    down: str
    embedding: str
    final_norm: str
    unembedding: tuple[str, ...] = ("lm_head",)
    tied: bool = False
    q: str = ""
    k: str = ""
    v: str = ""
    qkv: str | None = None
    interleaved: bool = False
    transposed: bool = False
    norm: str = "rms"
    norm_weights: tuple[str, bool] | bool = True
    gate: str | None = None
    positions: str | None = None
    qkv_bias: tuple[str, bool] | bool = True
    o_bias: tuple[str, bool] | bool = True
    mlp_bias: tuple[str, bool] | bool = True
    activation: str = "hidden_act"
    eps: str = ""
    default_eps: float = 1e-5
    own_heads: bool = False
    rotary_share: float | None = None
    embedding_by_root_of_width: bool = False
    ignored: tuple[str, ...] = ()

    def tensors_of_layer(self, config: Mapping[str, Any], i: int) -> Iterator[Place]:
        """The places of all tensors of a single layer, by names behind the prefix of all names.

        Args:
            config: Contents of config.json, which says which maps have biases.
            i: Number of the layer.
        """
        maps: tuple[tuple[str | None, tuple[str, ...], tuple[str, bool] | bool], ...] = (
            (self.o, ("ov",), self.o_bias),
            (self.qkv, ("qk", "ov"), self.qkv_bias),
            (self.q, ("qk",), self.qkv_bias),
            (self.k, ("qk",), self.qkv_bias),
            (self.v, ("ov",), self.qkv_bias),
            (self.up, ("mlp",), self.mlp_bias),
            (self.gate, ("mlp",), self.mlp_bias),
            (self.down, ("mlp",), self.mlp_bias),
        )
        for module, kinds, entry in maps:
            if not module:
                continue
            yield Place(self.at(i, f"{module}.weight"), kinds, i)
            if entry if isinstance(entry, bool) else config.get(*entry):
                # What the heads add together has a bias that belongs to none of them.
                yield Place(self.at(i, f"{module}.bias"), () if module == self.o else kinds, i)
        for module, kinds in ((self.attention_norm, ("qk", "ov")), (self.mlp_norm, ("mlp",))):
            for name in self.tensors_of_norm(module, config):
                yield Place(self.at(i, name), kinds, i, of_norm=True)

    def tensors_of_norm(self, module: str, config: Mapping[str, Any]) -> Iterator[str]:
        """Names of the tensors of a norm, some of which a norm may do without."""
        entry = self.norm_weights
        if not (entry if isinstance(entry, bool) else config.get(*entry)):
            return
        yield f"{module}.weight"
        if self.norm == "layer":
            yield f"{module}.bias"

    @property
    def mlp(self) -> str:
        """Name of the module of the MLP in a layer; empty where its maps stand in the layer."""
        # OPT keeps both maps of an MLP in the layer itself, so its path may be empty.
        return self.up.rpartition(".")[0]

    def at(self, i: int, module: str) -> str:
        """The name of a module of layer i, behind the prefix of all names."""
        return self.layer.format(i=i) + module


def _layouts() -> Iterator[Layout]:
    """The layouts of `layouts.toml`."""
    tables = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
    for name, own in tables.items():
        fields: dict[str, Any] = {**tables.get(own.pop("like", ""), {}), **own}
        # TOML has no tuples, and layouts are hashed.
        tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        yield Layout(name, **{**fields, **tuples})


LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in _layouts()}
"""Layouts by the `model_type` of their configurations."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a configuration names.

    Args:
        config: Contents of config.json.

    Returns:
        The layout.

    Raises:
        UnsupportedLayer: Where the type of the model, or a setting, is refused; the message says
            why.

    Example:
        >>> layout_of({"model_type": "gpt2"}).o
        'attn.c_proj'
    """
    name = config.get("model_type")
    # Known types that are no polynomial get their own reason, not the word unknown.
    if reason := NOT_POLYNOMIAL.get(str(name)):
        raise UnsupportedLayer(f"a transformer of type {name} {reason}; {_readable_layouts()}")
    if name not in LAYOUTS:
        raise UnsupportedLayer(
            f"no layout is known of transformers of type {printable(repr(name), 80)}; "
            f"{_readable_layouts()}"
        )
    _check_settings(config)
    return LAYOUTS[str(name)]


def _readable_layouts() -> str:
    return f"taken apart are {', '.join(LAYOUTS)}, and models of tnsim"


def _check_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings with which a model of a known type is another function."""
    # Each of these settings would leave the names as they are and change the function.
    name = config["model_type"]
    for key in _SOFTCAPS:
        if config.get(key):
            raise UnsupportedLayer(
                f"{key} = {config[key]!r} of config.json caps by tanh (softcap), and a cap is no "
                f"polynomial; {_readable_layouts()}"
            )
    for key in _QK_NORM_ENTRIES:
        if config.get(key):
            raise UnsupportedLayer(f"{key} of config.json {_NORMALISED_QK}; {_readable_layouts()}")
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantization_config of config.json says that weights are packed; save the model in "
            "plain numbers"
        )
    if name == "olmo" and config.get("clip_qkv") is not None:
        raise UnsupportedLayer(
            f"clip_qkv = {printable(repr(config['clip_qkv']), 40)} of config.json clips queries, "
            f"keys and values, and a clip is no polynomial; {_readable_layouts()}"
        )
    if name == "opt" and config.get("do_layer_norm_before") is False:
        raise UnsupportedLayer(
            "do_layer_norm_before = False of config.json puts norms behind the blocks, where parts "
            "read what no norm has normalised; parts are those of norms before the blocks"
        )
    if name == "opt" and config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise UnsupportedLayer(
            "word_embed_proj_dim of config.json differs from hidden_size: maps between embedding "
            "and stream are in no layout"
        )
    if name == "opt" and config.get("_remove_final_layer_norm"):
        raise UnsupportedLayer(
            "_remove_final_layer_norm of config.json takes away the norm behind which the layout "
            "has its logits; such a model is in no layout"
        )
    if name == "gpt2" and config.get("add_cross_attention"):
        raise UnsupportedLayer(
            "add_cross_attention of config.json: heads that read another sequence are in no layout"
        )


def root_of(layout: Layout, state: Mapping[str, Any]) -> tuple[str, str]:
    """The prefixes of names in a checkpoint.

    Args:
        layout: Layout of the checkpoint.
        state: Tensors by name.

    Returns:
        The prefix of names with a root, and the prefix of the unembedding. Wrappers put words
        before all names, and a model without its head lacks the root.

    Raises:
        CheckpointError: Where layer 0 is missing, or is there more than once.

    Example:
        >>> root_of(LAYOUTS["gpt2"], {"module.transformer.h.0.attn.c_proj.weight": None})
        ('module.transformer.', 'module.')
    """
    end = f"{layout.at(0, layout.o)}.weight"
    # A checkpoint of a headless model lacks the outer prefix, so prefixes are read off a name.
    roots = [name.removesuffix(end) for name in state if str(name).endswith(end)]
    roots = [root for root in roots if root[-1:] in ("", ".")]
    if len(roots) != 1:
        raise CheckpointError(
            f"the layout {layout.name} has one tensor whose name ends in {end!r}, found "
            f"{len(roots)}{listing(state)}"
        )
    (root,) = roots
    # The map to logits stands beside the inner model, without its prefix.
    if root.endswith(layout.root):
        return root, root.removesuffix(layout.root)
    return root, ""


def places_of(
    layout: Layout, layers: int, state: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Place]:
    """The place of every tensor of a checkpoint that holds weights, by its name in the checkpoint.

    Args:
        layout: Layout of the checkpoint.
        layers: Number of layers.
        state: Tensors by name.
        config: Contents of config.json, which says which maps have biases.

    Returns:
        The places of all tensors that the checkpoint has.

    Raises:
        UnsupportedLayer: Where a tensor is a norm of queries or keys.
        CheckpointError: Where another tensor has no place.

    Example:
        >>> state = {"h.0.attn.c_proj.weight": None, "wte.weight": None}
        >>> places_of(LAYOUTS["gpt2"], 1, state, {})["wte.weight"].kinds
        ('direct',)
    """
    root, top = root_of(layout, state)
    within = [place for i in range(layers) for place in layout.tensors_of_layer(config, i)]
    norm = layout.tensors_of_norm(layout.final_norm, config)
    within += [Place(name, ("direct",), of_norm=True) for name in norm]
    within.append(Place(f"{layout.embedding}.weight", ("direct",)))
    if layout.positions:
        within.append(Place(f"{layout.positions}.weight"))
    known = {root + place.name: place._replace(name=layout.root + place.name) for place in within}
    logits = Place(f"{layout.unembedding[0]}.weight", ("direct",))
    known |= {f"{top}{name}.weight": logits for name in layout.unembedding}
    ignored = [root + pattern for pattern in layout.ignored]
    for name in state:
        if name in known or any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            continue
        # A norm of queries would change scores, whatever the configuration says.
        if _QK_NORM_NAME.search(name):
            raise UnsupportedLayer(f"{name} {_NORMALISED_QK}")
        raise CheckpointError(
            f"tensor {printable(str(name), 120)!r} has no place in the layout {layout.name} of "
            f"{layers} layers with the biases that config.json says; merge adapters into the "
            "weights, and save the model alone"
        )
    return {name: known[name] for name in state if name in known}


class Affine(NamedTuple):
    """An affine map, or a map for each head.

    Attributes:
        weight: Matrix (out, in), or (heads, out, in).
        bias: Vector (out,), or (heads, out); None for a linear map.
    """

    weight: Matrices
    bias: Vectors | None

    def lifted(self) -> Matrices:
        """The map on inputs with a one behind them, `(weight, bias)`."""
        bias = np.zeros(self.weight.shape[:-1]) if self.bias is None else self.bias
        return np.concatenate([self.weight, bias[..., None]], axis=-1)

    def behind(self, norm: Norm) -> Affine:
        """The map of the normalised stream that the map behind a norm is."""
        return Affine(*norm.folded(*self))

    def turned(self, turn: Float[np.ndarray, "rows rows"]) -> Affine:
        """The map with its outputs turned by a matrix."""
        return Affine(turn @ self.weight, None if self.bias is None else turn @ self.bias)


def key_turns(
    frequencies: Float[np.ndarray, " half"] | None, d_head: int, distances: Sequence[int]
) -> Float[np.ndarray, "distances d_head d_head"] | None:
    """Matrices R with `q^T R k` for the score of a key some positions before its query (RoPE).

    The coordinates (i, i + n) with n frequencies are turned by position * frequencies[i], others
    stay. A query at position s and a key at position t have the score
    `(R_s q)^T (R_t k) = q^T R_(t-s) k`, and the distance is s - t.

    Args:
        frequencies: Angles for each position, in radians; None without rotations.
        d_head: Coordinates of a query.
        distances: Positions by which keys stand before their queries.

    Returns:
        Matrices, distance by distance; None without rotations.

    Example:
        >>> key_turns(np.array([np.pi / 2]), 3, [1]).round(9).tolist()
        [[[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]
    """
    if frequencies is None:
        return None
    whole = np.tile(np.eye(d_head), (len(distances), 1, 1))
    rotated = 2 * len(frequencies)
    # The key stands before its query, so it is turned back by the distance.
    whole[:, :rotated, :rotated] = turns(-np.multiply.outer(distances, frequencies))
    return whole


@dataclass(frozen=True, eq=False)
class Transformer:
    """A standard transformer in a known layout, whose tensors are read when asked for.

    Args:
        layout: Layout of the names.
        state: Tensors by name.
        config: Contents of config.json.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: Where the checkpoint does not fit the layout.
    """

    layout: Layout
    state: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any], config: Mapping[str, Any]) -> Transformer:
        """The transformer in a checkpoint.

        Args:
            state: Tensors by name.
            config: Contents of config.json.

        Returns:
            The transformer, its names checked.

        Raises:
            CheckpointError, UnsupportedLayer: Where the checkpoint has another layout.
        """
        transformer = cls(layout_of(config), state, config)
        assert transformer.places  # which refuses tensors without a place
        return transformer

    @cached_property
    def places(self) -> dict[str, Place]:
        """The place of every tensor, by its name in the checkpoint."""
        return places_of(self.layout, self.layers, self.state, self.config)

    # Sizes

    def _count_of(self, what: str, keys: str, default: int | None = None) -> int:
        """A positive integer of the configuration."""
        if default is not None and not any(self.config.get(key) for key in keys.split("|")):
            return default
        entry = number(f"config:{keys}", what, NamedArrays({}, self.config))
        # JSON may write whole numbers as floats.
        if entry != int(entry) or entry < 1:
            raise ModelError(f"the {what} must be a positive integer, config.json has {entry!r}")
        return int(entry)

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return self._count_of("number of layers", "num_hidden_layers|n_layer")

    @cached_property
    def heads(self) -> int:
        """Number of heads of a layer."""
        return self._count_of("number of heads", "num_attention_heads|n_head")

    @cached_property
    def groups(self) -> int:
        """Number of heads of keys and values of a layer, each for as many queries."""
        # Queries may share keys and values (grouped heads).
        if not self.layout.own_heads:
            return self.heads
        groups = self._count_of("number of key heads", "num_key_value_heads", self.heads)
        if self.heads % groups:
            raise ModelError(f"{self.heads} heads cannot share {groups} heads of keys and values")
        return groups

    @cached_property
    def width(self) -> int:
        """Coordinates of the stream."""
        return self._count_of("width", "hidden_size|n_embd")

    @cached_property
    def d_head(self) -> int:
        """Coordinates of a query."""
        # Heads may be wider than their share of the stream.
        if self.layout.own_heads and self.config.get("head_dim"):
            return self._count_of("width of a head", "head_dim")
        if self.width % self.heads:
            raise ModelError(f"{self.heads} heads do not divide a stream of width {self.width}")
        d_head = self.width // self.heads
        if self.layout.rotary_share is not None and self.config.get("head_dim") not in (
            None,
            d_head,
        ):
            raise UnsupportedLayer(
                f"head_dim of config.json differs from the width of heads, {d_head}: models of "
                "this type rotate by the one and have the other; remove it"
            )
        return d_head

    # Constants

    def score_scale(self, i: int) -> float:
        """The factor of the scores of layer i."""
        scale = self.d_head**-0.5
        if self.layout.name == "gpt2":
            # GPT-2 can leave the factor out, and divide scores by the number of the layer, to stay
            # in range of half precision. The entries mean nothing elsewhere.
            scale = scale if self.config.get("scale_attn_weights", True) else 1.0
            scale /= i + 1 if self.config.get("scale_attn_by_inverse_layer_idx") else 1
        return scale

    def window(self, i: int) -> int | None:
        """Positions that a query of layer i sees, its own the last; None for all before it.

        Defaults are those of Hugging Face's library.
        """
        config, name = self.config, self.layout.name
        if name == "qwen2" and config.get("use_sliding_window"):
            kinds = config.get("layer_types")
            first = config.get("max_window_layers", 28)
            ends = i >= first if kinds is None else kinds[i] == "sliding_attention"
        else:
            ends = name == "mistral"
        return config.get("sliding_window", 4096) if ends else None

    @cached_property
    def eps(self) -> float:
        """The constant that norms add to the mean square."""
        epsilon = self.config.get(self.layout.eps) if self.layout.eps else None
        epsilon = self.layout.default_eps if epsilon is None else epsilon
        if not (is_finite(epsilon) and epsilon >= 0):
            raise ModelError(f"norms add a number to the mean square, config.json has {epsilon!r}")
        return float(epsilon)

    @cached_property
    def frequencies(self) -> Float[np.ndarray, " half"] | None:
        """The angles by which queries and keys are turned, None for a table of positions."""
        if self.layout.positions is not None:
            return None
        return frequencies_of(self.config, self.d_head, self.layout.rotary_share)

    def turns(
        self, distances: Sequence[int]
    ) -> Float[np.ndarray, "distances d_head d_head"] | None:
        """Rotations between queries and keys at some distances, None for a table of positions."""
        return key_turns(self.frequencies, self.d_head, distances)

    @property
    def activation(self) -> str:
        """Name of the activation of the MLPs.

        Gemma's first files say "gelu" of a model that was trained with its form by tanh; Hugging
        Face's library computes the form by tanh for them, and so do its releases since.
        `hidden_activation` beside `hidden_act` is read by some releases and by others not.
        """
        entry = self.layout.activation
        named = self.config.get(entry)
        if self.layout.name == "gemma":
            other = self.config.get("hidden_activation")
            meant = "gelu_pytorch_tanh" if named == "gelu" else named
            if other not in (None, meant):
                raise UnsupportedLayer(
                    f"hidden_act = {printable(repr(named), 40)} and hidden_activation = "
                    f"{printable(repr(other), 40)} of config.json are two functions for gemma, of "
                    "which code of different years computes either: write the one that is meant "
                    "into both"
                )
            named = meant
        if not isinstance(named, str):
            raise ModelError(
                f"{entry} of config.json names the activation of the MLP, found {named!r}"
            )
        return named

    @property
    def settings(self) -> dict[str, Any]:
        """Everything beside tensors on which the function depends, by words."""
        config, name = self.config, self.layout.name
        windows = [self.window(i) for i in range(self.layers)]
        mask: Any = windows if any(windows) else None
        if name == "gemma":
            mask = bool(config.get("use_bidirectional_attention"))
        rotated = None if self.frequencies is None else self.frequencies.tolist()
        return {
            "number of layers": self.layers,
            "numbers and width of heads": (self.heads, self.groups, self.d_head),
            "scales of scores": [self.score_scale(i) for i in range(self.layers)],
            "rotation": rotated,
            "mask": mask,
            "norms": (self.layout.norm, self.eps),
            "parallel blocks": name == "gpt_neox" and config.get("use_parallel_residual", True),
            "scaled embeddings": self.layout.embedding_by_root_of_width,
        }

    # Tensors

    def named(self) -> Iterator[tuple[Place, np.ndarray]]:
        """All tensors with their places, as they are stored, one after another."""
        for name, place in self.places.items():
            yield place, self._stored_array(name)
        if self.is_tied:
            # Tied tables are stored once or twice, once under either of their names.
            table = f"{self.layout.root}{self.layout.embedding}.weight"
            stored = {place.name for place in self.places.values()}
            for name in (table, f"{self.layout.unembedding[0]}.weight"):
                if name not in stored:
                    yield Place(name, ("direct",)), self._stored_array(self._table_name)

    def _stored_array(self, name: str) -> np.ndarray:
        """A tensor as it is stored; a tensor of a file is not kept."""
        value = self.state[name]
        if isinstance(value, Stored):
            value = dataclasses.replace(value)  # the numbers are kept by the copy
        return np.asarray(NamedArrays({name: value}, None).get(name))

    @cached_property
    def _name_roots(self) -> tuple[str, str]:
        return root_of(self.layout, self.state)

    @property
    def root(self) -> str:
        """Prefix of the names of layers, as in the module or file."""
        return self._name_roots[0]

    def path(self, i: int, module: str = "") -> str:
        """Name of a module of layer i, or of the layer itself, as in the module or file."""
        return self.root + self.layout.at(i, module).rstrip(".")

    @property
    def final_norm_path(self) -> str:
        """Name of the norm before the unembedding, as in the module or file."""
        return self.root + self.layout.final_norm

    def _shaped_array(self, name: str, shape: tuple[int | None, ...]) -> Any:
        """A tensor of a known shape in float64, None where it is absent; a size of None may be any.

        A tensor of a file is not kept.
        """
        if name not in self.state:
            return None
        array = self._stored_array(name).astype(np.float64)
        if not np.isfinite(array).all():
            raise ModelError(f"tensor {printable(name, 120)!r} has entries that are not finite")
        fits = array.ndim == len(shape)
        # Shapes are checked against the configuration, which names alone do not tell.
        if not fits or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
            wanted = tuple("any" if n is None else n for n in shape)
            raise ModelError(
                f"tensor {printable(name, 120)!r} must have shape {wanted} by config.json, found "
                f"{tuple(array.shape)}"
            )
        return array

    def _map_of(self, i: int, module: str, rows: int | None, columns: int | None) -> Affine:
        """The map of a module of layer i, of a matrix (rows, columns)."""
        name, stored = self.path(i, module), (rows, columns)
        weight = self._shaped_array(
            f"{name}.weight", stored[::-1] if self.layout.transposed else stored
        )
        if weight is None:
            raise ModelError(f"tensor {printable(name, 120) + '.weight'!r} is missing")
        weight = weight.T if self.layout.transposed else weight
        return Affine(weight, self._shaped_array(f"{name}.bias", (weight.shape[0],)))

    def _norm_of(self, name: str) -> Norm:
        weight = self._shaped_array(f"{name}.weight", (self.width,))
        bias = self._shaped_array(f"{name}.bias", (self.width,))
        gain = np.ones(self.width) if weight is None else weight
        if weight is None and [*self.layout.tensors_of_norm(name, self.config)]:
            raise ModelError(f"tensor {printable(name, 120) + '.weight'!r} is missing")
        if self.layout.norm == "rms+1":
            # Gemma stores gains less one.
            gain = gain + 1.0
        return Norm(self.layout.norm == "layer", self.eps, gain, bias)

    def attention_norm(self, i: int) -> Norm:
        """The norm before the attention of layer i."""
        return self._norm_of(self.path(i, self.layout.attention_norm))

    def mlp_norm(self, i: int) -> Norm:
        """The norm before the MLP of layer i."""
        return self._norm_of(self.path(i, self.layout.mlp_norm))

    def mlp_path(self, i: int) -> str:
        """Name of the module of an MLP, as the tensors are named; empty where it has none."""
        return self.path(i, self.layout.mlp) if self.layout.mlp else ""

    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        return self._norm_of(self.final_norm_path)

    # Maps

    def head_maps(self, i: int, role: str) -> Affine:
        """The maps of all heads of layer i to queries, keys or values, behind the norm.

        Args:
            i: Number of the layer.
            role: "q", "k" or "v".

        Returns:
            Weights (heads, d_head, width) and biases (heads, d_head). Heads that share keys and
            values repeat them.
        """
        layout, d_head = self.layout, self.d_head
        # Keys and values of grouped heads are repeated for every query that reads them.
        shared = self.heads // self.groups
        if role == "q":
            shared = 1
        heads = self.heads // shared
        if layout.qkv is None:
            maps = self._map_of(i, getattr(layout, role), heads * d_head, self.width)
        else:
            maps = self._of_fused(self._map_of(i, layout.qkv, 3 * heads * d_head, self.width), role)
        weight = maps.weight.reshape(heads, d_head, self.width)
        bias = None if maps.bias is None else maps.bias.reshape(heads, d_head)
        if shared > 1:
            weight = np.repeat(weight, shared, axis=0)
            bias = None if bias is None else np.repeat(bias, shared, axis=0)
        return Affine(weight, bias)

    def _of_fused(self, fused: Affine, role: str) -> Affine:
        """Any of three maps that share a tensor."""
        n = "qkv".index(role)

        def chosen(array: np.ndarray) -> np.ndarray:
            # GPT-NeoX stacks query, key and value head by head.
            if self.layout.interleaved:
                parts = array.reshape(self.heads, 3, self.d_head, *array.shape[1:])[:, n]
            else:
                parts = array.reshape(3, self.heads, self.d_head, *array.shape[1:])[n]
            return parts.reshape(-1, *array.shape[1:])

        return Affine(chosen(fused.weight), None if fused.bias is None else chosen(fused.bias))

    def outputs(self, i: int) -> Matrices:
        """The output maps of the heads of layer i, (heads, width, d_head)."""
        joined = self._map_of(i, self.layout.o, self.width, self.heads * self.d_head).weight
        # Columns of the output map belong to heads.
        return joined.reshape(self.width, self.heads, self.d_head).swapaxes(0, 1)

    def output_bias(self, i: int) -> Vectors | None:
        """The bias of the output map of layer i, which belongs to no head."""
        return self._map_of(i, self.layout.o, self.width, self.heads * self.d_head).bias

    def block(self, i: int) -> tuple[Affine, Affine | None, Affine]:
        """The maps of the MLP of layer i, behind the norm.

        Returns:
            The map into the hidden units; the map whose activation multiplies them, None for an MLP
            without a gate; and the map out of them.
        """
        up = self._map_of(i, self.layout.up, None, self.width)
        hidden = up.weight.shape[0]
        gate = None
        if self.layout.gate is not None:
            gate = self._map_of(i, self.layout.gate, hidden, self.width)
        down = self._map_of(i, self.layout.down, self.width, hidden)
        return up, gate, down

    def embedding(self) -> Float[np.ndarray, "vocabulary width"]:
        """The table of tokens, as the stream begins with it."""
        name = self._table_name
        table = self._shaped_array(name, (None, self.width))
        if table is None:
            raise ModelError(
                f"tensor {printable(name, 120)!r} is missing, and config.json does not tie it to "
                "the matrix of logits (tie_word_embeddings)"
            )
        if self.layout.embedding_by_root_of_width:
            # Gemma scales embeddings in its forward pass, and not in the file.
            table = table * math.sqrt(self.width)
        return table

    @property
    def is_tied(self) -> bool:
        """Whether the table of tokens is the matrix of logits, so that files need one of them."""
        tied = self.config.get("tie_word_embeddings")
        return self.layout.tied if tied is None else bool(tied)

    @property
    def has_unembedding(self) -> bool:
        """Whether the checkpoint has a map to logits; a model without its head has none."""
        return self.is_tied or self._logits_name is not None

    @property
    def _table_name(self) -> str:
        """Name of the tensor with the table of tokens, which a tied table may have as logits."""
        name = f"{self.root}{self.layout.embedding}.weight"
        if name not in self.state and self.is_tied and self._logits_name is not None:
            return f"{self._logits_name}.weight"
        return name

    @property
    def _logits_name(self) -> str | None:
        """Name of the matrix of logits, None where the checkpoint has none of its own."""
        names = (f"{self._name_roots[1]}{name}" for name in self.layout.unembedding)
        return next((name for name in names if f"{name}.weight" in self.state), None)

    def unembedding(self) -> Affine:
        """The map of the final norm's output to logits.

        Raises:
            UnsupportedLayer: Where the checkpoint has none.
        """
        if not self.has_unembedding:
            raise UnsupportedLayer(
                f"the checkpoint has no {self.layout.unembedding[0]}.weight, as a model without "
                "its head: there are no logits"
            )
        name = self._logits_name
        if name is None:
            name = self._table_name.removesuffix(".weight")
        weight = self._shaped_array(f"{name}.weight", (None, self.width))
        return Affine(weight, self._shaped_array(f"{name}.bias", (weight.shape[0],)))


def frequencies_of(
    config: Mapping[str, Any], d_head: int, share: float | None
) -> Float[np.ndarray, " half"]:
    """The angles by which queries and keys are turned for each position, by a configuration.

    Args:
        config: Contents of config.json.
        d_head: Coordinates of a query.
        share: Share of the coordinates that are rotated where the configuration does not say; None
            where whole heads are rotated whatever it says.

    Returns:
        Frequencies by `base ** (-2 i / rotated)`, slower where the configuration stretches them.

    Raises:
        UnsupportedLayer: Where frequencies depend on the length of the text, or the configuration
            says two things.

    Example:
        >>> frequencies_of({"rope_theta": 100.0}, 4, None).round(9).tolist()
        [1.0, 0.1]

    Source:
        Su et al., RoFormer, arXiv:2104.09864; Llama 3's stretching as in its published code.
    """
    settings = _rotary_settings(config, share)
    base, part = settings["rope_theta"], settings["partial_rotary_factor"]
    for entry in (base, part):
        if not is_finite(entry):
            raise ModelError(f"base and share of rotations are numbers, found {entry!r}")
    if share is None and part != 1:
        raise UnsupportedLayer(
            f"partial_rotary_factor = {part:g} of config.json: models of this type rotate whole "
            "heads, and code that reads the entry does not run or computes another function; "
            "remove it, or set it to 1"
        )
    # Only a share of the coordinates may be turned; the others stay.
    rotated = int(d_head * part)
    if not (base > 0 and 0 <= rotated <= d_head) or rotated % 2:
        raise ModelError(
            "rotated are an even number of the coordinates of a head, by a base above 0: "
            f"config.json says {rotated} of {d_head}, base {base:g}"
        )
    frequencies = base ** (-2.0 * np.arange(rotated // 2) / max(rotated, 1))
    kind = settings.get("rope_type", "default")
    if kind == "linear":
        # Stretched positions are slower frequencies.
        with np.errstate(divide="ignore"):
            frequencies = frequencies / number(
                "config:rope.factor", "factor", NamedArrays({}, {"rope": settings})
            )
    elif kind == "llama3":
        length = config.get("max_position_embeddings")
        settings = {"original_max_position_embeddings": length, **settings}
        frequencies = _stretched_frequencies(frequencies, settings)
    elif kind != "default":
        raise UnsupportedLayer(
            f"RoPE of type {printable(repr(kind), 40)} changes frequencies with the length of the "
            "text or scales scores; read are default, linear and llama3"
        )
    if not np.isfinite(frequencies).all():
        raise ModelError(f"the factors of rotations in config.json divide by zero: {settings!r}")
    return frequencies


def _rotary_settings(config: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    """Everything that a configuration says about rotations, in one place.

    Releases of Hugging Face's library keep these entries under several names and in several
    places, and prefer one or the other: no release is right where two of them differ.
    """
    places = []
    for name in ("rope_parameters", "rope_scaling"):
        place = config.get(name) or {}
        if not isinstance(place, Mapping):
            raise ModelError(f"{name} of config.json are entries by name, found {place!r}")
        place = {key: value for key, value in place.items() if value is not None}
        if any(isinstance(value, Mapping) for value in place.values()):
            raise UnsupportedLayer(
                f"{name} of config.json differ from layer to layer, which no known layout does"
            )
        kind = place.pop("type", "default")
        places.append({"rope_type": kind, **place} if place or kind != "default" else {})
    settings, older = places
    entries = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    usual = [(key, key, config.get(key)) for key in (*entries, "original_max_position_embeddings")]
    special = [(name, key, config.get(name)) for key, name in entries.items()]
    # GPT-NeoX has names of its own, which are read there, by their defaults too, and only there.
    own, others = (usual, special) if share is None else (special, usual)
    defaults = [(None, "rope_theta", 1e4), (None, "partial_rotary_factor", share or 1.0)]
    in_older = [(f"rope_scaling.{key}", key, value) for key, value in older.items()]
    for name, key, value in (*in_older, *own, *defaults, *others):
        if value is not None and settings.setdefault(key, value) != value and name is not None:
            raise UnsupportedLayer(
                f"{name} = {printable(repr(value), 40)} of config.json, and elsewhere or by "
                f"default {key} = {printable(repr(settings[key]), 40)}: two rotations, of which "
                "code of different years computes either; remove the one that is not meant"
            )
    return settings


def _stretched_frequencies(frequencies: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Frequencies with long waves slowed by a factor, and waves between left between."""
    arrays = NamedArrays({}, {"rope": settings})
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, length = (number(f"config:rope.{name}", name, arrays) for name in names)
    turns = length * frequencies / (2 * math.pi)  # turns over the original length
    # Waves that turn often keep their frequency, those that turn rarely are slowed.
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / factor
