"""An experiment at a small setting: its three steps, and what became of its claims."""

from commands import command

from benchmarks.paper import __main__ as program
from benchmarks.paper.claims import verdict
from benchmarks.paper.run import ExperimentRun


def paper(*arguments, **options):
    """`python -m benchmarks.paper *arguments` in this process."""
    return command(*arguments, main=program.main, **options)


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


def by_verdict(found):
    """The names of the claims that became alike, in the order of the alphabet."""
    return {
        became: " ".join(sorted(n for n in found if found[n] == became))
        for became in found.values()
    }
