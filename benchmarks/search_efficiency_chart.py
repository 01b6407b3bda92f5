"""Regret curves as one SVG file: median regret against GPU time, a line a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 190, 20, 48
COLOURS = ("#0b5fff", "#e8710a", "#188038", "#a142f4", "#80868b", "#c5221f")
Curve = Sequence[tuple[float, float]]
"""(% of the exhaustive GPU time, regret in %), as steps."""


def chart(curves: Mapping[str, Curve], *, title: str, last: float, highest: float) -> str:
    """``last`` is where the time axis ends, ``highest`` where the regret axis does; both in %."""

    def x(share: float) -> float:
        return LEFT + min(share / last, 1.0) * (WIDTH - LEFT - RIGHT)

    def y(regret: float) -> float:
        return HEIGHT - BOTTOM - min(regret / highest, 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(0, int(highest) + 1, 5):
        parts.append(
            f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e0e0e0"/>'
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for tick in range(0, int(last) + 1, 5):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">GPU time, % of measuring'
        f' everything</text><text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        "median regret, %</text>"
    )
    for place, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=True)):
        path = "".join(
            f"{f'H{x(share):.1f}V' if number else f'M{x(share):.1f} '}{y(regret):.1f}"
            for number, (share, regret) in enumerate(curve)
        )
        key, width = TOP + 16 + 20 * place, 1.5 if place else 3
        parts.append(
            f'<path d="{path}H{WIDTH - RIGHT}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
            f'<path d="M{WIDTH - RIGHT + 14} {key - 4}h20" stroke="{colour}" stroke-width="3"/>'
            f'<text x="{WIDTH - RIGHT + 40}" y="{key}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
