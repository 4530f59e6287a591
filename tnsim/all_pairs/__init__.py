"""All pairs of many models, resumable.

Reading order: `run` (the public functions), `preparation` with `sources` and `run_plan`, the routes
`batched_plans` and `forward_runs`, `tasks`, `work` with `normalise`, `store` with `leases`,
`growing`, and `result`.
"""
