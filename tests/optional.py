"""Libraries that few tests need and that take seconds to import."""

import importlib.util

import pytest


def skip_without(*names: str) -> None:
    """Skip the module that asks where a library is not installed.

    Nothing is imported: every worker collects every file, and tests import what they need.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
