"""A few lines of SVG: text, boxes, arrows, in the colours of a light or a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours, and the word that names them in file names."""

    name: str
    text: str
    quiet: str
    line: str
    panel: str
    with_kdn: str
    without: str


THEMES = (
    Theme("light", "#1f2328", "#59636e", "#d1d9e0", "#f6f8fa", "#1a7f5a", "#b4552d"),
    Theme("dark", "#f0f6fc", "#9198a1", "#3d444d", "#151b23", "#3fb98a", "#e08a5f"),
)


class Drawing:
    """Shapes in the order in which they are added; nothing is drawn behind what came before."""

    def __init__(self, width: int, height: int, title: str, theme: Theme) -> None:
        self.width, self.height, self.title, self.theme = width, height, title, theme
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 14, colour: str = "", *,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour or self.theme.text}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *,
        edge: str = "none", opacity: float = 1.0, radius: float = 4,
    ) -> None:  # fmt: skip
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):g}" height="{height:g}" '
            f'rx="{radius:g}" fill="{fill}" fill-opacity="{opacity:g}" stroke="{edge}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        colour = self.theme.quiet if arrow else self.theme.line
        self._parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" fill="none"{end}/>'
        )

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')

    def __str__(self) -> str:
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{self.theme.quiet}"/>'
            "</marker></defs>"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" role="img" '
            f'aria-label="{escape(self.title)}">'
        )
        return "\n".join([head, arrow, *self._parts, "</svg>", ""])
