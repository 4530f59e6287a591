"""Parts of a single checkpoint, or of all checkpoints of a series, as models by name.

*Parts of a module* are held to the module's own blocks. A configuration says what a module was made
as. The module may compute something else since: an activation was replaced, a hook was registered,
a scale or a frequency was changed. So each block of which a part is asked for runs on random
states, hooks included, and is compared with its parts.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.adapters import merged_module, read_file
from tnsim.checkpoints.folders import located
from tnsim.checkpoints.formats import configuration
from tnsim.checkpoints.given import given_model, is_path_or_paths
from tnsim.checkpoints.load import ModelFile, Reading, Series, is_several, position_in
from tnsim.checkpoints.module_calls import as_numpy, copy_of, require_torch
from tnsim.checkpoints.modules import from_module, unwrapped_module
from tnsim.checkpoints.native import METADATA
from tnsim.circuits.standard_parts import (
    KINDS,
    Circuits,
    OwnParts,
    PartName,
    StandardParts,
    View,
    activation_of,
    checked_view,
)
from tnsim.circuits.transformer import LAYOUTS, NOT_POLYNOMIAL, Affine, Transformer, layout_of
from tnsim.errors import ModelError, TnsimError, UnsupportedLayer, naming, printable
from tnsim.models.model import Model, with_dense_matrices
from tnsim.options import checked
from tnsim.tables import html_table

BATCH, POSITIONS, WIDTH = 2, 7, 4
ALIKE = 3e-6
"""Relative difference between a block in float64 and its parts.

Norms, rotations and masks are computed in float32, also in modules of float64; one form of GELU
in the place of the other differs by 1e-4.
"""

States = Float[np.ndarray, "batch positions width"]


Anatomy: TypeAlias = StandardParts | OwnParts
"""A model that is taken apart."""


class BlockCall(NamedTuple):
    """A call of a submodule.

    Attributes:
        arguments: Its arguments by place.
        named: Its arguments by name.
        given: First argument, float64 or token numbers.
        result: First output, float64.
    """

    arguments: tuple
    named: dict[str, Any]
    given: np.ndarray
    result: np.ndarray


@dataclass(frozen=True, eq=False)
class PartsOfModule(StandardParts):
    """The parts of a module of PyTorch, each held to the block of which it is a part.

    Args:
        transformer: The maps of the module.
        module: The module; neither its weights nor its mode are changed.
    """

    module: Any = None
    _held: set[tuple[str, int | None]] = field(default_factory=set, repr=False)

    def part(self, name: PartName, view: View) -> Model:
        """The model of a part, compared with its block the first time.

        Raises:
            UnsupportedLayer: Where the module computes another function than its parts.
            ModelError: Where the module does not run.
        """
        self._check(name.kind, name.layer)
        return super().part(name, view)

    def circuits(self, kind: str, view: View) -> Circuits:
        """The maps of all heads on both sides of each circuit, each layer compared with its block.

        Raises:
            UnsupportedLayer, ModelError: Raised as by `part`.
        """
        for i in range(self.transformer.layers):
            self._check(kind, i)
        return super().circuits(kind, view)

    def ends(self, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Embeddings of all tokens and what reads outputs, compared with those of the module.

        Raises:
            UnsupportedLayer, ModelError: Raised as by `part`.
        """
        self._check("direct", None)
        return super().ends(kind)

    def _check(self, kind: str, i: int | None) -> None:
        kind = "heads" if kind in ("qk", "ov") else kind
        if (kind, i) in self._held:
            return
        with require_torch().no_grad():
            if i is None:
                self._check_ends()
            else:
                self._check_block(kind, i)
        self._held.add((kind, i))

    def _check_block(self, kind: str, i: int) -> None:
        layout, transformer = self.transformer.layout, self.transformer
        place = transformer.path(i)
        if place not in self._calls:
            raise UnsupportedLayer(f"the module does not call {place} when it runs")
        arguments, named = _in_float64(self._calls[place][:2])
        block = copy_of(self.module.get_submodule(place)).to("cpu").double().eval()
        is_heads = kind == "heads"
        before = layout.attention_norm if is_heads else layout.mlp_norm
        # OPT keeps the maps of its MLP in the layer itself.
        within = layout.o.rpartition(".")[0] if is_heads else layout.mlp or layout.down
        torch = require_torch()
        rng = torch.Generator().manual_seed(0)
        shape = (BATCH, POSITIONS, transformer.width)
        states = torch.randn(shape, generator=rng, dtype=torch.float64)
        if arguments:
            arguments = (states, *arguments[1:])
        else:
            named = {**named, "hidden_states": states}
        with _recorded(block, (before, within)) as seen:
            try:
                block(*arguments, **named)
            except Exception as reason:
                raise ModelError(
                    f"{place} does not run on random states, so its parts are not compared with "
                    f"it ({reason}): take the parts of its files, tnsim.parts(folder)"
                ) from reason
        if before not in seen or within not in seen:
            raise UnsupportedLayer(
                f"{place} does not call {before if before not in seen else within} when it runs, "
                "which its parts describe: take the parts of its files, tnsim.parts(folder)"
            )
        stream, found = (
            value.reshape(shape) for value in (seen[before].given, seen[within].result)
        )
        parts = self._attention_output(i, stream) if is_heads else self._mlp_output(i, stream)
        if difference := _difference(parts, found, ALIKE):
            raise self._refusal(f"{place}.{within}", "qk and ov" if is_heads else "mlp", difference)
        if not is_heads:
            self._check_activations(place, block)

    def _check_activations(self, place: str, block: Any) -> None:
        """Read the activations of a block, which may differ at numbers that no random state has."""
        expected = activation_of(self.transformer.activation)
        rows = np.linspace(-40.0, 40.0, 4000).reshape(-1, WIDTH)
        layout = self.transformer.layout
        for path, child in _activations_in(block):
            if path in (layout.attention_norm, layout.mlp_norm):
                continue  # a norm without weights is compared with the block's states, as any norm
            try:
                found = np.asarray(from_module(child, inputs=np.zeros((2, WIDTH)))(rows))
            except (UnsupportedLayer, ModelError) as refused:
                raise UnsupportedLayer(
                    f"{place}.{path} of this {type(self.module).__name__} computes something else "
                    f"than its mlp parts, an activation that is known: {refused}"
                ) from refused
            if difference := _difference(expected(rows), found, ALIKE):
                raise self._refusal(f"{place}.{path}", "mlp", difference)

    def _attention_output(self, i: int, stream: States) -> States:
        """What attention adds, from the maps of queries, keys, values and outputs."""
        transformer = self.transformer
        norm = transformer.attention_norm(i)
        read = norm.normalised(stream)[:, None]
        query, key, value = (
            _applied(transformer.head_maps(i, role).behind(norm), read) for role in "qkv"
        )
        if (turns := transformer.turns(range(0, -POSITIONS, -1))) is not None:
            query, key = (np.einsum("tij,bhtj->bhti", turns, x) for x in (query, key))
        scores = query @ key.swapaxes(-1, -2) * transformer.score_scale(i)
        seen = np.tri(POSITIONS, dtype=bool)
        if (window := transformer.window(i)) is not None:
            # Which keys a query sees is no part, so the window is taken as it is configured.
            seen &= ~np.tri(POSITIONS, k=-window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        pattern = np.exp(scores - scores.max(-1, keepdims=True))
        pattern /= pattern.sum(-1, keepdims=True)
        added = (pattern @ value @ transformer.outputs(i).swapaxes(-1, -2)).sum(1)
        bias = transformer.output_bias(i)
        return added if bias is None else added + bias

    def _mlp_output(self, i: int, stream: States) -> States:
        """What the MLP adds, from its maps and its activation."""
        part = super().part(PartName("mlp", i), View())
        read = self.transformer.mlp_norm(i).normalised(stream)
        return np.asarray(part(read.reshape(-1, read.shape[-1]))).reshape(read.shape)

    def _check_ends(self) -> None:
        """Compare embeddings and logits in the module's own dtype, at some tokens."""
        transformer, seen = self.transformer, self._calls
        tokens = self._tokens()
        first = seen[transformer.path(0)]
        start = as_numpy((*first.arguments, *first.named.values())[0])
        embedded = transformer.embedding()[tokens]
        added = start - embedded
        # A table of positions adds one vector to all tokens of a position.
        rest = added - (added[:1] if transformer.layout.positions is not None else 0.0)
        alike = _alike_in(self.module)
        if difference := _difference(embedded + rest, embedded, alike):
            raise self._refusal("the embedding", "direct", difference)
        if getattr(self.module, "base_model", None) is self.module:
            return  # a model without its head gives no logits that the tied table is held to
        norm = transformer.final_norm_path
        if norm not in seen:
            raise UnsupportedLayer(
                f"the module does not call {norm}, behind which its logits stand"
            )
        normed = transformer.final_norm()
        logits = transformer.unembedding()
        few = Affine(logits.weight[:64], None if logits.bias is None else logits.bias[:64])
        expected = _applied(few.behind(normed), normed.normalised(seen[norm].given))
        if difference := _difference(expected, seen[""].result[..., :64], alike):
            raise self._refusal("the unembedding", "direct", difference)

    def _refusal(self, place: str, parts: str, difference: float) -> UnsupportedLayer:
        name = type(self.module).__name__
        return UnsupportedLayer(
            f"{place} of this {name} computes something else than its {parts} parts, which its "
            f"weights and its configuration give (relative difference {difference:.2g} at random "
            "states): a replaced submodule, a hook or a changed constant is no part. Restore the "
            "module, or compare what it computes: tnsim.Empirical(inputs)"
        )

    def _tokens(self) -> np.ndarray:
        count = len(self.transformer.embedding())
        return np.random.default_rng(0).integers(0, count, (BATCH, POSITIONS))

    @cached_property
    def _calls(self) -> Mapping[str, BlockCall]:
        """One run of the module on random tokens, with the calls of blocks and final norm."""
        torch = require_torch()
        layers = map(self.transformer.path, range(self.transformer.layers))
        paths = [*layers, self.transformer.final_norm_path, ""]
        module = self.module
        device = next(module.parameters()).device
        tokens = torch.as_tensor(self._tokens(), device=device)
        with _recorded(module, paths) as seen, _evaluating(module):
            try:
                module(input_ids=tokens, use_cache=False)
            except Exception as reason:
                raise ModelError(
                    f"this {type(module).__name__} does not run on tokens, so its parts are not "
                    f"compared with it ({reason}): take the parts of its files, "
                    "tnsim.parts(folder)"
                ) from reason
        return seen


@contextlib.contextmanager
def _recorded(module: Any, paths: Iterable[str]) -> Iterator[dict[str, BlockCall]]:
    """The last call of each submodule while a module runs, hooks of others included."""
    seen: dict[str, BlockCall] = {}

    def record(path: str, _: Any, arguments: tuple, named: dict[str, Any], result: Any) -> None:
        # Outputs of blocks are arrays or tuples of which the states come first.
        first = result[0] if isinstance(result, tuple) else getattr(result, "logits", result)
        given = (*arguments, *named.values())[0]
        if hasattr(first, "detach"):
            seen[path] = BlockCall(arguments, named, as_numpy(given), as_numpy(first))

    with contextlib.ExitStack() as hooks:
        for path in paths:
            of_path, child = partial(record, path), module.get_submodule(path)
            hooks.enter_context(child.register_forward_hook(of_path, with_kwargs=True))
        yield seen


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Evaluation mode for a while, each submodule set back to its own mode afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _activations_in(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost submodules without weights that are no dropouts, by their names."""
    nn = require_torch().nn
    for name, child in module.named_children():
        if any(True for several in (child.parameters(), child.buffers()) for _ in several):
            yield from _activations_in(child, f"{path}{name}.")
        elif not isinstance(child, (nn.Identity, nn.modules.dropout._DropoutNd)):
            yield path + name, child


def _in_float64(values: Any) -> Any:
    """Arguments with float64 tensors on the host in the place of others."""

    def of_leaf(value: Any) -> Any:
        if not hasattr(value, "is_floating_point"):
            return value
        value = value.to("cpu")
        return value.double() if value.is_floating_point() else value

    return jax.tree.map(of_leaf, values)


def _applied(map_of: Affine, x: np.ndarray) -> np.ndarray:
    # A vector, or one for each head, stands at every position.
    bias = 0.0 if map_of.bias is None else map_of.bias[..., None, :]
    return x @ map_of.weight.swapaxes(-1, -2) + bias


def _difference(expected: np.ndarray, found: np.ndarray, alike: float) -> float:
    """Relative difference of two arrays, 0 where it is within rounding."""
    size = max(float(np.abs(found).max()), float(np.abs(expected).max()))
    difference = float(np.abs(expected - found).max())
    # Written so that a value that is no number differs.
    return 0.0 if difference <= alike * size else difference / (size or 1.0)


def _alike_in(module: Any) -> float:
    """Relative difference that rounding of a module's own dtype may make."""
    dtype = next(module.parameters()).dtype
    return max(ALIKE, 1e3 * float(require_torch().finfo(dtype).eps))


class Parts(Mapping[str, Model]):
    """Parts of a single checkpoint, as models by name such as `layer 0 head 3 qk`.

    A part is built when it is looked up; a safetensors file is then read as far as the part needs.

    Args:
        anatomy: Model that is taken apart.
        kinds: Kinds of parts.
        view: Choices about parts.
        file: Name of the file for messages, None for a model in memory.

    Attributes:
        names: Places of the parts, in order.

    Raises:
        ModelError: Where there is no part.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> file = Path(tnsim.__file__).parent / "data" / "induction" / "step_004000.safetensors"
        >>> tnsim.parts(file, ["qk"])
        Parts(8 parts: layer 1 head 0 qk, layer 1 head 1 qk, layer 1 head 2 qk, ...)
    """

    def __init__(
        self,
        anatomy: Anatomy,
        kinds: tuple[str, ...],
        view: View,
        file: str | os.PathLike[str] | None = None,
    ):
        self.file = file
        self.anatomy = anatomy
        self.kinds = kinds
        self.view = view
        self.names: tuple[PartName, ...] = tuple(
            name for kind in kinds for name in anatomy.names(kind)
        )
        if not self.names:
            raise ModelError(
                f"the model has no part of kind {' or '.join(kinds)}: compare it as a whole, by "
                "tnsim.similarity and tnsim.pairwise"
            )
        self._by_label = {str(name): name for name in self.names}

    def __getitem__(self, label: str) -> Model:
        name = self.place(label)
        with naming_file(self.file):
            return self.anatomy.part(name, self.view)

    def place(self, label: str) -> PartName:
        """The place of a part.

        Args:
            label: Name of the part, or the path of its module, such as "h.5.mlp".

        Returns:
            The place.

        Raises:
            UnknownPart: Where there is no such part.
        """
        if not isinstance(label, str):
            raise unknown_part(label, self)
        if label in self._by_label:
            return self._by_label[label]
        # A pattern that means a single part names it as well.
        matches = self.matching(label)
        if len(matches) != 1:
            with naming_file(self.file):
                raise unknown_part(label, self)
        return self._by_label[matches[0]]

    @checked
    def matching(self, pattern: str) -> list[str]:
        """The names of the parts that a pattern means.

        Args:
            pattern: Name of a part, or the path of a module with or without what stands before its
                first words; `*` stands for anything, as in "h.*.mlp".

        Returns:
            Names in order, none where nothing matches.
        """
        paths = {str(name): path for path, name in self.anatomy.paths().items()}

        def matches(label: str) -> bool:
            # The dots at both ends keep `mlp` from matching inside `other_mlp`.
            path = paths.get(label, label)
            known = f".{path}"
            return (
                fnmatch.fnmatchcase(label, pattern)
                or fnmatch.fnmatchcase(known, f"*.{pattern}")
                or fnmatch.fnmatchcase(f".{pattern}", f"*{known}")
            )

        return [label for label in self._by_label if matches(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_label)

    def __len__(self) -> int:
        return len(self._by_label)

    def __repr__(self) -> str:
        return f"Parts({_some_labels(self)})"

    def _repr_html_(self) -> str:
        return _parts_table(self.names)


def naming_file(model: Any) -> contextlib.AbstractContextManager[None]:
    """Put the name of the file of a model in front of every refusal, where there is a file."""
    file = model.file if isinstance(model, Parts) else model
    return naming(file) if isinstance(file, (str, os.PathLike)) else contextlib.nullcontext()


class UnknownPart(ModelError, KeyError):
    """A part that a model does not have."""

    def __str__(self) -> str:
        return self.args[0]  # unlike the text of a KeyError, without quotes


def unknown_part(label: Any, known: Any) -> UnknownPart:
    """The refusal of a name that is none of `known`."""
    return UnknownPart(f"there is no part {printable(repr(label), 80)} among {_some_labels(known)}")


def _some_labels(labels: Any) -> str:
    """The number of parts, and the first of them."""
    labels = list(labels)
    shown = ", ".join(labels[:3])
    return f"{len(labels)} parts: {shown}{', ...' if len(labels) > 3 else ''}"


def _parts_table(names: Sequence[PartName]) -> str:
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(name.kind, []).append(str(name))
    rows = [
        (kind, f"{len(names_of_kind)}, from {names_of_kind[0]}")
        for kind, names_of_kind in counts.items()
    ]
    return html_table(f"{len(names)} parts", rows, ("kind", "parts"))


@dataclass(frozen=True)
class PartOfFile:
    """A part of a checkpoint in a file, small enough to be sent to another process.

    Args:
        file: Checkpoint.
        name: Place of the part.
        view: Choices about parts.
    """

    file: ModelFile
    name: PartName
    view: View

    def read(self) -> Model:
        """The part, read from its file."""
        anatomy = _of_file(self.file)
        with naming(self.file.path):
            return _part_of(anatomy, self.name, self.view)


def _part_of(anatomy: Anatomy, name: PartName, view: View) -> Model:
    """A part of a checkpoint, which may have fewer layers than the first of its series."""
    if name not in anatomy.names(name.kind):
        raise unknown_part(str(name), map(str, anatomy.names(name.kind)))
    return anatomy.part(name, view)


class PartSeries(Sequence[Model]):
    """A part of all checkpoints of a series, or of all models of a list or a mapping.

    Models are looked up by their position or their label.

    Args:
        name: Place of the part.
        labels: Labels of the checkpoints.
        names: Names of the checkpoints in messages.
        sources: The part of each checkpoint: in its file, read when indexed, or a model.
    """

    def __init__(
        self,
        name: PartName,
        labels: Sequence[str],
        names: Sequence[str],
        sources: Sequence[PartOfFile | Model],
    ):
        self.name = name
        self.labels: tuple[str, ...] = tuple(labels)
        self.names: tuple[str, ...] = tuple(names)
        self.sources: tuple[PartOfFile | Model, ...] = tuple(sources)

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int | str) -> Model: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Model]: ...

    def __getitem__(self, index: int | str | slice) -> Model | Sequence[Model]:
        if isinstance(index, slice):
            return [self[n] for n in range(len(self))[index]]
        source = self.sources[position_in(index, self.labels)]
        return source.read() if isinstance(source, PartOfFile) else source

    def __repr__(self) -> str:
        return f"PartSeries({self.name} of {len(self)} checkpoints)"


class SeriesParts(Mapping[str, PartSeries]):
    """Parts of all checkpoints of a series, or of several models, as `pairwise` takes them.

    Args:
        series: Checkpoints, or models and files by label, at least one; the first says which parts
            there are.
        kinds: Kinds of parts.
        view: Choices about parts.

    Attributes:
        series: The checkpoints.
        names: Places of the parts, in order.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> run = tnsim.load(Path(tnsim.__file__).parent / "data" / "induction")
        >>> tnsim.parts(run, ["ov"])["layer 2 head 3 ov"]
        PartSeries(layer 2 head 3 ov of 12 checkpoints)
        >>> both = tnsim.parts({"before": run[0], "after": run[-1]}, ["ov"])
        >>> both["layer 2 head 3 ov"]
        PartSeries(layer 2 head 3 ov of 2 checkpoints)
    """

    def __init__(self, series: Series | Mapping[str, Any], kinds: tuple[str, ...], view: View):
        self.series = series
        self.kinds = kinds
        self.view = view
        self._anatomies: dict[str, Anatomy] = {}
        self._files: list[ModelFile] = []
        if isinstance(series, Series):
            # Other processes may have another working folder.
            paths = [path.absolute() for path in series.paths]
            self._files = [ModelFile(path, series.reading) for path in paths]
        else:
            for label, checkpoint in series.items():
                with naming(label):
                    self._anatomies[label] = opened(checkpoint)
        # The first checkpoint stands for all: parts are told by their names.
        label, anatomy = next(self._checkpoints())
        with naming(label):
            self._first = Parts(anatomy, kinds, view)
        self.names: tuple[PartName, ...] = self._first.names

    def of_kind(self, kind: str) -> SeriesParts:
        """The parts of a single kind."""
        chosen = copy.copy(self)  # with the files, of which models are in memory
        chosen.kinds = (kind,)
        chosen._first = Parts(self._first.anatomy, chosen.kinds, self.view)
        chosen.names = chosen._first.names
        return chosen

    def rests(self, digest: Callable[[Any], str]) -> list[dict[str, str]]:
        """What belongs to each checkpoint and to none of its parts, see `StandardParts.rest`.

        Args:
            digest: Function that makes the digest of an array or a setting.

        Returns:
            Digests by name, for each checkpoint. Checkpoints are opened one at a time, and of each
            one tensor.
        """
        found = []
        for label, anatomy in self._checkpoints():
            with naming(label):
                rest = anatomy.rest(self.names, self.view)
                found.append({name: digest(value) for name, value in rest})
        return found

    def _checkpoints(self) -> Iterator[tuple[str, Anatomy]]:
        """Every checkpoint with its name in messages."""
        for file in self._files:
            yield str(file.path), _of_file(file)
        yield from self._anatomies.items()

    def __getitem__(self, label: str) -> PartSeries:
        name = self._first.place(label)
        if isinstance(self.series, Series):
            sources = [PartOfFile(file, name, self.view) for file in self._files]
            return PartSeries(name, self.series.labels, self.series.names, sources)
        models = []
        for of, anatomy in self._anatomies.items():
            with naming(of):
                models.append(_part_of(anatomy, name, self.view))
        return PartSeries(name, list(self.series), list(self.series), models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"SeriesParts({len(self.series)} checkpoints, {_some_labels(self)})"

    def _repr_html_(self) -> str:
        return _parts_table(self.names)


@overload
def parts(
    checkpoint: Series | Mapping[Any, Any] | list[Any] | tuple[Any, ...],
    kinds: Sequence[str] | str = KINDS,
    *,
    distances: Sequence[int] = (1,),
    norm: str = "fold",
    centred: bool = False,
) -> SeriesParts: ...


@overload
def parts(
    checkpoint: Any,
    kinds: Sequence[str] | str = KINDS,
    *,
    distances: Sequence[int] = (1,),
    norm: str = "fold",
    centred: bool = False,
) -> Parts: ...


@checked(own="distances")
def parts(
    checkpoint: Any,
    kinds: Sequence[str] | str = KINDS,
    *,
    distances: Sequence[int] = (1,),
    norm: str = "fold",
    centred: bool = False,
) -> Parts | SeriesParts:
    r"""The parts of a standard transformer as models, each with exact inner products.

    A *qk* part is the score of a single head, before mask and softmax,

        (x_q, x_k) -> (Q x_q + b)^T R (K x_k + c) * scale,

    a model of the streams of query and key side by side, with an output for each distance where
    queries and keys are rotated (RoPE), else with a single output. An *ov* part is what a head adds
    to the stream, `x -> O (V x + b)`. An *mlp* part is what an MLP block adds, with its activation,
    which `Gaussian` and metrics of inputs compare: ReLU, GELU (two forms), SiLU, gated or not. The
    *direct* part is `token -> U E`, the logits of a token's own embedding.

    Parts read the stream as the norm before them leaves it. Softmax and the norms themselves are no
    parts, and norms between parts stay outside.

    A module is held to what it computes: the block of each part that is asked for runs on random
    states, hooks included, and is compared with its parts. Files have no code, so their parts are
    those of their configuration.

    Args:
        checkpoint: A file, a folder in Hugging Face's layout, a revision in a hub cache, an
            `nn.Module` of Hugging Face's library, a `Model` with bilinear attention or an
            `nn.Module` that `from_module` reads as such; or a series of checkpoints, or several of
            these in a list or by label in a mapping. Known layouts are GPT-2, GPT-NeoX, Llama,
            Mistral, Qwen2, OLMo 1, OPT and Gemma 1.
        kinds: Kinds of parts, of "qk", "ov", "mlp" and "direct".
        distances: Numbers of positions by which keys stand before their queries.
        norm: "fold" where parts read the normalised stream, gain and bias of the norm being folded
            into them; "leave" where parts read the output of the norm.
        centred: Whether qk parts are scores less their mean over keys of mean 0, which softmax does
            not see: biases of keys change no attention where positions are not rotated.

    Returns:
        A mapping from names, such as `layer 0 head 3 qk`, to models with float64 weights; an MLP
        also has the path of its module as a name, such as `transformer.h.0.mlp`. Layers
        have their numbers in the file; those of a `Model` their numbers in the model. For several
        checkpoints the mapping leads to `PartSeries`, and the whole is what `pairwise` takes.

    Raises:
        UnsupportedLayer: The layout is unknown, or the transformer normalises queries and keys,
            caps scores, or has an activation without a name here where MLPs are asked for. On
            looking a part up: its block of the module computes something else, or scores of it
            cannot be centred.
        CheckpointError: A file is damaged, or a tensor has no place in the layout.
        ModelError: A kind or a distance is unknown, or there is no part.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> file = Path(tnsim.__file__).parent / "data" / "induction" / "step_004000.safetensors"
        >>> head = tnsim.parts(file, distances=[1, 2])["layer 1 head 0 qk"]
        >>> head.d_in, head.d_out
        (64, 2)

    Source:
        Elhage et al., A Mathematical Framework for Transformer Circuits, 2021, section on
        attention heads, for QK and OV circuits.
    """
    view = checked_view(distances, norm, centred)
    chosen = checked_kinds(kinds)
    if isinstance(checkpoint, (str, os.PathLike)) and is_several(checkpoint):
        checkpoint = Series(checkpoint)
    if isinstance(checkpoint, (list, tuple)):
        # Several files are a series, with the labels that a series gives them.
        paths = is_path_or_paths(checkpoint)
        checkpoint = Series(checkpoint) if paths else dict(enumerate(checkpoint))
    if isinstance(checkpoint, Mapping):
        given, checkpoint = checkpoint, {str(label): model for label, model in checkpoint.items()}
        if len(checkpoint) < len(given):
            raise ModelError(
                f"labels are compared as text, and {len(given)} models have {len(checkpoint)} "
                "different ones; give each model a label of its own"
            )
    if isinstance(checkpoint, Mapping) and not checkpoint:
        raise ModelError("parts are those of at least one model, found none")
    if isinstance(checkpoint, (Series, Mapping)):
        return SeriesParts(checkpoint, chosen, view)
    anatomy = opened(checkpoint)
    file = checkpoint if isinstance(checkpoint, (str, os.PathLike)) else None
    with naming_file(file):
        return Parts(anatomy, chosen, view, file)


def checked_kinds(kinds: Sequence[str] | str) -> tuple[str, ...]:
    """Kinds of parts, each once, in the order of `KINDS`.

    Raises:
        ModelError: Where a kind is unknown, or there is none.

    Example:
        >>> checked_kinds("ov"), checked_kinds(["ov", "qk"])
        (('ov',), ('qk', 'ov'))
    """
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown or not given:
        refused = printable(repr(unknown[0] if unknown else kinds), 80)
        raise ModelError(f"kinds of parts are {', '.join(KINDS)}, found {refused}")
    return tuple(kind for kind in KINDS if kind in given)


def opened(checkpoint: Any, reading: Reading = Reading()) -> Anatomy:
    """A checkpoint or a model, ready to be taken apart.

    Args:
        checkpoint: File, folder, revision, module or model, as in `parts`.
        reading: Options of reading for files in no known layout of a transformer.

    Returns:
        The model; tensors of a file in a known layout are not read yet.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: Raised as by `parts`.
    """
    if isinstance(checkpoint, Model):
        return OwnParts(with_dense_matrices(checkpoint))
    if isinstance(checkpoint, (str, os.PathLike)):
        return _of_file(ModelFile(Path(checkpoint), reading))
    checkpoint = merged_module(unwrapped_module(checkpoint))
    config, state = (getattr(checkpoint, name, None) for name in ("config", "state_dict"))
    if not callable(state):
        raise ModelError(
            "parts are those of a file, a folder, a tnsim.Model, an nn.Module, or several of "
            f"these in a list or by label, found {type(checkpoint).__name__}"
        )
    if config is None:
        return OwnParts(with_dense_matrices(given_model(checkpoint)))
    entries = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    tensors: Any = state()
    transformer = Transformer.of(tensors, entries)
    # A state dict with a configuration describes a module; a module is what it computes.
    if hasattr(checkpoint, "register_forward_hook"):
        return PartsOfModule(transformer, checkpoint)
    return StandardParts(transformer)


def _of_file(file: ModelFile) -> Anatomy:
    """A transformer in a known layout, whose tensors are read when asked for, else a model."""
    path, reading = file.path, file.reading
    config: Mapping[str, Any] = {}
    # Files of tnsim and files with a dialect are read by their own rules.
    if reading.dialect is None:
        with naming(path):
            inventory, told_by = read_file(located(path))
            if METADATA not in inventory.metadata:
                config = configuration(told_by) or {}
            # Types that are refused go there as well, for the reason that the layout knows.
            if config.get("model_type") in {*LAYOUTS, *NOT_POLYNOMIAL}:
                _, n_ctx, leave_out, norm_inputs = reading
                if leave_out or norm_inputs is not None or n_ctx is not None:
                    raise ModelError(
                        "parts in the layout of a configuration hold all of their tensors, behind "
                        "the norm, of sequences of any length: leave_out (--leave-out), "
                        "norm_inputs (--norm-inputs) and n_ctx (--n-ctx) do not apply, leave them "
                        "out"
                    )
                return StandardParts(Transformer.of(inventory.state, config))
    try:
        return OwnParts(with_dense_matrices(file.model))
    except TnsimError:
        if "model_type" not in config:
            raise
        with naming(path):
            layout_of(config)  # says that the type is unknown
        raise
