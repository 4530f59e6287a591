"""The change from one network to another, split by component.

Between polynomials a and b every component is interpolated as a function (`models.components`),
f(0) = a and f(1) = b; between other networks the weights of components are (`change_of_weights`).
Three numbers answer three questions about a component c:

    share     <delta_c, b - a> / |b - a|^2   how much of the change it made, together with others
    removed   |b - b with c of a|^2          what breaks without it
    alone     |a with c of b - a|^2          what it does by itself

with delta_c after Aumann and Shapley (`switched_models`). Shares sum to 1, and `delta_c` to b - a
as functions; the other two add up only where components do not interact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np
from jaxtyping import Float
from numpy.typing import DTypeLike

from tnsim.checkpoints.given import folders_of_networks, is_path_or_paths, read_model
from tnsim.checkpoints.load import load
from tnsim.compare.numbers import jackknife_error
from tnsim.compare.request import Comparable, comparables, estimated, with_metric
from tnsim.engine.ir.problem import dtype_name
from tnsim.engine.planner import Budget
from tnsim.engine.runtime.devices import check_addresses
from tnsim.errors import CaveatWarning, ModelError, printable, warn
from tnsim.localise.change_of_functions import FunctionsExchanged, exchange_functions
from tnsim.localise.change_of_weights import WeightsExchanged, exchange_weights, name_of
from tnsim.localise.differences import (
    TOTALS,
    Run,
    Unchanged,
    by_input,
    checkpoints_of,
    directions,
    largest,
    least_sure,
    table_of_run,
    text_of_run,
)
from tnsim.localise.switched_models import Setting
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.components import GRANULARITIES
from tnsim.models.functions import is_function, loaded
from tnsim.models.model import warn_of_caveats
from tnsim.options import checked
from tnsim.tables import guarantee, html_table

if TYPE_CHECKING:
    import xarray as xr

Exchanges: TypeAlias = FunctionsExchanged | WeightsExchanged
"""Two networks a and b whose components are exchanged."""
_SHOWN = 8
"""Most components of a table in a notebook."""
_LINEAR = "linear layers, those of B on both sides of the change; parts with ends=True, --ends"
_NO_LINEAGE = (
    "putting back any single component moves the function further than the whole change did: the "
    "two are no checkpoints of one network, or hidden units moved, so that exchanged weights mean "
    "little; compare parts by tnsim.parts, or heads by tnsim.heads"
)


@dataclass(frozen=True, eq=False)
class Change:
    """A change of a network, split by component.

    The measures beside `share` are computed when they are first read, of the networks as they were
    given: `removed` and `alone` by one inner product or forward pass for every component, `matrix`
    by derivatives for every pair.

    Attributes:
        components: Labels of the components.
        share: Signed shares (components,), which sum to 1; along weights, each and their sum within
            a thousandth, or a caveat says how well they are known.
        total: Squared distance `|b - a|^2` in units of squared outputs, or `1 - similarity`, or the
            score of b less that of a; of polynomials with the linear layers of b on both sides,
            unless `ends=True`.
        surroundings: The same measure of the change of linear layers alone, which are no components
            and taken from b on both sides; 0 with `ends=True`.
        of: Measure of the change, `distance` or `similarity`, or the name of the score.
        metric: Name of the metric; of a score its name.
        exact: Whether the metric's definition is met exactly and the shares are exact.
        standard_error: Standard errors of `share`; None where nothing was sampled.
        caveats: Differences between the models and the networks they were read from.
        how: How weights were exchanged and on which inputs, in words; empty for polynomials.
    """

    components: tuple[str, ...]
    share: Float[np.ndarray, " components"]
    total: float
    surroundings: float
    of: str
    metric: str
    exact: bool
    standard_error: Float[np.ndarray, " components"] | None
    caveats: tuple[str, ...]
    how: str
    _exchanges: Exchanges = field(repr=False)

    @cached_property
    def removed(self) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component put back: what breaks without it.

        Of a score it is the score of b with one component put back, less that of b.
        """
        return self._exchanges.swapped(True, self.total)

    @cached_property
    def alone(self) -> Float[np.ndarray, " components"]:
        """The measure between a and a with one component of b: what it does by itself.

        Of a score it is the score of a with one component of b, less that of a.
        """
        return self._exchanges.swapped(False, self.total)

    @cached_property
    def matrix(self) -> Float[np.ndarray, "components components"]:
        """The inner products `<delta_c, delta_d>`, which sum to `total` for a distance.

        Raises:
            ModelError: The change is one of similarity or of a score, whose parts are no functions,
                or the networks are no polynomials.
        """
        if self.of != "distance":
            raise ModelError(
                f"a change of {self.of} has no parts with inner products; use of='distance'"
            )
        return self._exchanges.gram(self.total, self.share)

    @cached_property
    def by_input(self) -> Float[np.ndarray, "inputs *positions"]:
        """How much of `|b - a|^2` is on each input, and at each position of sequences.

        The sum is `|b - a|^2`, whatever measure was split. Inputs are those of `Empirical`, or the
        normal ones of an estimate.

        Raises:
            ModelError: The networks were compared by exact inner products, or by a score.
        """
        return by_input(self._exchanges.differences())

    @checked
    def directions(self, count: int = 4) -> xr.Dataset:
        """The directions of the outputs along which most of the change is, on the inputs.

        Args:
            count: Most directions.

        Returns:
            A Dataset over `direction`, that of the largest share first: the `share` of `|b - a|^2`,
            float64, which sums to 1 over all directions; unit vectors `output` (direction,
            coordinate); and `along` (direction, input, and position of sequences), in units of
            outputs, so that b - a is the sum over all directions of `along` times `output`.

        Raises:
            ModelError: The networks were compared by exact inner products or by a score, or `count`
                is no number from 1.
            TooLarge: The outputs on all inputs take more than 2 GiB.

        Example:
            >>> import numpy as np, tnsim
            >>> square = lambda w: tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))
            >>> a, b = (tnsim.Model([square(w)]) for w in (1.0, 2.0))
            >>> found = tnsim.change(a, b, tnsim.Empirical([[1.0], [2.0]]))
            >>> found.by_input.tolist(), found.directions().along.values.tolist()
            ([0.5, 8.0], [[1.0, 4.0]])
        """
        return directions(self._exchanges.differences(), count)

    @property
    def _guarantee(self) -> str:
        """The relation of the shares to the true shares, in words."""
        if self.how:
            return self.how
        # A cosine is no polynomial along the segment, whatever the metric.
        if self.of == "similarity" and self.standard_error is None:
            return "shares by numerical integration"
        return guarantee(self.exact, self.standard_error)

    def __str__(self) -> str:
        return text_of_change(self)

    def _repr_html_(self) -> str:
        what = TOTALS.get(self.of, self.of)
        beside = f"surroundings {self.surroundings:.4g}, " if self.surroundings else ""
        title = f"Change {what} = {self.total:.4g}, {beside}{self.metric} ({self._guarantee})"
        order = largest(self.share, len(self.share))
        rows = [(self.components[n], f"{self.share[n]:.4g}") for n in order]
        return html_table(title, rows, ("component", "share"))


def text_of_change(change: Change, beside: Mapping[str, np.ndarray] = MappingProxyType({})) -> str:
    """A change as text: what changed by how much, and a line for every component.

    Args:
        change: The change.
        beside: Further columns by name, a number for each component.
    """
    lines = [f"{TOTALS.get(change.of, change.of):<15} {change.total:.6g}"]
    if change.surroundings:
        lines.append(f"{'surroundings':<15} {change.surroundings:.6g} ({_LINEAR})")
    lines.append(f"{'metric':<15} {change.metric} ({change._guarantee})")
    heads = "".join(f"{name:>11}" for name in beside)
    lines.append(f"{'share':>10}{heads}   component")
    for n in largest(change.share, len(change.share)):
        others = "".join(f"{each[n]:>11.4g}" for each in beside.values())
        lines.append(f"{change.share[n]:>+10.4f}{others}   {change.components[n]}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ChangeSeries:
    """The changes of a run from every checkpoint to the next.

    Attributes:
        labels: Labels of the later checkpoints.
        each: `Change` of every step; None where a step left the function as it was.
        components: Labels of the components.

    Example:
        >>> import tnsim
        >>> model = lambda w: tnsim.Model([tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))])
        >>> steps = tnsim.change({0: model(1.0), 10: model(1.0), 20: model(2.0)})
        >>> steps.labels, steps.share.tolist()
        ((10, 20), [[0.0], [1.0]])
    """

    labels: tuple[Any, ...]
    each: tuple[Change | None, ...]
    components: tuple[str, ...]

    @property
    def share(self) -> Float[np.ndarray, "steps components"]:
        """Signed shares, of which those of a step sum to 1; 0 where nothing changed."""
        return self._table(lambda found: found.share)

    @property
    def removed(self) -> Float[np.ndarray, "steps components"]:
        """The measure between a checkpoint and itself with one component of the one before."""
        return self._table(lambda found: found.removed)

    @property
    def total(self) -> Float[np.ndarray, " steps"]:
        """The measure of every step; 0 where nothing changed."""
        return np.array([0.0 if found is None else found.total for found in self.each])

    @property
    def surroundings(self) -> Float[np.ndarray, " steps"]:
        """The measure of linear layers alone, see `Change.surroundings`."""
        return np.array([0.0 if found is None else found.surroundings for found in self.each])

    def _table(self, row: Callable[[Change], np.ndarray]) -> np.ndarray:
        nothing = np.zeros(len(self.components))
        return np.array([nothing if found is None else row(found) for found in self.each])

    def __str__(self) -> str:
        each = [found for found in self.each if found is not None]
        told = least_sure(each)
        most = int(self.total.argmax())
        up_to = printable(str(self.labels[most]), 40)
        what = f"{TOTALS.get(told.of, told.of)} {self.total[most]:.6g}, up to {up_to}"
        columns = self._beside()
        head = "".join(f"{name:>14}" for name, _ in columns)
        rows = zip(*(column for _, column in columns), strict=True)
        texts = ["".join(f"{text:>14}" for text in row) for row in rows]
        table = text_of_run(self.labels, self.components, self.share, (head, texts))
        lines = [f"metric      {told.metric} ({told._guarantee})", f"most        {what}"]
        if len(columns) > 1:
            lines.append(f"{'':<12}surroundings: {_LINEAR}")
        return "\n".join([*lines, table])

    def _beside(self) -> list[tuple[str, list[str]]]:
        """Names and texts of the columns beside the shares."""
        columns = [("change", self.total)]
        if self.surroundings.any():
            columns.append(("surroundings", self.surroundings))
        return [(name, [f"{number:.4g}" for number in column]) for name, column in columns]

    def _repr_html_(self) -> str:
        return table_of_run(
            "Shares of every change",
            self.labels,
            self.components,
            self.share,
            _SHOWN,
            self._beside(),
        )


@overload
def change(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Change: ...


@overload
def change(
    a: Any,
    b: None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> ChangeSeries: ...


@checked(own="by")
def change(
    a: Any,
    b: Any = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Change | ChangeSeries:
    """Split the change from one network to another by component, or every step of a run.

    Of polynomials, component functions are interpolated, never weights, so shares are exact and
    depend on what components compute: an order of hidden units, a scale moved from one factor to
    another, or a basis inside a head changes nothing. Components are matched by number, and both
    streams have one basis, as along a run.

    Of any other network (a module of PyTorch, a function of JAX that is a pytree of its weights, a
    model with activations) the weights of components are exchanged, which means something between
    checkpoints of one training run, fine-tunings and edits, not between two seeds. It runs on the
    inputs of `Empirical`, or on normal inputs under `Gaussian`. Shares are integrals along the
    straight path of weights, by one way back through the network for all components. `removed` asks
    what breaks where a component is put back, and mixes two checkpoints at their ends alone.

    Args:
        a, b: Models of equal layers, or modules of PyTorch and paths of files in the place of
            models; ranks may differ by layer. Or two networks with equal names of weights. Without
            b the checkpoints of a run: a `tnsim.load`, a folder or pattern of files or, on inputs,
            of folders of Hugging Face, a sequence or a mapping from labels, in their order.
        metric: Metric that weighs the inputs, or its name; any but `GaussianClosure`.
        by: Granularity of components. Of polynomials `"layer"`, `"head"` or `"unit"`, as for
            `components`. Of weights `"module"` for what stands inside of a numbered block (its
            attention, its norms) and other modules, `"block"`, `"parameter"`, a number for as many
            parts of a weight's dotted name, or beginnings of names. None for layers of models and
            for modules of other networks.
        of: Measure that is split: `"distance"` for `|b - a|^2`, `"similarity"` for
            `1 - similarity(a, b)`; or, of weights, a function of the network that returns a score,
            such as a loss on data of your own as a tensor.
        ends: Whether linear layers without a skip, such as embeddings, are components of
            polynomials as well. Otherwise the linear layers of b stand on both sides, see
            `Change.surroundings`.
        align: Change of basis of the stream of b: `"embedding"` for the rotation that takes its
            embedding nearest to that of a, or a square matrix; None where the bases are equal.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        A `Change`: float64 shares, which sum to 1, and the total; of a run a `ChangeSeries`, which
        holds that of every checkpoint from the one before.

    Raises:
        ModelError: The layers or weights of the networks do not correspond, the networks are equal,
            the metric is no bilinear form of the model, or `inner` would raise it.
        UnsupportedLayer: A layer has an activation, where `by` names parts of polynomials.
        TooLarge: The integral takes more than 512 gradients, or the computation is beyond the
            budget.
        ResultError: The models differ by less than rounding.

    Warns:
        PrecisionWarning: Few digits of the shares are left.
        CaveatWarning: Shares along weights are known to less than a thousandth, or any exchange of
            weights breaks the function.

    Example:
        >>> import numpy as np, tnsim
        >>> def model(first, second):
        ...     square = lambda w: tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))
        ...     return tnsim.Model([square(first), square(second)])
        >>> found = tnsim.change(model(1.0, 1.0), model(1.0, 2.0))
        >>> found.components, found.share.round(9).tolist()
        (('layer 0', 'layer 1'), [0.0, 1.0])
        >>> round(found.total, 9) == round(float(found.removed[1]), 9)
        True

        Any module, on inputs:

        >>> import copy, torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
        >>> b = copy.deepcopy(a)
        >>> with torch.no_grad():
        ...     _ = b[2].weight.mul_(1.5)
        >>> found = tnsim.change(a, b, tnsim.Empirical(np.eye(3)))
        >>> found.components, found.share.round(3).tolist()
        (('0', '2'), [0.0, 1.0])

        Every step of a run:

        >>> run = [model(1.0, 1.0), model(1.0, 2.0), model(3.0, 2.0)]
        >>> tnsim.change(run).share.round(9).tolist()
        [[0.0, 1.0], [1.0, 0.0]]

    Source:
        Aumann and Shapley 1974, "Values of non-atomic games"; integrated gradients after
        Sundararajan et al. 2017, on functions of components, or on weights, in the place of inputs.
    """
    by = by.tolist() if isinstance(by, np.ndarray) else by  # equals nothing and is in no list
    question = _Question(by, of, ends, align, n_ctx, dtype, budget)
    metric = as_metric(metric)
    if b is None:
        series = _changes(a, metric, question)
        _warn_of_each([found for found in series.each if found is not None])
        return series
    found = _change(a, b, metric, question)
    _warn_of_each([found])
    return found


class _Question(NamedTuple):
    """The arguments of `change` beside the networks and the metric."""

    by: Any
    of: Any = "distance"
    ends: bool = False
    align: Any = None
    n_ctx: int | None = None
    dtype: DTypeLike = "float64"
    budget: Budget = Budget()


def _changes(run: Any, metric: Metric, question: _Question) -> ChangeSeries:
    """The change of every checkpoint of a run from the one before, see `change`."""
    if isinstance(metric, Empirical) and (folders := folders_of_networks(run)):
        run = folders  # each runs on the inputs as it is read, two at a time
    elif is_path_or_paths(run):
        run = load(run, n_ctx=question.n_ctx)
    if not isinstance(run, Run):
        raise ModelError(
            "change takes two networks, or the checkpoints of a run in the place of both, found "
            f"one {type(run).__name__}"
        )
    labels, checkpoints = checkpoints_of(run)
    if len(labels) < 2:
        list(checkpoints)  # a name that stands for nothing is refused as such
        raise ModelError(f"a run has two checkpoints or more, found {len(labels)}")
    # Two networks at a time: a run may be longer than memory.
    networks = iter(checkpoints)
    before, each = next(networks), []
    for after in networks:
        try:
            each.append(_change(before, after, metric, question))
        except Unchanged:
            each.append(None)
        before = after
    known = [found.components for found in each if found is not None]
    if not known:
        raise ModelError("all checkpoints are the same function: there is no change to split")
    if any(names != known[0] for names in known):
        raise ModelError(
            "the checkpoints have different components, such as a bias of units or an adapter that "
            "only some have, so that no table holds them: of models use by='layer', and adapters "
            "are merged by merge_and_unload()"
        )
    return ChangeSeries(labels[1:], tuple(each), known[0])


def _change(a: Any, b: Any, metric: Metric, question: _Question) -> Change:
    """The change between two networks, see `change`."""
    exchanges, metric = _exchanged(a, b, metric, question)
    of = question.of
    split = exchanges.split()
    found = Change(
        exchanges.labels,
        split.share,
        split.total,
        split.surroundings,
        name_of(of),
        name_of(of) if callable(of) else metric.name,
        split.exact,
        _jackknife(split.parts),
        exchanges.caveats + split.doubts,
        exchanges.how,
        exchanges,
    )
    # Exchanged weights mean little between networks without a common ancestor.
    if exchanges.how and not callable(of) and len(exchanges.labels) > 1:
        back = found.removed[found.removed > 0]  # what is frozen, or no weight, breaks nothing
        if len(back) > 1 and (back > split.total).all():
            found = dataclasses.replace(found, caveats=(*found.caveats, _NO_LINEAGE))
    return found


def _warn_of_each(changes: Sequence[Change]) -> None:
    """Warn the caller of `change` of what holds of the networks and of the shares, each once."""
    said = dict.fromkeys(caveat for found in changes for caveat in found.caveats)
    of_networks = {caveat for found in changes for caveat in found._exchanges.caveats}
    warn_of_caveats(tuple(caveat for caveat in said if caveat in of_networks))
    for doubt in said:
        if doubt not in of_networks:
            warn(doubt, CaveatWarning)


def _exchanged(a: Any, b: Any, metric: Metric, question: _Question) -> tuple[Exchanges, Metric]:
    """Two networks whose components are exchanged, and the metric that compares them."""
    by, of, ends, align = question[:4]
    if not (callable(of) or of in TOTALS):
        raise ModelError(f"of must be one of {', '.join(TOTALS)}, or a function, found {of!r}")
    check_addresses()  # derivatives and forward passes are JAX's, whose first array starts XLA
    a, b, metric, exchanges_weights = _sides(a, b, metric, by, of, question.n_ctx)
    setting = Setting(metric, dtype_name(question.dtype), question.budget)
    if not exchanges_weights:
        return exchange_functions(a, b, setting, of, by, ends, align), metric
    if ends or align is not None:
        raise ModelError(
            "ends= and align= are for polynomials: here every weight belongs to a component, and "
            "weights are exchanged as they are"
        )
    return exchange_weights(a, b, setting, by, of), metric


def _sides(
    a: Any, b: Any, metric: Any, by: Any, of: Any, n_ctx: int | None
) -> tuple[Any, Any, Any, bool]:
    """Both networks, the metric, and whether weights are exchanged instead of functions.

    Polynomials have exact parts, so their weights are exchanged only where `by` or `of` asks.
    """
    a, b = loaded(a), loaded(b)
    if by in ("head", "unit") and not callable(of):
        return *comparables(a, b, metric, n_ctx), metric, False
    if by in (None, "layer") and not callable(of):
        given = a, b
        a, b, metric = with_metric(a, b, metric, n_ctx)
        functions = is_function(a), is_function(b)
        if any(functions) and not all(functions):
            raise ModelError(
                "one network is read as a model and the other is not, so that neither layers nor "
                "weights correspond: give two checkpoints of one network"
            )
        if not any(functions) and all(getattr(x, "is_polynomial", True) for x in (a, b)):
            return a, b, metric, False
        if by is None and isinstance(metric, Empirical) and all(map(is_function, given)):
            a, b = given  # a network that runs on inputs has the parts of its own code
        return a, b, metric, True
    # A folder of Hugging Face is a network with code of its own.
    a, b = (read_model(x, n_ctx, True) if folders_of_networks([x]) else x for x in (a, b))
    for one in (a, b):
        if not is_function(one):
            raise ModelError(
                "scores, and groups of weights, are those of a network itself: give modules of "
                f"PyTorch or functions of JAX, found {type(one).__name__}; of models and files "
                f"by= is one of {', '.join(GRANULARITIES)}"
            )
    return a, b, metric if callable(of) else estimated(metric, (a, b), n_ctx), True


def moved_by(
    a: Any,
    b: Any,
    metric: Metric,
    by: str | int | Sequence[str],
    n_ctx: int | None,
    dtype: DTypeLike = "float64",
) -> dict[str, float]:
    """How far every component alone moved a network, by forward passes or inner products alone.

    Args:
        a, b: The network before and after, as for `change`.
        metric: Metric that weighs the inputs.
        by: Granularity of components, as for `change`.
        n_ctx: Length of the sequences on which models with attention are compared.
        dtype: Precision of the computation.

    Returns:
        `|b - b with the component of a| / |b|` by component.

    Raises:
        Unchanged: The two are one function, or differ by rounding.
        ModelError, UnsupportedLayer, TooLarge: Raised as by `change`.

    Example:
        >>> import torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
        >>> b = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
        >>> sorted(moved_by(a, b, Empirical([[1.0]]), "module", None))
        ['0']
    """
    question = _Question(by, n_ctx=n_ctx, dtype=dtype)
    exchanges, _ = _exchanged(a, b, metric, question)
    length = exchanges.length
    # Rounding may take the squared norm of no difference below 0.
    back = np.sqrt(np.maximum(exchanges.swapped(True, length**2), 0.0))
    return dict(zip(exchanges.labels, (back / length).tolist(), strict=True))


def _jackknife(estimates: Float[np.ndarray, "groups components"]) -> np.ndarray | None:
    """Standard errors of shares from their values without each group of draws.

    They are infinite where the models do not differ without some group, so that shares of their
    change are undefined.
    """
    groups = len(estimates)
    if groups < 2:
        return None
    # The sums of all others, not differences: one group may have all but the last digits.
    left_out = (1.0 - np.eye(groups)) @ estimates
    totals = left_out.sum(axis=1, keepdims=True)
    if not totals.all():
        return np.full(left_out.shape[1], np.inf)
    return jackknife_error(left_out / totals)
