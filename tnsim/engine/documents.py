"""JSON that notices when it was changed. In: plain data. Out: text with a digest, and back.

A plan holds coefficients. A changed one would give another number under the same label, and no
check of types or shapes could tell. The digest is over the canonical form of the content (keys
sorted, no spaces), so a document may be indented or reordered, but no value in it may differ.
It is against damage and editing, not against forgery: whoever can compute a digest can write
one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"


def sealed(content: Mapping[str, Any]) -> str:
    """One JSON object: the content, and its digest under `digest`.

    Args:
        content: Plain data without the key `digest`; numbers are finite.

    Returns:
        JSON text that `opened` takes.

    Example:
        >>> opened(sealed({"weights": [0.5, 2.0]}))
        {'weights': [0.5, 2.0]}
    """
    return json.dumps({**content, DIGEST: _digest(content)}, separators=(",", ":"))


def opened(text: str | bytes) -> dict[str, Any]:
    """The content of a sealed document.

    Raises:
        ValueError: For text that is no JSON object, has no digest or not the content of its digest.
        RecursionError: For nesting deeper than the interpreter's stack.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    if DIGEST not in content:
        raise ValueError("it has no digest")
    if content.pop(DIGEST) != _digest(content):
        raise ValueError(
            "it was changed after it was written: its digest is that of another content"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
