"""The paper's experiments, rerun and judged: one folder each, three steps that can be read alone.

In: the name of an experiment. Out: checkpoints, stores, figures, and claims with verdicts.

An experiment is a folder of five files:

    setting.py    `Setting`, a frozen dataclass: sizes and rates, with the defaults of a quick run
    train.py      `train(run)`: a plain optax script; writes checkpoints and a log (`Series`)
    measure.py    `measure(run)`: reads the checkpoints, returns a frozen `Measured`; tnsim's public
                  interface only, as a user would write it
    claims.py     `claims(run, measured)`: rows of `Claim`, the paper's value beside ours
    figure.py     `figures(run, measured)`: the paper's figure in our drawing, by file name

and its `__init__.py` puts them together as `EXPERIMENT`; `catalogue.py` knows it by name.

*A step takes a `Run`* (`run.py`): where to write, the setting, the seed, data and checkpoints that
somebody has. It is deterministic by setting and seed. It keeps what it has finished, so that a run
that was stopped goes on: `train` skips a series whose log is written (`run.unfinished`), `measure`
gives every `tnsim.pairwise` a store (`run.store`). Long loops show a bar (`run.bar`).

*A claim is a number and an interval* (`claims.py`). The verdict is computed: in the interval it
*holds*; outside it *does not hold*, unless `differs` says in which way this setting is not the
paper's, then it *differs in setting*. What cannot be rerun says why (`cannot`). Several seeds give
several values, all of them shown. A score of drift has a `control`, the same score where nothing
but training happened, and an interval for the excess over it, which every seed must meet.

*Settings*: `default` takes minutes; `full` are those of the paper, by name where the paper's text
and the authors' code disagree (`text`, `code`).

Whatever a user of tnsim may need beyond the paper belongs to `analysis`, not here.
"""
