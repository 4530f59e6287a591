"""An inner product by components of the outputs: a problem with a matrix of contributions.

An output is a sum of parts, so an inner product is the sum of a matrix over pairs of parts. It is
folded as any inner product, but each part of the last nonlinear layer's output is multiplied by
an array that assigns the part to a component, `c` of the bra's output and `d` of the ket's
(`names.Selector`). At most one linear layer may follow. It acts on every component alike, and its
bias is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping

from tnsim.engine.ir.problem import Operand, Problem, Term, renamed
from tnsim.metrics.input_moments import SequenceInputs
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.names import (
    CONSTANT,
    CORE,
    HEADS,
    SLOTS,
    STREAM,
    WEIGHT,
    Leaf,
    ModelName,
    Pair,
    Selector,
    Slot,
    bias_of,
)
from tnsim.problems.sequences.fold import SequenceFold
from tnsim.problems.sequences.moments import Means, OutputCovariance, output_covariance
from tnsim.problems.sequences.notation import HEAD, OUTPUT_END, Product, Summand
from tnsim.problems.tensors.kinds import Kinds, LayerKind

COMPONENT: dict[Slot, str] = {"bra": "c", "ket": "d"}
END = "o"
"""Common coordinate of both outputs, after the linear layer if there is one."""


def fold_attribution(
    models: dict[ModelName, Kinds],
    metric: LayerwiseMetric,
    inputs: SequenceInputs,
    n_ctx: int,
    components: Mapping[ModelName, int],
    by_head: bool,
) -> Problem:
    """The problem that has the matrix of contributions, (components, components), as output `AB`.

    Args:
        models: Kinds of the layers, at most one linear layer after the last nonlinear one.
        metric: Metric that works layer by layer.
        inputs: Structure of the input's mean and covariance.
        n_ctx: Number of positions.
        components: Number of components of each model.
        by_head: Whether the heads of the last nonlinear layer, an attention layer, are told apart.

    Returns:
        Problem with the leaves of `fold_sequences` and one for each `names.Selector`, of shape
        (components,), or (components, heads) for `HEADS`.

    Raises:
        ModelError: The layers of the models cannot meet, see `fold_sequences`.
    """
    pair = Pair("A", "B")
    fold = SequenceFold(models, metric, inputs, n_ctx, (pair,))
    for number in range(fold.last_nonlinear):
        fold.advance(number)
    step = fold.step(fold.last_nonlinear)
    means = fold.means(step)
    covariance = output_covariance(step, pair, means, by_head)
    terms = Contributions(covariance, means, models, by_head).terms()
    fold.add_result(step, pair, tuple(COMPONENT.values()), covariance.stage, terms)
    return fold.problem(_selector_shapes(models, components, by_head))


class Contributions:
    """The terms of an inner product, assigned to components.

    Args:
        covariance: Covariance of the outputs of the last nonlinear layers.
        means: Means of these outputs.
        models: Kinds of all layers.
        by_head: Whether heads are assigned to components one by one.
    """

    def __init__(
        self,
        covariance: OutputCovariance,
        means: Means,
        models: Mapping[ModelName, Kinds],
        by_head: bool,
    ) -> None:
        self.names = covariance.names
        self.stage = covariance.stage
        self.covariances = covariance.summands
        self.means = means
        self.by_head = by_head
        self.tails = {slot: self._tail(models, slot) for slot in SLOTS}
        # Without a linear layer after it, an output has the common coordinate itself.
        self.ends = {OUTPUT_END[slot]: END for slot in SLOTS if self.tails[slot] is None}

    def terms(self) -> tuple[Term, ...]:
        """The terms with the indices `c` and `d`, summed over positions and outputs."""
        indices = tuple(COMPONENT.values())
        terms = []
        for summand in self.covariances:
            parts = zip(SLOTS, summand.parts, strict=True)
            selected = [self._selector(slot, part) for slot, part in parts]
            behind = (*self._behind("bra"), *self._behind("ket"))
            product = renamed((*summand.product, *selected, *behind), self.ends)
            terms.append(summand._replace(product=product).term(indices, summed=("s",)))
        bra, ket = self._mean("bra"), self._mean("ket")
        if bra is not None and ket is not None:
            terms.append(Term(1.0, (bra, ket)))
        return tuple(terms)

    def _mean(self, slot: Slot) -> Operand | None:
        """The mean of every component, `[component, s, o]`; None where all means vanish."""
        model = self.names.models[slot]
        at_slot = {OUTPUT_END["bra"]: OUTPUT_END[slot], HEAD["bra"]: HEAD[slot]}
        summands = []
        for summand in self.means[model].summands:
            product = renamed(summand.product, at_slot)
            product = (*product, self._selector(slot, summand.parts[0]), *self._behind(slot))
            summands.append(summand._replace(product=renamed(product, self.ends)))
        summands += self._bias_behind(slot)
        if not summands:
            return None
        indices = (COMPONENT[slot], "s", END)
        terms = [summand.term(indices) for summand in summands]
        return self.stage.define(f"components.{model}", indices, terms, kept=False)

    def _selector(self, slot: Slot, part: str) -> Operand:
        """The array that assigns a part of an output, or every head of it, to components."""
        model, component = self.names.models[slot], COMPONENT[slot]
        if self.by_head and part == CORE:
            return Operand(str(Selector(HEADS, model)), (component, HEAD[slot]))
        return Operand(str(Selector(part, model)), (component,))

    def _tail(self, models: Mapping[ModelName, Kinds], slot: Slot) -> LayerKind | None:
        """Kind of the linear layer after the last nonlinear one; None if there is none."""
        kinds, number = models[self.names.models[slot]], self._tail_number(slot)
        return kinds[number] if number < len(kinds) else None

    def _tail_number(self, slot: Slot) -> int:
        """Number that the linear layer after the last nonlinear one has, if there is one."""
        return self.names.number(slot) + 1

    def _tail_leaf(self, slot: Slot, role: str, *indices: str) -> Operand:
        """An array of the linear layer after the last nonlinear one."""
        name = Leaf(self.names.models[slot], self._tail_number(slot), role)
        return Operand(str(name), indices)

    def _behind(self, slot: Slot) -> Product:
        """The matrix of the linear layer; the empty product if there is none."""
        if self.tails[slot] is None:
            return ()
        return (self._tail_leaf(slot, WEIGHT, END, OUTPUT_END[slot]),)

    def _bias_behind(self, slot: Slot) -> list[Summand]:
        """The bias of the linear layer, a constant of the output."""
        tail = self.tails[slot]
        if tail is None or WEIGHT not in tail.biases:
            return []
        bias = self._tail_leaf(slot, bias_of(WEIGHT), END)
        ones = self.names.ones(slot, self.names.order(slot))
        return [Summand(1.0, (bias, *ones, self._selector(slot, CONSTANT)))]


def _selector_shapes(
    models: Mapping[ModelName, Kinds], components: Mapping[ModelName, int], by_head: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes of the selectors of all models."""
    shapes: dict[str, tuple[int, ...]] = {}
    for model, kinds in models.items():
        count = components[model]
        for part in (STREAM, CORE, CONSTANT):
            shapes[str(Selector(part, model))] = (count,)
        if by_head:
            last = [kind for kind in kinds if kind.order > 1][-1]
            shapes[str(Selector(HEADS, model))] = (count, last.heads[0])
    return shapes
