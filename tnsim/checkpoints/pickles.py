"""Checks of pickled weights before PyTorch reads them.

PyTorch's reader of plain weights calls a few dozen functions that PyTorch considers harmless, since
none of them runs code of the file. Some of them however take as much memory as a number in the file
says, `bytearray(2**31)` or `torch.FloatTensor(2**31)` in 300 bytes, and codecs other than latin1
take quadratic time. So the instructions are followed here first, on a stack that knows numbers,
texts and tuples only, and each call is checked before PyTorch makes it.
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple, NoReturn

from tnsim.checkpoints.guard import refusing
from tnsim.errors import CheckpointError

_PUSHED = ("BININT", "BININT1", "BININT2", "BINUNICODE", "LONG1", "SHORT_BINSTRING")
"""Instructions whose argument is the value."""
_OTHERS = ("BINFLOAT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "NEWFALSE", "NEWTRUE", "NONE")
"""Instructions that give a value of which nothing is to be known."""
_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_UNKNOWN = object()


class _Function(NamedTuple):
    """A function or a class, of which the name says enough."""

    name: str


def check_pickle(data: bytes) -> None:
    """Refuse a pickle that would take memory or time out of proportion.

    An instruction that is unknown here is left to PyTorch's reader, which refuses the whole file.

    Args:
        data: The bytes of the pickle.

    Raises:
        CheckpointError: When a call, which the message names, is out of proportion, or when the
            pickle ends within an instruction or takes values that the stack does not have.

    Example:
        >>> import pickle
        >>> check_pickle(pickle.dumps({"bias": [1.0]}, 2))
        >>> check_pickle(b"\\x80\\x02cbuiltins\\nbytearray\\nJ\\0\\0\\0\\x7f\\x85R.")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: its pickle asks for bytearray of 2130706432 bytes, which no...
    """
    with refusing("its pickle is damaged"):
        _follow_pickle(data)


def _follow_pickle(data: bytes) -> None:
    """Go through the instructions up to the last, or up to the first that no weights need."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # stacks that marks have saved
    memo: dict[int, Any] = {}
    value: Any
    for instruction, value, _ in pickletools.genops(data):
        match instruction.name:
            case name if name in _PUSHED:
                stack.append(value)
            case name if name in _OTHERS:
                stack.append(_UNKNOWN)
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "BINPUT" | "LONG_BINPUT":
                # A value may be used again by its number in the memo.
                memo[value] = stack[-1]
            case "MARK":
                # A mark begins an inner stack, which the instructions on several values take whole.
                outer.append(stack)
                stack = []
            case "TUPLE":
                items, stack = tuple(stack), outer.pop()
                stack.append(items)
            case name if name in _SIZES:
                place = len(stack) - _SIZES[name]
                if place < 0:
                    raise ValueError("it takes what is not there")
                stack[place:] = [tuple(stack[place:])]
            case "GLOBAL":
                stack.append(_Function(value.rpartition(" ")[2]))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                # The call itself is never made here.
                _check_call(function, arguments)
                # A function that encodes gives bytes, of which others may be made.
                encodes = isinstance(function, _Function) and function.name == "encode"
                stack.append(b"" if encodes else _UNKNOWN)
            case "APPEND" | "BUILD":
                stack.pop()
            case "SETITEM":
                del stack[-2:]
            case "APPENDS" | "SETITEMS":
                # The items go into a container, whose contents do not matter.
                stack = outer.pop()
            case "BINPERSID":
                stack[-1] = _UNKNOWN  # the numbers of a tensor, which lie in the file
            case "PROTO":
                pass
            case _:
                return  # the end, or an instruction that the reader refuses


def _check_call(function: Any, arguments: Any) -> None:
    """Refuse a call that takes memory or time out of proportion."""
    if not isinstance(function, _Function):
        return  # refused by the reader, or a function that the caller has allowed
    name = function.name
    # The reader takes lists, dictionaries and what functions return for arguments as well, of which
    # the stack here knows nothing.
    if not isinstance(arguments, tuple):
        _refuse(f"{name} of arguments that are no tuple")
    # This function calls another, whose arguments are its third.
    if name == "_rebuild_from_type_v2" and len(arguments) > 2:
        _check_call(arguments[0], arguments[2])
    if name == "bytearray":
        for argument in arguments:
            if isinstance(argument, int):
                _refuse(f"bytearray of {argument} bytes")
            if not isinstance(argument, (bytes, str)):  # a tensor of one number is a number, too
                _refuse("bytearray of something else than bytes")
    if name == "encode" and arguments[1:] != ("latin1",):
        _refuse("text in another encoding than latin1")
    # Plain weights rebuild tensors from storages in the file, and never make one themselves.
    if name.endswith(("Tensor", "Storage")):
        _refuse(f"{name} of a size alone")


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(
        f"its pickle asks for {what}, which no weights need; save them again by torch.save"
    )
