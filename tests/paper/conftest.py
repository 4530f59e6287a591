"""The experiments are no part of the package: the quick suite does not import them, and their tests are slow."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config):
    """True for every file where slow tests are left out; else others decide."""
    return True if "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
