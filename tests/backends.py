"""On what a test's plans run: NumPy, which needs no compiling, or JAX, as users run them.

The fixture `backend` is NumPy unless a test (or `pytestmark` of its file) is decorated with one of these.
"""

import pytest


def _on(*backends):
    return pytest.mark.parametrize("backend", backends, indirect=True)


# what JAX itself is tested by: compiled programs, precisions, transforms, bits that subprocesses give
compiled = _on("jax")
# crossings whose values matter: the reference always, compiled with `pytest -m slow`
both = _on("numpy", pytest.param("jax", marks=pytest.mark.slow))
