"""Models as rows of layers, linear combinations of models, and layers in a line of text.

Models form a vector space of functions, so `a - b` and `2.0 * a` are models too: a `Combination`
stores coefficients and models, and every inner product expands by bilinearity (paper, section 2.4,
tensor diff similarity). No larger network is ever built.

A model keeps the record of how it was read (`Origin`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.errors import CaveatWarning, ModelError, TooLarge, warn
from tnsim.models.arrays import (
    Array,
    bias_name,
    bytes_of,
    is_count,
    is_fixed,
    is_sparse,
    is_sparse_matrix,
    is_traced,
    register_pytree,
    rename_errors,
    requires_grad,
    scalar,
    set_arrays,
    with_numpy,
    written_out,
)
from tnsim.models.layers import (
    Attention,
    Layer,
    OwnLayer,
    Residual,
    activation_of,
    innermost,
    known_layer,
    map_names,
    with_widths,
)
from tnsim.options import checked, shown
from tnsim.sessions import per_object_cache, session
from tnsim.tables import html_table

Seed: TypeAlias = int | np.random.Generator | jax.Array
"""What random numbers are drawn from: a number, a NumPy generator or a JAX key."""


V = TypeVar("V")


def check_numbers(*models: Any) -> None:
    """Refuse weights that require grad in a computation that has no gradients to give.

    Raises:
        ModelError: A weight of a model, or of a model in a combination, requires grad.

    Example:
        >>> import tnsim
        >>> check_numbers(tnsim.Model([tnsim.Linear([[1.0]])]))
    """
    if any(map(requires_grad, jax.tree.leaves(models))):
        raise ModelError(
            "weights of a model are PyTorch tensors that require grad, and the gradient would be "
            "lost here: use tnsim.torch.similarity, or build the model of tensor.detach() where "
            "none is wanted"
        )


def check_untraced(verb: str, *arguments: Any, instead: str = "") -> None:
    """Refuse what JAX traces where a computation reads numbers.

    Args:
        verb: Name of the function that was called.
        arguments: Models, metric and arrays.
        instead: Further advice, the end of a sentence.

    Raises:
        ModelError: An array is traced.

    Example:
        >>> check_untraced("paths", np.ones(2))
    """
    if is_traced(arguments):
        raise ModelError(
            f"{verb} reads numbers, which a JAX trace does not have: call it outside of jax.jit, "
            "jax.vmap and jax.grad; similarity, inner, log_inner and slices, of "
            f"switched(model, z) as well, can be traced{instead}"
        )


def check_comparable(a: Any, b: Any) -> None:
    """Refuse models that cannot be compared.

    Raises:
        ModelError: The models read different inputs, give different outputs, or differ in `n_ctx`.

    Example:
        >>> import tnsim
        >>> a = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[1.0, 2.0]])])
        >>> check_comparable(a, b)
        Traceback (most recent call last):
        tnsim.errors.ModelError: the models read different inputs: 1 and 2 coordinates
    """
    if a.d_in != b.d_in:
        raise ModelError(f"the models read different inputs: {a.d_in} and {b.d_in} coordinates")
    if a.d_out != b.d_out:
        raise ModelError(f"the models have different outputs: {a.d_out} and {b.d_out}")
    if a.n_ctx != b.n_ctx:
        raise ModelError(
            f"the models read sequences of different length: n_ctx={a.n_ctx} and n_ctx={b.n_ctx}"
        )


def seed_number(seed: Seed, what: str = "the seed") -> int:
    """A seed as a number, from which the same inputs can be drawn again.

    Args:
        seed: Number of 0 or more; a NumPy generator, from which a number is drawn, so that its
            next use gives other inputs; or a JAX key, whose words are the digits of the number.
        what: Words for the seed in messages.

    Returns:
        A number of 0 or more; a number that is given is returned as it is.

    Raises:
        ModelError: The seed is none of these, a negative number or a key that is traced.

    Example:
        >>> seed_number(7), seed_number(jax.random.key(5)), seed_number(np.random.default_rng(0))
        (7, 5, 5874934615388537135)
    """
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(2**63))
    if is_traced(seed):
        raise ModelError(f"{what} is traced, and inputs are drawn outside the JAX trace")
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    try:
        words: Any = np.asarray(seed)
    except ValueError:  # rows of unequal length, which are refused below
        words = np.empty(0)
    if words.dtype == np.uint32 and words.ndim == 1 and len(words):  # a key of the older kind
        # The words of a key are digits in base 2^32, the first the highest.
        return int.from_bytes(words.astype(">u4").tobytes(), "big")
    try:
        number = operator.index(words.item() if words.ndim == 0 else seed)
    except TypeError:
        # Negative numbers are refused below, so a value that is no number joins them.
        number = -1
    # True would be seed 1 by accident.
    if number < 0 or isinstance(seed, bool):
        raise ModelError(
            f"{what} must be 0 or more, a NumPy generator or a JAX key, found {seed!r}"
        )
    return number


def normal_inputs(count: int, model: Any, seed: Seed) -> Float[np.ndarray, "n *positions in"]:
    """Standard normal inputs in the shape that a model reads.

    Args:
        count: Number of inputs.
        model: Model, or sum of models, that reads them.
        seed: Seed of the draws.

    Raises:
        TooLarge: Memory does not hold so many.

    Example:
        >>> import tnsim
        >>> normal_inputs(5, tnsim.Model([tnsim.Linear([[1.0, 2.0]])]), seed=0).shape
        (5, 2)
    """
    each = (model.d_in,) if model.n_ctx is None else (model.n_ctx, model.d_in)
    rng = np.random.default_rng(seed_number(seed))
    try:
        return rng.normal(size=(count, *each))
    except (MemoryError, ValueError, OverflowError):
        raise TooLarge(
            f"memory does not hold {count:,} inputs of shape {each}: draw fewer"
        ) from None


def check_length(n_ctx: Any) -> None:
    """Refuse a value that is no length of sequences.

    Raises:
        ModelError: The value is neither None nor a positive integer.

    Example:
        >>> check_length(-1)
        Traceback (most recent call last):
        tnsim.errors.ModelError: n_ctx must be a positive integer or None, found -1
    """
    if n_ctx is not None and not is_count(n_ctx):
        raise ModelError(f"n_ctx must be a positive integer or None, found {n_ctx!r}")


@dataclass(frozen=True)
class Origin:
    """Record of how a model was read, and how far it may be from the network in the file.

    A model holds its record as `model.origin`. Arithmetic and JAX's tree functions make new models
    without a record; a `Combination` holds the records of its terms.

    Args:
        source: Source of the weights, such as a state dict or a class of PyTorch.
        assumptions: Facts that were taken for granted, a sentence each, with the values found.
        caveats: Parts of the network that the model leaves out or approximates, a sentence each.
        ignored: Names of tensors that are no part of the function.
        error: Relative root mean square difference from the network's own forward pass; None if
            the network did not run.
        dialect: The `Dialect` that reads the state dict, or None.

    Example:
        >>> Origin("a state dict", caveats=("left out: norm.weight",)).caveats
        ('left out: norm.weight',)
    """

    source: str
    assumptions: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    error: float | None = None
    dialect: Any = None


def warn_of_caveats(caveats: tuple[str, ...]) -> None:
    """Warn that a number may be about other functions than the networks that were read.

    Args:
        caveats: Caveats of all models that the number is about.

    Warns:
        CaveatWarning: There is a caveat.

    Example:
        >>> warn_of_caveats(())
    """
    if caveats:
        warn(
            "the models are not quite the networks they were read from, or not known to be: "
            f"{'; '.join(caveats)}",
            CaveatWarning,
        )


def describe(layer: Layer) -> str:
    """Describe a layer in a single line: kind, shapes, biases, residual rule.

    Example:
        >>> import tnsim
        >>> describe(tnsim.Linear([[1.0, 2.0]], [0.0]))
        'Linear(2 -> 1, bias)'
        >>> describe(tnsim.Multilinear([[[1.0]]] * 3, [[1.0]]))
        'Multilinear(1 -> 1, rank 1)'

        A pytree holds anything where a function of JAX has put it:

        >>> describe(jax.tree.map(np.shape, tnsim.Linear([[1.0, 2.0]])))
        'Linear(weight=(1, 2))'
    """
    if isinstance(layer, Residual):
        skip, scale = _number_text(layer.skip), _number_text(layer.scale)
        return f"Residual({describe(layer.layer)}, skip={skip}, scale={scale})"
    names = map_names(layer)
    maps = {name: getattr(layer, name) for name in names}
    if any(len(getattr(each, "shape", ())) < 2 for each in maps.values()):
        return f"{type(layer).__name__}({', '.join(f'{k}={v!r}' for k, v in maps.items())})"
    facts = [f"{layer.d_in} -> {layer.d_out}"]
    if isinstance(layer, Attention):
        facts.append(f"{layer.n_heads} heads of {layer.d_head}")
        facts.append(f"{layer.mask} mask")
        facts.append("no RoPE" if layer.rope_base is None else f"RoPE base {layer.rope_base:g}")
    elif len(names) > 1:
        facts.append(f"rank {maps[names[0]].shape[-2]}")
    activation = activation_of(layer)
    if activation is not None:
        facts.append(activation.name)
    biases = map(bias_name, names)
    facts += [bias for bias in biases if getattr(layer, bias) is not None]
    return f"{type(layer).__name__}({', '.join(facts)})"


def _number_text(x: Any) -> str:
    return f"{x:g}" if isinstance(x, float) else "array"


class _Vector:
    """What `Model` and `Combination` share: arithmetic, and that no attribute is set again."""

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        raise AttributeError(f"{kind} is immutable, cannot set {name!r}; build a new one")

    def __add__(self, other: Any) -> Combination:
        return _combined_terms(self, other, 1.0)

    def __radd__(self, other: Any) -> Combination:
        # Python's `sum` begins with the number 0.
        return Combination(terms(self)) if type(other) is int and not other else NotImplemented

    def __sub__(self, other: Any) -> Combination:
        return _combined_terms(self, other, -1.0)

    def __mul__(self, factor: float) -> Combination:
        coefficient = with_numpy(scalar(factor, "a coefficient of a model"))
        return Combination(((coefficient * with_numpy(c), m) for c, m in terms(self)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Combination:
        by = with_numpy(scalar(divisor, "the divisor of a model"))
        if isinstance(by, float) and not by:
            raise ModelError("a model is divided by 0: give another divisor")
        return Combination(((with_numpy(c) / by, m) for c, m in terms(self)))

    def __neg__(self) -> Combination:
        return -1.0 * self


class Model(_Vector):
    """Layers applied in order to an input of shape (d_in,), or (..., d_in) for a batch.

    With `n_ctx` the input is a sequence, (..., n_ctx, d_in): `Attention` mixes positions, all other
    layers act on every position alone, and inner products sum over positions. A model with
    attention may leave `n_ctx` open and be called on any length, but comparisons need a length.

    A model is immutable, and a pytree whose leaves are the weights.

    Args:
        layers: Layers in order, from the input up.
        n_ctx: Number of positions of a sequence; None for vectors, or for any length.
        origin: Record of how the model was read; None for a model that was built.

    Raises:
        ModelError: There is no layer, or two neighbours do not chain.
        UnsupportedLayer: A layer is none that tnsim knows.

    Example:
        >>> import numpy as np
        >>> import tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> fourth = Model([square, square])
        >>> fourth(np.array([2.0])), fourth.degree
        (array([16.]), 4)

    Source:
        Paper, section 2.1.
    """

    layers: tuple[Layer, ...]
    n_ctx: int | None
    # No part of the pytree, as new weights have another origin, and are to be checked anew.
    origin: Origin | None = None
    _is_checked: bool = False

    @checked
    def __init__(
        self,
        layers: Iterable[Layer | OwnLayer],
        n_ctx: int | None = None,
        origin: Origin | None = None,
    ):
        layers = tuple(layers)
        if not layers:
            raise ModelError("a model needs at least one layer, found none")
        # Widths are settled before neighbours are checked, as elementwise layers take theirs from
        # them.
        known = with_widths(known_layer(layer, f"layer {i}") for i, layer in enumerate(layers))
        for i, (first, second) in enumerate(itertools.pairwise(known)):
            if first.d_out != second.d_in:
                raise ModelError(
                    f"layer {i + 1} expects {second.d_in} inputs but layer {i} gives {first.d_out}"
                )
        check_length(n_ctx)
        if n_ctx is not None:  # sequences are read through dense matrices
            known = tuple(map(written_out, known))
        set_arrays(self, layers=known, n_ctx=n_ctx, origin=origin, _is_checked=True)

    @property
    def d_in(self) -> int:
        """Coordinates of the input, at a single position of a sequence."""
        return self.layers[0].d_in

    @property
    def d_out(self) -> int:
        """Coordinates of the output, at a single position of a sequence."""
        return self.layers[-1].d_out

    @cached_property
    def orders(self) -> tuple[int, ...]:
        """Order of each layer in its own input."""
        return tuple(layer.order for layer in self.layers)

    @cached_property
    def degree(self) -> int:
        """Degree of the polynomial, which is the number of legs of the unrolled tree.

        Infinite where a layer has an activation.
        """
        return math.prod(self.orders)

    @cached_property
    def is_polynomial(self) -> bool:
        """Whether no layer has an activation."""
        return not any(map(activation_of, self.layers))

    @cached_property
    def growth(self) -> int:
        """Factor by which relative errors of the input may grow, to first order.

        The factor of a polynomial is its degree. An activation counts as a square, with a gate as a
        cube: those of the registry grow no faster.
        """
        return math.prod(_layer_growth(layer) for layer in self.layers)

    @cached_property
    def parameters(self) -> int:
        """Number of weights, without the skips and scales of residuals."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self) if np.ndim(leaf))

    @cached_property
    def attends(self) -> bool:
        """Whether any layer mixes positions."""
        return any(isinstance(innermost(layer), Attention) for layer in self.layers)

    @cached_property
    def is_sparse(self) -> bool:
        """Whether any layer has a sparse matrix."""
        return is_sparse(self)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        if self.n_ctx is not None and tuple(x.shape[-2:]) != (self.n_ctx, self.d_in):
            raise ModelError(
                f"the model reads sequences of shape ({self.n_ctx}, {self.d_in}), "
                f"found an input of shape {tuple(x.shape)}"
            )
        for layer in self.layers:
            x = layer(x)
        return x

    def __repr__(self) -> str:
        kinds = ", ".join(map(describe, self.layers))
        facts = [self._degree_text, f"{self.parameters:,} parameters"]
        if self.n_ctx is not None:
            facts.insert(0, f"n_ctx {self.n_ctx}")
        return f"Model({kinds}; {', '.join(facts)})"

    @property
    def _degree_text(self) -> str:
        return f"degree {self.degree}" if self.is_polynomial else "no polynomial"

    def _repr_html_(self) -> str:
        rows = [(f"layer {n}", describe(layer)) for n, layer in enumerate(self.layers)]
        if self.n_ctx is not None:
            rows.append(("positions", str(self.n_ctx)))
        rows.append(("degree", self._degree_text.removeprefix("degree ")))
        rows.append(("parameters", f"{self.parameters:,}"))
        rows += [("caveat", caveat) for caveat in caveats(self)]
        return html_table("Model", rows)


def _layer_growth(layer: Layer) -> int:
    """The factor of `Model.growth` for a single layer."""
    if activation_of(layer) is None:
        return layer.order
    # A gate with a second factor counts as a cube, without one as a square.
    return 1 + max(1, len(map_names(innermost(layer))) - 1)


class Combination(_Vector):
    """A linear combination `sum_i coefficients[i] * models[i]`, made by arithmetic on models.

    Args:
        weighted: Pairs (coefficient, model).

    Raises:
        ModelError: There is no pair, a coefficient is no number, or the models have different
            inputs or outputs.

    Example:
        >>> import numpy as np
        >>> import tnsim
        >>> double = Model([tnsim.Linear([[2.0]])])
        >>> difference = 3.0 * double - double
        >>> difference(np.array([1.0])), difference.coefficients
        (array([4.]), (3.0, -1.0))
        >>> mean = sum([double, 3.0 * double]) / 2
        >>> mean(np.array([1.0]))
        array([4.])

    Source:
        Paper, section 2.4.
    """

    coefficients: tuple[Any, ...]
    models: tuple[Model, ...]

    @checked
    def __init__(self, weighted: Iterable[tuple[Any, Model]]):
        weighted = tuple(weighted)
        for entry in weighted:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], Model):
                raise ModelError(
                    "a Combination is made of pairs (coefficient, tnsim.Model), found "
                    f"{shown(entry)}"
                )
        if not weighted:
            raise ModelError("a Combination needs a pair (coefficient, model), found none")
        coefficients = tuple(scalar(c, "a coefficient of a model") for c, _ in weighted)
        models = tuple(model for _, model in weighted)
        # The first model stands for all: being comparable is transitive.
        for model in models[1:]:
            check_comparable(models[0], model)
        set_arrays(self, coefficients=coefficients, models=models)

    @property
    def d_in(self) -> int:
        """Coordinates of the input."""
        return self.models[0].d_in

    @property
    def d_out(self) -> int:
        """Coordinates of the output."""
        return self.models[0].d_out

    @property
    def n_ctx(self) -> int | None:
        """Number of positions of a sequence, or None."""
        return self.models[0].n_ctx

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        # A sum from 0 keeps the library of the outputs.
        total: Any = 0
        for coefficient, model in terms(self):
            total = total + coefficient * model(x)
        return total

    def __repr__(self) -> str:
        return " + ".join(f"{c} * {m!r}" for c, m in terms(self))


AnyModel: TypeAlias = Model | Combination
"""Objects that can be compared, added and run."""


def terms(model: Any) -> tuple[tuple[Any, Model], ...]:
    """The (coefficient, model) pairs whose sum `model` is.

    Raises:
        ModelError: The value is neither a model nor a combination of models.

    Example:
        >>> import tnsim
        >>> [coefficient for coefficient, _ in terms(2.0 * Model([tnsim.Linear([[1.0]])]))]
        [2.0]
    """
    if isinstance(model, Model):
        return ((1.0, model),)
    if isinstance(model, Combination):
        return tuple(zip(model.coefficients, model.models, strict=True))
    raise ModelError(
        f"expected a tnsim Model or a combination of models, found {type(model).__name__}: a file "
        "becomes one by tnsim.load(path), a state dict by tnsim.from_state_dict(state, dialect), "
        "an nn.Module by tnsim.from_module(module)"
    )


def with_dense_matrices(model: Any) -> Any:
    """A model, or each model of a combination, with dense arrays in the place of sparse matrices.

    Args:
        model: A model or a combination; anything else is returned unchanged.

    Returns:
        The same functions; a model without sparse matrices itself. The same object at every call
        for a model that never changes, so that what is made of it is kept.

    Raises:
        TooLarge: A matrix is too large to be written out.

    Example:
        >>> import numpy as np, tnsim
        >>> model = Model([tnsim.Linear(tnsim.models.arrays.SparseMatrix.of(np.eye(2)))])
        >>> with_dense_matrices(model).layers[0].weight.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if isinstance(model, Combination) and any(part.is_sparse for part in model.models):
        return Combination((c, with_dense_matrices(part)) for c, part in terms(model))
    if not (isinstance(model, Model) and model.is_sparse):
        return model

    def make() -> Model:
        dense = Model(map(written_out, model.layers), model.n_ctx, model.origin)
        if is_constant(model):  # then nobody else holds the arrays that may be written to
            for leaf in jax.tree.leaves(dense):
                if isinstance(leaf, np.ndarray):
                    leaf.flags.writeable = False
        return dense

    return kept_with(model, with_dense_matrices, make, bytes_of)


def in_numpy(model: Any) -> Any:
    """A model, or each model of a combination, with weights in NumPy, see `arrays.with_numpy`.

    Verbs begin with it, so that a model answers alike whatever library its weights come from.

    Args:
        model: A model or a combination; anything else is returned unchanged.

    Returns:
        The same functions, in models that are kept as long as the given ones; a model itself where
        its weights are in NumPy, or where JAX traces one.

    Raises:
        ModelError: A function of JAX, such as `jax.tree.map`, made the model of leaves that are no
            weights of its layers.

    Example:
        >>> import jax.numpy as jnp, tnsim
        >>> model = Model([tnsim.Linear(jnp.ones((1, 1), "float32"))])
        >>> in_numpy(model).layers[0].weight, in_numpy(model) is in_numpy(model)
        (array([[1.]], dtype=float32), True)
    """
    if isinstance(model, Combination):
        parts = tuple((with_numpy(c), in_numpy(part)) for c, part in terms(model))
        same = all(c is d and m is n for (c, m), (d, n) in zip(parts, terms(model), strict=True))
        return model if same else Combination(parts)
    if not isinstance(model, Model):
        return model
    made = kept_with(model, "in NumPy", lambda: _in_numpy(model))
    return model if made is None else made


def _in_numpy(model: Model) -> Model | None:
    """The model with weights in NumPy; None where they are."""
    made = with_numpy(model)
    if not model._is_checked:
        made = rename_errors(
            "a model that was made leaf by leaf, as by jax.tree.map (a stack of models is compared "
            "inside jax.vmap)",
            lambda: _checked_again(made),
        )
    set_arrays(made, origin=model.origin, _is_checked=True)
    return None if made is model else made  # what is kept with an object must not refer to it


def _checked_again(model: Model) -> Model:
    """A model through its constructor, or the model itself where that changes no type of a leaf."""

    def sparse_checked(leaf: Any) -> Any:
        return dataclasses.replace(leaf) if is_sparse_matrix(leaf) else leaf

    def build(layer: Layer) -> Layer:
        if isinstance(layer, Residual):
            return dataclasses.replace(layer, layer=build(layer.layer))
        again: Any = jax.tree.map(sparse_checked, layer, is_leaf=is_sparse_matrix)
        again.__post_init__()
        return again

    layers = []
    for n, layer in enumerate(model.layers):
        again = rename_errors(f"layer {n}", partial(build, layer))
        # Arrays that may be written to are copied, and the copies are dropped, layer by layer.
        layers.append(layer if _types(again) == _types(layer) else again)
    again = Model(layers, model.n_ctx)
    return model if _types(again) == _types(model) else again


def _types(tree: Any) -> list[Any]:
    """The types of all leaves, None for numbers of Python."""
    return [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)]


@per_object_cache
def is_constant(model: Model) -> bool:
    """Whether no weight of a model is traced or may be written to.

    Example:
        >>> import tnsim
        >>> model = Model([tnsim.Linear(np.eye(2))])
        >>> is_constant(model), is_constant(jax.tree.map(np.copy, model))
        (True, False)
    """
    return all(map(is_fixed, jax.tree.leaves(model)))


def kept_with(
    model: Model,
    key: Hashable,
    make: Callable[[], V],
    size: Callable[[V], float] = lambda made: 0.0,
) -> V:
    """What is made of a model: once while the model lives, at every call where weights may change.

    Args:
        model: Model of which it is made.
        key: Everything besides the model that it depends on.
        make: Function that makes it.
        size: Bytes that it takes beyond the arrays of the model.
    """
    return session().belongings.get(model, key, make, size) if is_constant(model) else make()


def caveats(*models: Any) -> tuple[str, ...]:
    """Reasons why models are, or may be, other functions than the networks they were read from.

    Args:
        models: Models, or combinations of such.

    Returns:
        Distinct reasons, a sentence each; none for models that were built or read whole.

    Example:
        >>> import tnsim
        >>> layers = [tnsim.Linear([[1.0]])]
        >>> caveats(Model(layers, origin=Origin("a file", caveats=("left out: norm.weight",))))
        ('left out: norm.weight',)
    """
    origins = [part.origin for model in models for _, part in terms(model)]
    said = [caveat for origin in origins if origin for caveat in origin.caveats]
    # Models of a pair often share their origin; every reason is said once.
    return tuple(dict.fromkeys(said))


def _combined_terms(a: Any, b: Any, sign: float) -> Combination:
    signed = tuple((sign * coefficient, model) for coefficient, model in terms(b))
    return Combination((*terms(a), *signed))


register_pytree(Model, ("layers",), ("n_ctx",))
register_pytree(Combination, ("coefficients", "models"))
