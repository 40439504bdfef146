"""A bar chart of strategies as SVG. It needs no library, and a browser shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from gateway.simulator.compare import OURS, POOLED, StrategySummary

BAR_HEIGHT, ROW_HEIGHT, LABEL_WIDTH, PANEL_WIDTH, PANEL_GAP, TOP = 16, 26, 160, 260, 90, 64
COLOURS = {OURS: "#d9480f", POOLED: "#adb5bd"}
OTHER_COLOUR = "#4c6ef5"

PANELS: tuple[tuple[str, Callable[[StrategySummary], float], str], ...] = (
    ("prompt tokens from the cache", lambda summary: 100 * summary.hit_rate, "{:.1f} %"),
    ("mean time to the first chunk", lambda summary: summary.ttft_mean_seconds, "{:.2f} s"),
    ("time until all are complete", lambda summary: summary.makespan_seconds / 60, "{:.0f} min"),
)


def bar_chart(title: str, summaries: Sequence[StrategySummary]) -> str:
    """A panel for each figure of `PANELS`, with a row for each strategy."""
    width = LABEL_WIDTH + len(PANELS) * (PANEL_WIDTH + PANEL_GAP)
    height = TOP + len(summaries) * ROW_HEIGHT + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for row, summary in enumerate(summaries):
        y = TOP + row * ROW_HEIGHT + BAR_HEIGHT - 4
        parts.append(f'<text x="{LABEL_WIDTH - 10}" y="{y}" text-anchor="end">{escape(summary.strategy)}</text>')
    for column, (name, value_of, form) in enumerate(PANELS):
        left = LABEL_WIDTH + column * (PANEL_WIDTH + PANEL_GAP)
        longest = max(map(value_of, summaries)) or 1.0
        parts.append(f'<text x="{left}" y="{TOP - 12}" fill="#495057">{escape(name)}</text>')
        for row, summary in enumerate(summaries):
            value, top = value_of(summary), TOP + row * ROW_HEIGHT
            length = PANEL_WIDTH * value / longest
            colour = COLOURS.get(summary.strategy, OTHER_COLOUR)
            parts.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{top + BAR_HEIGHT - 4}">{form.format(value)}</text>')
    return "\n".join([*parts, "</svg>", ""])
