"""The report page of a long run in a browser: its size, and how long what one does with it takes.

    python benchmarks/page.py --out benchmarks/results/page.md

A made run of 101 x 101 checkpoints with the slices of 113 outputs and two curves, in headless
Chromium (a window of 1400 x 900 pixels), which must be installed. Script times are what the page's
own code takes, styles and layout included; frames are the times between two pictures while the
mouse crosses the matrix, of which a screen of 60 Hz shows one every 16.7 ms.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr

from tnsim.analysis import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import browser

CHECKPOINTS, OUTPUTS = 101, 113
TIMES = 40
MACHINE = "four cores of an AMD EPYC, 24 GiB, without a graphics card"
TIMED = """(() => {
    const times = [];
    for (let n = 0; n < %d; n++) {
        const begun = performance.now();
        %s;
        document.body.getBoundingClientRect();
        times.push(performance.now() - begun);
    }
    return times;
})()"""
ACTIONS = {
    "another pair, drawn": "choose({ row: 7 * n % rows, column: 3 * n % columns }); drawPair()",
    "another output": "chooseOutput(n)",
    "another twenty small pictures": "chooseOutput(20 * n % run.slices.length)",
    "other phases": "state.phases = n % 10; draw()",
}
FRAMES = """
    window.frames_seen = [];
    let last = performance.now();
    const look = (now) => {
        frames_seen.push(now - last);
        last = now;
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
"""


def made_run() -> xr.Dataset:
    """Unit vectors around three centres; slices scatter around the similarity."""
    g = np.random.default_rng(0)
    vectors = np.repeat(g.normal(size=(3, 40)), [20, 40, 41], axis=0)
    vectors = vectors + 0.3 * g.normal(size=vectors.shape)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = vectors @ vectors.T
    noise = 0.2 * g.normal(size=(CHECKPOINTS, CHECKPOINTS, OUTPUTS))
    slices = np.clip(similarity[..., None] + noise + noise.transpose(1, 0, 2), -1, 1)
    accuracy = np.linspace(0, 1, CHECKPOINTS)
    variables = {
        "similarity": (("a", "b"), similarity),
        "log_inner": (("a", "b"), np.log(np.abs(similarity))),
        "sign": (("a", "b"), np.sign(similarity)),
        "slices": (("a", "b", "output"), slices),
        "train_accuracy": ("a", accuracy),
        "test_accuracy": ("a", accuracy**2),
    }
    steps = 100 * np.arange(CHECKPOINTS)
    return xr.Dataset(variables, {"a": steps, "b": steps, "output": np.arange(OUTPUTS)})


def spread(times: list[float]) -> str:
    late = sorted(times)[int(0.95 * len(times))]
    return f"{statistics.median(times):.1f} ms | {late:.1f} ms | {max(times):.1f} ms"


def timings(window: browser.Browser, page: Path) -> dict[str, str]:
    """A row for each thing that one does."""
    window.open(page)
    opened = "performance.timing.domComplete - performance.timing.navigationStart"
    rows = {"opened and drawn, once": f"{window.run(opened)} ms | |"}
    for name, action in ACTIONS.items():
        times = window.run(TIMED % (TIMES, action))
        rows[name] = spread(times)
    left, top, width, height = window.run("""(() => {
        canvas.scrollIntoView();
        const box = canvas.getBoundingClientRect();
        return [box.left + place.left, box.top + place.top, place.w, place.h];
    })()""")
    window.run(FRAMES)
    for n in range(200):
        x, y = left + width * n / 200, top + height * (n % 50) / 50
        window.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    rows["a frame under the mouse"] = spread(window.run("frames_seen"))
    assert window.errors() == []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        run = made_run()
        begun = time.perf_counter()
        page = report.write(run, Path(folder) / "run.html", "A long run")
        seconds = time.perf_counter() - begun
        size = f"{page.stat().st_size / 1e6:.2f} MB, written in {seconds:.1f} s"
        with browser.Browser(Path(folder)) as window:
            rows = timings(window, page)
    what = f"{CHECKPOINTS} x {CHECKPOINTS} checkpoints, {OUTPUTS} slices"
    lines = ["# The report page", ""]
    lines += [f"`python benchmarks/page.py`: {what}. A file of {size}."]
    lines += [f"Headless Chromium on {MACHINE}.", ""]
    lines += ["| | median | 95th percentile | longest |", "|---|---|---|---|"]
    lines += [f"| {name} | {figure} |" for name, figure in rows.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
