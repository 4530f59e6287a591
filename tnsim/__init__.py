"""tnsim: exact similarity of polynomial networks, from their weights.

Names are loaded on first use, so that `import tnsim` is cheap and changes nothing in JAX. Functions
that need an optional package say so when they are called, not when they are named: `help(tnsim)`
and `from tnsim import *` work without optional packages.

Reading order of the packages: `models`, `metrics`, `problems`, `engine`, `compare`, `checkpoints`,
`circuits`, `tensor_networks`, `torch`, `all_pairs`, `localise`, `analysis`, `cli`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for editors and type checkers
    # torch is no part of __all__: a star would put it in the place of PyTorch
    from tnsim import torch as torch
    from tnsim.activations.activation import Activation
    from tnsim.all_pairs.heads import heads
    from tnsim.all_pairs.result import Pairwise
    from tnsim.all_pairs.run import open_pairwise, pairwise, plan_pairwise
    from tnsim.analysis import baselines, figures, reading, report
    from tnsim.analysis.hidden_states import hidden_states, layer_similarity
    from tnsim.checkpoints.dialects import Dialect
    from tnsim.checkpoints.functions import from_function
    from tnsim.checkpoints.load import (
        ForwardDifference,
        Series,
        compare_forward,
        from_state_dict,
        load,
    )
    from tnsim.checkpoints.module_calls import inputs_of
    from tnsim.checkpoints.modules import from_module
    from tnsim.checkpoints.native import save
    from tnsim.checkpoints.rules import (
        AttentionRule,
        BilinearRule,
        ElementwiseRule,
        GatedRule,
        LinearRule,
        Rule,
    )
    from tnsim.circuits.parts import Parts, PartSeries, SeriesParts, parts
    from tnsim.compare.estimates import Estimate
    from tnsim.compare.monte_carlo import Check, check
    from tnsim.compare.numbers import Number, Numbers, SignedLog
    from tnsim.compare.similarity import inner, log_inner, plan, similarity, slices
    from tnsim.compare.surrogate import polynomial
    from tnsim.engine.budget import Budget
    from tnsim.engine.plan import Plan
    from tnsim.errors import (
        CaveatWarning,
        CheckpointError,
        DamagedStore,
        DuplicateWarning,
        ExecutorError,
        MissingExtra,
        ModelError,
        NegativeEigenvalueWarning,
        PrecisionWarning,
        ResultError,
        StoreMismatch,
        StoreWarning,
        TnsimError,
        TooLarge,
        UnsupportedLayer,
    )
    from tnsim.localise.change import Change, change
    from tnsim.localise.edges import Edges, EdgeSeries
    from tnsim.localise.paths import Paths, PathSeries, paths
    from tnsim.metrics.categorical import Categorical
    from tnsim.metrics.empirical import Empirical
    from tnsim.metrics.metric import Frobenius, Gaussian, GaussianClosure, Symmetric, TreeSymmetric
    from tnsim.metrics.product import Product
    from tnsim.metrics.protocol import FiniteMetric, LayerwiseMetric, Metric
    from tnsim.models.activated import Elementwise, Gated
    from tnsim.models.attention import Attention
    from tnsim.models.components import components, switched
    from tnsim.models.layers import Bilinear, Linear, Multilinear, Residual
    from tnsim.models.matrices import SparseMatrix
    from tnsim.models.model import Combination, Model
    from tnsim.models.origin import Origin
    from tnsim.models.protocol import Layer, OwnLayer
    from tnsim.sessions import Session, session, using
    from tnsim.tensor_networks.closed_networks import networks
    from tnsim.tensor_networks.contraction import Expression, contract, contract_expression
    from tnsim.tensor_networks.network import network

_HOME = {
    "Linear": "models.layers",
    "Bilinear": "models.layers",
    "Multilinear": "models.layers",
    "SparseMatrix": "models.matrices",
    "OwnLayer": "models.protocol",
    "Elementwise": "models.activated",
    "Gated": "models.activated",
    "Activation": "activations.activation",
    "Attention": "models.attention",
    "Residual": "models.layers",
    "Layer": "models.protocol",
    "Model": "models.model",
    "Origin": "models.origin",
    "Combination": "models.model",
    "Metric": "metrics.protocol",
    "LayerwiseMetric": "metrics.protocol",
    "Frobenius": "metrics.metric",
    "TreeSymmetric": "metrics.metric",
    "Symmetric": "metrics.metric",
    "Gaussian": "metrics.metric",
    "GaussianClosure": "metrics.metric",
    "Categorical": "metrics.categorical",
    "Empirical": "metrics.empirical",
    "Product": "metrics.product",
    "FiniteMetric": "metrics.protocol",
    "similarity": "compare.similarity",
    "slices": "compare.similarity",
    "inner": "compare.similarity",
    "log_inner": "compare.similarity",
    "plan": "compare.similarity",
    "polynomial": "compare.surrogate",
    "Number": "compare.numbers",
    "Numbers": "compare.numbers",
    "SignedLog": "compare.numbers",
    "Budget": "engine.budget",
    "pairwise": "all_pairs.run",
    "plan_pairwise": "all_pairs.run",
    "open_pairwise": "all_pairs.run",
    "Pairwise": "all_pairs.result",
    "parts": "circuits.parts",
    "Parts": "circuits.parts",
    "PartSeries": "circuits.parts",
    "SeriesParts": "circuits.parts",
    "heads": "all_pairs.heads",
    "check": "compare.monte_carlo",
    "Check": "compare.monte_carlo",
    "components": "models.components",
    "switched": "models.components",
    "paths": "localise.paths",
    "Paths": "localise.paths",
    "PathSeries": "localise.paths",
    "Edges": "localise.edges",
    "EdgeSeries": "localise.edges",
    "change": "localise.change",
    "Change": "localise.change",
    "Plan": "engine.plan",
    "Estimate": "compare.estimates",
    "network": "tensor_networks.network",
    "networks": "tensor_networks.closed_networks",
    "contract": "tensor_networks.contraction",
    "contract_expression": "tensor_networks.contraction",
    "Expression": "tensor_networks.contraction",
    "hidden_states": "analysis.hidden_states",
    "layer_similarity": "analysis.hidden_states",
    "load": "checkpoints.load",
    "save": "checkpoints.native",
    "from_state_dict": "checkpoints.load",
    "Series": "checkpoints.load",
    "from_function": "checkpoints.functions",
    "from_module": "checkpoints.modules",
    "inputs_of": "checkpoints.module_calls",
    "Dialect": "checkpoints.dialects",
    "Rule": "checkpoints.rules",
    "LinearRule": "checkpoints.rules",
    "BilinearRule": "checkpoints.rules",
    "ElementwiseRule": "checkpoints.rules",
    "GatedRule": "checkpoints.rules",
    "AttentionRule": "checkpoints.rules",
    "compare_forward": "checkpoints.load",
    "ForwardDifference": "checkpoints.load",
    "TnsimError": "errors",
    "ModelError": "errors",
    "CheckpointError": "errors",
    "UnsupportedLayer": "errors",
    "TooLarge": "errors",
    "ResultError": "errors",
    "MissingExtra": "errors",
    "StoreMismatch": "errors",
    "DamagedStore": "errors",
    "ExecutorError": "errors",
    "CaveatWarning": "errors",
    "PrecisionWarning": "errors",
    "DuplicateWarning": "errors",
    "NegativeEigenvalueWarning": "errors",
    "StoreWarning": "errors",
    "Session": "sessions",
    "session": "sessions",
    "using": "sessions",
}

_MODULES = {
    "baselines": "analysis.baselines",
    "figures": "analysis.figures",
    "reading": "analysis.reading",
    "report": "analysis.report",
    "torch": "torch",
}

__all__ = [
    "Activation",
    "Attention",
    "AttentionRule",
    "Bilinear",
    "BilinearRule",
    "Budget",
    "Categorical",
    "CaveatWarning",
    "Change",
    "Check",
    "CheckpointError",
    "Combination",
    "DamagedStore",
    "Dialect",
    "DuplicateWarning",
    "EdgeSeries",
    "Edges",
    "Elementwise",
    "ElementwiseRule",
    "Empirical",
    "Estimate",
    "ExecutorError",
    "Expression",
    "FiniteMetric",
    "ForwardDifference",
    "Frobenius",
    "Gated",
    "GatedRule",
    "Gaussian",
    "GaussianClosure",
    "Layer",
    "LayerwiseMetric",
    "Linear",
    "LinearRule",
    "Metric",
    "MissingExtra",
    "Model",
    "ModelError",
    "Multilinear",
    "NegativeEigenvalueWarning",
    "Number",
    "Numbers",
    "Origin",
    "OwnLayer",
    "Pairwise",
    "PartSeries",
    "Parts",
    "PathSeries",
    "Paths",
    "Plan",
    "PrecisionWarning",
    "Product",
    "Residual",
    "ResultError",
    "Rule",
    "Series",
    "SeriesParts",
    "Session",
    "SignedLog",
    "SparseMatrix",
    "StoreMismatch",
    "StoreWarning",
    "Symmetric",
    "TnsimError",
    "TooLarge",
    "TreeSymmetric",
    "UnsupportedLayer",
    "baselines",
    "change",
    "check",
    "compare_forward",
    "components",
    "contract",
    "contract_expression",
    "figures",
    "from_function",
    "from_module",
    "from_state_dict",
    "heads",
    "hidden_states",
    "inner",
    "inputs_of",
    "layer_similarity",
    "load",
    "log_inner",
    "network",
    "networks",
    "open_pairwise",
    "pairwise",
    "parts",
    "paths",
    "plan",
    "plan_pairwise",
    "polynomial",
    "reading",
    "report",
    "save",
    "session",
    "similarity",
    "slices",
    "switched",
    "using",
]
__version__ = "0.1.0"

logging.getLogger("tnsim").addHandler(logging.NullHandler())  # silent unless asked otherwise


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        value = import_module(f"tnsim.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(import_module(f"tnsim.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'tnsim' has no attribute {name!r}")
    globals()[name] = value  # later uses find it without this function
    return value


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, *__all__, *_MODULES})
