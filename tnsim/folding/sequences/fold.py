"""From two sequence models and a metric to a folded problem. In: layer kinds, input structure. Out: a `Problem`.

Carried from layer to layer are the covariances of two models' states between positions, `C_XY[s, i, t, j]`, and
their means `m_X[s, i]`, in the cheapest form that holds them (see `legs.Moment`). Linear and bilinear layers act
position by position, attention is expanded in head space by `wick`, and a residual adds the
covariance of the stream with the layer's output. For the Gaussian metrics that is Isserlis' theorem layer by layer: exact
for one nonlinear layer, the closure beyond. For the tree metrics the "mean" of a state is its value at the zero
input, bra legs meet ket legs only, and every joining counts 1/n!, or just the straight one for `Frobenius`.

Everything is homogeneous in the state and in ONE, the constant 1 in a model's current scale, so that scales can be
renormalised between layers as for models without positions.
"""

from __future__ import annotations

from collections.abc import Iterable

from tnsim.engine.problem import Definition, Gauge, Operand, Problem, Stage, Term, prune
from tnsim.errors import ModelError
from tnsim.folding.layerwise import IDENTITY, PAIRS, Pair, Step, align
from tnsim.folding.sequences.coincidences import position_array
from tnsim.folding.sequences.layer_step import Step as Work
from tnsim.folding.sequences.projections import ONE, ONES, SAME_POSITION, Layers, Moment, States
from tnsim.metrics.metric import Metric, SequenceInputs
from tnsim.names import COVARIANCE, MEAN, Leaf, Side
from tnsim.tensors.positional import SequenceKind, sequence_shapes

Kinds = tuple[SequenceKind, ...]


def fold_sequences(
    models: dict[Side, Kinds],
    metric: Metric,
    inputs: SequenceInputs,
    n_ctx: int,
    pairs: Iterable[Pair],
    per_output: bool,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions, as scalars or per output.

    Raises `ModelError` where an attention layer of one model meets a bilinear layer of the other.
    """
    folder = _Folder(models, metric, inputs, n_ctx, tuple(pairs))
    *first, last = range(len(folder.steps))
    for step in first:
        folder.advance(step)
    folder.close(last, per_output)
    return folder.problem(inputs)


def fold_attribution(
    models: dict[Side, Kinds],
    metric: Metric,
    inputs: SequenceInputs,
    n_ctx: int,
    sizes: dict[str, tuple[int, ...]],
) -> Problem:
    """The problem whose output `AB` is the matrix of contributions at the last nonlinear layers, behind at most one linear layer.

    sizes: shapes of the arrays named by `steps.selector`.
    """
    folder = _Folder(models, metric, inputs, n_ctx, (Pair("A", "B"),))
    last = max(
        n
        for n, layers in enumerate(folder.layers)
        if any(kind.order > 1 for kind in layers.kinds.values())
    )
    for step in range(last):
        folder.advance(step)
    folder.attribute(last, any(name.startswith("SELECT.HEADS") for name in sizes))
    return folder.problem(inputs, sizes)


class _Folder:
    """Lays stages down, step by step; holds the states as they stand."""

    def __init__(
        self,
        models: dict[Side, Kinds],
        metric: Metric,
        inputs: SequenceInputs,
        n_ctx: int,
        pairs: tuple[Pair, ...],
    ):
        self.models, self.metric, self.n_ctx, self.pairs = models, metric, n_ctx, pairs
        self.steps: tuple[Step, ...] = align(models["A"], models.get("B", models["A"]), metric)
        self.stages: list[Stage] = []
        covariance = Moment("" if inputs.covariance == "identity" else COVARIANCE, *inputs.form)
        mean = Moment(MEAN, inputs.mean) if inputs.mean else None
        self.states = States(
            dict.fromkeys(PAIRS, covariance),
            dict.fromkeys(models, mean),
            dict.fromkeys(models, ONE),
        )
        sides = {side for pair in pairs for side in pair}
        self.tracked = tuple(
            p
            for p in PAIRS
            if set(p) <= sides and (p in pairs or (metric.closes and p.bra == p.ket))
        )
        constants = mean is not None or any(
            k.biases or k.skips for kinds in models.values() for k in kinds
        )
        self.scale_by_model = metric.closes or constants
        self.layers = [self.layers_of(n, step) for n, step in enumerate(self.steps)]
        names = [{kind.name for kind in layers.kinds.values() if kind} for layers in self.layers]
        if any({"Attention", "Bilinear"} <= found for found in names):
            raise ModelError(
                "an attention layer of one model meets a bilinear layer of the other at the same depth; "
                "models of sequences are compared attention with attention and bilinear with bilinear"
            )
        self.last_mixing = max(
            (n for n, found in enumerate(names) if "Attention" in found), default=-1
        )

    def layers_of(self, number: int, step: Step) -> Layers:
        numbers = {"A": step.bra, "B": step.ket}
        return Layers(
            number,
            {s: None if numbers[s] is None else k[numbers[s]] for s, k in self.models.items()},
            numbers,
        )

    def work(self, step: int) -> Work:
        return Work(
            self.layers[step],
            self.states,
            self.metric,
            self.n_ctx,
            mixes_later=step < self.last_mixing,
        )

    def advance(self, step: int) -> None:
        """The stages of one step: the legs and the mean of each model, the covariance of each pair, then scales."""
        work = self.work(step)
        states = States(*(dict(x) for x in self.states))
        updates: list[Definition] = []

        def update(
            name: str,
            indices: tuple[str, ...],
            operands: tuple[Operand, ...],
            powers: tuple[tuple[str, int], ...],
        ) -> str:
            updates.append(
                Definition(f"{name}@{step}", indices, (Term(1.0, operands),), powers=powers)
            )
            return f"{name}@{step}"

        for side in self.models:
            mean = work.side(side)
            if work.layers.kinds[side] is None:
                continue
            one = (Operand(self.states.ones[side], ()),) * work.order(side)
            states.ones[side] = update(f"one.{side}", (), one, ((side, 1),))
            states.means[side] = None
            if mean is not None:
                indices = ("s", "k") if mean.form == "each" else ("k",)
                states.means[side] = mean._replace(
                    name=update(f"m.{side}", indices, (Operand(mean.name, indices),), ((side, 1),))
                )
        for pair in self.tracked:
            if all(work.layers.kinds[side] is None for side in pair):
                continue
            found, indices = work.pair(pair)
            states.moments[pair] = found._replace(
                name=update(
                    f"S.{pair.group}", indices, (Operand(found.name, indices),), self.powers(pair)
                )
            )
        self.stages += [*work.stages, Stage(tuple(updates), tuple(self.gauges(work, states)))]
        self.states = states

    def close(self, step: int, per_output: bool) -> None:
        """The last step: its inner products instead of its moments."""
        work, outputs = self.work(step), ("k",) if per_output else ()
        for side in self.models:
            work.side(side)
        self.stages += work.stages
        grown = self.grown(work)
        for pair in self.pairs:
            definitions, terms = work.closed(pair, outputs)
            self.stages.append(self.product(pair, work, outputs, definitions, terms, grown))
            grown = ()

    def attribute(self, step: int, by_head: bool) -> None:
        """The last nonlinear step: its inner product by components."""
        work, (pair,) = self.work(step), self.pairs
        for side in self.models:
            work.side(side)
        tails = {
            side: kinds[work.layers.numbers[side] + 1]
            if len(kinds) > work.layers.numbers[side] + 1
            else None
            for side, kinds in self.models.items()
        }
        definitions, terms = work.attributed(pair, tails, by_head)
        self.stages += work.stages
        self.stages.append(
            self.product(pair, work, ("c", "d"), definitions, terms, self.grown(work))
        )

    def product(
        self,
        pair: Pair,
        work: Work,
        outputs: tuple[str, ...],
        definitions: list[Definition],
        terms: tuple[Term, ...],
        grown: tuple[Gauge, ...],
    ) -> Stage:
        """The stage of a pair's inner product, whose scale is a group of its own beside those of the models."""
        own = ((pair.group, 1),) if self.scale_by_model else ()
        degree = 1 if self.scale_by_model else work.order(pair.bra)
        last = Definition(pair.group, outputs, terms, powers=self.powers(pair) + own)
        return Stage((*definitions, last), (*grown, Gauge(pair.group, degree, pair.group, 1)))

    def grown(self, work: Work) -> tuple[Gauge, ...]:
        """How the last step raises the scales of the models, which it does not read off anew."""
        sides = self.models if self.scale_by_model else ()
        return tuple(Gauge(side, work.order(side), None, 2) for side in sides)

    def problem(
        self, inputs: SequenceInputs, sizes: dict[str, tuple[int, ...]] | None = None
    ) -> Problem:
        n, d = self.n_ctx, self.models["A"][0].d_in
        shapes = {ONE: (), ONES: (n,), SAME_POSITION: (n, n), IDENTITY: (d, d), **(sizes or {})}
        shapes |= {MEAN: inputs.mean_shape(d, n), COVARIANCE: inputs.covariance_shape(d, n)}
        for side, kinds in self.models.items():
            for number, kind in enumerate(kinds):
                shapes |= {
                    str(Leaf(side, number, role)): shape
                    for role, shape in sequence_shapes(kind, n).items()
                }
        operands = {
            o.name
            for stage in self.stages
            for d in stage.definitions
            for t in d.terms
            for o in t.operands
        }
        constants = ((name, position_array(name, n)) for name in sorted(operands))
        shapes |= {name: array.shape for name, array in constants if array is not None}
        return prune(
            Problem(
                tuple(self.stages),
                shapes,
                frozenset({IDENTITY, SAME_POSITION}),
                tuple(p.group for p in self.pairs),
            )
        )

    def powers(self, pair: Pair) -> tuple[tuple[str, int], ...]:
        if not self.scale_by_model:
            return ((pair.group, 1),)
        return ((pair.bra, 2),) if pair.bra == pair.ket else ((pair.bra, 1), (pair.ket, 1))

    def gauges(self, work: Work, states: States) -> Iterable[Gauge]:
        """Under a Gaussian metric, or with constants, all values of a model share the scale read off its own covariance."""
        if not self.scale_by_model:
            yield from (
                Gauge(p.group, work.order(p.bra), states.moments[p].name, 1) for p in self.tracked
            )
            return
        for side in self.models:
            own = Pair(side, side)
            yield Gauge(
                side, work.order(side), states.moments[own].name if own in self.tracked else None, 2
            )
