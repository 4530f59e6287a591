"""What training code puts around weights. In: nested mappings, names. Out: the weights under them.

`{"model": ..., "optimizer": ...}` of a training loop, `state_dict` and `net.` of Lightning,
`module.` of DistributedDataParallel and `_orig_mod.` of torch.compile change no number. Names tell
where the weights are: a place is taken only where every name asked for lies, and only where it is
the one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tnsim.checkpoints.named_arrays import KeysDiffer

DEEPEST = 3  # mappings inside one another
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")


class Place(NamedTuple):
    """Where weights lie.

    Attributes:
        way: Keys of the mappings that lead there.
        prefix: What stands before their names.
    """

    way: tuple[str, ...] = ()
    prefix: str = ""

    def __str__(self) -> str:
        said = [f"under {' / '.join(map(repr, self.way))}"] if self.way else []
        if self.prefix:
            said.append(f"behind {self.prefix!r}")
        return " ".join(said) or "at the top"


def place_of(state: Mapping[str, Any], names: Sequence[str]) -> Place:
    """Where the weights of some names lie.

    Args:
        state: Arrays by name, or mappings of such.
        names: That have to be there, one at least.

    Returns:
        The top where they are there, or where they are nowhere; else the one place that has all.

    Raises:
        KeysDiffer: Where there is more than one.

    Example:
        >>> place_of({"model": {"module.w": 1, "module.b": 2}, "step": 3}, ["w", "b"])
        Place(way=('model',), prefix='module.')
    """
    if all(name in state for name in names):
        return Place()
    found = list(_places(state, names, (), set()))
    if len(found) > 1:
        shown = "; ".join(map(str, found[:4]))
        raise KeysDiffer(
            f"the weights are there more than once: {shown}. Say which are meant by nested in the "
            f"dialect, such as {list(found[0].way)}, and by names with what stands before them"
        )
    return found[0] if found else Place()


def inside(state: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The mapping at a place, its names without what stands before them.

    Args:
        state: As for `place_of`.
        place: As that gave it.

    Returns:
        Arrays by name. Names that have no such prefix stay.

    Raises:
        KeysDiffer: Where a name is there with the prefix and without.

    Example:
        >>> inside({"model": {"module.w": 1}}, Place(("model",), "module."))
        {'w': 1}
    """
    for key in place.way:
        state = state[key]
    if not place.prefix:
        return state
    named = {name.removeprefix(place.prefix): value for name, value in state.items()}
    if len(named) < len(state):
        twice = next(name for name in state if place.prefix + name in state)
        raise KeysDiffer(f"{twice!r} is there with {place.prefix!r} before it and without")
    return named


def common_prefix(names: Sequence[str]) -> str:
    """What wrappers put before all of some names.

    Args:
        names: Of tensors.

    Returns:
        Words of `PREFIXES`, empty where not all names begin with one.

    Example:
        >>> common_prefix(["module._orig_mod.w", "module._orig_mod.b"])
        'module._orig_mod.'
    """
    for word in PREFIXES:
        if names and all(name.startswith(word) for name in names):
            return word + common_prefix([name.removeprefix(word) for name in names])
    return ""


def _places(
    state: Mapping[Any, Any], names: Sequence[str], way: tuple[str, ...], seen: set[int]
) -> Iterator[Place]:
    """Every place that has all names, in this mapping and those inside it, which may be itself."""
    seen.add(id(state))
    for name in state:
        if not isinstance(name, str) or not name.endswith(names[0]):
            continue
        prefix = name.removesuffix(names[0])
        if prefix[-1:] in ("", ".") and all(prefix + other in state for other in names):
            yield Place(way, prefix)
    if len(way) == DEEPEST:
        return
    for key, value in state.items():
        if isinstance(value, Mapping) and isinstance(key, str) and id(value) not in seen:
            yield from _places(value, names, (*way, key), seen)
