"""Options of public functions, held against their annotations before anything runs.

The annotation of a parameter says already what it takes, so that no function repeats it: `@checked`
reads `within: Iterable[str] | None` and refuses `within=3` in a sentence. Numbers of NumPy become
those of Python. What an annotation cannot say, such as a range, or which names there are, is
checked where it is known; what an annotation has beside this grammar takes anything.

    kind      None, bool, int, float, str, os.PathLike, Mapping[...], Callable[...], A | B,
              a list, an array, a tnsim.Budget, or a class of xarray or quimb
    a list    Sequence[A], Iterable[A], list[A], tuple[A, ...]
    an array  Float[np.ndarray, "rows columns"], with an axis for each name
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np

from tnsim.errors import OptionError, printable

P = ParamSpec("P")
T = TypeVar("T")
Class = TypeVar("Class", bound=type)
_MOST = 2**1023  # integers beyond have no float


class _Misfit(Exception):
    """A value that is not of the kind that was asked for."""


class Kind(NamedTuple):
    """A kind of values.

    Attributes:
        words: The kind in messages, with an article.
        plural: Several of the kind.
        read: Function from a value to the same value as Python has it; raises `_Misfit`.
    """

    words: str
    plural: str
    read: Callable[[Any], Any]


def _such(words: str, plural: str, fits: Callable[[Any], bool]) -> Kind:
    """The kind of the values that fit, which stay as they are."""

    def read(value: Any) -> Any:
        if not fits(value):
            raise _Misfit
        return value

    return Kind(words, plural, read)


def _flag(value: Any) -> bool:
    # 0 and 1 are equal to False and True; other numbers, and words such as "no", are mistakes.
    if not isinstance(value, (bool, np.bool_, int, np.integer)) or value not in (0, 1):
        raise _Misfit
    return bool(value)


def _whole(value: Any) -> int:
    # True would be 1 by accident.
    if isinstance(value, (bool, np.bool_)):
        raise _Misfit
    try:
        number = operator.index(value)
    except TypeError:
        raise _Misfit from None
    if abs(number) >= 2**63:
        raise _Misfit
    return number


def _number(value: Any) -> Any:
    # An array of a single number, of NumPy, JAX or PyTorch, is a number.
    kind = str(value.dtype) if getattr(value, "ndim", 1) == 0 else ""
    is_array = "int" in kind or "float" in kind
    # True would be 1 by accident.
    if isinstance(value, bool) or not (isinstance(value, Real) or is_array):
        raise _Misfit
    # A limit of NaN is no limit; no comparison with NaN holds.
    number: Any = abs(value)
    if not number <= float("inf") or (isinstance(value, int) and number > _MOST):
        raise _Misfit
    return value


def _is_mapping(value: Any) -> bool:
    # Files of NumPy, safetensors and HDF5 are mappings by what they do.
    return not isinstance(value, type) and hasattr(value, "keys") and hasattr(value, "__getitem__")


def _array_of(names: str) -> Kind:
    """Arrays of real numbers with an axis for each name; lists of numbers become such arrays."""
    count = len(names.split())

    def read(value: Any) -> Any:
        try:
            array = np.asarray(value)
        except Exception:  # lists of several lengths, or what a class of the user raises
            raise _Misfit from None
        if array.ndim != count or array.dtype.kind not in "fiu":
            raise _Misfit
        return value if hasattr(value, "ndim") else array

    ways = "an axis" if count == 1 else f"{count} axes"
    return Kind(f"an array of numbers with {ways}", f"arrays of numbers with {ways}", read)


def _instance_of(name: str, words: str) -> Kind:
    """Objects of a class that is not imported here, by its name."""
    return _such(
        f"a {words}", f"{words}s", lambda value: name in (x.__name__ for x in type(value).__mro__)
    )


def is_list(value: Any) -> bool:
    """Whether a value holds others in an order: no text, no mapping, no array of a single number.

    Example:
        >>> is_list(["a"]), is_list("a"), is_list(np.ones(2)), is_list(np.array(2))
        (True, False, True, False)
    """
    if isinstance(value, (str, bytes, Mapping, type)):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def _list_of(kind: Kind, annotation: str) -> Kind:
    def read(values: Any) -> Any:
        if not is_list(values):
            raise _Misfit
        # What can be read only once is read here.
        if annotation == "tuple" or isinstance(values, (tuple, Iterator)):
            return tuple(map(kind.read, values))
        return values if kind is _ANYTHING else list(map(kind.read, values))

    return Kind(f"a list of {kind.plural}", f"lists of {kind.plural}", read)


_ANYTHING = Kind("anything", "values", lambda value: value)
_PLAIN = {
    "None": _such("None", "None", lambda value: value is None),
    "bool": Kind("True or False", "True or False", _flag),
    "int": Kind("an integer", "integers", _whole),
    "float": Kind("a number", "numbers", _number),
    "str": _such("a text", "texts", lambda value: isinstance(value, str)),
    "PathLike": _such("a path", "paths", lambda value: isinstance(value, os.PathLike)),
    "Mapping": _such("a mapping", "mappings", _is_mapping),
    "Callable": _such("a function", "functions", callable),
    "DataArray": _instance_of("DataArray", "DataArray of xarray"),
    "Dataset": _instance_of("Dataset", "Dataset of xarray"),
    "TensorNetwork": _instance_of("TensorNetwork", "TensorNetwork of quimb"),
    "Budget": _instance_of("Budget", "tnsim.Budget(memory_bytes=...)"),
}
_LISTS = ("Sequence", "Iterable", "list", "tuple")


def _kinds(annotation: ast.expr) -> list[Kind]:
    """The kinds that an annotation joins by `|`; what is not in the grammar takes anything."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return [*_kinds(left), *_kinds(right)]
        case ast.Constant(value=None):
            return [_PLAIN["None"]]
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [_PLAIN.get(name, _ANYTHING)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            of = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return [_list_of(_union(_kinds(of)), name)]
        case ast.Subscript(
            value=ast.Name(id="Float"),
            slice=ast.Tuple(elts=[ast.Attribute(attr="ndarray"), ast.Constant(value=str(names))]),
        ) if names.replace(" ", "").isidentifier():
            return [_array_of(names)]
        case ast.Subscript(value=ast.Name(id="Literal")):
            return [_PLAIN["str"]]
        case ast.Subscript(value=outer):
            return _kinds(outer)
        case _:
            return [_ANYTHING]


def _union(kinds: list[Kind]) -> Kind:
    """One kind for several."""
    if len(kinds) == 1 or _ANYTHING in kinds:
        return kinds[0] if len(kinds) == 1 else _ANYTHING

    def read(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.read(value)
            except _Misfit:
                continue
        raise _Misfit

    *first, last = (kind.words for kind in kinds)
    *some, most = (kind.plural for kind in kinds)
    return Kind(f"{', '.join(first)} or {last}", f"{', '.join(some)} or {most}", read)


def _options_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """The kinds of the parameters that have one, by name."""
    found = {}
    for name, annotation in function.__annotations__.items():
        kind = _union(_kinds(ast.parse(str(annotation), mode="eval").body))
        if name != "return" and kind is not _ANYTHING:
            found[name] = kind
    return found


@overload
def checked(function: Class) -> Class: ...
@overload
def checked(function: Callable[P, T]) -> Callable[P, T]: ...
@overload
def checked(function: None = None, *, own: str) -> Callable[[T], T]: ...
def checked(function: Any = None, *, own: str = "") -> Any:
    """A function that refuses options of a kind that its annotations do not name.

    Args:
        function: Function with annotations that are not evaluated, or a class with such an
            `__init__`, as dataclasses have.
        own: Names of parameters that the function refuses itself, since it knows more of them, such
            as a range: they are read where they fit, and are given as they are where not.

    Returns:
        The function or the class, with the same signature; numbers of NumPy reach it as those of
        Python.

    Raises:
        OptionError: In a call: an argument is of another kind.

    Example:
        >>> @checked
        ... def power(x: float, times: int | None = None, names: Sequence[str] = ()):
        ...     return x**times
        >>> power(2.0, np.int64(3))
        8.0
        >>> power(2.0, times="3")
        Traceback (most recent call last):
        tnsim.errors.OptionError: times of power must be an integer or None, found '3'
    """
    if function is None:
        return functools.partial(checked, own=own)
    if isinstance(function, type):
        cls: Any = function
        cls.__init__ = checked(cls.__init__, own=own)
        return cls
    order = tuple(inspect.signature(function).parameters)
    name = function.__qualname__.removesuffix(".__init__")
    known: dict[str, Kind] = {}
    refused = frozenset(own.split())

    def read(option: str, value: Any) -> Any:
        kind = known.get(option)
        try:
            return value if kind is None else kind.read(value)
        except _Misfit:
            if option in refused:
                return value
            raise OptionError(
                f"{option} of {name} must be {known[option].words}, found {shown(value)}"
            ) from None

    @functools.wraps(function)
    def with_checks(*args: Any, **options: Any) -> Any:
        if not known:  # read on the first call, so that an import costs nothing
            known.update(_options_of(function) or {"": _ANYTHING})
        # Arguments beyond the last parameter are refused by the function.
        args = (*map(read, order, args), *args[len(order) :])
        options = {option: read(option, value) for option, value in options.items()}
        # Strict promotion of types is for the caller's own code: tnsim's mixes integers and floats.
        promotion = jax.config.jax_numpy_dtype_promotion  # pyright: ignore[reportAttributeAccessIssue]
        if promotion == "standard":
            return function(*args, **options)
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return with_checks


def shown(value: Any) -> str:
    """A value in a message: short, and safe whatever it is.

    Example:
        >>> shown(3), shown(np.ones((2, 2)))
        ('3', 'an array of shape (2, 2)')
    """
    if isinstance(value, np.ndarray) and value.ndim:
        return f"an array of shape {value.shape}"
    try:
        return printable(repr(value), 80)
    except Exception:  # the repr of a user's class, or an integer of too many digits
        return f"a {type(value).__name__}"
