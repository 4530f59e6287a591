"""Figures of a pairwise run: what is drawn, that labels do not overlap, what is refused."""

import itertools
import re
from functools import partial

import matplotlib.text
import numpy as np
import pytest
from closeness import assert_close
from refusals import refused
from sample_runs import SHIPPED, blocks, shipped

import tnsim
from tnsim import baselines, figures, reading


@pytest.fixture
def run():
    found = shipped()
    found["weight_cosine"] = baselines.weight_cosine(tnsim.load(SHIPPED))
    return found


def images(figure):
    return [axes.images[0] for axes in figure.axes if axes.images]


def drawn(figure, axis):
    """Extents, in pixels, of the labels along one axis."""
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]


def test_heatmaps_share_one_colour_range(run):
    points = reading.segment(run, 3).change_points
    figure = figures.pairwise(run, "heatmap", ["similarity", "weight_cosine"], points)
    first, second = images(figure)
    assert np.array_equal(first.get_array(), run.similarity)
    assert first.get_clim() == second.get_clim() == (0, 1)
    assert len(figure.axes) == 3
    assert [axes.get_title() for axes in figure.axes[:2]] == ["similarity", "weight cosine"]
    assert sorted(line.get_xdata()[0] for line in figure.axes[0].lines)[-2:] == [3.5, 8.5]


def test_curves_stand_above_every_heatmap(run):
    count = len(run.a)
    run["train_accuracy"] = ("a", np.linspace(0, 1, count))
    half = ("a", np.linspace(0, 0.5, count))
    run = run.assign_coords(test_accuracy=half, loss=("a", -run.a.values))
    strips = [("train_accuracy", "test_accuracy"), "loss"]
    figure = figures.pairwise(run, "heatmap", ["similarity", "weight_cosine"], (4,), strips)
    for axes in figure.axes[:2]:
        lower, upper = axes.child_axes
        assert upper.get_title() and not axes.get_title()
        assert upper.lines[1].get_ydata().tolist() == run.test_accuracy.values.tolist()
        assert upper.lines[-1].get_xdata()[0] == 3.5 and upper.get_xlim() == axes.get_xlim()
        assert [text.get_text() for text in lower.get_legend().get_texts()] == ["loss"]


def test_curves_alone(run):
    run["train_accuracy"] = ("a", np.linspace(0, 1, len(run.a)))
    curves = ["train_accuracy", ("log_norm_a", "log_norm_b")]
    figure = figures.curves_over_training(run, curves, (4,))
    upper, lower = figure.axes
    assert upper.lines[0].get_ydata().tolist() == run.train_accuracy.values.tolist()
    assert len(lower.lines) == 3 and lower.lines[2].get_xdata()[0] == 3.5
    assert lower.get_xticklabels()[0].get_text() == "0"


def test_scatter(run):
    figure = figures.pairwise(run, "scatter", ["similarity", "weight_cosine", "log_inner"])
    points = figure.axes[1].collections[0].get_offsets()
    above = np.triu_indices(len(run.a), 1)
    assert np.array_equal(points[:, 0], run.similarity.values[above])
    assert np.array_equal(points[:, 1], run.log_inner.values[above])
    found = reading.correlation(run, run.log_inner)
    assert figure.axes[1].texts[0].get_text().startswith(f"r = {found.pearson:.3f}, rank")
    assert [axes.get_title() for axes in figure.axes] == ["weight cosine", "log inner"]


def test_other_quantities_have_their_own_range(run):
    (image,) = images(figures.pairwise(run, variable="log_inner"))
    assert image.get_clim() == (run.log_inner.min(), run.log_inner.max())
    run["similarity"][0, -1] = run["similarity"][-1, 0] = -0.5
    assert images(figures.pairwise(run))[0].get_clim() == (-1, 1)


@pytest.mark.parametrize("changes, said", [([1, 2, 3], "angle"), ([1, 2, 3, 3000], "log of 1 - s")])
def test_small_changes_have_colours_of_their_own(run, changes, said):
    """Whatever their size, the least change differs clearly from none."""
    angles = 1e-5 * np.cumsum([0, *changes])
    near = np.cos(np.subtract.outer(angles, angles))
    few = run[["similarity"]].isel(a=slice(len(near)), b=slice(len(near)))
    figure = figures.pairwise(few.assign(similarity=(("a", "b"), near)))
    image = figure.axes[0].images[0]
    assert np.array_equal(image.get_array(), near)
    assert said in figure.axes[1].get_ylabel()
    if said == "angle":
        assert abs(image.norm(near[0]) - (1 - angles / angles[-1])).max() < 1e-3  # of a table
    assert np.ptp(image.norm(near[0])) > 0.9
    named = figures.pairwise(few.assign(similarity=(("a", "b"), near)), vmin=0.0, vmax=1.0)
    assert named.axes[0].images[0].get_clim() == (0, 1)
    assert named.axes[1].get_ylabel() == "similarity"


@pytest.mark.crossing
@pytest.mark.parametrize("count", [5, 60, 150])
@pytest.mark.parametrize("kind", ["heatmap", "trajectory", "dendrogram"])
def test_labels_do_not_overlap(rng, kind, count):
    figure = figures.pairwise(blocks(rng, [count // 5] * 5), kind)
    boxes = drawn(figure, figure.axes[0].xaxis)
    assert len(boxes) >= 5 and all(p.x1 <= q.x0 for p, q in itertools.pairwise(boxes))
    if kind == "heatmap":
        boxes = drawn(figure, figure.axes[0].yaxis)
        assert all(p.y1 <= q.y0 for p, q in itertools.pairwise(boxes))


def test_trajectories(run):
    figure = figures.pairwise(run, "trajectory", ["similarity", "weight_cosine"], (4,))
    last, before = figure.axes[0].lines[:2]
    assert last.get_ydata().tolist() == reading.trajectory(run).values.tolist()
    assert len(before.get_xdata()) == 12 and figure.axes[0].get_ylabel() == "value"
    assert len(figure.axes[0].get_legend().get_texts()) == 4
    assert figure.axes[0].lines[-1].get_xdata()[0] == 3.5


@pytest.mark.parametrize("angle", [1.0, 1e-2, 1e-4, 1e-6])
def test_numbers_beside_curves_are_whole(run, angle):
    """Near 1 none is taken out of them, to be written where the legend is."""
    few, angles = run[["similarity"]].isel(a=slice(4), b=slice(4)), angle * np.arange(4)
    near = few.assign(similarity=(("a", "b"), np.cos(np.subtract.outer(angles, angles))))
    figure = figures.pairwise(near, "trajectory")
    figure.draw_without_rendering()
    axis = figure.axes[0].yaxis
    said = [float(text.get_text().replace("\N{MINUS SIGN}", "-")) for text in axis.get_ticklabels()]
    assert not axis.get_offset_text().get_text() and len(set(said)) == len(said) >= 4
    assert_close(said, axis.get_ticklocs())


def test_slices(run):
    figure = figures.pairwise(run, "slices")
    panels = images(figure)
    assert len(panels) == 6 and len({panel.get_clim() for panel in panels}) == 1
    assert np.array_equal(panels[4].get_array(), run.slices.sel(output=4))
    assert len(images(figures.pairwise(run.isel(output=[0, 3]), "slices", change_points=(4,)))) == 2


def test_embedding_and_dendrogram(run):
    figure = figures.pairwise(run, "mds", change_points=(4, 9))
    axes = figure.axes[0]
    assert np.array_equal(axes.collections[0].get_offsets(), reading.mds(run).points)
    assert len({tuple(c) for c in axes.collections[0].get_facecolors()}) == 3
    assert {"0", "100000"} <= {text.get_text() for text in axes.texts}
    axes = figures.pairwise(run, "dendrogram", change_points=(4, 9)).axes[0]
    assert len(axes.collections[0].get_segments()) == 12
    assert len({text.get_color() for text in axes.get_xticklabels()}) == 3


@pytest.mark.parametrize(
    ("labels", "points", "starts"),
    [
        (["1", "2", "3", "best"], (2, 3), [2]),  # a phase of the copy alone
        (["best", "1", "2", "3"], (1, 3), [2]),
        (["1", "best", "2", "3"], (1, 2), [1]),
    ],
)
def test_phases_of_copies_alone_are_left_out(rng, labels, points, starts):
    weights = {label: rng.normal(size=(2, 3)) for label in labels}
    weights["best"] = weights["2"]
    models = {label: tnsim.Model([tnsim.Linear(x)]) for label, x in weights.items()}
    with pytest.warns(tnsim.errors.DuplicateWarning):
        run = tnsim.pairwise(models)
    axes = figures.pairwise(run, "trajectory", change_points=points).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines[2:]] == [start - 0.5 for start in starts]
    points_of_plane = figures.pairwise(run, "mds", change_points=points).axes[0].collections[0]
    assert len({tuple(c) for c in points_of_plane.get_facecolors()}) == len(starts) + 1


def test_two_sets_of_models_have_a_heatmap(run):
    assert images(figures.pairwise(run.isel(a=slice(0, 4))))[0].get_array().shape == (4, 13)


def test_no_global_state(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.pairwise(run, "mds")
    assert dict(matplotlib.rcParams) == before


def test_refusals(run):
    for message, given, options in [
        ("drawn as heatmap, .*, scatter, parts, not as 'violin'", run, {"kind": "violin"}),
        ("no variable 'cka', only similarity", run, {"variable": "cka"}),
        ("no variable 'slices'.*with slices", run.drop_vars("slices"), {"kind": "slices"}),
        ("200 slices are not 1 to 144", run.isel(output=[0] * 200), {"kind": "slices"}),
        ("change points must rise from 1 to 12", run, {"change_points": (20,)}),
        ("all pairs of one set of models", run.isel(a=[0, 1]), {"kind": "mds"}),
        ("above a heatmap, not above 'mds'", run, {"kind": "mds", "curves": ["log_norm_a"]}),
        ("no variable 'accuracy', only", run, {"curves": ["accuracy"]}),
        (r"each of 13 columns: similarity is of shape \(13, 13\)", run, {"curves": ["similarity"]}),
        (r"log_norm_a is of shape \(4,\)", run.isel(a=slice(4)), {"curves": ["log_norm_a"]}),
        ("found 'similarity' alone: name two or more", run, {"kind": "scatter"}),
    ]:
        with refused(message, tnsim.errors.ResultError):
            figures.pairwise(given, **options)
    with refused("needs at least one strip, found none", tnsim.errors.ResultError):
        figures.curves_over_training(run, [])


def test_contributions_that_cancel_have_no_shares():
    figure = figures.contributions(np.array([[1.0, -1.0]]), ["all"], ["one", "other"])
    assert not figure.axes[0].texts and figure.axes[0].get_title() == "contributions, sum 0"


LABELS = [f"layer {layer} head {head}" for layer in (1, 2) for head in (0, 1)] + ["layer 3"]
VALUES = np.array([0.5, -0.1, 0.3, 0.2, 0.1])
WIRES = ["embed > Q of layer 1", "embed > K of layer 1", "layer 1 > in of layer 2"]
TABLE, BESIDE = np.outer([1.0, 0.5], VALUES), {"accuracy": [0, 1]}
COSTS = dict(multiplications=900, paper_multiplications=1000, unrolled_multiplications=4000)
COSTS |= dict(milliseconds=0.5, hand_milliseconds=0.4)
DEPTHS = [{"depth": depth, **COSTS} for depth in (1, 2)]
BOTH = ["similarity", "weight_cosine"]


def test_shares_beyond_the_largest_are_one_bar():
    axes = figures.shares(LABELS, np.array([0.5, -0.25, 0.375, 0.25, 0.125]), most=2).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.375, 0.125]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [LABELS[0], LABELS[2], "3 others"]


def test_costs_that_were_not_counted_have_no_point():
    rows = [DEPTHS[0], {**DEPTHS[1], "unrolled_multiplications": None}]
    counts, times = (
        [dict(zip(*line.get_data(), strict=True)) for line in axes.lines]
        for axes in figures.depth(rows).axes
    )
    assert counts == [{1: 900, 2: 900}, {1: 1000, 2: 1000}, {1: 4000}]
    assert times == [{1: 0.5, 2: 0.5}, {1: 0.4, 2: 0.4}]


def pairwise(kind, *variables):
    """A plot of a result, or of a result over parts."""

    def plot(run, **drawing):
        if kind == "parts":
            of_part = {"kind": ["qk", "ov"], "layer": [0, 0], "head": [0, 0]}
            run = run.similarity.expand_dims(part=["qk", "ov"]).to_dataset()
            run = run.assign_coords({name: ("part", x) for name, x in of_part.items()})
        return figures.pairwise(run, kind, variables or "similarity", **drawing)

    return plot


def network(run, **drawing):
    return figures.draw(tnsim.tensor_networks.network(tnsim.load(SHIPPED)[0]), **drawing)


def curved(run):
    """The run with two accuracies, and strips of them and of another curve."""
    train = np.linspace(0, 1, len(run.a))
    found = run.assign(train_accuracy=("a", train), validation_accuracy=("a", train**2))
    return found, [("train_accuracy", "validation_accuracy"), "log_norm_a"]


def curves(run, **drawing):
    return figures.curves_over_training(*curved(run), (4,), **drawing)


def curves_above(run, **drawing):
    found, strips = curved(run)
    return figures.pairwise(found, "heatmap", BOTH, (4,), strips, **drawing)


def scatter_grid(run, **drawing):
    matrix = run.similarity.values
    panels = {"one": (matrix, matrix), "two": (matrix, matrix**3)}
    return figures.scatter_grid(panels, "x", "y", **drawing)


# Each public plot of a run by name, with the number of its panels and whether it has a range of
# values.
PLOTS = {
    "heatmap": (1, True, lambda run, **d: figures.heatmap(run.similarity, list(map(str, run.a.values)), **d)),
    "contributions": (1, True, lambda _, **d: figures.contributions(VALUES[None], ["all"], LABELS, **d)),
    "shares": (1, True, lambda _, **d: figures.shares(LABELS, VALUES, abs(VALUES), most=3, **d)),
    "layers and heads": (1, True, lambda _, **d: figures.layers_and_heads(LABELS, VALUES, **d)),
    "shares over training": (1, True, lambda _, **d: figures.shares_over_training(["0", "1"], LABELS, TABLE, BESIDE, **d)),
    "edges": (1, True, lambda _, **d: figures.edges(WIRES, VALUES[:3], **d)),
    "network": (1, False, network),
    "depth": (2, False, lambda _, **d: figures.depth(DEPTHS, "costs", **d)),
    "scatter grid": (2, True, scatter_grid),
    "curves": (2, True, curves),
    "curves above": (2, True, curves_above),
    "heatmaps": (2, True, pairwise("heatmap", *BOTH)),
    "trajectory": (1, True, pairwise("trajectory", *BOTH)),
    "slices": (6, True, pairwise("slices")),
    "mds": (2, False, pairwise("mds", *BOTH)),
    "dendrogram": (2, True, pairwise("dendrogram", *BOTH)),
    "scatter": (1, True, pairwise("scatter", *BOTH)),
    "parts": (2, True, pairwise("parts")),
}  # fmt: skip


def shown_range(axes):
    """Ends of the colours or, without an image, of both axes."""
    if axes.images:
        return [axes.images[0].get_clim()]
    return [axes.get_xlim(), axes.get_ylim()]


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_takes_axes_size_colours_and_range(run, name):
    panels, has_range, drawn_by = PLOTS[name]
    plot = partial(drawn_by, run)
    assert plot(figsize=(7, 5)).get_size_inches().tolist() == [7, 5]
    whole, grid = figures.new_figure(ncols=panels + 1, squeeze=False, figsize=(4 * panels, 4))
    given = list(grid[0, 1:])
    assert plot(ax=given) is whole
    assert all(axes.has_data() for axes in given) and not grid[0, 0].has_data()
    if panels == 1:
        assert plot(ax=grid[0, 0]) is whole
    coloured = plot(cmap="magma")
    assert coloured.axes[0].has_data()
    if coloured.axes[0].images:
        assert coloured.axes[0].images[0].get_cmap().name == "magma"
    if not has_range:
        with refused("has no range of values that vmax could end", tnsim.errors.ResultError):
            plot(vmax=0.7)
        return
    figure = plot(vmin=-0.4, vmax=0.7)
    if name != "edges":  # the range of widths of lines
        assert all((-0.4, 0.7) in shown_range(axes) for axes in figure.axes[:panels])
    with refused("vmin is below vmax, found a range from 2 to 1", tnsim.errors.ResultError):
        plot(vmin=2.0, vmax=1.0)


@pytest.mark.parametrize(
    "drawing, message",
    [
        ({"axes": 1}, "a plot takes ax, figsize, cmap, vmin, vmax beside arguments of its own"),
        ({"ax": [1]}, r"ax is axes of matplotlib, found int: figure, ax = plt\.subplots\(\)"),
        ({"cmap": "no map"}, "cmap is the name of a colour map of matplotlib.*found 'no map'"),
        ({"vmin": "0"}, "vmin is a number, found '0'"),
        ({"vmax": float("nan")}, "vmax is a number, found nan"),
    ],
)
def test_what_cannot_be_drawn_with(run, drawing, message):
    with refused(message, tnsim.errors.ResultError):
        run.tnsim.plot(**drawing)


@pytest.mark.parametrize("is_run", [True, False])
def test_only_the_models_of_a_run_are_joined(run, is_run):
    labels = run.a.values if is_run else [f"seed {n}" for n in range(run.sizes["a"])]
    plane = run.assign_coords(a=labels, b=labels).tnsim.plot("mds").axes[0]
    assert len(plane.lines) == is_run


def test_layers_below_the_first_part_are_not_drawn(run):
    numbers = {"kind": ["qk", "qk", "direct"], "layer": [1, 2, -1], "head": [0, 0, -1]}
    parts = run.similarity.expand_dims(part=["one", "two", "direct"]).to_dataset()
    parts = parts.assign_coords({name: ("part", x) for name, x in numbers.items()})
    qk, direct = parts.tnsim.plot("parts").axes[:2]
    assert [label.get_text() for label in qk.get_yticklabels()] == ["1", "2"]
    assert [axes.images[0].get_array().shape for axes in (qk, direct)] == [(2, 1), (1, 1)]


def test_axes_and_panels_are_as_many(run):
    _, grid = figures.new_figure(ncols=2)
    with refused(r"this picture has 1 panel, found 2 axes: give 1", tnsim.errors.ResultError):
        run.tnsim.plot(ax=grid)
    with refused("leave out figsize, or leave out ax", tnsim.errors.ResultError):
        run.tnsim.plot(ax=grid[0], figsize=(3, 3))


def inside(box, points):
    return [(x, y) for x, y in points if box.x0 < x < box.x1 and box.y0 < y < box.y1]


def covered(figure):
    """Points of curves, in pixels, that lie behind a legend; points between two values included."""
    figure.draw_without_rendering()
    behind = []
    every = [child for axes in figure.axes for child in (axes, *axes.child_axes)]
    for legend in (axes.get_legend() for axes in every if axes.get_legend()):
        box = legend.get_window_extent()
        for axes in every:
            for line in axes.lines:
                ends = line.get_transform().transform(line.get_xydata())
                steps = np.linspace(0, 1, 20)[:, None]
                between = [p + steps * (q - p) for p, q in itertools.pairwise(ends)]
                behind += inside(box, np.concatenate(between)) if between else []
    return behind


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ["shares over training", "edges", "depth", "curves", "curves above", "trajectory"])  # fmt: skip
def test_a_legend_covers_no_curve_and_no_title(run, name):
    panels, _, drawn_by = PLOTS[name]
    plot = partial(drawn_by, run)
    _, grid = figures.new_figure(ncols=panels, squeeze=False, figsize=(5 * panels, 5))
    for figure in (plot(), plot(ax=grid[0])):
        assert covered(figure) == []
        for axes in (child for top in figure.axes for child in (top, *top.child_axes)):
            if axes.get_legend() and axes.get_title():
                legend = axes.get_legend().get_window_extent()
                assert legend.y1 <= axes.title.get_window_extent().y0


def test_long_names_leave_room_for_the_matrix(run):
    """Paths of files are labels where nothing shorter tells them apart."""
    names = [f"/home/somebody/runs/{'long' * 15}/step_{n}/model.pt" for n in run.a.values]
    named = run.assign_coords(a=names, b=names)
    for kind in ("heatmap", "mds", "dendrogram", "trajectory"):
        figure = figures.pairwise(named, kind)
        figure.draw_without_rendering()
        box = figure.axes[0].get_window_extent()
        width, height = figure.canvas.get_width_height()
        assert box.width > 0.3 * width and box.height > 0.3 * height
        if kind == "mds":  # names of points are inside, and cover no number of an axis
            names = [text.get_window_extent() for text in figure.axes[0].texts]
            assert names and all(box.x0 < name.x0 and name.x1 < box.x1 for name in names)
        texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
        assert any(re.fullmatch(r"/home/somebo….*/step_\d+/model\.pt", text) for text in texts)


def outside(figure):
    """Texts of a figure, other than the labels of ticks, that its edges cut."""
    figure.draw_without_rendering()
    ticks = {
        text
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for text in axis.get_ticklabels(which="both")
    }
    width, height = figure.canvas.get_width_height()
    texts = [
        text
        for text in figure.findobj(matplotlib.text.Text)
        if text.get_text() and text not in ticks
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [
        text
        for text, box in boxes
        if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]


CHANGE = "share of the change of 8.86e+10"
LONG_PATHS = [f"embed > layer 1 head 0 + layer 1 head 1 > layer 2 head {n}" for n in range(4)]
MODEL = f"/home/somebody/runs/{'long' * 15}/model.pt"
CROWDED = {
    "a narrow matrix": lambda run: figures.layers_and_heads(["layer 1"], np.ones(1), title=CHANGE),
    "long names of models": lambda run: figures.contributions(VALUES[None], ["all"], LABELS, names=(MODEL, MODEL)),
    "long paths": lambda run: figures.contributions(np.eye(4), LONG_PATHS, LONG_PATHS),
    "long bars": lambda run: figures.shares([MODEL, "b"], np.array([0.5, 0.5]), title=CHANGE),
    "edges": lambda run: figures.edges(WIRES[:1], VALUES[:1], title=f"{CHANGE} from 100 to 200"),
    "six in a legend": lambda run: figures.shares_over_training(["0", "1"], [f"embed > layer 1{n}" for n in range(6)], np.ones((2, 6))),
    "parts": lambda run: pairwise("parts")(run.assign_coords({side: [f"{MODEL}_{n}" for n in range(13)] for side in "ab"})),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWDED)
def test_no_edge_cuts_a_text(name, run):
    assert outside(CROWDED[name](run)) == []


def test_long_paths_leave_room_for_the_numbers():
    for figure in (
        figures.contributions(np.eye(4), LONG_PATHS, LONG_PATHS),
        figures.shares(LONG_PATHS, np.ones(4)),
    ):
        figure.draw_without_rendering()
        box = figure.axes[0].get_window_extent()
        assert box.width > 200 and box.height > 90


def test_a_line_past_a_layer_is_not_hidden_behind_it():
    wires = [
        f"{source} > in of layer {n}" for source, n in (("embed", 1), ("layer 1", 2), ("embed", 2))
    ]
    figure = figures.edges(wires, np.ones(3))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (middle,) = [text for text in axes.texts if text.get_text() == "layer 1"]
    box = middle.get_bbox_patch().get_window_extent().transformed(axes.transData.inverted())
    assert box.y0 < 1 < box.y1 and len(axes.lines) == 3
    at_layer = [np.interp(1.0, *line.get_xydata().T[::-1]) for line in axes.lines]
    assert [box.x0 < x < box.x1 for x in at_layer] == [True, True, False]
    assert axes.lines[2].get_ydata()[[0, -1]].tolist() == [0, 2]


NOT_FINITE = {
    "contributions": lambda values: figures.contributions(values[None], ["all"], LABELS),
    "shares": lambda values: figures.shares(LABELS, values),
    "errors of shares": lambda values: figures.shares(LABELS, VALUES, values),
    "layers and heads": lambda values: figures.layers_and_heads(LABELS, values),
    "shares over training": lambda values: figures.shares_over_training(["all"], LABELS, values[None]),
    "edges": lambda values: figures.edges([f"embed > Q of {name}" for name in LABELS], values),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_not_left_out(name):
    """A bar of no length and a point of no place would be missing, and nothing would tell."""
    for value in (np.nan, np.inf):
        values = np.where(np.arange(len(LABELS)) == 3, value, VALUES)
        with refused(f"found {value} for .*layer 2 head 1", tnsim.errors.ResultError):
            NOT_FINITE[name](values)


NAMES = ["loss_$x$ in $", "file\udcff.pt", "100%", "$x$_$y^{$", r"a\$b$", "a\nb", "<b>"]


@pytest.mark.slow
def test_names_are_written_letter_by_letter(rng):
    """Two dollar signs are no formula, and half of a surrogate pair is an escape."""
    three = np.eye(len(NAMES))
    named = blocks(rng, [3, 4]).assign_coords(a=NAMES, b=NAMES)
    named["$a$ $"] = named.similarity
    for kind in ("heatmap", "trajectory", "mds", "dendrogram"):
        figures.pairwise(named, kind, ["similarity", "$a$ $"]).draw_without_rendering()
    titled = {"title": NAMES[1]}
    drawn = [
        figures.heatmap(three, NAMES, **titled),
        figures.contributions(three, NAMES, NAMES, names=(NAMES[0], NAMES[1]), **titled),
        figures.shares(NAMES, three[0], **titled),
        figures.shares_over_training(NAMES, NAMES, three, {NAMES[0]: three[0]}, **titled),
        figures.edges([f"{name} > Q of {name}" for name in NAMES], three[0], **titled),
    ]
    for figure in drawn:
        figure.draw_without_rendering()  # a letter that no font has is a warning, which fails a test
        texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
        assert any(r"loss_\$x\$ in \$" in text or r"loss \$x\$ in \$" in text for text in texts)
        assert any(r"file\udcff.pt" in text for text in texts)
