"""A run of an experiment: the folder in which its steps keep their results.

FOLDER/setting.json                 the setting of the run; a run at another setting is refused
FOLDER/seconds.json                 the time that each step took
FOLDER/checkpoints/SERIES/*         checkpoints of `train`, and log.json of a complete series
FOLDER/stores/NAME.zarr             similarities that `measure` has computed
FOLDER/measured/NAME.json           other values that it has computed
FOLDER/claims.json, *.png, *.html   claims, figures and pages
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import tnsim
from tnsim.errors import CheckpointError, StoreMismatch
from tnsim.files import json_object, regular, replacing

LOG = "log.json"

S = TypeVar("S")


@dataclass(frozen=True)
class ExperimentRun(Generic[S]):
    """The folder, setting, seed and inputs of a run.

    Args:
        folder: Folder of this run.
        setting: Sizes and rates, a frozen dataclass.
        seed: Seed of all random numbers; several seeds are counted from here.
        data: A folder of the user's real data, None for none.
        given: A folder of the user's checkpoints; then nothing is trained.
        progress: Whether bars are shown.

    Example:
        >>> from benchmarks.paper.invariance import InvarianceSetting
        >>> run = ExperimentRun(Path("out/invariance"), InvarianceSetting())
        >>> print(run.checkpoints, run.store("gaussian"))
        out/invariance/checkpoints out/invariance/stores/gaussian.zarr
    """

    folder: Path
    setting: S
    seed: int = 0
    data: Path | None = None
    given: Path | None = None
    progress: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder whose folders are series of checkpoints."""
        return self.given or self.folder / "checkpoints"

    def store(self, name: str) -> Path:
        """The path of the store in which a pairwise run keeps its tiles."""
        return self.folder / "stores" / f"{name}.zarr"

    def series(self, name: str) -> tnsim.Series:
        """The checkpoints of a series, in the order of training."""
        return tnsim.Series(self.checkpoints / name)

    def log(self, name: str, *numbers: str) -> list[dict[str, Any]]:
        """The log that `train` wrote about a series.

        Args:
            name: Name of the series.
            *numbers: Names of numbers that every entry must have in addition to `step`.

        Returns:
            An entry for each checkpoint.

        Raises:
            CheckpointError: When the log is missing, or does not fit these checkpoints.
        """
        path = self.checkpoints / name / LOG
        wanted = ("step", *numbers)
        try:
            entries = read_json(path)["checkpoints"]
            lacking = [key for key in wanted if not all(key in entry for entry in entries)]
        except (CheckpointError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as the log of a series ({error}); it is a JSON object "
                f"whose 'checkpoints' have one entry, with {', '.join(wanted)}, for each file"
            ) from None
        count = len(self.series(name))
        if lacking or len(entries) != count:
            raise CheckpointError(
                f"{path}: {len(entries)} entries for {count} checkpoints, without "
                f"{', '.join(lacking) or 'nothing'} that is needed; give every file an entry with "
                f"{', '.join(wanted)}"
            )
        return entries

    def unfinished(self, names: Iterable[str]) -> list[str]:
        """The names of series that are not complete yet, among some names."""
        # The log is written last, so a series without it was interrupted.
        return [name for name in names if not (self.checkpoints / name / LOG).exists()]

    def bar(self, total: int | None, description: str, unit: str = "step") -> Any:
        """A progress bar, a context manager with `update(n)`."""
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=description, unit=unit, disable=not self.progress)


class Recorder:
    """Writes a series: checkpoints in turn, and the log when all are there.

    Args:
        run: The run to which the series belongs.
        name: Name of the series.
        **about: Settings that the log repeats.

    Example, as text:
        recorder = Recorder(run, "seed-0", rate=1e-3)
        recorder.add(100, model, loss=0.5)
        recorder.finish()
    """

    def __init__(self, run: ExperimentRun, name: str, **about: Any) -> None:
        self._folder = run.checkpoints / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._about = about
        self._entries: list[dict[str, Any]] = []

    def add(self, step: int, model: tnsim.Model, name: str = "", **numbers: float) -> None:
        """Keep a checkpoint.

        Args:
            step: Training step.
            model: Model at this step.
            name: Name of the file; by default the step.
            **numbers: Numbers for the log, such as losses and accuracies.
        """
        tnsim.save(model, self._folder / f"{name or f'step_{step:06d}'}.safetensors")
        plain = {key: float(value) for key, value in numbers.items()}
        self._entries.append({"step": step, **plain})

    def finish(self) -> None:
        """Write the log, after which the series counts as complete."""
        write_json(self._folder / LOG, {"settings": self._about, "checkpoints": self._entries})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object as a whole or not at all; folders are made, NaN is refused.

    An existing file is replaced only where it is a JSON object of the same keys.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
    with replacing(path, json_object("a JSON object of tnsim", *data)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """An object that a run has kept.

    Args:
        path: Path of the file.

    Returns:
        The object.

    Raises:
        CheckpointError: When the file cannot be read, or holds something else.
    """
    try:
        with regular(path) as file:
            data = json.loads(file.read())
    except RecursionError:
        reason = "it is nested too deeply"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if isinstance(data, dict):
            return data
        reason = f"expected a JSON object, found {type(data).__name__}"
    raise CheckpointError(
        f"{path}: cannot be read as what a run has kept: {reason}; give another --out, or remove "
        "the folder"
    )


def claim_folder(run: ExperimentRun, experiment: str) -> None:
    """Record in a folder which run it holds, or refuse a folder that holds another run.

    Args:
        run: The run that starts.
        experiment: Name of the experiment.

    Raises:
        StoreMismatch: When the folder holds a run of another experiment, setting, seed or data.
    """
    path = run.folder / "setting.json"
    about = {
        "experiment": experiment,
        "setting": dataclasses.asdict(run.setting),
        "seed": run.seed,
        "data": None if run.data is None else str(run.data.resolve()),
        "checkpoints": None if run.given is None else str(run.given.resolve()),
    }
    about = json.loads(json.dumps(about))  # as it will be read: tuples are lists
    if not path.exists():
        write_json(path, about)
        return
    record = read_json(path)
    # Results of another setting must not be mixed with those in the folder.
    other = [key for key, value in about.items() if record.get(key) != value]
    if other:
        raise StoreMismatch(
            f"{run.folder} holds a run with another {', '.join(other)}; give another --out, "
            "or remove the folder"
        )


@contextmanager
def timed(run: ExperimentRun, step: str) -> Iterator[None]:
    """Add up the seconds that a step takes until it is done, over all interrupted runs."""
    path = run.folder / "seconds.json"
    known = _step_seconds(path)
    so_far = known.get(step, {"seconds": 0.0, "done": False})
    start = time.perf_counter()
    done = False
    try:
        yield
        done = True
    finally:
        # A step that was interrupted adds up its times; a finished step keeps its time.
        if not so_far["done"]:
            seconds = so_far["seconds"] + time.perf_counter() - start
            known[step] = {"seconds": round(seconds, 3), "done": done}
            write_json(path, known)


def seconds_of(run: ExperimentRun) -> dict[str, float]:
    """The seconds that the steps of a run took, as `timed` recorded them."""
    path = run.folder / "seconds.json"
    return {step: entry["seconds"] for step, entry in _step_seconds(path).items()}


def _step_seconds(path: Path) -> dict[str, Any]:
    """The seconds of the steps so far; empty where there is no file yet."""
    if not path.exists():
        return {}
    known = read_json(path)
    for entry in known.values():
        is_whole = isinstance(entry, dict) and isinstance(entry.get("done"), bool)
        if not (is_whole and isinstance(entry.get("seconds"), (int, float))):
            raise CheckpointError(
                f"{path}: holds something else than the seconds of the steps of a run; remove it, "
                "and the times are counted from now"
            )
    return known


def unfinished_seeds(run: ExperimentRun[Any], count: int, series: Sequence[str]) -> list[int]:
    """Seeds whose series are not all complete yet.

    Args:
        run: The run that is trained.
        count: Number of seeds, counted from the seed of the run.
        series: Names of the series of each seed, in a folder `seed-N`.

    Returns:
        The seeds that are left to train.
    """
    missing = []
    for seed in range(run.seed, run.seed + count):
        if run.unfinished(f"seed-{seed}/{name}" for name in series):
            missing.append(seed)
    return missing


def seed_folders(run: ExperimentRun, holding: str) -> list[str]:
    """Folders of a run's checkpoints, seed by seed.

    Args:
        run: A run after its training.
        holding: Words for the contents of each folder, for the message.

    Returns:
        Names of the folders in order.

    Raises:
        CheckpointError: When there is no such folder.
    """
    folders = sorted(path.name for path in run.checkpoints.glob("seed-*"))
    if not folders:
        raise CheckpointError(
            f"{run.checkpoints}: no folder seed-0 or the like, which holds {holding}"
        )
    return folders


def with_curves(result: Any, log: Sequence[Mapping[str, float]], curves: Iterable[str]) -> Any:
    """A result with numbers from the log of its checkpoints along `a`.

    Args:
        result: All pairs, or checkpoints compared with other models; it is changed.
        log: An entry for each checkpoint, from `ExperimentRun.log`.
        curves: Names of the numbers, and of the new variables.

    Returns:
        The result itself.
    """
    for curve in curves:
        result[curve] = ("a", [entry[curve] for entry in log])
    return result
