"""Figures of a pairwise run: what is drawn, that labels do not overlap, what is refused."""

import itertools

import numpy as np
import pytest
from closeness import assert_close
from sample_runs import SHIPPED, blocks, shipped

import tnsim
from tnsim.analysis import baselines, figures, reading


@pytest.fixture
def run():
    found = shipped()
    found["weight_cosine"] = baselines.weight_cosine(tnsim.load(SHIPPED))
    return found


def images(figure):
    return [axes.images[0] for axes in figure.axes if axes.images]


def drawn(figure, axis):
    """Extents, in pixels, of the labels along one axis."""
    figure.canvas.draw()
    return [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]


def test_heatmaps_share_one_colour_range(run):
    points = reading.segment(run, 3).change_points
    figure = figures.pairwise(run, "heatmap", ["similarity", "weight_cosine"], points)
    first, second = images(figure)
    assert np.array_equal(
        first.get_array(), run.similarity
    ) and first.get_clim() == second.get_clim() == (0, 1)
    assert len(figure.axes) == 3 and [axes.get_title() for axes in figure.axes[:2]] == [
        "similarity",
        "weight cosine",
    ]
    assert sorted(line.get_xdata()[0] for line in figure.axes[0].lines)[-2:] == [3.5, 8.5]


def test_curves_stand_above_every_heatmap(run):
    count = len(run.a)
    run["train_accuracy"] = ("a", np.linspace(0, 1, count))
    run = run.assign_coords(
        test_accuracy=("a", np.linspace(0, 0.5, count)), loss=("a", -run.a.values)
    )
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
    figure = figures.curves_over_training(
        run, ["train_accuracy", ("log_norm_a", "log_norm_b")], (4,)
    )
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
    assert images(figures.pairwise(run, variable="log_inner"))[0].get_clim() == (
        run.log_inner.min(),
        run.log_inner.max(),
    )
    run["similarity"][0, -1] = run["similarity"][-1, 0] = -0.5
    assert images(figures.pairwise(run))[0].get_clim() == (-1, 1)


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
    assert (
        last.get_ydata().tolist() == reading.trajectory(run).values.tolist()
        and len(before.get_xdata()) == 12
    )
    assert (
        len(figure.legends[0].get_texts()) == 4 and figure.axes[0].lines[-1].get_xdata()[0] == 3.5
    )


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
    assert len(axes.lines) == 12 and len({text.get_color() for text in axes.get_xticklabels()}) == 3


def test_two_sets_of_models_have_a_heatmap(run):
    assert images(figures.pairwise(run.isel(a=slice(0, 4))))[0].get_array().shape == (4, 13)


def test_no_global_state(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.pairwise(run, "mds")
    assert dict(matplotlib.rcParams) == before


def test_refusals(run):
    many = run.isel(output=[0] * 200)
    for call, message in (
        (
            lambda: figures.pairwise(run, "violin"),
            "drawn as heatmap, trajectory, slices, mds, dendrogram, scatter, parts, not as 'violin'",
        ),
        (lambda: figures.pairwise(run, variable="cka"), "no variable 'cka', only similarity"),
        (
            lambda: figures.pairwise(run.drop_vars("slices"), "slices"),
            "no variable 'slices'.*compute the run with slices",
        ),
        (lambda: figures.pairwise(many, "slices"), "200 slices are not 1 to 144"),
        (
            lambda: figures.pairwise(run, change_points=(20,)),
            "change points must rise from 1 to 12",
        ),
        (lambda: figures.pairwise(run.isel(a=[0, 1]), "mds"), "all pairs of one set of models"),
        (
            lambda: figures.pairwise(run, "mds", curves=["log_norm_a"]),
            "curves are drawn above a heatmap, not above 'mds'",
        ),
        (lambda: figures.pairwise(run, curves=["accuracy"]), "no variable 'accuracy', only"),
        (
            lambda: figures.pairwise(run, curves=["similarity"]),
            r"one value for each of 13 columns: similarity is of shape \(13, 13\)",
        ),
        (
            lambda: figures.pairwise(run.isel(a=slice(4)), curves=["log_norm_a"]),
            r"one value for each of 13 columns: log_norm_a is of shape \(4,\)",
        ),
        (
            lambda: figures.curves_over_training(run, []),
            "needs at least one strip, found none",
        ),
        (lambda: figures.pairwise(run, "scatter"), "found 'similarity' alone: name two or more"),
    ):
        with pytest.raises(tnsim.ResultError, match=message):
            call()


def test_pictures_of_parts_draw_on_given_axes():
    labels = [f"layer {layer} head {head}" for layer in (1, 2) for head in (0, 1)] + ["layer 3"]
    values = np.array([0.5, -0.1, 0.3, 0.2, 0.1])
    wires = ["embed > Q of layer 1", "embed > K of layer 1", "layer 1 > in of layer 2"]
    table = np.outer([1.0, 0.5], values)
    drawings = {
        "shares": lambda ax: figures.shares(labels, values, abs(values), most=3, ax=ax),
        "heads": lambda ax: figures.layers_and_heads(labels, values, ax=ax),
        "run": lambda ax: figures.shares_over_training(["0", "1"], labels, table, ax=ax),
        "edges": lambda ax: figures.edges(wires, values[:3], ax=ax),
    }
    whole, grid = figures.new_figure(nrows=2, ncols=2)
    for (name, draw), axes in zip(drawings.items(), grid.flat, strict=True):
        assert draw(axes) is whole, name
        assert axes.has_data(), name
        assert draw(None) is not whole, name
    bars = [float(bar.get_width()) for bar in grid[0, 0].patches]
    assert_close(
        bars, [0.5, 0.3, 0.2, 0.0], scale=1.0, rtol=1e-12
    )  # the last is the sum of the others
