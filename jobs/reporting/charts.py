"""Small SVG charts for the report, drawn here so that the page needs no script, no font and no network.

A viewBox of 360 units is about as wide as a phone: text of 12 units is readable there, and on a
desktop the same chart is simply larger. Colours are classes (`s0` to `s5`), so that the page's
stylesheet decides them for light and dark; every colour comes with a legend or a label. Each chart is
an `img` to a screen reader, named by its title; the figures stand in a table beside it.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH = 360
LONGEST_NAME = 24  # characters of a label before it is cut; the table beside the chart has it whole
SERIES_COLOURS = 6
MARKED_POINTS = 12  # a line through so few is drawn with a dot at each: between them nothing was measured
WHOLE_FROM = 0.0995  # share from which its percentage is shown without a digit after the point
Point = tuple[float, float]


def line_chart(title: str, series: Sequence[tuple[str, Sequence[Point]]], *, x_label: str, floor: float | None = None) -> Markup:
    """Lines over a common x axis; `floor` pulls the y axis down to it. Nothing to draw gives nothing."""
    series = [(name, points) for name, points in series if points]
    if not series:
        return Markup()
    height, left, right, top, bottom = 220, 46, 10, 10, 34
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    y_ticks = ticks(min(ys) if floor is None else min(floor, *ys), max(ys), 5)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def across(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (WIDTH - left - right)

    def up(y: float) -> float:
        return height - bottom - (y - y_low) / (y_high - y_low or 1) * (height - top - bottom)

    parts = [f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>' for y in y_ticks]
    parts += [_text(left - 5, up(y) + 4, label(y), "end") for y in y_ticks]
    parts += [_text(across(x), height - bottom + 16, label(x), "middle") for x in ticks_within(min(xs), max(xs))]
    parts.append(_text((left + WIDTH - right) / 2, height - 3, x_label, "middle"))
    for position, (_, points) in enumerate(series):
        colour = f"s{position % SERIES_COLOURS}"
        if len(points) <= MARKED_POINTS:
            parts += [f'<circle class="dot {colour}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3"/>' for x, y in points]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
    return _svg(title, height, parts) + legend([name for name, _ in series])


def interval_bars(title: str, rows: Sequence[tuple[str, float, float | None, float | None]], maximum: float) -> Markup:
    """A horizontal bar a row, its 95 % interval as a whisker, its value at the right; the axis starts at 0."""
    if not rows:
        return Markup()
    maximum = max(maximum, *(row[1] for row in rows), *(row[3] or 0 for row in rows))
    step, top = 40, 4
    height = top + step * len(rows) + 20

    def across(value: float) -> float:
        return 2 + value / maximum * (WIDTH - 4)

    base = top + step * len(rows)
    marks = [tick for tick in ticks(0, maximum, 5) if tick <= maximum]
    parts = [f'<line class="grid" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{top}" y2="{base}"/>' for x in marks]
    parts += [_text(min(max(across(x), 6), WIDTH - 6), base + 15, label(x), "middle") for x in marks]
    for position, (name, mean, low, high) in enumerate(rows):
        y = top + step * position
        value = f"{mean:.2f}" if low is None or high is None else f"{mean:.2f}  ({low:.2f} to {high:.2f})"
        parts.append(_text(2, y + 14, shortened(name), "start", "label"))
        parts.append(_text(WIDTH - 2, y + 14, value, "end", "value"))
        parts.append(
            f'<rect class="bar {"strong" if name == "trained" else "soft"}" x="2" y="{y + 19}" width="{max(across(mean) - 2, 1):.1f}" height="14" rx="2"/>'
        )
        if low is not None and high is not None:
            middle = y + 26
            parts.append(
                f'<path class="whisker" d="M{across(low):.1f} {middle}H{across(high):.1f}M{across(low):.1f} {middle - 5}v10M{across(high):.1f} {middle - 5}v10"/>'
            )
    return _svg(title, height, parts)


def grouped_bars(title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> Markup:
    """Shares between 0 and 1: a group of bars a position, a colour a series, the percentage above each bar."""
    if not series or not groups:
        return Markup()
    height, left, top, bottom = 200, 46, 18, 24
    ground = height - bottom
    room = (WIDTH - left - 8) / len(groups)
    thick = min(34.0, room * 0.84 / len(series))
    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = ground - tick * (ground - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 5, y + 4, f"{100 * tick:.0f} %", "end"))
    for place, name in enumerate(groups):
        start = left + 4 + room * place + (room - thick * len(series)) / 2
        parts.append(_text(left + 4 + room * (place + 0.5), height - 6, name, "middle"))
        for position, (_, values) in enumerate(series):
            if place >= len(values):
                continue
            tall = max(0.0, min(1.0, values[place])) * (ground - top)
            x = start + thick * position
            parts.append(
                f'<rect class="bar s{position % SERIES_COLOURS}" x="{x:.1f}" y="{ground - tall:.1f}" width="{max(thick - 2, 1):.1f}" height="{tall:.1f}"/>'
            )
            if thick >= 18:
                parts.append(_text(x + thick / 2 - 1, ground - tall - 4, percentage(values[place]), "middle", "value"))
    return _svg(title, height, parts) + legend([name for name, _ in series])


def duration_bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Markup:
    """(name, seconds, text) as horizontal bars in the order of the stages."""
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    if longest <= 0:
        return Markup()
    step = 24
    parts = []
    for position, (name, seconds, text) in enumerate(rows):
        y = step * position
        width = seconds / longest * (WIDTH - 186)
        parts.append(_text(106, y + 15, shortened(name), "end", "label"))
        parts.append(f'<rect class="bar strong" x="112" y="{y + 4}" width="{max(width, 1):.1f}" height="14" rx="2"/>')
        parts.append(_text(112 + width + 6, y + 15, text, "start", "value"))
    return _svg(title, step * len(rows) + 4, parts)


def legend(names: Sequence[str]) -> Markup:
    if len(names) < 2:
        return Markup()
    items = Markup("").join(
        Markup('<li><span class="key s{}"></span>{}</li>').format(position % SERIES_COLOURS, name) for position, name in enumerate(names)
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def thinned(points: Sequence[Point], limit: int = 300) -> list[Point]:
    """At most `limit` points: means of equal groups, so that a spike is not dropped unseen; the last point is kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil((len(points) - 1) / (limit - 1))
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [*means, points[-1]]


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that span [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    raw = (high - low) / max(count - 1, 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)]


def ticks_within(low: float, high: float, fewest: int = 3) -> list[float]:
    """Round numbers inside [low, high], as few as an axis needs; an end that is not round has none."""
    found = [low]
    if high <= low:
        return found
    for count in range(5, 12):
        found = [tick for tick in ticks(low, high, count) if low <= tick <= high]
        if len(found) >= fewest:
            break
    return found


def percentage(share: float) -> str:
    """What stands above a bar: a small share is not shown as none."""
    return f"{100 * share:.0f}" if share >= WHOLE_FROM else f"{100 * share:.1f}"


def label(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "axis") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> Markup:
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {height:g}" preserveAspectRatio="xMidYMid meet">'
    return Markup(head + f"<title>{escape(title)}</title>" + "".join(parts) + "</svg>")
