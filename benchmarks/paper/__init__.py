"""The paper's experiments, rerun and judged: a module for each experiment, of three steps.

`python -m benchmarks.paper NAME` runs one, in a clone (`__main__.py`); they are no part of the
installed package and use tnsim as a user does.

The modules in their reading order:

    experiment      `Experiment`: the steps and settings of an experiment, and experiments by name
    run, steps      the folder of a single run, and the sequence of its steps
    claims, records claims with verdicts, and their JSON
    page            claims as a table for a terminal, and all runs as a Markdown page
    invariance, grokking, forgetting, differences, backdoor, argmax, language, induction, paths,
    activations     the experiments
    classifiers, images   networks and data of the experiments on images
    repetitions     the training of induction
    phases          phases of matrices compared with phases of behaviour

The module of an experiment has its parts in this order:

    setting    a frozen dataclass of sizes and rates, with the defaults of a quick run
    train      `train(run)`: a plain optax script; writes checkpoints and a log (`Series`)
    measure    `measure(run)`: reads the checkpoints, returns a frozen `Measured`; tnsim's public
               interface only, as a user would write it
    claims     `claims(run, measured)`: rows of `Claim`, the paper's value beside ours
    figures    `figures(run, measured)`: the paper's figure in our drawing, by file name

and `EXPERIMENT` at its end puts them together; `experiment.py` knows it by name.

*A step takes an `ExperimentRun`* (`run.py`): the folder to write to, the setting, the seed, and
data and checkpoints of the user. A step is deterministic by setting and seed. Finished work is
kept, so that a stopped run goes on: `train` skips a series whose log is written
(`run.unfinished`), `measure` gives every `tnsim.pairwise` a store (`run.store`). Long loops show a
bar (`run.bar`).

*A claim is a number and an interval* (`claims.py`). The verdict is computed: in the interval it
*holds*; outside it *does not hold*, unless `differs` says in which way this setting is not the
paper's, then it *differs in setting*. A claim that cannot be rerun says why (`cannot`). Several
seeds give several values, all of them shown. A score of drift has a `control`, the same score where
nothing but training happened, and an interval for the excess over it, which every seed must meet.

*Settings*: `default` takes minutes; `full` are those of the paper, by name where the paper's text
and the authors' code disagree (`text`, `code`).

Tools that a user of tnsim may need beyond the paper belong to `analysis`, not here.
"""
