"""Parts of a module held to the module's own blocks at random states.

A configuration says what a module was made as. The module may compute something else since: an
activation was replaced, a hook was registered, a scale or a frequency was changed. So each block
of which a part is asked for runs on random states, hooks included, and is compared with its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.module_calls import as_numpy, copy_of, require_torch
from tnsim.checkpoints.modules import from_module
from tnsim.circuits.standard_parts import Circuits, PartName, StandardParts, View, activation_of
from tnsim.circuits.transformer import Affine
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.models.model import Model

BATCH, POSITIONS, WIDTH = 2, 7, 4
ALIKE = 3e-6
"""Relative difference between a block in float64 and its parts.

Norms, rotations and masks are computed in float32, also in modules of float64; one form of GELU
in the place of the other differs by 1e-4.
"""

States = Float[np.ndarray, "batch positions width"]


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

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of all tokens and the unembedding, compared with those of the module.

        Raises:
            UnsupportedLayer, ModelError: Raised as by `part`.
        """
        self._check("direct", None)
        return super().ends()

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
