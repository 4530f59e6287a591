"""Reads a finished matrix; computes no similarity.

In: the result of a pairwise run, one of its matrices or a plain array; for baselines, the models.
Out: scores, phases, embeddings, matplotlib figures, a page to read the run by.
"""
