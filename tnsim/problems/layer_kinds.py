"""Layers without their numbers: the kinds on which plans depend.

*Alignment.* Layers of two models are matched from the input up, in steps of a single layer of each
model. Where a model has a linear layer more, the other waits: an identity stands in for its layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple, TypeAlias

from tnsim.activations.activation import Activation
from tnsim.errors import ModelError
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import Columns, SparseMatrix, add, bias_name, written_out
from tnsim.models.layers import (
    Attention,
    Core,
    Layer,
    Linear,
    activation_of,
    affine_maps,
    innermost,
    map_names,
)
from tnsim.models.model import Model
from tnsim.names import SCORES, WEIGHT, Side
from tnsim.sessions import per_object_cache


class LayerKind(NamedTuple):
    """A layer without its numbers, enough to plan a comparison. Hashable.

    Args:
        name: Class of the layer, for messages.
        legs: Roles of the arrays through which the layer reads its input; it is linear in each.
        down: Role of the array that maps the product of the legs to the output; None for a single
            leg, which is the output.
        d_in: Number of coordinates of the input.
        d_out: Number of coordinates of the output.
        rank: Number of hidden units; 0 for attention.
        biases: Roles that have a bias.
        skips: Whether a residual adds the input. A skip around a linear layer is in its matrix.
        heads: (n_heads, d_head, d_value) of attention, zeros otherwise.
        rotary: Whether queries and keys depend on the position (RoPE).
        causal: Whether an output sees its own and earlier positions only.
        dense: Whether the layer is given by its whole tensor, lifted, and not by arrays.
        sparse: Roles of sparse matrices, with the columns of their entries.
        activation: Activation of the first leg, or of the input itself where there are no legs;
            None for polynomial layers.

    Example:
        >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=3, d_out=3, rank=8)
        >>> kind.order, kind.constant, kind.mixes_positions
        (2, False, False)
    """

    name: str
    legs: tuple[str, ...]
    down: str | None
    d_in: int
    d_out: int
    rank: int = 0
    biases: tuple[str, ...] = ()
    skips: bool = False
    heads: tuple[int, int, int] = (0, 0, 0)
    rotary: bool = False
    causal: bool = False
    dense: bool = False
    sparse: tuple[tuple[str, Columns], ...] = ()
    activation: Activation | None = None

    @property
    def order(self) -> int:
        """Degree of the output in the input, and number of input legs; infinite with an activation.

        No plan is made of layers of infinite order.
        """
        infinite: Any = math.inf
        return len(self.legs) if self.activation is None else infinite

    @property
    def constant(self) -> bool:
        """Whether the layer reads the constant coordinate of a lifted input."""
        return bool(self.biases) or self.skips or self.dense

    @property
    def mixes_positions(self) -> bool:
        """Whether an output depends on the input at other positions: scores, values and heads."""
        return self.heads[0] > 0

    def is_rotary(self, role: str) -> bool:
        """Whether the array of a leg depends on the position, as RoPE makes queries and keys do."""
        return self.rotary and any(role in score for score in SCORES)

    def multiplications(self, seen: int) -> int:
        """Number of scalar multiplications of a forward pass at a single position.

        Args:
            seen: Number of positions that this one sees, its own included.

        Example:
            >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=3, d_out=2, rank=8)
            >>> kind.multiplications(seen=1)
            72
        """
        if self.mixes_positions:
            # Per head and position: rows of the input; for every key two scores, their product and
            # mask, and the weighted value; the head's part of the output.
            heads, d_head, d_value = self.heads
            rows = 4 * d_head + d_value
            scores = seen * (2 * d_head + d_value + 2)
            return heads * (rows * self.d_in + scores + d_value * self.d_out)
        if not self.legs:
            return self.d_in
        if self.down is None:
            return self.d_in * self.d_out
        legs = len(self.legs)
        return self.rank * (legs * self.d_in + legs - 1 + self.d_out)

    @property
    def dense_size(self) -> int:
        """Elements of the layer's whole tensor where `whole_tree` needs it, else 0."""
        if not self.dense and self.order <= 2:
            return 0
        return (self.d_out + 1) * (self.d_in + 1) ** self.order


Kinds: TypeAlias = tuple[LayerKind, ...]


def layer_kind(layer: Layer) -> LayerKind:
    """The kind of a layer.

    Example:
        >>> import numpy as np, tnsim
        >>> layer_kind(tnsim.Bilinear(*[np.eye(2)] * 3)).legs
        ('LEFT', 'RIGHT')
    """
    core = innermost(layer)
    names = map_names(core)
    biases: list[str] = []
    sparse: list[tuple[str, Columns]] = []
    for name in names:
        weight = getattr(core, name)
        if getattr(core, bias_name(name)) is not None:
            biases.append(name.upper())
        if isinstance(weight, SparseMatrix):
            sparse.append((name.upper(), weight.columns))
    # A layer that reads its input through a single map, without an activation, is linear, whatever
    # its class.
    own = LayerKind(
        name=type(core).__name__,
        legs=(WEIGHT,),
        down=None,
        d_in=core.d_in,
        d_out=core.d_out,
        biases=(WEIGHT,) if biases else (),
        sparse=tuple(sparse),
    )
    if not names:
        return own._replace(legs=(), skips=core is not layer, activation=activation_of(core))
    rows, output = affine_maps(core)
    if len(rows) < 2 and activation_of(core) is None:  # see `core_of`
        return own
    multiplied = own._replace(
        legs=tuple(map(str.upper, rows)),
        down=output.upper(),
        biases=tuple(biases),
        skips=core is not layer,
    )
    if not isinstance(core, Attention):
        rank = getattr(core, names[0]).shape[0]
        return multiplied._replace(rank=rank, activation=activation_of(core))
    return multiplied._replace(
        heads=(core.n_heads, core.d_head, core.d_value),
        rotary=core.rope_base is not None,
        causal=core.mask == "causal",
    )


def core_of(layer: Layer) -> Core:
    """The layer inside its residuals; a product of a single affine map becomes a linear layer.

    Example:
        >>> import tnsim
        >>> core_of(tnsim.Multilinear([[[2.0]]], [[3.0]])).weight
        array([[6.]])
    """
    core = innermost(layer)
    if len(map_names(core)) != 2 or activation_of(core) is not None:
        return core
    rows, output = affine_maps(core)
    core = written_out(core)
    down, bias = getattr(core, output), getattr(core, bias_name(output))
    first = getattr(core, bias_name(rows[0]))
    if first is not None:
        bias = add(down @ first, bias)
    return Linear(down @ getattr(core, rows[0]), bias)


@per_object_cache
def kinds(model: Model) -> Kinds:
    """Kinds of a model's layers, from the input up.

    Models of equal kinds share their plans, and their weights can be stacked.

    Example:
        >>> import numpy as np, tnsim
        >>> len(kinds(tnsim.Model([tnsim.Linear(np.eye(2))] * 3)))
        3
    """
    return tuple(layer_kind(layer) for layer in model.layers)


def nonlinear(*models: Kinds) -> int:
    """Number of nonlinear layers of the deeper model.

    Example:
        >>> import numpy as np, tnsim
        >>> nonlinear(kinds(tnsim.Model([tnsim.Linear(np.eye(2))])))
        0
    """
    return max(sum(layer.order > 1 for layer in layers) for layers in models)


def joined_levels(*models: Kinds) -> int:
    """Number of levels at which layers of these models join, see `joins_whole_trees`.

    It is that of nonlinear layers, and two where attention stands beside a layer of products: no
    rule joins these at one level, so the legs of whole models are joined.

    Example:
        >>> import numpy as np, tnsim
        >>> eye = np.eye(2)
        >>> attention = tnsim.Attention(*[eye] * 6, n_heads=1)
        >>> layers = attention, tnsim.Bilinear(eye, eye, eye)
        >>> joined_levels(*(kinds(tnsim.Model([layer])) for layer in layers))
        2
    """
    alone = nonlinear(*models)
    mixes = {kind.mixes_positions for layers in models for kind in layers if kind.order > 1}
    return 2 if alone == 1 and len(mixes) > 1 else alone


def need_constant(models: Collection[Kinds]) -> bool:
    """Whether the constant 1 is needed as a coordinate where some models meet.

    It is needed where some layer has a constant, or where only some of the models are of odd
    degree: without it, an odd and an even model have no complete pairing of legs.

    Example:
        >>> import tnsim
        >>> plain, biased = (tnsim.Model([tnsim.Linear([[1.0]], b)]) for b in (None, [1.0]))
        >>> need_constant([kinds(plain)]), need_constant([kinds(plain), kinds(biased)])
        (False, True)
    """
    # A kind depends on shapes and on which biases exist, never on numbers, so plans are found by
    # it.
    if any(layer.constant for layers in models for layer in layers):
        return True
    return len({math.prod(layer.order for layer in layers) % 2 for layers in models}) > 1


Step: TypeAlias = dict[Side, int | None]
"""Numbers of the layers that a step applies, by model; None where a model waits."""


def align(bra: Kinds, ket: Kinds) -> tuple[Step, ...]:
    """Match layers from the input up: linear with linear, nonlinear with nonlinear.

    Args:
        bra, ket: Kinds of the layers of each model.

    Returns:
        Steps in order, of the bra as A and the ket as B; every layer is in a single step.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.layer_kinds import kinds
        >>> linear, square = tnsim.Linear([[1.0]]), tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> bra, ket = (kinds(tnsim.Model(layers)) for layers in ([linear, square], [square]))
        >>> align(bra, ket)
        ({'A': 0, 'B': None}, {'A': 1, 'B': 0})
    """
    steps: list[Step] = []
    # Numbers of the next layer of each model. Every step applies a layer of at least one model, so
    # the loop ends.
    i, j = 0, 0
    while i < len(bra) or j < len(ket):
        one = bra[i].order if i < len(bra) else None
        two = ket[j].order if j < len(ket) else None
        if one is None or two is None:
            advances = one is not None, two is not None
        # Linear meets linear, nonlinear meets nonlinear; a nonlinear layer waits for a linear one.
        elif one == two or 1 not in (one, two):
            advances = True, True
        else:
            advances = one == 1, two == 1
        steps.append({"A": i if advances[0] else None, "B": j if advances[1] else None})
        i += advances[0]
        j += advances[1]
    return tuple(steps)


def check_shapes(bra: Kinds, ket: Kinds, metric: Metric) -> None:
    """Refuse trees of different shapes under a metric that joins no legs within a model.

    Args:
        bra, ket: Kinds of the layers of each model.
        metric: Metric that joins the legs of both.

    Raises:
        ModelError: The metric compares trees of equal shape, and these differ.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.layer_kinds import kinds
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> layers = [square], [tnsim.Linear([[1.0]]), square]
        >>> check_shapes(*(kinds(tnsim.Model(x)) for x in layers), tnsim.TreeSymmetric())
    """
    # Orders of the nonlinear layers, from the input up.
    orders = [[layer.order for layer in layers if layer.order > 1] for layers in (bra, ket)]
    if metric.pairs_within_model or orders[0] == orders[1]:
        return
    raise ModelError(
        f"{type(metric).__name__} compares trees of one shape, but the nonlinear layers have "
        f"orders {orders[0]} and {orders[1]}; use GaussianClosure() or Gaussian()"
    )
