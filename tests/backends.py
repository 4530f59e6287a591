"""The tier in which a test's plans run: interpreted by NumPy, or compiled by XLA.

The fixture `backend` leaves the choice to the plan, as for users, unless a test (or `pytestmark` of its file)
is decorated with one of these. The oracle of both is `eager`.
"""

import pytest


def _on(*backends):
    return pytest.mark.parametrize("backend", backends, indirect=True)


# what JAX itself is tested by: compiled programs, precisions, transforms, bits that subprocesses give
compiled = _on("compile")
# crossings whose plans take minutes to compile and milliseconds to interpret
interpreted = _on("interpret")
# crossings whose values matter: interpreted always, compiled with `pytest -m full`, as XLA compiles what NumPy runs
both = _on("interpret", pytest.param("compile", marks=pytest.mark.full))


def with_inputs(several, compiled, rare=()):
    """Values of the argument `inputs`, interpreted all of them, and some compiled with `pytest -m full`.

    The rare ones are interpreted with `pytest -m slow`.
    """
    cases = [pytest.param(name, "interpret", id=f"{name}-interpret") for name in several]
    cases += [
        pytest.param(name, "interpret", id=f"{name}-interpret", marks=pytest.mark.slow)
        for name in rare
    ]
    cases += [
        pytest.param(name, "compile", id=f"{name}-compile", marks=pytest.mark.full)
        for name in compiled
    ]
    return pytest.mark.parametrize(("inputs", "backend"), cases, indirect=["backend"])
