"""Layers of two models matched from the input up, in steps of a single layer of each model.

Where a model has a linear layer more, the other waits: an identity stands in for its layer.
"""

from __future__ import annotations

from typing import NamedTuple

from tnsim.errors import ModelError
from tnsim.metrics.protocol import Metric
from tnsim.problems.tensors.kinds import Kinds


class Step(NamedTuple):
    """The layers that a step applies, by their numbers.

    Args:
        bra: Number of the bra's layer; None where the bra waits.
        ket: Number of the ket's layer; None where the ket waits.
    """

    bra: int | None
    ket: int | None


def align(bra: Kinds, ket: Kinds) -> tuple[Step, ...]:
    """Match layers from the input up: linear with linear, nonlinear with nonlinear.

    Args:
        bra, ket: Kinds of the layers of each model.

    Returns:
        Steps in order; every layer is in a single step.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.tensors.kinds import kinds
        >>> linear, square = tnsim.Linear([[1.0]]), tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> bra, ket = (kinds(tnsim.Model(layers)) for layers in ([linear, square], [square]))
        >>> [tuple(step) for step in align(bra, ket)]
        [(0, None), (1, 0)]
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
        steps.append(Step(i if advances[0] else None, j if advances[1] else None))
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
        >>> from tnsim.problems.tensors.kinds import kinds
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
