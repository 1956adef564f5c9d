"""The chart of layer errors, and the grid that charts share."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 260, 56, 28


def error_chart(layers: Sequence[tuple[str, float]]) -> str:
    """Draw a point for the relative error of each (name, error), as SVG; titles name the layers.

    For screen readers, put a table next to it.
    """
    top = max((error for _, error in layers), default=0.0) or 1.0
    step = (WIDTH - LEFT - 12) / max(1, len(layers) - 1)
    points = "".join(
        f'<circle cx="{LEFT + number * step:.1f}" cy="{height(error / top):.1f}" r="3">'
        f"<title>{escape(name)}: {error:.5f}</title></circle>"
        for number, (name, error) in enumerate(layers)
    )
    label = f"Relative error of {len(layers)} layers, at most {top:.4f}; the table below has every number."
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{grid(top)}{points}'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">first layer</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">last layer</text></svg>'
    )


def grid(top: float) -> str:
    """Draw horizontal lines from 0 to ``top``, with their numbers."""
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height(share):.1f}" y2="{height(share):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{height(share) + 4:.1f}" text-anchor="end">{share * top:.3g}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )


def height(share: float) -> float:
    """Return the vertical position of a share of the largest value."""
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 12)
