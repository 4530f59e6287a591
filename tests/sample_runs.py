"""A pairwise result of the shipped modular-addition run, and made ones, in the layout that the readers take."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import xarray as xr

import tnsim
from tnsim import report
from tnsim.all_pairs import result as result_module

SHIPPED = Path(tnsim.__file__).parent / "data" / "modular-addition"
FORMULAS = {
    "=1+1": "'=1+1",
    "+1": "'+1",
    "-1": "'-1",
    "@SUM(A1)": "'@SUM(A1)",
    " =1+1": "' =1+1",
    "\xa0-1": "'\xa0-1",
    "\u200b=1": "'\u200b=1",
    "\ufeff@A1": "'\ufeff@A1",
    "\u034f=1": "'\u034f=1",
    "\u3164=1": "'\u3164=1",
    "\uff1d1+1": "'\uff1d1+1",
    " \uff20A1": "' \uff20A1",
    "\ufe661": "'\ufe661",
    '"=1"': '\'"=1"',
    "\tx": "'\tx",
    "\rx": "'\rx",
    "\n=1+1": "'\n'=1+1",
    " \t=1": " \t'=1",
    "a\n=1": "a\n'=1",
    "a\r\n\u200b=1": "a\r\n'\u200b=1",
    "a\v-1": "a\v'-1",
    "a\x85+1": "a\x85'+1",
    "a\u2028 =1": "a\u2028' =1",
    "a;=1": "a;'=1",
    "a, +1": "a,' +1",
    "a\t@A1": "a\t'@A1",
    "a|-1": "a|'-1",
    'a;"=1"': 'a;\'"=1"',
    "plain": "plain",
    "a=b": "a=b",
    "seed 1, step -2; x=3": "seed 1, step -2; x=3",
    "\udc80x": "\\udc80x",
    'say "x", y': 'say "x", y',
}
"""Labels of models, and the cells that they become in a table."""
WRITERS = {
    "similarity.csv": result_module.write_csv,
    "result.npz": result_module.write_npz,
    "pairs.parquet": result_module.write_parquet,
    "run.html": report.write,
}
"""What writes a result into a file, by the name of the file."""


@cache
def _shipped():
    series = tnsim.load(SHIPPED)
    found = tnsim.pairwise(series, slices=True)
    inner = (found.sign * np.exp(found.log_inner)).values
    return result(inner, [int(x) for x in series.labels], found.slices.values[..., :6])


def shipped():
    """All pairs of the thirteen shipped checkpoints, with six of the slices."""
    return _shipped().copy(deep=True)


def result(inner, labels, slices=None):
    """The Dataset that a pairwise run gives, from inner products."""
    norms = np.sqrt(np.diag(inner))
    variables = {
        "similarity": (("a", "b"), inner / np.outer(norms, norms)),
        "log_inner": (("a", "b"), np.log(np.abs(inner))),
        "sign": (("a", "b"), np.sign(inner)),
        "log_norm_a": ("a", 2 * np.log(norms)),
        "log_norm_b": ("b", 2 * np.log(norms)),
    }
    if slices is not None:
        variables["slices"] = (("a", "b", "output"), slices)
    hashes, names = (
        [f"{n:064x}" for n in range(len(labels))],
        [f"step_{label}.safetensors" for label in labels],
    )
    coords = {"a": labels, "b": labels}
    coords |= {
        f"{kind}_{d}": (d, v) for d in "ab" for kind, v in (("hash", hashes), ("name", names))
    }
    attrs = {
        "metric": "gaussian",
        "metric_parameters": "{}",
        "exact": 1,
        "dtype": "float64",
        "symmetric": 1,
        "tnsim_version": "0.1.0",
    }
    return xr.Dataset(variables, coords, attrs)


def data_of(page):
    """The run that a page has, as JSON."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'json" id="run">(.*?)</script>', text, re.DOTALL)[1])


def blocks(rng, sizes, spread=0.3, dim=40):
    """A made run: unit vectors around one centre per phase, so that the phases are known."""
    centres = rng.normal(size=(len(sizes), dim)).repeat(sizes, axis=0)
    vectors = centres + spread * rng.normal(size=centres.shape)
    return result(vectors @ vectors.T, [100 * n for n in range(sum(sizes))])
