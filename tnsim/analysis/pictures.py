"""The figures that are drawn on. In: options of matplotlib's. Out: figures that notebooks show."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure of matplotlib's that a notebook shows though pyplot does not know it.

    Example:
        >>> Picture(figsize=(1, 1))._repr_png_()[1:4]
        b'PNG'
    """

    def _repr_png_(self) -> bytes:
        """What Jupyter shows."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
