"""The command line: `tnsim ...` in a process of its own, as a user runs it, or, sooner, in this one."""

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from typing import NamedTuple
from unittest import mock

from tnsim.cli import app


class Done(NamedTuple):
    """What a command left: named as the fields of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def command(*arguments, check=True, main=app.main):
    """`tnsim *arguments` in this process, or another program that has an entry point `main`."""
    argv = ["tnsim", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        status = _status_of(main)
    return _checked(Done(status, out.getvalue(), err.getvalue()), check)


def told(*arguments):
    """What `tnsim *arguments --json` prints."""
    return json.loads(command(*arguments, "--json").stdout)


def refusal(*arguments, said="", main=app.main):
    """The one line that `tnsim *arguments` is refused by, which has the words; nothing else is printed."""
    done = command(*arguments, check=False, main=main)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.count("\n") == 1 and "unforeseen" not in done.stderr, done.stderr
    assert said in done.stderr, done.stderr
    return done.stderr


def process(*arguments, check=True, **options):
    """`tnsim *arguments` in a process of its own."""
    argv = [sys.executable, "-m", "tnsim", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, **options)
    return _checked(Done(done.returncode, done.stdout, done.stderr), check)


def piped(text):
    """What stands for standard input with a text, or with bytes of any encoding."""
    data = text if isinstance(text, bytes) else text.encode()
    return io.TextIOWrapper(io.BytesIO(data))


def processor_seconds():
    """What the processes that have ended took of the processor, which a busy machine does not
    lengthen."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _status_of(main):
    try:
        main()
    except SystemExit as ended:
        return ended.code
    raise AssertionError("a command always exits")


def _checked(done, check):
    assert not check or done.returncode == 0, done.stderr
    debugging = os.environ.get("TNSIM_DEBUG") == "1"
    assert debugging or "Traceback" not in done.stderr
    return done
