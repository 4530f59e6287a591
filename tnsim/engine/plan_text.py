"""What is shown of a plan. In: a plan. Out: a line, a table as text, a table as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnsim.tables import html_table

if TYPE_CHECKING:
    from tnsim.engine.plan import Plan


def one_line(plan: Plan) -> str:
    """Metric, guarantee, inner products and cost."""
    guarantee = "exact" if plan.exact else "approximation"
    return (
        f"Plan({plan.metric}, {guarantee}: {', '.join(plan.outputs)}; "
        f"{plan.multiplications:,} multiplications, "
        f"{plan.peak_bytes / 2**20:,.2f} MiB of {plan.dtype})"
    )


def table(plan: Plan) -> str:
    """One line for everything that a reader wants to know."""
    return "\n".join(f"{name:<16} {text}" for name, text in _rows(plan))


def html(plan: Plan) -> str:
    """The same as a table for notebooks."""
    return html_table("Plan", _rows(plan))


def _rows(plan: Plan) -> list[tuple[str, str]]:
    """What a reader wants to know, in words."""
    repeated = f", in {plan.runs} runs" if plan.runs > 1 else ""
    return [
        ("metric", f"{plan.metric} ({'exact' if plan.exact else 'approximation'})"),
        ("inner products", ", ".join(plan.outputs)),
        ("diagrams", f"{plan.diagrams:,}"),
        ("stages", f"{len(plan.stages):,} running {len(plan.pieces)} distinct pieces"),
        ("contractions", f"{plan.contractions:,} distinct pairwise contractions"),
        ("multiplications", f"{plan.multiplications:,} scalar multiplications{repeated}"),
        (
            "unshared",
            f"{plan.unshared_multiplications:,} if every product were contracted on its own",
        ),
        (
            "peak memory",
            f"{plan.peak_bytes / 2**20:,.2f} MiB of {plan.dtype} beside the models",
        ),
        ("compiling", f"{plan.program_bytes / 2**20:,.0f} MiB more, once in a process"),
        ("searched with", plan.searched_with),
    ]
