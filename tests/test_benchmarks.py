"""The script of the engine's table runs, on whatever JAX finds, and its table is readable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
ROW = "tiny: depth 2, d=8, a cosine, float32"


@pytest.mark.full
def test_a_row_is_measured_in_halves_and_tabulated(tmp_path):
    out = tmp_path / "engine.json"
    command = [sys.executable, RUN, "--device", "gpu", "--dtype", "float32", "--out", out]
    for process in ("first", "second"):
        subprocess.run([*command, "--rows", "tiny", "--process", process], check=True)
    (rows,) = json.loads(out.read_text()).values()
    row = rows[ROW]["compile"]
    assert 0 < row["floor s"] < row["warm s"] < row["first s"]
    assert f"\n| {ROW} | compile | " in out.with_suffix(".md").read_text()
    again = subprocess.run(
        [*command, "--rows", "tiny", "--missing"], check=True, capture_output=True
    )
    assert not again.stdout
