"""All pairs of many models, resumable.

Read `run` first, then `preparation`, `run_plan`, `tasks`, `work` and `store`.
"""
