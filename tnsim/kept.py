"""Containers that know when to give things up. In: keys and how to make a value. Out: the value.

A `Recent` holds what was used last, up to a limit. `Belongings` holds what was made of an object
for as long as the object lives. A `Session` owns one of each kind for every use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping that holds what was used last, up to a total size. Threads may share it.

    Args:
        limit: Total size of the values that are kept; one value stays whatever its size.
        size: Size of a value, in the unit of the limit; by default each counts as one.

    Attributes:
        held: Total size of the values in it.

    Example:
        >>> squares = Recent(limit=2)
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
        """The value of a key, made by the first who asks.

        Two threads that ask at once may both make it; all get the same one.

        Args:
            key: Under which the value is kept.
            make: Called where there is none.

        Returns:
            The value.
        """
        with self._changing:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()  # outside the lock: making one value may ask for others
        with self._changing:
            if key not in self._values:
                self._values[key] = value
                self.held += self.size(value)
                self._shrink()
            return self._values.get(key, value)

    def _shrink(self) -> None:
        while self.held > self.limit and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self.held -= self.size(dropped)

    def forget(self, chosen: Callable[[K], bool]) -> None:
        """Give up the values of the keys that are chosen, and no others."""
        with self._changing:
            for key in [key for key in self._values if chosen(key)]:
                self.held -= self.size(self._values.pop(key))

    def shrink(self, limit: float, least: int, chosen: Callable[[K], bool]) -> None:
        """Of the keys that are chosen, keep `least` values, and more only up to a size of `limit`.

        What was not used for longest goes first; other keys are left alone.
        """
        with self._changing:
            keys = [key for key in self._values if chosen(key)]
            held = sum(self.size(self._values[key]) for key in keys)
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


class Drawer:
    """What was made of one object.

    Attributes:
        values: By key.
        held: Their total size.
        used: Grows with every use, so that the smallest was not used for longest.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self.held = 0.0
        self.used = 0


class Belongings:
    """What was made of objects, kept for as long as these live. Threads may share it.

    Every object has a `Drawer`, which goes with it: objects are referred to weakly, so they must be
    immutable, and no value may refer to the object that it was made of.

    Args:
        limit: Total size of what is kept; beyond it whole drawers are given up, first the one that
            was not used for longest. The last one stays whatever its size.

    Example:
        >>> class Weight:
        ...     pass
        >>> kept, weight = Belongings(limit=10), Weight()
        >>> kept.get(weight, "on the device", lambda: [1.0], len), kept.held
        ([1.0], 1.0)
        >>> del weight
        >>> len(kept), kept.held
        (0, 0.0)
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._drawers: WeakKeyDictionary[Any, Drawer] = WeakKeyDictionary()
        self._changing = threading.RLock()
        self._uses = count()

    def get(
        self,
        owner: Any,
        key: Hashable,
        make: Callable[[], V],
        size: Callable[[V], float] = lambda value: 0.0,
    ) -> V:
        """What was made of an object under a key, made by the first who asks.

        Two threads that ask at once may both make it; all get the same one.

        Args:
            owner: The object.
            key: Tells apart what is made of one object.
            make: Called where there is nothing yet.
            size: Size of the value, in the unit of the limit.

        Returns:
            The value.
        """
        with self._changing:
            drawer = self._drawers.get(owner)
            if drawer is None:
                drawer = self._drawers[owner] = Drawer()
            drawer.used = next(self._uses)
            if key in drawer.values:
                return drawer.values[key]
        value = make()  # outside the lock: making one value may ask for others
        with self._changing:
            drawer = self._drawers.setdefault(owner, drawer)
            if key not in drawer.values:
                drawer.values[key] = value
                drawer.held += size(value)
                self._shrink()
            return drawer.values[key]

    def _shrink(self) -> None:
        if self.held <= self.limit:
            return
        full = [(drawer.used, owner) for owner, drawer in self._drawers.items() if drawer.held]
        for _, owner in sorted(full, key=lambda one: one[0])[:-1]:
            if self.held <= self.limit:
                return
            del self._drawers[owner]

    @property
    def held(self) -> float:
        """Total size of what is kept."""
        return sum((drawer.held for drawer in list(self._drawers.values())), 0.0)

    def clear(self) -> None:
        """Empty every drawer."""
        with self._changing:
            self._drawers.clear()

    def __len__(self) -> int:
        return len(self._drawers)

    def __contains__(self, owner: Any) -> bool:
        return owner in self._drawers
