"""What is kept between calls, and who owns it. In: functions, arguments. Out: results, remembered.

Plans, contraction routes, compiled programs and models made ready take time to make and are asked
for again and again. They belong to a `Session`: one is there from the start, `using(Session())`
puts another in its place for a `with` block, `clear()` forgets, and what has not been used for
longest is given up when a limit is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from tnsim.kept import Belongings, Recent

V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")


class Session:
    """Owner of everything that tnsim keeps in memory between calls.

    Args:
        results: Number of results of planning that are kept: plans, pieces, contraction routes.
        operations: Number of operations that compiled programs may have together. An operation maps
            one or two regions of code, and Linux allows a process 65,530 of them.
        block_bytes: Bytes that the blocks of models of runs over many pairs may take together. Each
            run keeps its own within half of the free memory and lets go of them when it ends.
        device_bytes: Bytes that arrays of models may take together, laid out for plans and put on
            the device. They go when their model goes, and when a plan needs the memory.

    Attributes:
        results: Results of planning by function and arguments.
        programs: Compiled programs by piece and shapes.
        blocks: Models made ready, by run and content.
        belongings: What was made of models: kinds of their layers, arrays on the device.

    Example:
        >>> import tnsim
        >>> tnsim.session().clear()
        >>> len(tnsim.session().programs)
        0
    """

    def __init__(
        self,
        results: int = 65_536,
        operations: int = 16_384,
        block_bytes: float = 2**36,
        device_bytes: float = 2**32,
    ) -> None:
        self.results: Recent[Hashable, Any] = Recent(results)
        self.programs: Recent[Hashable, Any] = Recent(operations, lambda program: program.length)
        self.blocks: Recent[tuple[Hashable, ...], Any] = Recent(
            block_bytes, lambda block: block.nbytes
        )
        self.belongings = Belongings(device_bytes)

    def clear(self) -> None:
        """Forget everything; the next call makes anew what it needs."""
        self.results.clear()
        self.programs.clear()
        self.blocks.clear()
        self.belongings.clear()


_default = Session()
_current: ContextVar[Session] = ContextVar("tnsim session", default=_default)


def session() -> Session:
    """The session in use.

    Returns:
        That of the innermost `using` block, else the one that is there from the start.

    Example:
        >>> session() is session()
        True
    """
    return _current.get()


def remembered(function: Callable[P, V]) -> Callable[P, V]:
    """Keep the results of a pure function in the session in use.

    Args:
        function: Its arguments must be hashable.

    Returns:
        The same function, which runs once for each set of arguments.

    Example:
        >>> @remembered
        ... def square(n):
        ...     print("computed")
        ...     return n * n
        >>> square(3), square(3)
        computed
        (9, 9)
    """

    @wraps(function)
    def recalled(*args: P.args, **kwargs: P.kwargs) -> V:
        key = (function, args, tuple(sorted(kwargs.items())))
        return session().results.get(key, lambda: function(*args, **kwargs))

    return recalled


def kept_with(function: Callable[[T, *Arguments], V]) -> Callable[[T, *Arguments], V]:
    """Keep the results of a pure function of an immutable object for as long as the object lives.

    Args:
        function: Of the object and of hashable arguments. Its result must not refer to the object.

    Returns:
        The same function, which runs once for each object and set of arguments.

    Example:
        >>> class Word(str):
        ...     pass
        >>> @kept_with
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


@contextmanager
def using(chosen: Session) -> Iterator[Session]:
    """Make a session the one in use inside a `with` block, in this thread.

    Args:
        chosen: Takes the place of the session in use.

    Yields:
        The same session.

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
