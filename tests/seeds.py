"""Where the random data of tests comes from: one seed, and the content of a case.

Names take no part: a test that is renamed, moved or reordered keeps its data. `pytest --seed 7` rolls other data for
every test, and `pytest --seeds 20` runs every test once for each of the seeds 0 to 19, see `scripts/margins`.
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np

_NAMES = {
    "backend",
    "data_seed",
}  # parameters that select where a case runs, which is not its content
_current = 0


def use(seed: int) -> None:
    """Make `seed` the seed of all data drawn from now on."""
    global _current
    _current = seed


def current() -> int:
    """The seed in use."""
    return _current


def generator(*numbers: int) -> np.random.Generator:
    """A generator of the current seed, one for each row of numbers."""
    return np.random.default_rng([_current, *numbers])


def case_generator(parameters: dict[str, Any]) -> np.random.Generator:
    """A generator for the values of a parametrised case, in whatever order and under whatever names they come."""
    values = (_content(value) for name, value in parameters.items() if name not in _NAMES)
    digest = hashlib.sha256(
        "\n".join(sorted(filter(None, values))).encode(errors="surrogatepass")
    ).digest()
    return generator(*np.frombuffer(digest, np.uint32).tolist())


def _content(value: Any) -> str:
    """A description of a value by plain data alone; functions and classes are names and describe nothing."""
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.dtype}{value.tolist()}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_content, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_content(k)}:{_content(v)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _content([getattr(value, field.name) for field in dataclasses.fields(value)])
    return ""
