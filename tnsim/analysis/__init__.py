"""Readers of a finished matrix of similarities, which compute no similarity themselves.

The modules in their reading order:

    matrices       a result, one of its matrices or an array, as a checked matrix
    reading        phases, embeddings, agreement of two matrices, and first answers in words
    baselines      other measures of the same models
    hidden_states  layers of two networks
    axes, figures  matplotlib: where, the six drawings, and the figures
    report, page   a page to read a run by, and its scripts
"""

import lazy_loader

PUBLIC = ("baselines", "figures", "reading", "report")
"""Modules that are public names of tnsim, loaded on first use."""

__getattr__, _, _ = lazy_loader.attach(__name__, PUBLIC)
