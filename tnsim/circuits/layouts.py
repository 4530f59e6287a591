"""Layouts of standard transformers: names of tensors, entries of configurations, refusals by name.

A layout says under which names a family of models keeps its maps and norms, and how the maps of
queries, keys and values share a tensor. Every tensor of a checkpoint must have a place in the
layout: a tensor without a place may be a norm of queries or an adapter, and is refused.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tnsim.checkpoints.named_arrays import listing
from tnsim.errors import CheckpointError, UnsupportedLayer, printable

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
