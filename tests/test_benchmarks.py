"""Scripts that a reader may run: the engine's table on whatever JAX finds, and the attack on the numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "run.py"
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


@pytest.mark.sampled(quick=0, slow=5)
@pytest.mark.parametrize("place", [1, -1])
@pytest.mark.parametrize("metric", ["frobenius", "tree", "symmetric", "closure", "gaussian"])
def test_the_attack_on_numbers_has_an_oracle_of_every_metric(metric, place):
    spec = importlib.util.spec_from_file_location("cosines", ROOT / "scripts/attack/cosines.py")
    attack = sys.modules["cosines"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attack)
    kinds = [name for name, kind in attack.KINDS.items() if metric in kind.depths]
    case = attack.Case(kinds[place], metric, "plain", 0)
    with attack.interpreted():
        counted = [name for _, name, _ in attack.outcomes(case)]
    assert counted and not {*counted} & {*attack.ERRORS}
