"""Readers of a finished matrix of similarities, which compute no similarity themselves.

Reading order: `matrices` (the result of a pairwise run, any of its matrices or a plain array, as a
checked matrix); `phases`, `chords` and `correlations`, which `reading` puts together; `measures`
and `baselines` (other measures of the same models), with `hidden_states` (of their layers); `axes`,
`canvas` and `figures` (matplotlib); `report` (a page to read a run by).
"""

import lazy_loader

PUBLIC = ("baselines", "figures", "reading", "report")
"""Modules that are public names of tnsim, loaded on first use."""

__getattr__, _, _ = lazy_loader.attach(__name__, PUBLIC)
