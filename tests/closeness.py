"""The one comparison of numbers in tests: an error relative to the values that are compared.

An absolute tolerance says nothing about a result of unknown size, and a tolerance relative to another quantity
passes or fails by the luck of the data. So a test names a scale: the values themselves (the default), the size 1 of a
cosine, or the product of the norms that bounds an inner product. `scripts/margins` runs the tests with the recorder
on and lists every assertion whose error comes near its tolerance.
"""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import seeds

RECORDS = (
    "TNSIM_TEST_MARGINS"  # names the folder of records; the recorder is off without the variable
)
LARGEST = (
    "largest"  # the scale of arrays whose entries are sums of terms as large as the largest entry
)
STRICT = 1e-9  # the largest tolerance of an oracle in float64


def assert_close(
    actual: Any,
    expected: Any,
    *,
    scale: Any = None,
    rtol: float = STRICT,
    limited_by: str | None = None,
) -> None:
    """Assert |actual - expected| <= rtol * scale, entry by entry.

    Args:
        actual: Number or array under test.
        expected: Number or array of an independent computation. An array has the shape of `actual`.
        scale: Size to which an error is relative, a number or an array. By default |expected|, entry by entry;
            `LARGEST` for the largest entry of |expected|.
        rtol: Largest error in units of `scale`.
        limited_by: Reason why no oracle reaches `STRICT`, such as "float32" or "finite differences". A tolerance
            above `STRICT` requires a reason.

    Raises:
        AssertionError: An error above its tolerance, a shape of another kind, or NaN on one side.
        ValueError: A tolerance above `STRICT` without a reason.
    """
    if rtol > STRICT and limited_by is None:
        raise ValueError(f"rtol={rtol:g} is above {STRICT:g}: name the reason in limited_by")
    found, wanted = np.asarray(actual), np.asarray(expected)
    assert wanted.ndim == 0 or found.shape == wanted.shape, (
        f"shape {found.shape} is not the expected shape {wanted.shape}"
    )
    if found.dtype.kind not in "biufc" or wanted.dtype.kind not in "biufc":
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    found, wanted = (x.astype(np.result_type(x, np.float64)) for x in (found, wanted))
    if isinstance(scale, str):
        scale = np.max(np.abs(wanted), initial=0.0)
    tolerance = rtol * np.broadcast_to(np.abs(wanted if scale is None else scale), found.shape)
    with np.errstate(invalid="ignore"):  # equal infinities have no difference
        error = np.where(found == wanted, 0.0, np.abs(found - wanted))
    _record(error, tolerance, rtol, limited_by)
    beyond = ~((error <= tolerance) & np.isfinite(error))
    if beyond.any():
        worst = np.unravel_index(
            np.argmax(np.where(beyond, np.nan_to_num(error, nan=np.inf), -1)), error.shape
        )
        at = (
            f" at {tuple(map(int, worst))}, {beyond.sum()} of {beyond.size} entries"
            if error.ndim
            else ""
        )
        raise AssertionError(
            f"found {found[worst]!r}, expected {np.broadcast_to(wanted, found.shape)[worst]!r}{at}: "
            f"error {error[worst]:.3g}, tolerance {tolerance[worst]:.3g}"
        )


def is_recorded() -> bool:
    """Whether errors are recorded."""
    return RECORDS in os.environ


def _record(error: np.ndarray, tolerance: np.ndarray, rtol: float, limited_by: str | None) -> None:
    """Append the largest error over tolerance, with the place of the assertion, to the records of the process."""
    if not is_recorded() or error.size == 0:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(error == 0, 0.0, error / tolerance)
    ratio = float(np.max(np.nan_to_num(ratios, nan=np.inf, posinf=np.inf)))
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    inside = [frame for frame in frames if "tests" in Path(frame.filename).parts]
    caller = inside[-1] if inside else frames[-1]
    record = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0],
        "line": f"{Path(caller.filename).name}:{caller.lineno}",
        "seed": seeds.current(),
        "ratio": ratio if np.isfinite(ratio) else 1e300,
        "rtol": rtol,
        "limited_by": limited_by,
    }
    file = Path(os.environ[RECORDS]) / f"{os.getpid()}.jsonl"
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
