"""All pairs of many models, resumable.

In: models or a series of checkpoints, a metric; a folder for the store, an executor where wanted.
Out: a `Pairwise` result, what it would cost, csv, npz and parquet files.
"""
