"""Which part of a model: paths through a model, and the parts of a change.

Read `grams` first (the inner products of many models that share layers), then `paths` (models split
by the components that a signal goes through), `edges` (paths split by the legs that read a
component), `nodes` (integrals along a segment of switches) and `change` (differences of two models
split by component).
"""
