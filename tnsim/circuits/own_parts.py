"""Parts of models of tnsim: heads of bilinear attention, blocks of a single layer, the direct path.

A head of bilinear attention multiplies two scores, so its QK circuit is of order four:
`(q1 . k1) (q2 . k2) / d_head^2` with queries and keys of the stream, rotated by distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnsim.circuits.standard_parts import Circuits, PartName, View, is_held, score
from tnsim.circuits.transformer import Affine, key_turns
from tnsim.errors import UnsupportedLayer
from tnsim.models.activated import Elementwise
from tnsim.models.attention import Attention
from tnsim.models.layers import Bilinear, Linear, Residual, innermost, residual_rule
from tnsim.models.matrices import bias_name
from tnsim.models.model import Model
from tnsim.models.origin import Origin
from tnsim.models.protocol import Layer

_KINDS_OF_ROLES = {**dict.fromkeys(("q1", "k1", "q2", "k2"), ("qk",)), "v": ("ov",), "o": ("ov",)}
"""Kinds of parts that hold the maps of attention."""


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

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of all tokens, and the matrix of logits.

        Raises:
            UnsupportedLayer: The model does not begin and end with linear layers.
        """
        first, last = self.model.layers[0], self.model.layers[-1]
        if not (isinstance(first, Linear) and isinstance(last, Linear)):
            raise UnsupportedLayer(
                "heads are compared through an embedding and an unembedding, and the model does "
                "not begin and end with a linear layer"
            )
        embedded = np.asarray(first.weight, np.float64).T
        if first.bias is not None:
            embedded = embedded + np.asarray(first.bias, np.float64)
        return embedded, np.asarray(last.weight, np.float64)

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
        embedded, _ = self.ends()
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
