"""States and layers of a step as plain data, and the layers of bra and ket as operands.

Nothing is computed here. `States` names the moments below a step and `LayerStep` has its layers;
`BraKet` looks up the arrays of a slot and gives them that slot's index names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tnsim.engine.ir.problem import ALIAS_SUFFIX, Operand
from tnsim.metrics.input_moments import PositionForm
from tnsim.names import IDENTITY, SCORES, SKIP, SLOTS, STREAM, VALUE, Leaf, Pair, Side, Slot
from tnsim.problems.sequences.joining_rules import MetricRules
from tnsim.problems.sequences.notation import FIRST, KEY_POSITION, Leg, Product
from tnsim.problems.tensors.kinds import LayerKind

MEAN_AXES: dict[PositionForm, tuple[str, ...]] = {"alike": ("k",), "each": ("s", "k")}
COVARIANCE_AXES: dict[PositionForm, tuple[str, ...]] = {
    "alike": ("k", "l"),
    "each": ("s", "k", "l"),
    "full": ("s", "k", "S", "l"),
}
"""Axes of a mean and of a covariance of outputs by form."""
_READ_AT_KEYS = (*(key for _, key in SCORES), VALUE)


class Moment(NamedTuple):
    """A mean or a covariance of states over positions, as the array `name` holds it.

    Its axes are `MEAN_AXES` or `COVARIANCE_AXES`. Where a covariance is not full, states at
    different positions are independent. A `diagonal` covariance has a common axis for both
    coordinates; a covariance without a name is the identity.
    """

    name: str
    form: PositionForm
    diagonal: bool = False


class Positions(NamedTuple):
    """Structure of the positions below a step.

    Args:
        n_ctx: Number of positions.
        independent: Whether states at different positions are independent.
        relative: Whether they are moreover distributed alike, so that only differences of positions
            matter.
    """

    n_ctx: int
    independent: bool
    relative: bool


class States(NamedTuple):
    """Moments of both models below a step.

    Args:
        moments: Covariance of the states of a pair of models.
        means: Mean of a model's state; None for zero.
        ones: Name of the constant 1 in the current scale of a model.
    """

    moments: dict[Pair, Moment]
    means: dict[Side, Moment | None]
    ones: dict[Side, str]

    def positions(self, n_ctx: int) -> Positions:
        """The structure of the positions: whether they are independent and distributed alike."""
        forms = {moment.form for moment in self.moments.values()}
        means = {mean.form for mean in self.means.values() if mean is not None}
        relative = forms == {"alike"} and means <= {"alike"}
        return Positions(n_ctx, "full" not in forms, relative)


@dataclass(frozen=True)
class LayerStep:
    """A layer of each model over the states below; a model without a layer waits (see `alignment`).

    Args:
        number: Number of the step, from the input.
        kinds: Kinds of the layers; None for a model that waits.
        layers: Numbers of the layers within the models; None for a model that waits.
        states: Moments below the step.
        rules: Rules by which the metric joins legs.
        positions: Structure of the positions below.
        mixes_later: Whether a later layer mixes positions, so that covariances between different
            ones are still needed.
        with_own: Whether the covariance of each model with itself is computed along with the cross
            term.
    """

    number: int
    kinds: dict[Side, LayerKind | None]
    layers: dict[Side, int | None]
    states: States
    rules: MetricRules
    positions: Positions
    mixes_later: bool
    with_own: bool

    @property
    def suffix(self) -> str:
        """The end of all names that the step defines."""
        return f"@{self.number}"

    @property
    def mixes(self) -> bool:
        """Whether a layer of the step mixes positions."""
        return any(kind is not None and kind.mixes_positions for kind in self.kinds.values())

    def order(self, model: Side) -> int:
        """Order of a model's layer. A model that waits applies the identity, of order 1."""
        kind = self.kinds[model]
        return 1 if kind is None else kind.order


class BraKet:
    """The layers of a single step that meet in an inner product.

    Of two attention layers, in <A|A> the ket's arrays are the bra's arrays under a second name (see
    `ALIAS_SUFFIX`): the stages of <A|A>, <A|B> and <B|B> then have equal structure and share a
    single program, of thousands of products. Other layers have few, and in <A|A> a quarter of them
    are transposes of others or known from the mean, as long as the arrays go by one name.

    Args:
        step: Layers, and the states below.
        pair: Model in the bra and model in the ket.
        one_position: Whether outputs are needed at equal positions only, both then called `s`.
    """

    def __init__(self, step: LayerStep, pair: Pair, one_position: bool) -> None:
        self.step = step
        self.pair = pair
        self.models: dict[Slot, Side] = {"bra": pair.bra, "ket": pair.ket}
        self.marks: dict[Slot, str] = {
            "bra": "",
            "ket": ALIAS_SUFFIX if pair.bra == pair.ket and step.mixes else "",
        }
        self.outputs: dict[Slot, str] = {"bra": "s", "ket": "s" if one_position else "S"}

    @property
    def output_positions(self) -> tuple[str, ...]:
        """Names of the positions of the outputs: a name, or two where they are told apart."""
        return tuple(dict.fromkeys(self.outputs[slot] for slot in SLOTS))

    @property
    def apart(self) -> bool:
        """Whether outputs at different positions are told apart."""
        return len(self.output_positions) == 2

    # --- layers ------------------------------------------------------------------------------

    def waits(self, slot: Slot) -> bool:
        """Whether a slot has no layer, so that the identity stands in."""
        return self.step.kinds[self.models[slot]] is None

    def kind(self, slot: Slot) -> LayerKind:
        """Kind of the layer in a slot, which does not wait."""
        kind = self.step.kinds[self.models[slot]]
        assert kind is not None, f"no layer in the {slot}"
        return kind

    def number(self, slot: Slot) -> int:
        """Number of the layer in a slot, which does not wait, within its model."""
        number = self.step.layers[self.models[slot]]
        assert number is not None, f"no layer in the {slot}"
        return number

    def order(self, slot: Slot) -> int:
        """Order of the layer in a slot, 1 where the model waits."""
        return self.step.order(self.models[slot])

    def legs(self, slot: Slot) -> tuple[Leg, ...]:
        """The legs of the layer in a slot."""
        return tuple(Leg(slot, role) for role in self.kind(slot).legs)

    def leaf(self, slot: Slot, role: str, *indices: str) -> Operand:
        """An array of the layer in a slot."""
        name = str(Leaf(self.models[slot], self.number(slot), role))
        return Operand(name + self.marks[slot], indices)

    def one(self, slot: Slot) -> Operand:
        """The constant 1 in the current scale of the model in a slot."""
        return Operand(self.step.states.ones[self.models[slot]] + self.marks[slot], ())

    def ones(self, slot: Slot, count: int) -> Product:
        """A power of the constant 1, which makes a term homogeneous of the layer's order."""
        return (self.one(slot),) * count

    def skip(self, slot: Slot) -> Product | None:
        """The factor of the residual stream in an output; None where there is no skip.

        A model that waits applies the identity: its output is the stream alone.
        """
        if self.waits(slot):
            return ()
        kind = self.kind(slot)
        if not kind.skips:
            return None
        return (self.leaf(slot, SKIP), *self.ones(slot, kind.order - 1))

    # --- legs --------------------------------------------------------------------------------

    def position(self, leg: Leg) -> str:
        """Name of the position at which a leg reads; keys and values read at a key position."""
        if leg.role in _READ_AT_KEYS:
            return KEY_POSITION[leg.slot]
        return self.outputs[leg.slot]

    def rows(self, leg: Leg) -> tuple[str, ...]:
        """Axes of a leg's weight but the last, under their names in the bra.

        The axes are the position, where RoPE rotates the leg; the head, where the layer has heads;
        and the coordinate.
        """
        kind = self.kind(leg.slot)
        position = ("s",) if kind.is_rotary(leg.role) else ()
        head = ("a",) if kind.mixes_positions else ()
        return (*position, *head, FIRST)

    # --- states below ------------------------------------------------------------------------

    def state_mean(self, slot: Slot, coordinate: str) -> Operand | None:
        """Mean of the state below, at `s` where positions have their own means; None for zero."""
        below = self.step.states.means[self.models[slot]]
        if below is None:
            return None
        position = ("s",) if below.form == "each" else ()
        return Operand(below.name + self.marks[slot], (*position, coordinate))

    def state_moment(self, one: Slot, two: Slot) -> Moment:
        """Covariance of the states below two slots as stored: of A with B, never of B with A."""
        models = self.models[one], self.models[two]
        stored = Pair("A", "B") if self.transposed(one, two) else Pair(*models)
        moment = self.step.states.moments[stored]
        if models[0] != models[1] or not moment.name:
            return moment
        # In <A|A> moments of the bra's model with itself, of the ket's, and between both are three
        # names of one array, as they would be three arrays for two models.
        mark = self.marks[one] if one == two else 2 * self.marks["ket"]
        return moment._replace(name=moment.name + mark)

    def transposed(self, one: Slot, two: Slot) -> bool:
        """Whether the covariance of two slots is stored the other way round."""
        return (self.models[one], self.models[two]) == ("B", "A")

    def form(self) -> PositionForm:
        """Form of the covariance between the bra's state and the ket's."""
        return self.state_moment("bra", "ket").form

    def state_covariance(
        self, slots: tuple[Slot, Slot], positions: tuple[str, str], ends: tuple[str, str]
    ) -> Product:
        """Covariance of the states below two slots.

        Args:
            slots: Slots above the states.
            positions: Names of the positions at which states are read, where the covariance is
                full; otherwise there is a single position, called `s`.
            ends: Names of the coordinates.
        """
        moment = self.state_moment(*slots)
        if self.transposed(*slots):
            positions = (positions[1], positions[0])
            ends = (ends[1], ends[0])
        if moment.form == "full":
            return (Operand(moment.name, (positions[0], ends[0], positions[1], ends[1])),)
        if not moment.name:
            return (Operand(IDENTITY, ends),)
        position = ("s",) if moment.form == "each" else ()
        if moment.diagonal:
            return (Operand(IDENTITY, ends), Operand(moment.name, (*position, ends[0])))
        return (Operand(moment.name, (*position, *ends)),)


def stream(slot: Slot) -> Leg:
    """The residual stream as a leg: the state itself."""
    return Leg(slot, STREAM)
