"""What all experiments share: verdicts, records, folders that go on, the command, the page."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_close
from matplotlib.figure import Figure
from refusals import refused
from rerun import paper

import tnsim
from benchmarks.paper import experiment, page, records, steps
from benchmarks.paper.claims import Claim, Summary, at_least, at_most, near, verdict
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import ExperimentRun, Recorder, seconds_of, timed, write_json
from tnsim import CheckpointError, TnsimError
from tnsim.errors import MissingExtra, ResultError, StoreMismatch

DOCS = Path(__file__).parents[2] / "docs"


@dataclasses.dataclass(frozen=True)
class Setting:
    values: tuple[float, ...] = (1.0, 3.0)


def train(run):
    for name in run.unfinished(["line"]):
        recorder = Recorder(run, name, rate=0.1)
        for step, value in enumerate(run.setting.values):
            recorder.add(step, tnsim.Model([tnsim.Linear([[value, 1.0]])]), loss=value)
        recorder.finish()


def measure(run):
    return [float(tnsim.similarity(model, run.series("line")[-1])) for model in run.series("line")]


def claims(run, measured):
    return (
        Claim("first", "The first is like the last.", "figure 1", (measured[0],), at_least(0.8)),
        Claim("never", "Seen on a cluster.", "figure 2", cannot="it needs a cluster"),
    )


def figures(run, measured):
    figure = Figure()
    figure.subplots().plot(measured)
    return {"line": figure}


TOY = Experiment(
    name="toy",
    title="A line",
    where="figure 1",
    default=Setting(),
    full={"text": Setting((2.0, 1.0)), "code": Setting((2.0, 2.0))},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    summaries=lambda measured: (Summary("Side by side", ("measure", "r"), (("ours", "0.9"),)),),
)


def claim(**fields):
    return Claim("name", "A claim.", "figure 1", **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ours": (0.9,), "expected": at_least(0.9)}, "holds"),
        ({"ours": (0.8, 1.0), "expected": at_least(0.9)}, "holds"),  # the mean
        ({"ours": (0.8,), "expected": at_least(0.9)}, "does not hold"),
        ({"ours": (0.8,), "expected": at_least(0.9), "differs": "digits"}, "differs in setting"),
        ({"ours": (0.9,), "expected": at_least(0.9), "differs": "digits"}, "holds"),
        ({"ours": (0.5, 0.4), "control": (0.2, 0.3), "excess": at_least(0.1)}, "holds"),
        ({"ours": (0.9, 0.3), "control": (0.2, 0.3), "excess": at_least(0.1)}, "does not hold"),
        ({"cannot": "no cluster"}, "cannot be rerun"),
    ],
)
def test_verdicts(fields, expected):
    assert verdict(claim(**fields)).value == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ours": (math.nan,), "expected": at_least(0)}, "needs finite values"),
        ({"expected": at_least(0)}, "says why in `cannot`"),
        ({"ours": (1.0,)}, "expects nothing"),
        ({"ours": (1.0,), "control": (1.0,), "expected": near(1, 1)}, "give `excess`"),
        ({"ours": (1.0, 2.0), "control": (1.0,), "excess": at_most(1)}, "its own control"),
    ],
)
def test_a_claim_without_a_basis_is_refused(fields, message):
    with refused(message, ResultError):
        verdict(claim(**fields))


def test_a_run_keeps_what_it_has_and_says_what_it_found(tmp_path):
    record = steps.reproduce(TOY, "default", tmp_path)
    assert [row["verdict"] for row in record["claims"]] == ["holds", "cannot be rerun"]
    assert records.read(tmp_path / "claims.json") == record
    assert (tmp_path / "line.png").exists()
    log = json.loads((tmp_path / "checkpoints/line/log.json").read_text())
    assert log["settings"] == {"rate": 0.1}
    assert log["checkpoints"] == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 3.0}]
    assert "2 claims: 1 hold, 1 cannot be rerun" in page.lines(record)


def test_a_finished_training_is_not_repeated(tmp_path):
    before = steps.reproduce(TOY, "default", tmp_path)
    untrained = dataclasses.replace(TOY, train=lambda run: run.unfinished(["line"]) and 1 / 0)
    assert steps.reproduce(untrained, "default", tmp_path) == before  # seconds as well


def test_seconds_add_up_until_a_step_is_done(tmp_path):
    run = ExperimentRun(tmp_path, Setting())
    with pytest.raises(KeyboardInterrupt), timed(run, "train"):
        raise KeyboardInterrupt
    first = seconds_of(run)["train"]
    with timed(run, "train"):
        pass
    done = seconds_of(run)["train"]
    with timed(run, "train"):
        sum(range(100_000))
    assert first <= done == seconds_of(run)["train"]


def test_a_folder_holds_one_run(tmp_path):
    steps.reproduce(TOY, "default", tmp_path)
    with refused(r"another seed; give another --out", StoreMismatch):
        steps.reproduce(TOY, "default", tmp_path, seed=1)
    with refused("another setting", StoreMismatch):
        steps.reproduce(TOY, "text", tmp_path)


def test_what_an_experiment_does_not_take_is_refused(tmp_path):
    with refused("toy takes no --data", TnsimError):
        steps.reproduce(TOY, "default", tmp_path, data=tmp_path)
    taking = dataclasses.replace(TOY, checkpoints="a series of lines")
    with refused("no such folder; toy wants a series of lines", TnsimError):
        steps.reproduce(taking, "default", tmp_path, checkpoints=tmp_path / "none")


def test_checkpoints_of_somebody_are_measured_as_they_are(tmp_path):
    given = tmp_path / "given"
    (given / "line").mkdir(parents=True)
    for step in range(2):
        model = tnsim.Model([tnsim.Linear(np.array([[1.0, step]]))])
        tnsim.save(model, given / "line" / f"step_{step}.safetensors")
    taking = dataclasses.replace(TOY, checkpoints="a series of lines")
    record = steps.reproduce(taking, "default", tmp_path / "run", checkpoints=given)
    (ours,) = record["claims"][0]["ours"]
    assert_close(ours, 0.5**0.5)
    assert "train" not in record["seconds"]
    run = ExperimentRun(tmp_path / "run", Setting(), given=given)
    with refused("cannot be read as the log of a series", CheckpointError):
        run.log("line")
    (given / "line" / "log.json").write_text('{"checkpoints": [{"step": 0}]}')
    with refused(r"1 entries for 2 checkpoints.* with step, loss", CheckpointError):
        run.log("line", "loss")
    (given / "line" / "step_0.safetensors").write_text("")
    with refused("toy wants as --checkpoints a series of lines", CheckpointError):
        steps.reproduce(taking, "default", tmp_path / "again", checkpoints=given)


def test_claims_with_one_name_are_refused(tmp_path):
    twice = dataclasses.replace(TOY, claims=lambda run, measured: 2 * claims(run, measured)[:1])
    with refused("claims need different names", ResultError):
        steps.reproduce(twice, "default", tmp_path)


def test_a_row_becomes_its_claim_again():
    one = claim(ours=(0.5,), expected=at_most(1), control=(0.1,), excess=near(0.4, 0.1), paper="x")
    row = records.row(one)
    assert json.loads(json.dumps(row)) == row and records.claim_of(row) == one
    assert page.expectation(row) == "at most 1; beyond control 0.4 ± 0.1"


def test_a_damaged_record_is_said(tmp_path):
    (tmp_path / "claims.json").write_text('{"claims": []}')
    with refused("cannot be read as the claims of an experiment", ResultError):
        records.read(tmp_path / "claims.json")
    with refused("holds no finished experiment", ResultError):
        page.write(tmp_path / "none", tmp_path / "page.md")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(experiment, "find_spec", lambda module: None if module == "optax" else True)
    with refused(r"needs optax.*pip install 'tnsim\[paper\]'", MissingExtra):
        experiment.experiment("invariance")


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(experiment, "NAMES", ("toy",))
    monkeypatch.setattr(page, "NAMES", ("toy",))
    monkeypatch.setattr(experiment, "experiment", lambda name: TOY)


def test_the_command_runs_judges_and_writes_a_page(toy, tmp_path):
    said = paper("toy", "--out", tmp_path).stdout
    assert "The first is like the last." in said and "2 claims: 1 hold, 1 cannot be rerun" in said
    written = (tmp_path / "reproduction.md").read_text()
    assert "- *toy*: Seen on a cluster. It needs a cluster." in written
    assert "](toy/default/line.png)" in written
    assert "measure  r\nours     0.9" in said and "| ours | 0.9 |" in written


def test_the_command_runs_every_setting_of_the_paper(toy, tmp_path):
    done = paper("all", "--full", "--out", tmp_path, "--json")
    found = json.loads(done.stdout)["experiments"]
    assert [one["setting"] for one in found] == ["text", "code"]
    assert (tmp_path / "toy" / "code" / "claims.json").exists()
    assert "](#a-line-setting-code)" in (tmp_path / "reproduction.md").read_text()


def test_the_command_lists_experiments():
    listed = json.loads(paper("--list", "--json").stdout)["experiments"]
    assert tuple(one["name"] for one in listed) == experiment.NAMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name an experiment: invariance"),
        (("nothing",), "no experiment is called 'nothing'; there are invariance"),
        (("all", "--data", "."), "belong to one experiment; name it instead of all"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, tmp_path):
    done = paper(*arguments, "--out", tmp_path, check=False)
    assert done.returncode == 2 and message in done.stderr


def test_a_stopped_run_says_what_is_kept(toy, tmp_path, monkeypatch):
    import signal

    def stopped(run):
        signal.raise_signal(signal.SIGINT)

    stopping = dataclasses.replace(TOY, train=stopped)
    monkeypatch.setattr(experiment, "experiment", lambda name: stopping)
    done = paper("toy", "--out", tmp_path, check=False)
    assert done.returncode == 130
    assert f"stopped by SIGINT: what is finished is kept in {tmp_path}" in done.stderr


def test_a_seed_is_a_number_that_generators_take(tmp_path):
    done = paper("invariance", "--out", tmp_path, "--seed", "1" * 30, check=False)
    assert done.returncode == 2 and "--seed" in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"train": 3}', "[" * 50_000, '"\xff"'])
@pytest.mark.parametrize("name", ["seconds.json", "setting.json"])
def test_what_a_run_has_kept_and_was_damaged(name, text, tmp_path):
    kept = tmp_path / "invariance" / "default" / name
    kept.parent.mkdir(parents=True)
    kept.write_text(text, encoding="latin1")
    done = paper("invariance", "--out", tmp_path, check=False)
    is_other = name == "setting.json" and text == '{"train": 3}'
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert ("another experiment" if is_other else f"{name}: ") in done.stderr
    assert kept.read_text(encoding="latin1") == text


@pytest.mark.parametrize("text", ["notes of somebody", '{"name": "mine"}', None])
def test_no_file_of_another_kind_is_replaced_by_the_page(text, tmp_path):
    path = tmp_path / "reproduction.md"
    path.mkdir() if text is None else path.write_text(text)
    done = paper("invariance", "--out", tmp_path, check=False)
    assert done.returncode == 2 and "reproduction.md" in done.stderr
    assert list(tmp_path.iterdir()) == [path]
    assert text is None or path.read_text() == text


def test_logs_of_a_run_do_not_replace_foreign_ones(tmp_path):
    path = tmp_path / "log.json"
    write_json(path, {"checkpoints": []})
    write_json(path, {"checkpoints": [1], "settings": {}})
    assert json.loads(path.read_text())["checkpoints"] == [1]
    path.write_text('{"name": "mine"}')
    with pytest.raises(FileExistsError, match="holds something else than"):
        write_json(path, {"checkpoints": []})
    assert json.loads(path.read_text()) == {"name": "mine"}


PUBLISHED = sorted((DOCS / "reproduction").glob("*/*/claims.json"))


def test_the_published_page_is_made_of_its_records(tmp_path):
    text = page.page(page.gathered(DOCS / "reproduction", DOCS))
    assert (DOCS / "reproduction.md").read_text() == text


def test_the_readme_has_the_score_of_the_page():
    text = (DOCS / "reproduction.md").read_text()
    score = next(line for line in text.splitlines() if line.startswith("**")).strip("*.")
    assert score in (DOCS.parent / "README.md").read_text()


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parts[-3])
def test_published_verdicts_are_what_their_numbers_say(path):
    record = records.read(path)
    assert all((path.parent / figure).exists() for figure in record["figures"])
    for row in record["claims"]:
        assert verdict(records.claim_of(row)).value == row["verdict"]
