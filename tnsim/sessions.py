"""Caches in memory with limits, and the `Session` that owns a cache for every use.

An `LRUCache` holds the values that were used last, up to a limit. A `WeakCache` holds what was made
of an object for as long as the object lives.

Plans, contraction paths, compiled programs and prepared models take time to make and are asked for
again and again. They belong to a `Session`: a default session exists from the start,
`using(Session())` replaces it inside a `with` block, `clear()` empties it, and beyond a limit the
values that were not used for longest are dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import count
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tnsim.errors import ModelError
from tnsim.options import checked

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")
TIERS = ("auto", "interpret", "compile")


class LRUCache(Generic[K, V]):
    """A mapping that holds the values used last, up to a total size; threads may share it.

    Args:
        limit: Limit for the total size of the values; the last value stays even above it.
        size: Size of a value, in the unit of the limit; by default each value counts as 1.

    Attributes:
        held: Total size of the values in the cache.

    Example:
        >>> squares = LRUCache(limit=2)
        >>> [squares.get(n, lambda: n * n) for n in (1, 2, 3)]
        [1, 4, 9]
        >>> 1 in squares, 3 in squares
        (False, True)
    """

    def __init__(self, limit: float, size: Callable[[V], float] = lambda value: 1) -> None:
        self.limit = limit
        self.size = size
        self.held = 0.0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._changing = threading.RLock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made on the first call.

        Two threads that call at once may both make the value, but all get the same value.

        Args:
            key: Key of the value.
            make: Function that makes a missing value.

        Returns:
            The value.
        """
        with self._changing:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()  # outside the lock, as `make` may need other values
        with self._changing:
            # Another thread may have made the value in the meantime; the first one stays.
            if key not in self._values:
                self._values[key] = value
                self.held += self.size(value)
                self._shrink()
            return self._values.get(key, value)

    def _shrink(self) -> None:
        # A single value may exceed the limit: dropping it would only make it again.
        while self.held > self.limit and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self.held -= self.size(dropped)

    def forget(self, chosen: Callable[[K], bool]) -> None:
        """Drop the values of the chosen keys, and no others."""
        with self._changing:
            # A list, as the mapping changes on the way.
            for key in list(filter(chosen, self._values)):
                self.held -= self.size(self._values.pop(key))

    def shrink(self, limit: float, least: int, chosen: Callable[[K], bool]) -> None:
        """Drop values of chosen keys until their size is at most `limit` or `least` are left.

        The values that were not used for longest go first; other keys are left alone.
        """
        with self._changing:
            keys = list(filter(chosen, self._values))
            held = sum(self.size(self._values[key]) for key in keys)
            # The values used longest ago come first.
            for key in keys[: max(0, len(keys) - least)]:
                if held <= limit:
                    return
                size = self.size(self._values.pop(key))
                held, self.held = held - size, self.held - size

    def clear(self) -> None:
        """Drop every value."""
        with self._changing:
            self._values.clear()
            self.held = 0.0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values


class Entry:
    """The values that were made of an object.

    Attributes:
        values: Values by key.
        held: Total size of the values.
        used: Number of the last use in the cache; the smallest was not used for longest.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self.held = 0.0
        self.used = 0


class WeakCache:
    """Values made of objects, cached for as long as the objects live; threads may share it.

    Every object has an `Entry` that disappears with the object. Objects are referred to weakly, so
    no value may refer to its object, which would then live forever. Objects must be immutable.

    Args:
        limit: Limit for the total size of the values. Above it whole entries are dropped, first
            the entry that was not used for longest; the last entry stays whatever its size.

    Example:
        >>> class Weight:
        ...     pass
        >>> kept, weight = WeakCache(limit=10), Weight()
        >>> kept.get(weight, "on the device", lambda: [1.0], len), kept.held
        ([1.0], 1.0)
        >>> del weight
        >>> len(kept), kept.held
        (0, 0.0)
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._entries: WeakKeyDictionary[Any, Entry] = WeakKeyDictionary()
        self._changing = threading.RLock()
        self._uses = count()
        self._at_most = 0.0  # what is held, with what has gone since it was last summed

    def get(
        self,
        owner: Any,
        key: Hashable,
        make: Callable[[], V],
        size: Callable[[V], float] = lambda value: 0.0,
    ) -> V:
        """The value of an object under a key, made on the first call.

        Two threads that call at once may both make the value, but all get the same value.

        Args:
            owner: Object of which the value is made.
            key: Key of the value among the values of the object.
            make: Function that makes a missing value.
            size: Size of the value, in the unit of the limit.

        Returns:
            The value.
        """
        # Without the lock, which changes alone need: a tiny comparison looks up 40 values.
        entry = self._entries.get(owner)
        if entry is not None and key in entry.values:
            entry.used = next(self._uses)
            return entry.values[key]
        value = make()  # outside the lock, as `make` may need other values
        with self._changing:
            # Not the entry above: it may have been dropped meanwhile, with values of other threads
            # in it that are no longer counted.
            entry = self._entry(owner)
            if key not in entry.values:
                entry.values[key] = value
                if taken := size(value):
                    entry.held += taken
                    self._at_most += taken
                    # A run over thousands of models would sum thousands of entries for each.
                    if self._at_most > self.limit:
                        self._shrink()
                        self._at_most = self.held
            return entry.values[key]

    def _entry(self, owner: Any) -> Entry:
        entry = self._entries.get(owner)
        if entry is None:
            entry = self._entries[owner] = Entry()
        entry.used = next(self._uses)
        return entry

    def _shrink(self) -> None:
        # Only what holds something can give memory back.
        full = [(entry.used, owner) for owner, entry in self._entries.items() if entry.held]
        # All but the value used last, which the caller is about to use.
        for _, owner in sorted(full, key=lambda pair: pair[0])[:-1]:
            if self.held <= self.limit:
                return
            del self._entries[owner]

    @property
    def held(self) -> float:
        """Total size of all values."""
        with self._changing:  # no other thread may add an entry while these are counted
            return sum((entry.held for entry in self._entries.values()), 0.0)

    def clear(self) -> None:
        """Drop every value."""
        with self._changing:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, owner: Any) -> bool:
        return owner in self._entries


class Session:
    """Owner of all caches of tnsim in memory.

    Args:
        results: Limit for the number of results of planning: plans, programs, contraction paths.
        operations: Limit for the total number of operations in compiled programs. An operation maps
            a region or two of code, and Linux allows a process 65,530 regions.
        block_bytes: Limit in bytes for the blocks of models of runs over many pairs, together. Each
            run keeps its own blocks within half of the free memory and drops them when it ends.
        device_bytes: Limit in bytes for the arrays of models, laid out for plans and put on the
            device, for the networks of files that run on inputs, and for models of files whose
            parts are compared. Arrays are dropped with their model, or when a plan needs the
            memory.
        tier: Way in which plans run on a CPU: "interpret" by NumPy, at once; "compile" by XLA;
            "auto" as "interpret". On other devices and inside traces of JAX all plans are
            compiled. With "compile" a step of training is one program, as inside `jax.jit`.

    Raises:
        ModelError: The tier is none of the three.

    Attributes:
        results: Results of planning, by function and arguments.
        programs: Compiled programs, by program and shapes.
        blocks: Prepared models, by run and content.
        belongings: Values made of models: kinds of their layers, arrays on the device.
        places: Tables of the places of coefficients in vectors; at most 1 GiB.

    Example:
        >>> import tnsim
        >>> tnsim.session().clear()
        >>> len(tnsim.session().programs)
        0
        >>> with tnsim.using(tnsim.Session(tier="compile")):
        ...     print(tnsim.session().tier)
        compile
    """

    @checked
    def __init__(
        self,
        results: int = 65_536,
        operations: int = 16_384,
        block_bytes: float = 2**36,
        device_bytes: float = 2**32,
        tier: Literal["auto", "interpret", "compile"] = "auto",
    ) -> None:
        if tier not in TIERS:
            raise ModelError(f"tier must be one of {', '.join(TIERS)}, found {tier!r}")
        limits = dict(
            results=results,
            operations=operations,
            block_bytes=block_bytes,
            device_bytes=device_bytes,
        )
        for name, limit in limits.items():
            if limit < 0:
                raise ModelError(f"{name} of a Session must be at least 0, found {limit!r}")
        self.tier = tier
        self.results: LRUCache[Hashable, Any] = LRUCache(results)
        self.programs: LRUCache[Hashable, Any] = LRUCache(
            operations, lambda program: program.length
        )
        self.blocks: LRUCache[tuple[Hashable, ...], Any] = LRUCache(
            block_bytes, lambda block: block.nbytes
        )
        self.belongings = WeakCache(device_bytes)
        self.places: LRUCache[Hashable, Any] = LRUCache(2**30, lambda places: places.nbytes)

    def __repr__(self) -> str:
        limits = {
            "results": self.results.limit,
            "operations": self.programs.limit,
            "block_bytes": self.blocks.limit,
            "device_bytes": self.belongings.limit,
            "tier": self.tier,
        }
        return f"Session({', '.join(f'{name}={value!r}' for name, value in limits.items())})"

    def clear(self) -> None:
        """Empty all caches; later calls fill them again."""
        self.results.clear()
        self.programs.clear()
        self.blocks.clear()
        self.belongings.clear()
        self.places.clear()


_default = Session()
_current: ContextVar[Session] = ContextVar("tnsim session", default=_default)


def session() -> Session:
    """The session in use.

    Returns:
        The session of the innermost `using` block, or else the default session.

    Example:
        >>> session() is session()
        True
    """
    return _current.get()


def session_cache(function: Callable[P, V]) -> Callable[P, V]:
    """Cache the results of a pure function in the session in use.

    Args:
        function: Pure function of hashable arguments.

    Returns:
        The same function, which runs once for each set of arguments.

    Example:
        >>> @session_cache
        ... def square(n):
        ...     print("computed")
        ...     return n * n
        >>> square(3), square(3)
        computed
        (9, 9)
    """

    @wraps(function)
    def recalled(*args: P.args, **kwargs: P.kwargs) -> V:
        # Keyword arguments in any order are the same call.
        key = (function, args, tuple(sorted(kwargs.items())))
        return session().results.get(key, lambda: function(*args, **kwargs))

    return recalled


def per_object_cache(function: Callable[[T, *Arguments], V]) -> Callable[[T, *Arguments], V]:
    """Cache the results of a pure function of an immutable object while the object lives.

    Args:
        function: Function of the object and of hashable arguments. The result must not refer to the
            object.

    Returns:
        The same function, which runs once for each object and set of arguments.

    Example:
        >>> class Word(str):
        ...     pass
        >>> @per_object_cache
        ... def spelled(word):
        ...     print("computed")
        ...     return list(word)
        >>> word = Word("ab")
        >>> spelled(word), spelled(word)
        computed
        (['a', 'b'], ['a', 'b'])
    """

    @wraps(function)
    def recalled(owner: T, *args: *Arguments) -> V:
        belongings = session().belongings
        return belongings.get(owner, (function, args), lambda: function(owner, *args))

    return recalled


def own_cache(method: Callable[Concatenate[T, P], V]) -> Callable[Concatenate[T, P], V]:
    """Cache the results of a method in its object.

    `functools.cache` of a bound method makes a cycle of references: the object, and all that it
    holds, would stay until the next collection of garbage.

    Args:
        method: Method of hashable positional arguments.

    Returns:
        The same method, which runs once for each object and set of arguments.

    Example:
        >>> class Squares:
        ...     @own_cache
        ...     def of(self, n):
        ...         print("computed")
        ...         return n * n
        >>> squares = Squares()
        >>> squares.of(3), squares.of(3)
        computed
        (9, 9)
    """

    @wraps(method)
    def recalled(self: T, *args: P.args, **kwargs: P.kwargs) -> V:
        known = vars(self).setdefault("_known", {})
        key = recalled, args
        value = known.get(key, known)  # once, as hashes of long tuples are most of it
        if value is known:
            value = known[key] = method(self, *args, **kwargs)
        return value

    return recalled


@contextmanager
def using(chosen: Session) -> Iterator[Session]:
    """Use a given session inside a `with` block, in this thread.

    Args:
        chosen: Session that replaces the session in use.

    Yields:
        The chosen session.

    Example:
        >>> with using(Session(results=100)) as small:
        ...     session() is small
        True
        >>> session() is small
        False
    """
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
