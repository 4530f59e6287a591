"""What is kept between calls, and who owns it. In: functions and arguments. Out: their results, remembered.

Plans, contraction routes, compiled programs and models made ready take time to make and are asked for again
and again. They belong to a `Session`: one is there from the start, `tnsim.Session()` opens another for a `with`
block, `clear()` forgets, and what has not been used for longest is given up when a limit is reached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")


class Recent(Generic[K, V]):
    """A mapping that holds what was used last, up to a total size. Safe to share between threads."""

    def __init__(self, limit: float, size: Callable[[V], float] = lambda value: 1) -> None:
        self.limit, self.size = limit, size
        self.held = 0.0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._changing = threading.RLock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made by the first who asks.

        Two threads that ask at once may both make it; all get the same one.
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

    def clear(self) -> None:
        with self._changing:
            self._values.clear()
            self.held = 0.0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values


class Session:
    """Owner of everything that tnsim keeps in memory between calls.

    Args:
        results: How many results of planning (plans, pieces, contraction routes) are kept.
        operations: How many operations compiled programs may have together. An operation maps one or two
            regions of code, and Linux allows a process 65,530 of them.

    Example:
        >>> import tnsim
        >>> tnsim.session().clear()
        >>> len(tnsim.session().programs)
        0
    """

    def __init__(self, results: int = 65_536, operations: int = 16_384) -> None:
        self.results: Recent[Hashable, Any] = Recent(results)
        self.programs: Recent[Hashable, Any] = Recent(operations, lambda program: program.length)

    def clear(self) -> None:
        """Forget everything; the next call makes anew what it needs."""
        self.results.clear()
        self.programs.clear()


_default = Session()
_current: ContextVar[Session] = ContextVar("tnsim session", default=_default)


def session() -> Session:
    """The session in use: that of the innermost `using` block, else the default one."""
    return _current.get()


def remembered(function: Callable[P, V]) -> Callable[P, V]:
    """Keep the results of a pure function of hashable arguments in the session in use."""

    @wraps(function)
    def recalled(*args: P.args, **kwargs: P.kwargs) -> V:
        key = (function, args, tuple(sorted(kwargs.items())))
        return session().results.get(key, lambda: function(*args, **kwargs))

    return recalled


@contextmanager
def using(chosen: Session) -> Iterator[Session]:
    """Make a session the one in use inside a `with` block, in this thread."""
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
