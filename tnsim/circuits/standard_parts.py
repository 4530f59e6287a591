"""Parts of transformers as models: of standard ones, and of models of tnsim.

A part of a standard transformer is exact as a function of the normalised stream. Models of tnsim
have heads of bilinear attention, blocks of a single layer, and the direct path. A head of bilinear
attention multiplies two scores, so its QK circuit is of order four: `(q1 . k1) (q2 . k2) /
d_head^2` with queries and keys of the stream, rotated by distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tnsim.activations.activation import Activation, activation
from tnsim.checkpoints.norms import Norm
from tnsim.circuits.transformer import Affine, Transformer, key_turns
from tnsim.errors import ModelError, UnsupportedLayer, printable
from tnsim.models.arrays import bias_name
from tnsim.models.layers import (
    Attention,
    Bilinear,
    Elementwise,
    Gated,
    Layer,
    Linear,
    Residual,
    innermost,
    residual_rule,
)
from tnsim.models.model import Model, Origin
from tnsim.options import is_list

KINDS = ("qk", "ov", "mlp", "direct")
"""Kinds of parts: scores of a head, values of a head, an MLP block, the direct path to logits."""

_ACTIVATIONS = {
    "linear": "identity",
    "identity": "identity",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Names of activations, by their names in config.json."""


_KINDS_OF_ROLES = {**dict.fromkeys(("q1", "k1", "q2", "k2"), ("qk",)), "v": ("ov",), "o": ("ov",)}
"""Kinds of parts that hold the maps of attention."""


class PartName(NamedTuple):
    """The place of a part in a model.

    Attributes:
        kind: Any of `KINDS`.
        layer: Number of the layer, None for the direct path.
        head: Number of the head, None for a part of a whole layer.
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        place = "" if self.layer is None else f"layer {self.layer} "
        if self.head is not None:
            place += f"head {self.head} "
        return place + self.kind


class View(NamedTuple):
    """Choices about parts that are the same for all of them.

    Attributes:
        distances: Positions by which keys stand before their queries, an output of a score for
            each.
        norm: "fold" where parts read the normalised stream, gain and bias of the norm folded into
            them; "leave" where parts read the output of the norm.
        centred: Whether scores are less their mean over keys, which softmax does not see.
    """

    distances: tuple[int, ...] = (1,)
    norm: str = "fold"
    centred: bool = False

    @property
    def keys(self) -> str:
        """The keys of scores that depend on distance, in words."""
        return f"of keys {', '.join(map(str, self.distances))} before their query"

    def behind(self, norm: Norm, after: Affine) -> Affine:
        """The map of a part that stands behind a norm."""
        return after.behind(norm) if self.norm == "fold" else after

    def key(self, transformer: Transformer, key: Affine) -> Affine:
        """The map of a key: of scores less their mean over keys the map without its bias.

        For keys x of mean 0 the mean of `q^T (K x + c)` is `q^T c`, a number for each query.
        """
        if not self.centred:
            return key
        if transformer.frequencies is not None:
            raise UnsupportedLayer(
                "scores with rotated keys have a mean that depends on the distance, which softmax "
                "sees: leave centred out"
            )
        return Affine(key.weight, None)


@dataclass(frozen=True, eq=False)
class StandardParts:
    """The parts of a transformer in a known layout.

    Args:
        transformer: The transformer, read part by part.
    """

    transformer: Transformer

    def names(self, kind: str) -> list[PartName]:
        """The parts of a kind, in order.

        Raises:
            UnsupportedLayer: Where the activation of the MLPs is unknown.
        """
        transformer = self.transformer
        layers = range(transformer.layers)
        if kind == "direct":
            return [PartName("direct")] if transformer.has_unembedding else []
        if kind == "mlp":
            # An unknown activation is refused here, before the first part is read.
            activation_of(transformer.activation)
            return [PartName("mlp", i) for i in layers]
        return [PartName(kind, i, h) for i in layers for h in range(transformer.heads)]

    def part(self, name: PartName, view: View) -> Model:
        """The model of a part."""
        if name.layer is None:
            return self._direct_path(view)
        if name.head is None:
            return self._mlp(name.layer, view)
        return {"qk": self._qk, "ov": self._ov}[name.kind](name.layer, name.head, view)

    def rest(self, parts: Collection[PartName], view: View) -> Iterator[tuple[str, Any]]:
        """What belongs to the transformer and to none of some parts, by name.

        Args:
            parts: The parts.
            view: Choices about parts.

        Yields:
            Name and value: tensors as they are stored, one after another, of which the parts do
            not hold all, and the settings on which the function depends.
        """
        held = {(name.kind, name.layer) for name in parts}
        for place, array in self.transformer.named():
            in_parts = view.norm == "fold" or not place.of_norm
            if not (in_parts and is_held(place.kinds, place.layer, held)):
                yield place.name, array
        yield from self.transformer.settings.items()
        try:
            named = self.transformer.activation
        except UnsupportedLayer:  # a name of two functions
            named = str(self.transformer.config.get(self.transformer.layout.activation))
        yield "activation", _ACTIVATIONS.get(named, named)

    def paths(self) -> dict[str, PartName]:
        """Parts by the names of their modules: MLPs, as "transformer.h.5.mlp"."""
        named = {self.transformer.mlp_path(i): i for i in range(self.transformer.layers)}
        return {path: PartName("mlp", i) for path, i in named.items() if path}

    def circuits(self, kind: str, view: View) -> Circuits:
        """The maps of all heads on both sides of each circuit.

        Args:
            kind: "qk" or "ov".
            view: Choices about parts.
        """
        transformer = self.transformer
        names = self.names(kind)
        left, right = [], []
        for i in range(transformer.layers):
            norm = transformer.attention_norm(i)
            if kind == "qk":
                # The scale of scores stands on the side of queries alone, as both sides are
                # multiplied.
                scale = transformer.score_scale(i)
                left.append(view.behind(norm, transformer.head_maps(i, "q")).lifted() * scale)
                keys = view.behind(norm, transformer.head_maps(i, "k"))
                right.append(view.key(transformer, keys).lifted())
            else:
                left.append(transformer.outputs(i).swapaxes(-1, -2))
                right.append(view.behind(norm, transformer.head_maps(i, "v")).lifted())
        turns = transformer.turns(view.distances) if kind == "qk" else None
        return Circuits(names, np.concatenate(left), np.concatenate(right), turns)

    def ends(self, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Embeddings of all tokens as parts read them, and the unembedding with the norm's gain.

        Args:
            kind: "qk" or "ov".

        Returns:
            The embeddings (vocabulary, width), normalised, without positions; for what heads add
            to the stream, "ov", the matrix (vocabulary, width) of logits, the factor of the final
            norm left out, and None for scores.
        """
        transformer = self.transformer
        # Parts read a normalised stream, so embeddings are normalised as well.
        embedded = transformer.attention_norm(0).normalised(transformer.embedding())
        if kind == "qk":
            return embedded, None
        return embedded, transformer.unembedding().behind(transformer.final_norm()).weight

    def _qk(self, i: int, h: int, view: View) -> Model:
        transformer = self.transformer
        norm = transformer.attention_norm(i)
        query, key = (
            view.behind(norm, _of_head(transformer.head_maps(i, role), h)) for role in "qk"
        )
        keys, said = [view.key(transformer, key)], "scores before mask and softmax"
        said += ", less their mean over keys" if view.centred else ""
        if (turns := transformer.turns(view.distances)) is not None:
            # The query stands still, and each distance turns the key.
            keys = [key.turned(turn) for turn in turns]
            said += f", {view.keys}"
        scores = score([query] * len(keys), keys, transformer.score_scale(i))
        return self._part_model([scores], said, self._reads_from("attention", i, view))

    def _ov(self, i: int, h: int, view: View) -> Model:
        transformer = self.transformer
        value = _of_head(transformer.head_maps(i, "v"), h)
        value = view.behind(transformer.attention_norm(i), value)
        layers = [Linear(*value), Linear(transformer.outputs(i)[h])]
        said = "what the head adds to the stream for each position that it attends to fully"
        return self._part_model(layers, said, self._reads_from("attention", i, view))

    def _mlp(self, i: int, view: View) -> Model:
        transformer = self.transformer
        up, gate, (down, bias) = transformer.block(i)
        norm, function = transformer.mlp_norm(i), activation_of(transformer.activation)
        up = view.behind(norm, up)
        layers: list[Layer]
        if gate is not None:
            gate = view.behind(norm, gate)
            layers = [Gated(gate.weight, up.weight, down, function, gate.bias, up.bias, bias)]
        elif function.name == "identity":
            layers = [Linear(*up), Linear(down, bias)]
        else:
            # Without a gate the block is three plain layers.
            layers = [Linear(*up), Elementwise(function), Linear(down, bias)]
        said = f"what the block adds to the stream, by the activation {transformer.activation}"
        return self._part_model(layers, said, self._reads_from("the MLP", i, view))

    def _direct_path(self, view: View) -> Model:
        transformer = self.transformer
        logits = view.behind(transformer.final_norm(), transformer.unembedding())
        layers = [Linear(transformer.embedding().T), Linear(*logits)]
        caveat = "the direct path leaves out the final norm, whose factor depends on the input"
        if transformer.layout.positions is not None:
            caveat += ", and the embeddings of positions"
        return self._part_model(
            layers, "logits of a token's own embedding", "one-hot tokens", caveat
        )

    def _reads_from(self, before: str, i: int, view: View) -> str:
        what = "the normalised stream, gain and bias folded,"
        if view.norm == "leave":
            what = "the output of the norm"
        return f"{what} before {before} of layer {i}"

    def _part_model(
        self, layers: Sequence[Layer], gives: str, reads: str, caveat: str = ""
    ) -> Model:
        said = (f"reads {reads}", f"gives {gives}")
        caveats = (caveat,) if caveat else ()
        return Model(
            layers, None, Origin(f"part of a {self.transformer.layout.name}", said, caveats)
        )


def is_held(
    kinds: Collection[str], layer: int | None, held: Collection[tuple[str, int | None]]
) -> bool:
    """Whether parts hold all of a tensor.

    Args:
        kinds: Kinds of parts that together hold it; none where no part does.
        layer: Number of its layer.
        held: Kinds and layers of the parts.

    Example:
        >>> is_held(("qk", "ov"), 0, {("qk", 0)}), is_held(("ov",), 0, {("ov", 0)})
        (False, True)
    """
    return bool(kinds) and all((kind, layer) in held for kind in kinds)


class Circuits(NamedTuple):
    """Maps on both sides of the circuits of all heads, whose products are their inner products.

    Attributes:
        names: Places of the heads.
        left: Queries, (heads, d_head, width + 1), biases in the last column; for OV circuits the
            transposed outputs, (heads, d_head, width).
        right: Keys or values, (heads, d_head, width + 1).
        turns: Rotations between left and right, (distances, d_head, d_head); None for the identity.
    """

    names: list[PartName]
    left: np.ndarray
    right: np.ndarray
    turns: np.ndarray | None


def score(queries: Sequence[Affine], keys: Sequence[Affine], scale: float) -> Bilinear:
    """The bilinear forms of scores.

    Args:
        queries: Maps of the query, of the stream at its position, one for each score.
        keys: Maps of the key, such as of a head at each distance.
        scale: Factor of the scores.

    Returns:
        A layer that reads a query's and a key's stream side by side, and gives every score.

    Example:
        >>> layer = score([Affine(np.eye(1), None)], [Affine(2 * np.eye(1), None)], 0.5)
        >>> layer(np.array([3.0, 5.0]))
        array([15.])
    """
    rows, width = keys[0].weight.shape
    zero = np.zeros((rows, width))
    # A query in front of its key, (x, y): queries read x, keys read y.
    left = np.vstack([np.hstack([query.weight, zero]) for query in queries])
    right = np.vstack([np.hstack([zero, key.weight]) for key in keys])
    # Each score is the sum over the coordinates of a head.
    down = np.kron(np.eye(len(keys)), np.full((1, rows), scale))
    return Bilinear(left, right, down, _all_biases(queries), _all_biases(keys))


def _all_biases(maps: Sequence[Affine]) -> np.ndarray | None:
    """The biases of maps one behind the other, None where none has any."""
    if all(each.bias is None for each in maps):
        return None
    return np.concatenate([each.lifted()[:, -1] for each in maps])


def _of_head(maps: Affine, h: int) -> Affine:
    return Affine(maps.weight[h], None if maps.bias is None else maps.bias[h])


def activation_of(name: str) -> Activation:
    """The activation that config.json names."""
    if name not in _ACTIVATIONS:
        raise UnsupportedLayer(
            f"the MLP has the activation {printable(repr(name), 80)}; known are "
            f"{', '.join(_ACTIVATIONS)}: leave its parts out by kinds=('qk', 'ov', 'direct')"
        )
    return activation(_ACTIVATIONS[name])


def checked_view(distances: Sequence[int], norm: str, centred: bool = False) -> View:
    """Choices about parts, checked.

    Args:
        distances: Distances of keys before their queries.
        norm: Treatment of norms.
        centred: Whether scores are less their mean over keys.

    Returns:
        The choices.

    Raises:
        ModelError: Where a distance is no whole number from 0, two are equal, or `norm` is unknown.

    Example:
        >>> checked_view([1, 2], "fold").distances
        (1, 2)
    """
    if norm not in ("fold", "leave"):
        raise ModelError(f"norm must be 'fold' or 'leave', found {norm!r}")
    several: tuple[Any, ...] = tuple(distances) if is_list(distances) else (distances,)
    # True counts as an integer in Python.
    whole = [
        isinstance(distance, (int, np.integer)) and not isinstance(distance, bool)
        for distance in several
    ]
    if not (
        several
        and all(whole)
        and min(several) >= 0
        and max(several) < 2**63
        and len(set(several)) == len(several)
    ):
        raise ModelError(
            "distances lists by how many positions keys stand before queries, different whole "
            f"numbers from 0, such as (1, 2, 4), found {distances!r}"
        )
    return View(tuple(map(int, several)), norm, centred)


@dataclass(frozen=True, eq=False)
class OwnParts:
    """The parts of a model of tnsim. Layers have their numbers in the model.

    Args:
        model: The model.
    """

    model: Model

    def names(self, kind: str) -> list[PartName]:
        """The parts of a kind, in order. There is no direct path past a layer without a skip."""
        layers = list(enumerate(map(innermost, self.model.layers)))
        if kind == "direct":
            # A layer without a skip lets nothing past it.
            passes = all(
                isinstance(innermost(layer), Linear) or residual_rule(layer)[0] != 0
                for layer in self.model.layers
            )
            return [PartName("direct")] if passes else []
        attention = [(i, layer) for i, layer in layers if isinstance(layer, Attention)]
        if kind != "mlp":
            return [PartName(kind, i, h) for i, layer in attention for h in range(layer.n_heads)]
        # An activation alone has no weights, and is the same in every checkpoint.
        others = (Attention, Linear, Elementwise)
        blocks = [i for i, layer in layers if not isinstance(layer, others)]
        return [PartName("mlp", i) for i in blocks]

    def part(self, name: PartName, view: View) -> Model:
        """The model of a part."""
        if name.layer is None:
            return self._direct_path()
        layer = self.model.layers[name.layer]
        scale = residual_rule(layer)[1]
        core = innermost(layer)
        if not isinstance(core, Attention) or name.head is None:
            # Without the skip the layer gives only what it adds.
            inner = layer if core is layer else Residual(core, 0.0, scale)  # type: ignore[arg-type]
            return self._part_model([inner], "what the layer adds to the stream")
        if name.kind == "ov":
            value = _head_rows(core, "v", name.head)
            columns = slice(name.head * core.d_value, (name.head + 1) * core.d_value)
            # The residual's scale belongs to what the head adds.
            output = scale * np.asarray(core.o, np.float64)[:, columns]
            said = "what the head adds to the stream for each position with a score of one"
            return self._part_model([Linear(*value), Linear(output)], said)
        return self._qk(core, name.head, view)

    def rest(self, parts: Collection[PartName], view: View) -> Iterator[tuple[str, Any]]:
        """What belongs to the model and to none of some parts, by name, see `StandardParts.rest`.

        Args:
            parts: The parts.
            view: Choices about parts.

        Yields:
            Name and value: arrays of which the parts do not hold all, and settings.
        """
        held = {(name.kind, name.layer) for name in parts}
        yield "number of positions", self.model.n_ctx
        for i, layer in enumerate(self.model.layers):
            core = innermost(layer)
            yield f"layer {i}: skip and scale", list(map(float, residual_rule(layer)))
            yield f"layer {i}: kind", type(core).__name__
            if not dataclasses.is_dataclass(core):  # a layer of the user's
                if not is_held(("mlp",), i, held):
                    yield f"layer {i}", core
                continue
            for field in dataclasses.fields(core):
                value = getattr(core, field.name)
                kinds: tuple[str, ...] = ("mlp",)
                place: int | None = i
                if isinstance(core, Linear):
                    kinds, place = ("direct",), None
                elif isinstance(core, Attention):
                    kinds = _KINDS_OF_ROLES.get(field.name.removesuffix("_bias"), ())
                    # What the heads add together has a bias that belongs to none of them.
                    kinds = () if field.name == "o_bias" else kinds
                if value is not None and not is_held(kinds, place, held):
                    yield f"layer {i}: {field.name}", value

    def paths(self) -> dict[str, PartName]:
        """Parts by the names of their modules, which a model has not."""
        return {}

    def circuits(self, kind: str, view: View) -> Circuits:
        """The maps of all heads on both sides of each circuit, of OV circuits only.

        Raises:
            UnsupportedLayer: For QK circuits, whose scores are products of two.
        """
        if kind != "ov":
            raise UnsupportedLayer("scores of bilinear attention are no bilinear forms")
        names = self.names("ov")
        parts = [self.part(name, view).layers for name in names]
        left = [np.asarray(output.weight).T for _, output in parts]  # type: ignore[attr-defined]
        # Biases become a column, so that inner products include them.
        right = [Affine(value.weight, value.bias).lifted() for value, _ in parts]  # type: ignore[attr-defined]
        return Circuits(names, _stacked(left), _stacked(right), None)

    def ends(self, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Embeddings of all tokens, and for what heads add to the stream the matrix of logits.

        Args:
            kind: "qk" or "ov".

        Raises:
            UnsupportedLayer: The model does not begin and end with linear layers.
        """
        layers = self.model.layers
        first, last = layers[0], None if kind == "qk" else layers[-1]
        if not (isinstance(first, Linear) and isinstance(last, Linear | None)):
            raise UnsupportedLayer(
                "heads are compared through an embedding, and what they add to the stream through "
                "an unembedding: the model does not begin and end with a linear layer"
            )
        embedded = np.asarray(first.weight, np.float64).T
        if first.bias is not None:
            embedded = embedded + np.asarray(first.bias, np.float64)
        return embedded, None if last is None else np.asarray(last.weight, np.float64)

    def scores_of_tokens(self, view: View) -> Circuits:
        """QK circuits of all heads as bilinear forms of tokens.

        The product of two forms of rank r is a form of rank r^2, of the products of rows:
        `(q1 . k1) (q2 . k2) = sum_ij (q1_i q2_j) (k1_i k2_j)`. So it is with rotated keys, whose
        products turn by the Kronecker product of both rotations.

        Returns:
            Values (heads, d_head^2, vocabulary) of both sides on all tokens, divided by the root of
            the vocabulary, so that sums over tokens are means.

        Raises:
            UnsupportedLayer: Layers rotate keys differently.
        """
        embedded, _ = self.ends("qk")
        lifted = np.column_stack([embedded, np.ones(len(embedded))]).T
        names = self.names("qk")
        left, right, rotations = [], [], []
        for name in names:
            core, h = innermost(self.model.layers[name.layer or 0]), name.head or 0
            assert isinstance(core, Attention)  # as `names` says
            q1, q2, k1, k2 = (
                _head_rows(core, role, h).lifted() @ lifted for role in ("q1", "q2", "k1", "k2")
            )
            # Either side takes the root of the mean over tokens, and one of the two factors 1 /
            # d_head.
            share = 1.0 / (core.d_head * len(embedded) ** 0.5)
            left.append(share * _row_products(q1, q2))
            right.append(share * _row_products(k1, k2))
            rotations.append(key_turns(core.frequencies, core.d_head, view.distances))
        turns = rotations[0]
        if not all(np.array_equal(other, turns) for other in rotations):
            raise UnsupportedLayer(
                "heads are compared through the embedding by one rotation of keys, and layers of "
                "the model have several: leave through out, where both streams have one basis"
            )
        if turns is not None:
            # Products of two scores turn both factors at once.
            turns = np.stack([np.kron(turn, turn) for turn in turns])
        return Circuits(names, _stacked(left), _stacked(right), turns)

    def _qk(self, core: Attention, h: int, view: View) -> Model:
        if view.centred:
            raise UnsupportedLayer(
                "no softmax follows the scores of bilinear attention, so that their mean over keys "
                "counts: leave centred out"
            )
        said = "products of two scores, before the mask"
        turns = key_turns(core.frequencies, core.d_head, view.distances)
        if turns is None:
            turns = np.eye(core.d_head)[None]
        else:
            said += f", {view.keys}"
        queries, keys = [], []
        for n in "12":
            key = _head_rows(core, f"k{n}", h)
            keys += [key.turned(turn) for turn in turns]
            queries += [_head_rows(core, f"q{n}", h)] * len(turns)
        count = len(turns)
        # The layer divides by d_head^2, which each of both scores shares.
        both = score(queries, keys, 1.0 / core.d_head)
        # The second layer multiplies the two scores of each distance.
        first, second = np.hsplit(np.eye(2 * count), 2)
        return self._part_model([both, Bilinear(first.T, second.T, np.eye(count))], said)

    def _direct_path(self) -> Model:
        """Linear layers in a row, with the skips of nonlinear ones between them."""
        layers: list[Layer] = []
        for layer in self.model.layers:
            if isinstance(innermost(layer), Linear):
                layers.append(layer)
            elif (skip := residual_rule(layer)[0]) != 1.0:
                layers.append(Linear(skip * np.eye(layer.d_in)))
        layers = layers or [Linear(np.eye(self.model.d_in))]
        return self._part_model(layers, "outputs of the linear layers alone")

    def _part_model(self, layers: list[Any], gives: str) -> Model:
        caveats = self.model.origin.caveats if self.model.origin else ()
        said = (f"gives {gives}",)
        return Model(layers, None, Origin("part of a model", said, caveats))


def _stacked(maps: Sequence[np.ndarray]) -> np.ndarray:
    """Maps of all heads as one array, with rows of zeros behind those of narrower heads."""
    rows = max(map(len, maps))
    return np.stack([np.pad(each, ((0, rows - len(each)), (0, 0))) for each in maps])


def _row_products(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Products of every row of a matrix with every row of another, entry by entry."""
    return (first[:, None] * second[None]).reshape(-1, first.shape[-1])


def _head_rows(core: Attention, role: str, h: int) -> Affine:
    """The rows of a head in a map, in float64."""
    weight = np.asarray(getattr(core, role), np.float64)
    # Rows of a head stand together.
    rows = slice(h * len(weight) // core.n_heads, (h + 1) * len(weight) // core.n_heads)
    bias = getattr(core, bias_name(role))
    return Affine(weight[rows], None if bias is None else np.asarray(bias, np.float64)[rows])
