"""Similarity along a training run, recorded while the run trains.

A `Monitor` is called with the step and the module. Every so many steps it keeps the function that
the module computes then, and compares the function with the first, with the one recorded before
and with a reference: three numbers for any logger, and a matrix of all pairs of those kept. Under a
metric that compares weights, the function is a `Model` read from the module, which holds the
weights alone; under `Empirical` it is a copy of the module, which runs on the metric's inputs.

Loggers and training loops are told by their methods: nothing of wandb, TensorBoard, Lightning or
Hugging Face is imported, except the base class that a training loop asks of its callbacks, where an
adaptor is made for this loop.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from tnsim.analysis import figures, matrices
from tnsim.checkpoints.given import given_model
from tnsim.checkpoints.module_calls import copy_of, diverged
from tnsim.compare.centred import without_mean
from tnsim.compare.request import estimated, may_estimate
from tnsim.compare.similarity import similarity
from tnsim.engine.ir.problem import dtype_name
from tnsim.errors import CaveatWarning, MissingExtra, ModelError, UnsupportedLayer, warn
from tnsim.localise.change import moved_by
from tnsim.localise.differences import Unchanged
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import is_count
from tnsim.models.functions import is_module
from tnsim.models.model import check_length
from tnsim.options import checked

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

PREFIX, MOVED = "similarity/", "moved/"
"""Beginnings of the names under which loggers show the numbers."""


class Monitor:
    """Similarity of a network in training to its first, its previous and a reference state.

    Args:
        metric: Metric that weighs the inputs, or its name; under `Gaussian` networks without an
            exact inner product are estimated on normal inputs. `Empirical` for networks that read
            tokens or images, or for inputs of yours.
        reference: Model, module or path of a file to compare with; None for none.
        every: Steps from one record to the next.
        matrix: Most models in the matrix, at least 2; where it is full, every second of its models
            is left out.
        n_ctx: Length of the sequences on which models with attention are compared.
        centred: Whether similarities are those of functions without their means over the inputs.
        by: Components of which is recorded how far each moved the function since the last record,
            `"module"`, `"block"`, a list of beginnings of names or another granularity of
            `tnsim.change`, at a forward pass over the inputs for each; None for none.
        dtype: Precision of what components moved, float64 or float32; the latter for networks whose
            code knows no float64, such as mixtures of experts of Hugging Face.
        log: Logger: an object with `log(numbers, step=)` as a wandb run, with `add_scalar` as a
            `SummaryWriter`, or a function of (numbers, step); None for none.

    Attributes:
        history: Numbers of every record, each with its step.

    Raises:
        ModelError: A setting is no positive number, or the logger has no known method.

    Example:
        >>> import torch, tnsim
        >>> net = torch.nn.Linear(2, 2)
        >>> monitor = tnsim.torch.Monitor(every=10)
        >>> for step in range(21):
        ...     with torch.no_grad():
        ...         net.weight[0, 0] += 0.1
        ...     numbers = monitor(step, net)
        >>> [row["step"] for row in monitor.history], sorted(numbers)
        ([0, 10, 20], ['similarity/first', 'similarity/previous'])
        >>> monitor.similarity.shape
        (3, 3)
    """

    @checked(own="every matrix")
    def __init__(
        self,
        metric: Metric | str = Gaussian(),
        *,
        reference: Any = None,
        every: int = 100,
        matrix: int = 32,
        n_ctx: int | None = None,
        centred: bool = False,
        by: str | int | Sequence[str] | None = None,
        dtype: DTypeLike = "float64",
        log: Any = None,
    ) -> None:
        if not (is_count(every) and is_count(matrix) and matrix > 1):
            raise ModelError(
                f"a record every {every!r} steps and {matrix!r} models in the matrix: give whole "
                "numbers, at least 1 and 2"
            )
        check_length(n_ctx)
        metric = as_metric(metric)
        self.history: list[dict[str, float]] = []
        self._metric, self._every, self._most, self._n_ctx = metric, every, matrix, n_ctx
        self._inputs = metric.inputs if isinstance(metric, Empirical) else None
        self._centred = centred
        self._reference = None if reference is None else self._function(_frozen(reference))
        self._by, self._components, self._before = by, (), None
        self._dtype = dtype_name(dtype)
        self._send = None if log is None else _sender(log)
        self._first: Any = None
        self._previous: Any = None
        self._kept: list[tuple[int, Any]] = []
        self._values = np.empty((0, 0))

    def __repr__(self) -> str:
        watched = ["similarity to the first and the previous state"]
        watched += ["a reference"] * (self._reference is not None)
        watched += [f"moves by {self._by!r}"] * (self._by is not None)
        metric = self._metric.name + ", centred" * self._centred
        records = f"every {self._every} steps, {len(self.history)} records"
        return f"Monitor({', '.join(watched)}; {metric}, {records})"

    def __call__(self, step: int, module: Any) -> dict[str, float]:
        """Record the module where a record is due.

        Args:
            step: Number of the step; records are due at multiples of `every`.
            module: Network in training; its weights and its mode stay as they are.

        Returns:
            Similarities by name, `similarity/first`, `similarity/previous` and
            `similarity/reference` as far as there are any, and for each component, as in
            `moved/h.0.attn`, the norm of what the function loses where the component is put back to
            the last record, in units of the function's norm; nothing where no record is due, and,
            with a warning, at steps below that of the last record.

        Raises:
            ModelError: The step is no whole number, or the module cannot be compared.
            UnsupportedLayer: The module cannot be compared under the metric.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise ModelError(f"step must be a whole number, found {step!r}") from None
        # A training loop may report a step several times, for instance while it accumulates
        # gradients.
        last = self.history[-1]["step"] if self.history else step - 1
        if step < last:  # no reason to end a run of training
            warn(
                f"steps went back: nothing is recorded before step {last:g} is passed, as a "
                "monitor records one run, whose steps increase; make another Monitor where "
                "training begins again",
                CaveatWarning,
            )
            return {}
        if step % self._every or step == last:
            return {}
        frozen = _frozen(module)
        now = self._function(frozen)
        # Comparisons asked for by name, and with all models of the matrix. A model that stands
        # under several names is compared once, which its identity tells.
        named = {"first": self._first, "previous": self._previous, "reference": self._reference}
        named = {name: other for name, other in named.items() if other is not None}
        others = [*named.values(), *(model for _, model in self._kept)]
        distinct = {id(other): other for other in others}
        # Pair by pair: a row of all pairs would compile anew for every length of the row.
        by_object = {}
        for key, other in distinct.items():
            by_object[key] = float(similarity(now, other, self._metric))
        numbers = {PREFIX + name: by_object[id(other)] for name, other in named.items()}
        numbers |= self._moved(frozen)
        self._keep(step, now, [by_object[id(model)] for _, model in self._kept])
        self._first = now if self._first is None else self._first
        self._previous = now
        self.history.append({"step": step, **numbers})
        if self._send is not None:
            self._send(numbers, step, self._pixels)
        return numbers

    @property
    def similarity(self) -> xr.DataArray:
        """All pairs of the models kept, float64 in [-1, 1], over (a, b), labelled by step."""
        steps = [step for step, _ in self._kept]
        about = {"metric": self._metric.name}
        return matrices.labelled(self._values.copy(), steps, about, "similarity")

    def figure(self) -> Figure:
        """The matrix as a figure of matplotlib; nothing is shown."""
        return figures.heatmap(self._values, [str(step) for step, _ in self._kept])

    def lightning(self) -> Any:
        """A callback for the `Trainer` of Lightning, which counts its optimiser steps.

        Without a logger of its own the monitor writes to the loggers of the trainer.

        Raises:
            MissingExtra: Lightning is not installed.
        """
        base = _base(("lightning.pytorch", "pytorch_lightning"), "Callback")
        # Inside the callback `self` is the callback, so the monitor goes by a name of its own.
        monitor = self

        def record(_: Any, trainer: Any, module: Any, *rest: Any) -> None:
            numbers = monitor(trainer.global_step, module)
            if numbers and monitor._send is None:
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=trainer.global_step)
                    _send_picture(logger.experiment, trainer.global_step, monitor._pixels)

        hooks = {"on_train_start": record, "on_train_batch_end": record}
        return type("SimilarityCallback", (base,), hooks)()

    def trainer(self) -> Any:
        """A callback for the `Trainer` of Hugging Face.

        Numbers are added to the trainer's log history, and written by the logger of the monitor.

        Raises:
            MissingExtra: transformers is not installed.
        """
        base = _base(("transformers",), "TrainerCallback")
        monitor = self

        def record(
            _: Any, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
        ) -> None:
            if numbers := monitor(state.global_step, model):
                state.log_history.append({**numbers, "step": state.global_step})

        # The class is made here because its base class exists only where the training loop is
        # installed.
        hooks = {"on_train_begin": record, "on_step_end": record}
        return type("SimilarityCallback", (base,), hooks)()

    def _moved(self, now: Any) -> dict[str, float]:
        """How far every component moved the function since the last record."""
        before, self._before = self._before, now if self._by is not None else None
        if self._by is None or before is None:
            return {}
        try:
            moved = moved_by(before, now, self._metric, self._by, self._n_ctx, self._dtype)
        except Unchanged:
            moved = dict.fromkeys(self._components, 0.0)
        self._components = tuple(moved)
        return {MOVED + name: value for name, value in moved.items()}

    def _function(self, module: Any) -> Any:
        """The function of a module, without its mean if asked."""
        try:
            runs = may_estimate(self._metric)
            function = given_model(module, self._n_ctx, self._inputs, runs=runs)
            self._metric = estimated(self._metric, [function], self._n_ctx)
            if isinstance(self._metric, Empirical):  # later states run as they are
                self._inputs = self._metric.inputs
        except (UnsupportedLayer, ModelError) as refusal:
            if self._inputs is not None:
                raise
            if is_module(module) and (said := diverged(module)):
                raise ModelError(said) from None
            raise type(refusal)(
                "this network is monitored on inputs of yours: "
                f"tnsim.torch.Monitor(tnsim.Empirical(inputs)); {refusal}"
            ) from None
        return without_mean(function, self._metric) if self._centred else function

    def _keep(self, step: int, model: Any, row: list[float]) -> None:
        """Add a model to the matrix; a full matrix loses every second of its models first."""
        # Leaving out every second model keeps the matrix evenly spaced in time at a bounded number
        # of models. The row of the new model loses the same columns.
        if len(self._kept) == self._most:
            self._kept, row = self._kept[::2], row[::2]
            self._values = self._values[::2, ::2]
        count = len(self._kept)
        # The matrix grows by a row and a column. The diagonal is 1.
        values = np.ones((count + 1, count + 1))
        values[:count, :count] = self._values
        values[count, :count] = values[:count, count] = row
        self._kept.append((step, model))
        self._values = values

    def _pixels(self) -> np.ndarray:
        """The picture of the matrix, (height, width, 3), uint8."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(self.figure())
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _frozen(module: Any) -> Any:
    """A copy of a module as it is now, which later steps of training leave alone."""
    # A module is copied whole, with dropout off and without gradients, and the module in training
    # stays in its mode.
    if is_module(module):
        frozen = copy_of(module).eval()
        for parameter in frozen.parameters():
            # The weights of a copied program of TorchScript are computed from those of the first.
            parameter.requires_grad_(False) if parameter.is_leaf else parameter.detach_()
        return frozen
    return module


def _base(modules: tuple[str, ...], name: str) -> type:
    """The class that a training loop asks of its callbacks."""
    import importlib

    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    raise MissingExtra(modules[0].split(".")[0], None, "a callback of its trainer")


def _sender(log: Any) -> Callable[[Mapping[str, float], int, Callable[[], np.ndarray]], Any]:
    """The function that gives numbers and a picture to a logger."""
    if hasattr(log, "add_scalar"):

        def send(numbers: Mapping[str, float], step: int, pixels: Any) -> None:
            for name, value in numbers.items():
                log.add_scalar(name, value, step)
            _send_picture(log, step, pixels)

        return send
    if hasattr(log, "log"):

        def send(numbers: Mapping[str, float], step: int, pixels: Any) -> None:
            log.log({**numbers, **_picture(log, pixels)}, step=step)

        return send
    if callable(log):
        return lambda numbers, step, pixels: log(dict(numbers), step)
    raise ModelError(
        "log is a function of (numbers, step), or has the method add_scalar or log, found "
        f"{type(log).__name__}"
    )


def _send_picture(log: Any, step: int, pixels: Callable[[], np.ndarray]) -> None:
    """Give the matrix to a logger that takes pictures."""
    if hasattr(log, "add_image"):
        log.add_image(f"{PREFIX}matrix", pixels(), step, dataformats="HWC")
    elif picture := _picture(log, pixels):
        log.log(picture, step=step)


def _picture(log: Any, pixels: Callable[[], np.ndarray]) -> dict[str, Any]:
    """The matrix in the form that wandb takes; nothing for other loggers."""
    # A logger of wandb exists only where wandb has been imported, so nothing is imported here.
    wandb = sys.modules.get("wandb")
    if wandb is None or not hasattr(log, "log"):
        return {}
    return {f"{PREFIX}matrix": wandb.Image(pixels())}
