"""Checks of pickled weights before PyTorch reads them.

PyTorch's reader of plain weights calls a few dozen functions that PyTorch considers harmless, since
none of them runs code of the file. Some of them however take as much memory as a number in the file
says, `bytearray(2**31)` or `torch.FloatTensor(2**31)` in 300 bytes, and codecs other than latin1
take quadratic time. So the instructions are followed here first, on a stack that knows numbers,
texts and tuples only, and each call is checked before PyTorch makes it.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, NoReturn

from tnsim.checkpoints.guard import refusing
from tnsim.errors import CheckpointError

_FIXED = {  # lengths of the arguments of instructions whose arguments need no decoding
    pickle.BINFLOAT: 8,
    pickle.BINPUT: 1,
    pickle.LONG_BINPUT: 4,
    pickle.PROTO: 1,
}
_PLAIN = (pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE)
_CONTAINERS = (pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET)
_INTEGERS = {pickle.BININT: 4, pickle.BININT1: 1, pickle.BININT2: 2}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
_UNKNOWN = object()


class _Named(NamedTuple):
    """A function or a class by its name."""

    module: str
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
    at = 0
    while True:
        code, at = data[at : at + 1], at + 1
        if code in _INTEGERS:
            size = _INTEGERS[code]
            # Four-byte integers of pickle are signed, shorter ones are not.
            stack.append(int.from_bytes(_taken_bytes(data, at, size), "little", signed=size == 4))
            at += size
        elif code == pickle.BINGET:
            stack.append(memo[_taken_bytes(data, at, 1)[0]])
            at += 1
        elif code == pickle.LONG_BINGET:
            stack.append(memo[int.from_bytes(_taken_bytes(data, at, 4), "little")])
            at += 4
        elif code in _FIXED:
            number = _taken_bytes(data, at, _FIXED[code])
            at += len(number)
            if code in (pickle.BINPUT, pickle.LONG_BINPUT):
                # A value may be used again by its number in the memo.
                memo[int.from_bytes(number, "little")] = stack[-1]
            elif code == pickle.BINFLOAT:
                stack.append(_UNKNOWN)
        elif code == pickle.MARK:
            # A mark begins an inner stack, which the instructions on several values take whole.
            outer.append(stack)
            stack = []
        elif code == pickle.TUPLE:
            items, stack = tuple(stack), outer.pop()
            stack.append(items)
        elif code in _TUPLES:
            size = _TUPLES[code]
            items = tuple(stack[-size:])
            if len(items) < size:
                raise ValueError("it takes what is not there")
            stack[-size:] = [items]
        elif code == pickle.EMPTY_TUPLE:
            stack.append(())
        elif code in _PLAIN or code in _CONTAINERS:
            stack.append(_UNKNOWN)
        elif code in (pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.LONG1):
            width = 4 if code == pickle.BINUNICODE else 1
            size = int.from_bytes(_taken_bytes(data, at, width), "little")
            text = _taken_bytes(data, at + width, size)
            at += width + size
            stack.append(_decoded_value(code, text))
        elif code == pickle.GLOBAL:
            module, name, at = _two_lines(data, at)
            stack.append(_Named(module, name))
        elif code in (pickle.REDUCE, pickle.NEWOBJ):
            arguments, function = stack.pop(), stack.pop()
            # The call itself is never made here.
            _check_call(function, arguments)
            # A function that encodes gives bytes, of which others may be made.
            encodes = isinstance(function, _Named) and function.name == "encode"
            stack.append(b"" if encodes else _UNKNOWN)
        elif code in (pickle.APPEND, pickle.BUILD):
            stack.pop()
        elif code == pickle.SETITEM:
            del stack[-2:]
        elif code in (pickle.APPENDS, pickle.SETITEMS):
            # The items go into a container, whose contents do not matter.
            stack = outer.pop()
        elif code == pickle.BINPERSID:
            stack[-1] = _UNKNOWN  # the numbers of a tensor, which lie in the file
        else:
            return  # the end, or an instruction that the reader refuses


def _taken_bytes(data: bytes, at: int, size: int) -> bytes:
    """The `size` bytes from a place, refused where the data are shorter."""
    taken = data[at : at + size]
    if len(taken) < size:
        raise ValueError("it ends within an instruction")
    return taken


def _two_lines(data: bytes, at: int) -> tuple[str, str, int]:
    """Two lines of text, and the place behind them."""
    # No name of a function is longer than this, and a file without line ends is not searched to its
    # end.
    module, name, _ = data[at : at + 2**10].split(b"\n", 2)
    return module.decode(), name.decode(), at + len(module) + len(name) + 2


def _decoded_value(code: bytes, data: bytes) -> Any:
    if code == pickle.BINUNICODE:
        return str(data, "utf-8", "surrogatepass")
    return int.from_bytes(data, "little", signed=True) if code == pickle.LONG1 else data


def _check_call(function: Any, arguments: Any) -> None:
    """Refuse a call that takes memory or time out of proportion."""
    if not isinstance(function, _Named):
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
