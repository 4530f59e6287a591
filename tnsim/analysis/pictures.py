"""Figures that are drawn on, and that notebooks show by themselves."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A matplotlib figure that a notebook shows although pyplot does not know it.

    Example:
        >>> Picture(figsize=(1, 1))._repr_png_()[1:4]
        b'PNG'
    """

    def _repr_png_(self) -> bytes:
        """The figure as PNG, which Jupyter shows."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
