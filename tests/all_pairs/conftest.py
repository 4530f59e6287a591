"""Checkpoints to compare."""

import pytest
from oracles import bilinear

import tnsim


@pytest.fixture
def folder(tmp_path, rng):
    """Ten checkpoints in `models`."""
    for n in range(10):
        file = tmp_path / "models" / f"step_{n:03}.safetensors"
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), file)
    return tmp_path
