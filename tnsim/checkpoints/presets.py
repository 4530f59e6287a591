"""Dialects of layouts found in the wild. In: nothing. Out: dialects by name."""

from __future__ import annotations

from typing import Any

from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.rules import CONFIGURED_HEADS, PROJECTIONS, Rule


def _attention_model(
    name: str, keys: dict[str, str], description: str, rope_base: float | str
) -> Dialect:
    """Embedding, attention layers each added to its input, unembedding under a constant norm."""
    roles: dict[str, Any] = {}
    for role in PROJECTIONS:
        roles[role] = f"layers.{{i}}.{keys[role]}.weight"
        roles[f"{role}_bias"] = f"layers.{{i}}.{keys[role]}.bias?"
    attention = Rule(
        "attention",
        **roles,
        n_heads=CONFIGURED_HEADS,
        residual="additive",
        scale="config:model.attn_scale|attn_scale",
        rope_base=rope_base,
        repeat=True,
    )
    unembed = Rule(
        "linear",
        weight="unembed.weight",
        norm_energy="final_norm.running_mean_energy?",
        norm_epsilon=1e-6,
    )
    layers = (Rule("linear", weight="embed.weight", transpose=True), attention, unembed)
    return Dialect(
        name,
        layers,
        nested=("model_state_dict?",),
        ignore=("final_norm.num_batches_tracked", "step"),
        description=description,
    )


def _fused_blocks(name: str, description: str, residual: str | None) -> Dialect:
    """Embedding, bilinear layers with left and right in one array, head."""
    block = Rule(
        "bilinear",
        fused="blocks.{i}.weight",
        fused_bias="blocks.{i}.bias?",
        residual=residual,
        repeat=True,
    )
    embed, head = (Rule("linear", weight=f"{part}.weight") for part in ("embed", "head"))
    return Dialect(name, (embed, block, head), description=description)


PRESETS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "bilinear-classifier",
            (
                Rule("linear", weight="embed.weight", bias="embed.bias?"),
                Rule(
                    "bilinear",
                    left="body.left.weight",
                    right="body.right.weight",
                    down="body.down.weight",
                    left_bias="body.left.bias?",
                    right_bias="body.right.bias?",
                    down_bias="body.down.bias?",
                ),
                Rule("linear", weight="head.weight", bias="head.bias?"),
            ),
            description="embed, one bilinear layer called body, head",
        ),
        Dialect(
            "bilinear-readout",
            (Rule("bilinear", left="W_l", right="W_r", down="W_p"),),
            ignore=("epoch", "seed", "accuracy"),
            description="one bilinear layer W_l, W_r with the readout W_p",
        ),
        Dialect(
            "fused-projection",
            (Rule("bilinear", fused="bi_linear.weight", down="projection.weight"),),
            description="one bilinear layer with left and right in one array",
        ),
        _fused_blocks(
            "fused-blocks",
            "embed, fused bilinear blocks without down-projection or residual, head",
            residual=None,
        ),
        _fused_blocks(
            "fused-blocks-residual",
            "as fused-blocks, each block added to its input",
            residual="additive",
        ),
        _attention_model(
            "bilinear-attention",
            {role: role for role in PROJECTIONS},
            "token embedding, residual bilinear attention layers, unembedding",
            10_000.0,
        ),
        _attention_model(
            "bilinear-attention-attn",
            {role: f"attn.{role}" for role in PROJECTIONS},
            "as bilinear-attention, with keys under attn",
            10_000.0,
        ),
        _attention_model(
            "quadratic-attention",
            {"q1": "q", "k1": "k", "q2": "q", "k2": "k", "v": "v", "o": "o"},
            "as bilinear-attention, both scores from the same q and k",
            "config:model.rope_base|rope_base|rope_theta",
        ),
    )
}
