"""Parts of standard transformers as models, each exact as a function of the normalised stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tnsim.activations.activation import Activation, activation
from tnsim.checkpoints.norms import Norm
from tnsim.circuits.transformer import Affine, Transformer
from tnsim.errors import ModelError, UnsupportedLayer, printable
from tnsim.models.activated import Elementwise, Gated
from tnsim.models.layers import Bilinear, Linear
from tnsim.models.model import Model
from tnsim.models.origin import Origin
from tnsim.models.protocol import Layer
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

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of all tokens as parts read them, and the unembedding with the norm's gain.

        Returns:
            The embeddings (vocabulary, width), normalised, without positions; the matrix
            (vocabulary, width) of logits, the factor of the final norm left out.
        """
        transformer = self.transformer
        # Parts read a normalised stream, so embeddings are normalised as well.
        embedded = transformer.attention_norm(0).normalised(transformer.embedding())
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
