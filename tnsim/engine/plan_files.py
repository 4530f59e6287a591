"""Plans as documents that know when they were changed. In: a plan or a text. Out: the other."""

from __future__ import annotations

import dataclasses

from tnsim.engine.documents import opened, sealed
from tnsim.engine.plan import Plan
from tnsim.engine.plan_json import plan_from_data
from tnsim.errors import CheckpointError

FORMAT = 2


def document(plan: Plan) -> str:
    """A plan as one JSON document with a digest of its content.

    Args:
        plan: Any.

    Returns:
        What `plan_from` reads.
    """
    return sealed({"format": FORMAT, **dataclasses.asdict(plan)})


def plan_from(text: str | bytes) -> Plan:
    """The plan that a document holds.

    Args:
        text: What `document` wrote. Indentation and the order of its keys do not matter.

    Returns:
        An equal plan.

    Raises:
        CheckpointError: As `Plan.from_json`.
    """
    try:
        data = opened(text)
        if data.pop("format", None) != FORMAT:
            raise ValueError("another format number")
        return plan_from_data(data)
    except (ValueError, TypeError) as error:
        reason = str(error)
    except RecursionError:
        reason = "it is nested too deeply"
    raise CheckpointError(f"not a tnsim plan in format {FORMAT}: {reason}")
