"""Entry point of `python -m tnsim` and of the command `tnsim`.

Ctrl-C leads to the same exit status from the first import on. An interrupt in the middle of the
import of a library may surface as anything from an `ImportError` to a crash, so during imports the
process ends at once; no file is half-written at that time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

STATUS = 128 + signal.SIGINT  # the convention of shells for a process that a signal ends
_CORE = "OPENBLAS_CORETYPE"  # names the kernels of NumPy's matrix products, before NumPy loads
_COLLECTED = 100_000  # objects made between two looks for cyclic garbage
_WIDE = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}  # what these kernels need


def main() -> None:
    """Run the command line."""
    prepare()
    from tnsim.cli.app import main as run

    try:
        run()
    except SystemExit as ended:
        if ended.code in (STATUS, 128 + signal.SIGTERM):
            # A thread in which XLA still compiles crashes where Python takes itself apart.
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(int(ended.code))
        raise


def prepare() -> None:
    """Settings of a process that is started for a command, before anything large is imported.

    Imports make some hundred thousand objects that stay. Python's collector of cyclic garbage looks
    through all of them again and again, which takes a sixth of the time of the imports.
    """
    gc.set_threshold(_COLLECTED)
    if _CORE not in os.environ and _is_unknown_to_openblas():
        os.environ[_CORE] = "SkylakeX"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _is_unknown_to_openblas() -> bool:
    """Whether OpenBLAS may take the processor for one without its 512-bit instructions.

    OpenBLAS knows processors by family and model. Newer ones of other makers than Intel, which have
    the instructions of its kernels for Skylake X, are taken for Haswell, and matrix products take
    up to three times as long.
    """
    properties: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            properties.setdefault(name.strip(), value)
    is_known = properties.get("vendor_id", "").strip() == "GenuineIntel"
    return not is_known and set(properties.get("flags", "").split()) >= _WIDE


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process at once inside an import or a callback of JAX, else as Python does."""
    os.write(2, b"tnsim: stopped by SIGINT\n")
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "_xla_gc_callback":
            os._exit(STATUS)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
