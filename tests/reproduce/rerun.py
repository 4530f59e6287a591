"""An experiment at a small setting: its three steps, and what became of its claims."""

from tnsim.reproduce.claims import verdict
from tnsim.reproduce.run import ExperimentRun


def verdicts(experiment, setting, folder, **options):
    """The verdict of every claim, by name: what a test pins down, so that a change is seen."""
    run = ExperimentRun(folder, setting, **options)
    if run.given is None:
        experiment.train(run)
    measured = experiment.measure(run)
    figures = experiment.figures(run, measured)
    assert figures and all(figure.axes for figure in figures.values())
    rows = experiment.claims(run, measured)
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: verdict(row).value for row in rows}
