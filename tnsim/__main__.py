"""Entry point of `python -m tnsim` and of the command `tnsim`.

Ctrl-C leads to one exit status from the first import on. An interrupt in the middle of the import
of a library may surface as anything from an `ImportError` to a crash, so during imports the process
ends at once; no file is half-written at that time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STATUS = 128 + signal.SIGINT  # the convention of shells for a process that a signal ends


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    from tnsim.cli.app import main as run

    run()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process at once inside an import or a callback of JAX, else as Python does."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "_xla_gc_callback":
            os.write(2, b"tnsim: stopped by SIGINT\n")
            os._exit(STATUS)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
