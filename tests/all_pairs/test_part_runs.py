"""Runs over parts: one result over (part, a, b), resumable, with pictures and tables, as a command too."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformer_cases as cases
import xarray as xr
from closeness import LARGEST, assert_close
from commands import command, refusal, told
from oracles import bilinear
from pyarrow import parquet
from refusals import refused
from stored_runs import Stopping
from transformer_cases import written

import tnsim
from tnsim import figures
from tnsim.all_pairs.sources import content_hash
from tnsim.all_pairs.store import FORMAT
from tnsim.checkpoints import load

CONFIG = {**cases.CONFIGS["gpt_neox"], "hidden_act": "quick_gelu"}


@pytest.fixture
def run(tmp_path, rng):
    """A folder of three checkpoints, each a folder in Hugging Face's layout."""
    for n in range(3):
        written(tmp_path / "run" / f"step{n}00", cases.checkpoint(rng, CONFIG), CONFIG)
    return tmp_path / "run"


def test_a_run_over_parts_is_the_run_of_every_part(run, tmp_path):
    parts = tnsim.parts(tnsim.load(run), ["qk", "ov"], distances=[1, 2])
    result = tnsim.pairwise(parts, store=tmp_path / "store")
    assert result.similarity.dims == ("part", "a", "b") and result.similarity.shape == (8, 3, 3)
    assert isinstance(result, tnsim.Pairwise) and result.attrs["exact"] == 1
    assert result["layer"].values.tolist() == [0, 0, 1, 1] * 2
    assert result["head"].values.tolist() == [0, 1] * 4
    assert result.attrs["plan"].startswith("qk: ") and "; ov: " in result.attrs["plan"]
    label = "layer 1 head 0 qk"
    alone = tnsim.pairwise(list(parts[label]), names=parts[label].labels)
    one = result.sel(part=label)
    for name in ("similarity", "log_inner", "sign", "log_norm_a", "a", "hash_a"):
        assert np.array_equal(one[name], alone[name])
    pair = parts[label][0], parts[label][2]
    assert_close(one.similarity.sel(a=0, b=200).item(), tnsim.similarity(*pair), scale=1.0)
    assert np.array_equal(tnsim.open_pairwise(tmp_path / "store").similarity, result.similarity)


def test_the_plan_of_parts_is_the_sum_over_parts(run):
    series = tnsim.load(run)
    parts = tnsim.parts(series, ["qk", "ov"], distances=[1, 2])
    found = tnsim.plan_pairwise(parts)
    each = [tnsim.plan_pairwise(part) for part in parts.values()]
    assert (found.tiles.pairs, len(parts)) == (8 * 6, 8)
    for name in ("pairs", "number"):
        assert getattr(found.tiles, name) == sum(getattr(plan.tiles, name) for plan in each)
    assert found.tiles.side == max(plan.tiles.side for plan in each)
    assert found.multiplications == sum(plan.multiplications for plan in each)
    assert found.peak_bytes == max(plan.peak_bytes for plan in each)
    # Parts of a kind share their programs.
    assert found.tiles.programs == each[0].tiles.programs + each[-1].tiles.programs
    assert found.seconds > 0
    first, second = (tnsim.parts(chosen, ["ov"]) for chosen in (series[:2], series))
    one = tnsim.plan_pairwise(first, other=second)
    label = "layer 0 head 0 ov"
    assert one.route == tnsim.plan_pairwise(first[label], other=second[label]).route
    assert one.tiles.pairs == 4 * 6
    with refused("parts have different numbers of outputs"):
        tnsim.plan_pairwise(parts, slices=True)


@pytest.mark.slow
def test_a_run_over_parts_grows_part_by_part(run, tmp_path):
    """Stopped in the second part, whose later pairs are missing, and not its earlier pairs."""
    series, store = tnsim.load(run), tmp_path / "store"
    first = tnsim.pairwise(tnsim.parts(series[:2], ["ov"]), store=store)
    with pytest.raises(tnsim.errors.ExecutorError):
        tnsim.pairwise(tnsim.parts(series, ["ov"]), store=store, executor=Stopping(4))
    said = "not finished: .*layer 1 head 0 ov: later models"
    with pytest.warns(tnsim.errors.StoreWarning, match=said):
        shown = tnsim.open_pairwise(store)
    assert shown.similarity.shape == (4, 3, 3)
    assert np.array_equal(shown.similarity[:, :2, :2], first.similarity)
    missing = np.isnan(shown.similarity.values).reshape(4, -1).sum(1)
    assert missing[0] == 0 and missing[-1] == 5 and set(missing) <= {0, 4, 5}
    assert np.array_equal(shown.hash_a[-1], [*first.hash_a.values[-1], ""])
    found = tnsim.pairwise(tnsim.parts(series, ["ov"]), store=store)
    whole = tnsim.pairwise(tnsim.parts(series, ["ov"]))
    assert_close(found.similarity, whole.similarity, scale=1.0)
    assert np.array_equal(found.similarity[:, :2, :2], first.similarity)
    assert tnsim.open_pairwise(store).identical(found)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_all_kinds_of_parts_make_one_run(kind, tmp_path, rng):
    """Of some the means are known and of others not; those of parts have no meaning."""
    config = cases.CONFIGS[kind]
    for n in range(2):
        written(tmp_path / f"step{n}", cases.checkpoint(rng, config), config)
    parts = tnsim.parts(tnsim.load(tmp_path))
    with pytest.warns(tnsim.CaveatWarning, match="the direct path leaves out the final norm"):
        found = tnsim.pairwise(parts)
    assert set(found.kind.values) == {"qk", "ov", "mlp", "direct"} and found.attrs["exact"] == 1
    assert isinstance(found, tnsim.Pairwise) and "mean_share_a" not in found
    for label in ("layer 0 mlp", "layer 1 mlp"):
        one = found.similarity.sel(part=label, a=0, b=1).item()
        assert_close(one, tnsim.similarity(*parts[label]), scale=1.0)


def test_a_run_goes_on_where_it_ended(run, tmp_path, monkeypatch):
    store = tmp_path / "store"
    parts = tnsim.parts(tnsim.load(run), "ov")
    wanted = tnsim.pairwise(parts)
    from tnsim.circuits.parts import PartOfFile

    read, seen = PartOfFile.read, []

    def interrupted(file):
        if len(seen) > 9:
            raise KeyboardInterrupt
        seen.append(file.name)
        return read(file)

    monkeypatch.setattr(PartOfFile, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tnsim.pairwise(parts, store=store)
    monkeypatch.setattr(PartOfFile, "read", read)
    said = "not finished: layer 0 head 1 ov: .* missing"
    with pytest.warns(tnsim.errors.StoreWarning, match=said):
        half = tnsim.open_pairwise(store)
    assert np.isfinite(half.similarity[0]).all() and np.isnan(half.similarity[-1]).all()
    finished = {file: file.stat().st_mtime_ns for file in (store / "records").iterdir()}
    assert np.array_equal(tnsim.pairwise(parts, store=store).similarity, wanted.similarity)
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())


def test_a_file_is_read_once_for_all_of_its_parts(tmp_path, monkeypatch):
    paths = [tmp_path / f"step{n}.safetensors" for n in range(2)]
    kept = sorted((Path(tnsim.__file__).parent / "data" / "induction").glob("*.safetensors"))
    for path, file in zip(paths, kept, strict=False):
        shutil.copy(file, path)
    read, seen = load.read, []

    def counted(path, *reading):
        seen.append(path)
        return read(path, *reading)

    monkeypatch.setattr(load, "read", counted)
    parts = tnsim.parts(tnsim.load(tmp_path), "ov")
    first = {label: list(parts[label]) for label in parts}
    assert len(first) > 1 and sorted(seen) == paths
    shutil.copy(kept[2], paths[1])  # a file that changes is another model
    for label, (one, other) in first.items():
        assert content_hash(parts[label][0]) == content_hash(one)
        assert content_hash(parts[label][1]) != content_hash(other)
    assert sorted(seen) == [paths[0], paths[1], paths[1]]


def test_parts_of_two_runs(run):
    series = tnsim.load(run)
    first, second = (tnsim.parts(one, "qk") for one in (series[:1], series[1:]))
    result = tnsim.pairwise(first, other=second)
    assert result.similarity.shape == (4, 1, 2) and not result.attrs["symmetric"]
    whole = tnsim.pairwise(tnsim.parts(series, "qk"))
    assert_close(result.similarity.values, whole.similarity.values[:, :1, 1:], scale=1.0)


def test_what_is_refused(run, tmp_path):
    series = tnsim.load(run)
    parts = tnsim.parts(series, "qk")
    store = tmp_path / "store"
    tnsim.pairwise(parts, store=store)
    with refused(r"over 4 parts of kinds qk, .* kinds ov", tnsim.errors.StoreMismatch):
        tnsim.pairwise(tnsim.parts(series, "ov"), store=store)
    with refused(r"distances \[1\] .* not over .* \[2\]", tnsim.errors.StoreMismatch):
        tnsim.pairwise(tnsim.parts(series, "qk", distances=[2]), store=store)
    with refused(r"over 4 parts .* not over whole models", tnsim.errors.StoreMismatch):
        tnsim.pairwise(parts["layer 0 head 0 qk"], store=store)
    (store / "records").rename(tmp_path / "outside")
    (store / "records").symlink_to(tmp_path / "outside")
    with refused("records: is a link, through which", tnsim.errors.StoreMismatch):
        tnsim.pairwise(parts, store=store)
    with refused("not a store of tnsim", tnsim.errors.StoreMismatch):
        tnsim.pairwise(parts, store=run)
    with refused("both series need the same parts"):
        tnsim.pairwise(parts, other=tnsim.parts(series, "ov"))
    with refused("parts are compared with parts"):
        tnsim.pairwise(parts, other=series)
    with refused("slices are those of one part"):
        tnsim.pairwise(parts, slices=True)
    assert tnsim.plan_pairwise(parts["layer 0 head 0 qk"]).tiles.pairs == 6
    listed = json.dumps({"content": {"format": FORMAT, "parts": {"names": [["qk", "x", 0]]}}})
    for damage in (listed, "{", "[]"):
        (store / "run.json").write_text(damage)
        with refused(r"damaged: run\.json; run pairwise again", tnsim.errors.DamagedStore):
            tnsim.open_pairwise(store)


def test_a_checkpoint_that_lacks_a_part(run, tmp_path, rng):
    small = {**CONFIG, "num_hidden_layers": 1}
    tensors = cases.checkpoint(rng, CONFIG)
    state = {name: array for name, array in tensors.items() if ".layers.1." not in name}
    written(run / "step900", state, small)
    with refused(r"step900.*: there is no part 'layer 1 head 0 qk'"):
        tnsim.pairwise(tnsim.parts(tnsim.load(run), "qk"))


def test_pictures_of_parts(run):
    with pytest.warns(tnsim.CaveatWarning, match="leaves out the final norm"):
        result = tnsim.pairwise(tnsim.parts(tnsim.load(run), ["qk", "ov", "direct"]))
    assert "final norm" in result.attrs["caveats"][0]
    figure = result.tnsim.plot("parts")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["qk", "ov", "direct"]
    drawn = [axes.images[0].get_array() for axes in figure.axes[:3]]
    assert np.array_equal(drawn[0], result.similarity[:4, 0, -1].values.reshape(2, 2))
    assert drawn[2].shape == (1, 1)
    one = result.sel(part="layer 0 head 1 qk")
    assert one.tnsim.plot("heatmap").axes[0].get_title() == "similarity"
    begun = result.assign(similarity=result.similarity * np.nan)
    with refused(r"no part has a finite similarity.*finish", tnsim.errors.ResultError):
        begun.tnsim.plot("parts")
    with refused("parts are drawn of one matrix over", tnsim.errors.ResultError):
        figures.pairwise(one, "parts")
    with refused("select the others first", tnsim.errors.ResultError):
        result.tnsim.plot("heatmap")


@pytest.mark.slow
def test_the_command(run, tmp_path):
    out = tmp_path / "out"
    shown = command("pairwise", run, "--parts", "qk, ov", "--dry-run")
    assert "qk: 4 parts, together" in shown.stdout and "ov: 4 parts, together" in shown.stdout
    cost = told("pairwise", run, "--parts", "qk", "--parts", "ov", "--dry-run")
    assert cost["qk"]["parts"] == 4 and cost["qk"]["together"]["tiles"]["pairs"] == 4 * 6
    assert list(cost) == ["qk", "ov"]
    distances = "--distances", 1, "--distances", 2
    arguments = ("pairwise", run, "--parts", "qk,ov", *distances, "--out", out)
    done = command(*arguments, "--plots", "--parquet")
    assert "parts       8: qk, ov" in done.stdout and "lowest      similarity " in done.stdout
    assert " in layer " in done.stdout
    expected = tnsim.pairwise(tnsim.parts(tnsim.load(run), ["qk", "ov"], distances=[1, 2]))
    with (out / "similarity.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["", "", "0", "100", "200"] and len(rows) == 24
    assert rows[5][:2] == ["layer 0 head 1 qk", "200"]
    values = np.array([row[2:] for row in rows], float).reshape(8, 3, 3)
    assert np.array_equal(values, expected.similarity)
    table = parquet.read_table(out / "pairs.parquet")
    assert table.column_names[:4] == ["part", "a", "b", "similarity"] and len(table) == 72
    assert np.array_equal(table["similarity"], expected.similarity.values.ravel())
    assert table["part"][9].as_py() == "layer 0 head 1 qk" and table["a"][12].as_py() == 100
    assert np.array_equal(np.load(out / "result.npz")["similarity"], expected.similarity)
    assert (out / "parts.png").stat().st_size > 1000
    again = told(*arguments)
    assert again["part"][0] == "layer 0 head 0 qk" and np.shape(again["similarity"]) == (8, 3, 3)


@pytest.mark.parametrize("first", ["parts", "whole models"])
@pytest.mark.parametrize("options", [(), ("--follow", 1, "--until", 1)], ids=["run", "follow"])
def test_results_of_another_kind_are_kept(first, options, run, rng, tmp_path):
    """Tables over parts and over whole models have the same names."""
    out = tmp_path / "out"
    for n in range(2):
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), tmp_path / f"m{n}.safetensors")
    commands = [[run, "--parts", "qk"], sorted(tmp_path.glob("m*"))]
    earlier, later = commands if first == "parts" else reversed(commands)
    command("pairwise", *earlier, "--out", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    said = f"holds the results of a run over {first}, kept in {out}"
    refusal("pairwise", *options, *later, "--out", out, said=said)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "heads"), "kinds of parts are qk, ov, mlp, direct, found 'heads'"),
        (("--parts", "qk,mlp"), "activation 'quick_gelu'; known are"),
        (("--parts", "qk", "--distances", "x"), "--distances lists whole numbers"),
        (("--parts", "qk", "--slices"), "slices are those of one part"),
    ],
)
def test_commands_that_are_refused(options, message, run, tmp_path):
    refusal("pairwise", run, "--out", tmp_path / "out", *options, said=message)


def test_parts_are_ranked_by_their_distances(rng):
    """The distance is the norm of the difference of the functions, in units of outputs."""

    def model(size):
        return tnsim.Model([tnsim.Linear(size * rng.normal(size=(2, 3)))])

    parts = {"small": [model(0.1) for _ in "abc"], "large": [model(10.0) for _ in "abc"]}
    results = [tnsim.pairwise(models) for models in parts.values()]
    found = xr.concat(results, xr.Variable("part", list(parts)))
    for name, models in parts.items():
        wanted = [[float(tnsim.inner(b - a, b - a)) ** 0.5 for b in models] for a in models]
        distance = found.tnsim.distance.sel(part=name)
        assert_close(distance, wanted, scale=LARGEST, rtol=1e-7, limited_by="digits of 1 - s")
    ranked = found.tnsim.most_changed()
    assert ranked.part.values.tolist() == ["large", "small"]
    pair = found.tnsim.distance.isel(a=0, b=2)
    assert (ranked.distance.values == sorted(pair.values)[::-1]).all()
    assert (found.tnsim.most_changed(1, 1).distance.values < 1e-7).all()
    assert found.tnsim.most_changed("0", "2").identical(ranked)
    with refused("no model is called 5 along a: 0, 1, 2", tnsim.errors.ResultError):
        found.tnsim.most_changed(5)
