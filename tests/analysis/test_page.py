"""The page in a browser: what is drawn, chosen, pinned, explained, stepped through, downloaded."""

import csv
import io
import struct

import browser
import numpy as np
import pytest
import xarray as xr
from closeness import assert_close
from sample_runs import FORMULAS, blocks

from tnsim import reading, report
from tnsim.all_pairs import result

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")
PHONE = 400
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def show(window, tmp_path):
    """Writes the page of a run and opens it; the page must not complain, then or later."""

    def opened(run, title="A run", **options):
        window.open(report.write(run, tmp_path / "run.html", title), **options)
        return window

    yield opened
    assert window.errors() == []


def run_of(sizes, outputs=0):
    """A made run; its slices are the similarity shrunk towards one half."""
    run = blocks(np.random.default_rng(0), sizes)
    if outputs:
        shares = np.linspace(0.1, 1, outputs)
        around = np.multiply.outer(run.similarity.values - 0.5, shares)
        run["slices"] = (("a", "b", "output"), 0.5 + around)
        run = run.assign_coords(output=np.arange(outputs))
    return run


def middle_of(window, row, column):
    """Where a pair stands in the window."""
    return window.run(f"""(() => {{
        canvas.scrollIntoView();
        const box = canvas.getBoundingClientRect();
        const x = box.left + place.left + ({column} + 0.5) * place.cell;
        return [x, box.top + place.top + place.h - ({row} + 0.5) * place.cell];
    }})()""")


def readout(window):
    """The lines of the table of the pair, by their names."""
    lines = window.run("""[...byId("readout").rows].map(
        (row) => [...row.cells].map((cell) => cell.textContent))""")
    return {name: values for name, *values in lines}


def shown(value, digits=4):
    return f"{value:.{digits}f}".replace("-", "−")


def download(window, button):
    """Press a button and wait for the file that comes of it."""
    window.run(f"byId('{button}').click()")
    path = window.downloaded()
    contents = path.read_bytes()
    path.unlink()
    return path.name, contents


@pytest.mark.parametrize("sizes", [[5, 4, 4], [2, 2]])
def test_what_is_drawn(show, sizes):
    run = run_of(sizes)
    window = show(run, "A <b>run</b>")
    assert window.text("h1") == "A <b>run</b>"
    count = sum(sizes)
    assert window.text("#subtitle") == f"{count} × {count} checkpoints · gaussian · exact · float64"
    assert readout(window)["row, column"] == [f"{100 * (count - 1)}, 0"]
    assert readout(window)["similarity"] == [shown(run.similarity.values[-1, 0])]
    lines = window.run("document.querySelectorAll('#trajectory path').length")
    points = window.run("document.querySelectorAll('#plane circle').length")
    assert (lines, points) == (3, count) and window.run("byId('ofParts').hidden")
    division = reading.segment(run, 3)
    score = reading.block_score(run, division.change_points)
    assert f"block score Δ of the similarity {shown(score, 3)}" in window.text("#score")


def test_two_sets_have_no_phases_and_no_embedding(show):
    window = show(run_of([3, 3]).isel(a=slice(0, 2)))
    assert window.run("['divisions', 'segments', 'embedding'].every((id) => byId(id).hidden)")
    assert window.run("document.querySelectorAll('#models table').length") == 2


@pytest.mark.parametrize("width", [1400, PHONE])
@pytest.mark.parametrize("letter", ["", "W"])
def test_names_of_points_cover_no_point_and_no_other_name(show, width, letter):
    """Nor are they cut at the edges, wide letters or not."""
    run = run_of([9, 8, 7])
    names = [f"{letter * 30}{step}" for step in run.a.values]
    window = show(run.assign_coords(a=names, b=names), width=width)
    boxes, dots, frame = window.run("""(() => {
        const svg = byId("plane"), { x, y, width, height } = svg.viewBox.baseVal;
        const inner = [...svg.querySelectorAll("text")].map((text) => text.getBBox());
        const dots = [...svg.querySelectorAll("circle")];
        return [inner.map((box) => [box.x, box.y, box.x + box.width, box.y + box.height]),
            dots.map((dot) => [+dot.getAttribute("cx"), +dot.getAttribute("cy")]),
            [x, y, x + width, y + height]];
    })()""")
    assert len(boxes) >= 2
    for n, (left, top, right, bottom) in enumerate(boxes):
        assert frame[0] <= left and right <= frame[2] and frame[1] <= top + 3
        assert bottom - 3 <= frame[3]
        assert not any(left < x < right and top < y < bottom for x, y in dots)
        for a, b, c, d in boxes[:n]:  # a box of a line is higher than its letters
            assert not (left < c and a < right and top + 2 < d - 2 and b + 2 < bottom - 2)


def test_a_mouse_chooses_and_pins(show):
    run = run_of([3, 3])
    window = show(run)
    window.point(*middle_of(window, 4, 2))
    chosen, pinned = run.similarity.values[5, 1], run.similarity.values[4, 2]
    assert readout(window)["similarity"] == [shown(pinned)]
    window.point(*middle_of(window, 4, 2), press=True)
    window.point(*middle_of(window, 5, 1))
    table = readout(window)
    assert table["row, column"] == ["500, 100", "400, 200", ""]
    assert table[""] == ["pair", "pinned", "difference"]
    difference = round(chosen, 4) - round(pinned, 4)
    assert table["similarity"] == [shown(chosen), shown(pinned), shown(difference)]
    assert window.run("!byId('pinned').hidden && byId('legend').children.length") == 4
    window.point(*middle_of(window, 4, 2), press=True)
    assert readout(window)["similarity"] == [shown(pinned)] and window.run("byId('pinned').hidden")


def test_a_tap_chooses_and_the_next_one_pins(show):
    run = run_of([3, 3])
    window = show(run, width=PHONE)
    window.tap(*middle_of(window, 1, 3))
    assert readout(window)["row, column"] == ["100, 300"] and window.run("state.pinned") is None
    window.tap(*middle_of(window, 1, 3))
    assert window.run("state.pinned") == {"row": 1, "column": 3}
    window.tap(*middle_of(window, 2, 2))
    assert readout(window)["similarity"][0] == "1.0000"
    assert readout(window)["row, column"] == ["200, 200", "100, 300", ""]


def test_keys_and_fields_choose_and_pin(show):
    window = show(run_of([3, 3]))
    window.run("canvas.focus()")
    window.press("ArrowDown")
    window.press("ArrowRight")
    window.press("Enter")
    window.press("End")
    window.press("ArrowDown", shift=True)
    assert readout(window)["row, column"] == ["0, 500", "400, 100", ""]
    assert window.text("#spoken").startswith("0, 500: ")
    window.press("Escape")
    assert readout(window)["row, column"] == ["0, 500"]
    window.run("byId('row').selectedIndex = 2; byId('row').dispatchEvent(new Event('change'))")
    window.frame()
    window.run("byId('pin').click()")
    assert readout(window)["row, column"] == ["200, 500", "200, 500", ""]
    assert window.text("#pin") == "Unpin"


def test_every_term_explains_itself(show):
    run = run_of([3, 3], outputs=2).assign_attrs(caveats=["a norm was left out"])
    run["cka"] = run.similarity.assign_attrs(samples=200)
    window = show(run)
    assert window.text("#caveats") == "Caveat: a norm was left out"
    window.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    notes = window.run("""[...document.querySelectorAll(".term")].map((button) => {
        button.click();
        const isOpen = button.getAttribute("aria-expanded") === "true";
        return [button.dataset.term, isOpen && byId(button.getAttribute("aria-controls")).innerText];
    })""")
    named = dict(notes)
    expected = "exact sign log_inner similarity slices block_score scatter caveats chords phases"
    assert named.keys() >= {*expected.split()} and all(named.values())
    assert "exp(log inner)" in named["log_inner"] and named["cka"] == "samples: 200"
    window.run("document.querySelector('[data-term=sign]').focus()")
    window.press("Enter")
    assert window.text("#note").startswith("The sign of the inner product")
    window.press("Escape")
    assert window.run("byId('note')") is None


@pytest.mark.parametrize("exact, kind", [(1, "on these inputs"), (0, "estimates")])
def test_the_heading_says_how_sure_sampled_numbers_are(show, exact, kind):
    run = run_of([2, 2])
    run["standard_error"] = 0.02 * (run.similarity < 1)
    window = show(run.assign_attrs(exact=exact))
    assert f" · {kind}, with standard errors up to 0.02 · " in window.text("#subtitle")
    assert window.run(f"TERMS.has({kind!r})")


def test_a_note_stays_while_pairs_are_chosen(show):
    window = show(run_of([3, 3]))
    window.run("document.querySelector('#readout [data-term=sign]').click()")
    window.point(*middle_of(window, 1, 1))
    assert window.text("#note").startswith("The sign")
    window.run("document.querySelector('h2 [data-term=phases]').click(); state.phases = 1; draw()")
    assert window.text("#note").startswith("A division")
    window.run("document.querySelector('[data-term=scatter]').click(); state.phases = 2; draw()")
    assert window.run("byId('note')") is None


def test_slices_step_by_step(show):
    run = run_of([3, 3], outputs=45)
    window = show(run)
    tiles = "[...byId('tiles').children].map((tile) => tile.textContent)"
    assert window.run(tiles) == list(map(str, range(20)))
    window.run("byId('tiles').children[19].click()")
    assert window.text("#heading") == "slice of output 19"
    window.run("byId('next').click()")
    assert window.run(tiles) == list(map(str, range(20, 40)))
    pressed = "document.querySelector('.tile[aria-pressed=true]').textContent"
    assert window.run(pressed) == "20" and window.text("#shown") == "21 to 40 of 45 outputs"
    value = run.slices.values[5, 0, 20]
    assert readout(window)["slice of output 20"] == [shown(value, 3)]
    score = reading.block_score(run.slices.sel(output=20), reading.segment(run, 3).change_points)
    assert f"of the slice of output 20 {shown(score, 3)}" in window.text("#score")
    window.run("chooseOutput(44)")
    assert window.run("byId('next').disabled")
    assert window.run(tiles) == list(map(str, range(40, 45)))


@pytest.mark.parametrize("steps, said", [([1, 2, 3], "angle"), ([1, 2, 3, 3000], "log(1 − s)")])
def test_small_changes_are_told_apart(show, steps, said):
    angles = 1e-4 * np.cumsum([0, *steps])
    near = np.cos(np.subtract.outer(angles, angles))
    run = run_of([len(angles)])
    window = show(run.assign(similarity=(("a", "b"), near)))
    assert window.run("drawing.range.said") == said
    colours = window.run("valuesOf(current()).slice(0, columns).map(drawing.range.at)")
    assert max(colours.values()) - min(colours.values()) > 0.9
    assert abs(float(readout(window)["similarity"][0]) - near[-1, 0]) < 1e-9  # the digits shown


@pytest.mark.parametrize("step", [1e-3, 1e-5])
def test_no_number_beside_trajectories_is_cut(show, step):
    """Near 1 it has as many digits as tell it from its neighbours."""
    angles = step * np.arange(4)
    near = np.cos(np.subtract.outer(angles, angles))
    window = show(run_of([4]).assign(similarity=(("a", "b"), near)))
    lefts, texts = window.run("""(() => {
        const texts = [...document.querySelectorAll("#trajectory text:not([transform])")];
        return [texts.map((text) => text.getBBox().x), texts.map((text) => text.textContent)];
    })()""")
    assert len(set(texts)) == len(texts) >= 3 and min(lefts) >= 0
    across = window.run(
        "[...document.querySelectorAll('#plane circle')].map((dot) => +dot.getAttribute('cx'))"
    )
    assert max(across) - min(across) > 100  # nor are the models one point


def test_curves_stand_above_the_matrix(show):
    run = run_of([3, 3])
    before = show(run).run("place.top")
    run["train_accuracy"] = ("a", [0.1, 0.2, np.nan, 0.6, 0.8, 1.0])
    run["test_accuracy"] = ("a", np.linspace(0, 1, 6))
    run["loss"] = ("a", np.linspace(4, 1, 6))
    window = show(run)
    # the two accuracies share a strip; ink is found in each strip
    strip = window.run("STRIP")
    assert window.run("place.top") == before + 2 * strip
    inked = """(top) => {
        const box = [place.left, top, place.w, STRIP].map(Math.round);
        return canvas.getContext("2d").getImageData(...box).data.some((x) => x > 0);
    }"""
    assert window.run(f"({inked})(0)") and window.run(f"({inked})(STRIP)")
    assert readout(window)["train accuracy"] == ["1, 0.1"]
    assert readout(window)["loss"] == ["1, 4"]


def test_the_table_that_is_downloaded_is_the_one_a_run_writes(show, tmp_path):
    labels = [*FORMULAS]
    run = run_of([len(labels)]).assign_coords(a=labels, b=labels)
    window = show(run, "=1+1/../A <run>")
    name, contents = download(window, "csv")
    assert name == "1-1-a-run-similarity.csv"
    result.write_csv(run, tmp_path / "run.csv")
    texts = contents, (tmp_path / "run.csv").read_bytes()
    ours, written = (list(csv.reader(io.StringIO(text.decode(), newline=""))) for text in texts)
    assert ours[0] == written[0] and [row[0] for row in ours] == [row[0] for row in written]
    assert ours[0][1:] == [*FORMULAS.values()]
    numbers = [np.array([row[1:] for row in table[1:]], float) for table in (ours, written)]
    assert_close(*numbers, scale=1.0, rtol=5.1e-5, limited_by="numbers shown with four digits")


def test_numbers_stay_numbers_and_gaps_are_said(show):
    run = run_of([3]).assign_coords(a=[-2, -1, 0], b=[-2, -1, 0])
    run["log_inner"][2, 0] = run["log_inner"][0, 2] = -np.inf
    window = show(run)
    window.run("state.matrix = 1; draw()")
    _, contents = download(window, "csv")
    header, *lines = contents.decode().split("\r\n")
    assert header == ",-2,-1,0" and lines[0].startswith("-2,") and lines[0].endswith(",nan")
    window.run("choose({row: 2, column: 0})")
    window.frame()
    assert readout(window)["log inner"] == ["not finite"]


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_that_is_downloaded_is_light(show, dark):
    window = show(run_of([3, 3]), dark=dark)
    name, contents = download(window, "png")
    assert name == "a-run-similarity.png" and contents.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", contents[16:24])
    assert min(width, height) > 1200
    corner = "[...pictureOf(drawing, 'x').getContext('2d').getImageData(0, 0, 1, 1).data]"
    assert window.run(corner) == [255] * 4


@pytest.mark.parametrize("width", [1400, PHONE])
def test_long_and_hostile_names_do_no_harm(show, width):
    labels = [f"{HOSTILE}{n}{'long' * 60}" for n in range(4)]
    outputs = [HOSTILE, "", "x" * 99]
    run = run_of([2, 2], outputs=3).assign_coords(a=labels, b=labels, output=outputs)
    attrs = {"note": HOSTILE * 9, "__proto__": "x", "caveats": [HOSTILE * 9]}
    run = run.assign_coords(name_a=("a", labels)).assign_attrs(attrs)
    for name in ("__proto__", "constructor", HOSTILE * 3):
        run[name] = run.similarity.assign_attrs({"constructor": HOSTILE, "long": "x" * 999})
        run[f"{name}_a"] = ("a", np.arange(4.0))
    window = show(run, HOSTILE * 9, width=width)
    window.run("""for (const part of document.querySelectorAll(".term, .tile, details")) {
        part.click();
        part.open = true;
    }""")
    window.run("togglePin()")
    assert window.run("document.querySelector('img')") is None
    assert window.run("document.scrollingElement.scrollWidth <= innerWidth")
    assert HOSTILE in download(window, "csv")[1].decode()


@pytest.mark.parametrize("width", [1400, PHONE])
def test_no_column_of_the_phases_is_cut(show, width):
    labels = [f"seed_{n // 3}_epoch_{n:02}" for n in range(9)]
    window = show(run_of([3, 3, 3]).assign_coords(a=labels, b=labels), width=width)
    window.run("state.phases = 2; draw()")
    cut = "byId('segmentation').parentElement"
    assert window.run("byId('segmentation').rows[1].cells[4].innerText") != ""
    assert window.run(f"{cut}.scrollWidth <= {cut}.clientWidth")


def test_numbers_that_round_to_zero_have_no_sign(show):
    found = show(run_of([2, 2])).run("[-0.004, 0.004, -0.006, -1].map((x) => rounded(x, 2))")
    assert found == ["0.00", "0.00", "−0.01", "−1.00"]


@pytest.mark.parametrize("width", [1400, PHONE])
def test_no_row_of_the_provenance_is_cut(show, width):
    plan = "recursion: 8.66e+08 multiplications in 1 tiles of 20 x 20, and what else is to be said"
    run = run_of([3, 3]).assign_attrs(plan=plan, metric_parameters="standard", caveats=[])
    window = show(run, width=width)
    rows = window.run("""[...byId("provenance").rows].map(
        (row) => [...row.cells].map((cell) => cell.scrollWidth <= cell.clientWidth + 1))""")
    assert len(rows) >= 5 and all(all(row) for row in rows)
    edge = window.run("byId('provenance').getBoundingClientRect().right - innerWidth")
    assert edge <= 0
    cells = "[...byId('provenance').rows].map((r) => [...r.cells].map((c) => c.innerText))"
    said = dict(window.run(cells))
    wanted = {"exact": "yes", "caveats": "none", "metric parameters": "standard"}
    assert wanted.items() <= said.items()
    window = show(run.assign_attrs(caveats=["left out", "folded"]), width=width)
    assert "left out; folded" in window.text("#provenance")


def test_light_and_dark(show):
    grounds = []
    for dark in (False, True):
        window = show(run_of([3, 3], outputs=2), dark=dark)
        ground = window.run("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(map(int, ground.strip("rgb()").split(","))) > 384)
        ink = window.run("getComputedStyle(document.body).color")
        assert (sum(map(int, ink.strip("rgb()").split(","))) > 384) != grounds[-1]
    assert grounds == [True, False]


@pytest.mark.slow
def test_choosing_draws_once_a_frame_and_never_the_matrix(show):
    window = show(run_of([3, 3]))
    counts = window.run("""new Promise((done) => {
        const counts = { drawMatrix: 0, drawReadout: 0 };
        for (const name of Object.keys(counts)) {
            const drawn = window[name];
            window[name] = (...given) => { counts[name]++; return drawn(...given); };
        }
        for (let n = 0; n < 5; n++) choose({ row: n, column: n });
        requestAnimationFrame(() => requestAnimationFrame(() => done(counts)));
    })""")
    assert counts == {"drawMatrix": 0, "drawReadout": 1}


def run_of_parts():
    """A made run over two layers of two heads and the direct path."""
    matrices = [np.abs(run_of([2, 3]).similarity.values) ** (1 / (1 + n)) for n in range(5)]
    kinds, layers, heads = ["qk"] * 4 + ["direct"], [1, 1, 2, 2, -1], [0, 1, 0, 1, -1]
    names = [f"layer {i} head {h} qk" for i, h in zip(layers[:4], heads[:4], strict=True)]
    of_part = {"part": [*names, "direct"], "kind": kinds, "layer": layers, "head": heads}
    coordinates = {name: ("part", values) for name, values in of_part.items()}
    values = {"similarity": (("part", "a", "b"), np.stack(matrices))}
    return xr.Dataset(values, {**coordinates, "a": range(5), "b": range(5)})


@pytest.mark.slow
def test_parts_layer_by_head_open_their_matrices(show):
    run = run_of_parts()
    window = show(run)
    tables = window.run("""[...document.querySelectorAll("table.parts")].map((table) =>
        [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent)))""")
    values = [shown(value, 2) for value in run.similarity.values[:, -1, 0]]
    assert tables[0] == [["2", values[2], values[3]], ["1", values[0], values[1]]]  # and no 0
    assert tables[1] == [[values[4]]]
    window.run("document.querySelector(\"[aria-label='layer 2 head 0 qk']\").click()")
    assert window.text("#heading") == "layer 2 head 0 qk"
    assert readout(window)["layer 2 head 0 qk"] == [shown(run.similarity.values[2, -1, 0])]
    pressed = "[...document.querySelectorAll('.part[aria-pressed=true]')].map((cell) => cell.title)"
    assert window.run(pressed) == ["layer 2 head 0 qk"]
    assert window.run("byId('segments').hidden && byId('embedding').hidden")


def test_a_part_that_never_changes_leaves_the_scale_of_the_others(show):
    run = run_of_parts()
    angles = 1e-4 * np.arange(5)
    near = np.cos(np.subtract.outer(angles, angles))
    values = np.stack([near] * 4 + [np.ones((5, 5))])
    window = show(run.assign(similarity=(("part", "a", "b"), values)))
    assert window.run("rangeOfParts.said") == "angle"
    assert window.run("rangeOf(run.matrices[4].scale).said") is None
