"""`python -m tnsim`, and the command `tnsim`. In: the command line. Out: an exit status.

Ctrl-C is one exit status from the first import on. What libraries make of an interrupt that reaches
them while they are imported is anything from an `ImportError` to a crash, so there the process ends
at once; it holds no half-written file then.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STATUS = 128 + signal.SIGINT


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    from tnsim.cli.app import main as run

    run()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once within an import or a callback of a library, else as Python does."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "_xla_gc_callback":
            os.write(2, b"tnsim: stopped by SIGINT\n")
            os._exit(STATUS)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
