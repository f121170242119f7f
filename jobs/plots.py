"""Line charts as self-contained SVG: no library, no script, readable in print and without colour.

Every series has its own dash pattern and marker beside its colour, and carries its name at its end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLORS = ("#12355b", "#c4501b", "#2f7d5b", "#7b4397", "#8a6d00", "#4a4a4a")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring")
FONT = "font-family='system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif'"
INK, FAINT = "#222", "#d9d9d9"


@dataclass(frozen=True)
class Series:
    """Points of one line. `notes`: a short text beside each point; `marks` off draws the line alone."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    notes: Sequence[str] = ()
    marks: bool = True
    style: int | None = None  # which colour, dash and marker; none is the place among the series
    thin: bool = False


@dataclass(frozen=True)
class Axis:
    """`log` scales; `zero` starts a linear axis at 0; `ticks` fixes where the labels are."""

    label: str
    log: bool = False
    zero: bool = True
    ticks: Sequence[float] = ()


def line_chart(
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    title: str,
    reference: tuple[str, float] | None = None,
    width: int = 560,
    height: int = 320,
) -> str:
    """An SVG element. Points that are not finite, or not above 0 on a log axis, are left out.

    `reference` is a named horizontal line. `title` becomes the accessible name; print it above the figure yourself.
    """
    kept = [(i, s, _points(s, x, y)) for i, s in enumerate(series)]
    kept = [(i, s, points) for i, s, points in kept if points]
    xs = [p[0] for _, _, points in kept for p in points]
    ys = [p[1] for _, _, points in kept for p in points] + ([reference[1]] if reference else [])
    if not xs:
        return ""
    x_ticks, y_ticks = _ticks(xs, x), _ticks(ys, y)
    names = [s.name for _, s, _ in kept] + ([reference[0]] if reference else [])
    left, top, bottom = 14 + 7 * max(len(_label(t)) for t in y_ticks) + 16, 14, 46
    right = 14 + round(8.3 * max(len(n) for n in names))
    plot_w, plot_h = width - left - right, height - top - bottom
    to_x = _scale(x_ticks, xs, x, left, plot_w)
    to_y = _scale(y_ticks, ys, y, top + plot_h, -plot_h)
    base, end = top + plot_h, left + plot_w
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT} font-size='12' "
        f"aria-label='{escape(title, {chr(39): '&apos;'})}'>",
        f"<rect width='{width}' height='{height}' fill='#fff'/>",
    ]
    for tick in y_ticks:
        out.append(f"<path d='M{left} {to_y(tick):.1f}H{end}' stroke='{FAINT}'/>")
        out.append(_text(left - 7, to_y(tick) + 4, _label(tick), anchor="end"))
    for tick in x_ticks:
        out.append(f"<path d='M{to_x(tick):.1f} {base}v5' stroke='{INK}'/>")
        out.append(_text(to_x(tick), base + 19, _label(tick), anchor="middle"))
    out.append(f"<path d='M{left} {top}V{base}H{end}' fill='none' stroke='{INK}'/>")
    out.append(_text(left + plot_w / 2, height - 8, x.label, anchor="middle"))
    out.append(f"<g transform='translate(13 {top + plot_h / 2:.0f}) rotate(-90)'>")
    out.append(_text(0, 0, y.label, anchor="middle") + "</g>")
    ends: list[tuple[float, str, str]] = []
    if reference:
        at = to_y(reference[1])
        out.append(f"<path d='M{left} {at:.1f}H{end}' stroke='{INK}' stroke-dasharray='1 3' stroke-width='1.5'/>")
        ends.append((at, reference[0], INK))
    for i, s, points in kept:
        style = i if s.style is None else s.style
        color, dash = COLORS[style % len(COLORS)], DASHES[style % len(DASHES)]
        path = "L".join(f"{to_x(a):.1f} {to_y(b):.1f}" for a, b, _ in points)
        stroke = f" stroke-dasharray='{dash}'" if dash else ""
        out.append(f"<path d='M{path}' fill='none' stroke='{color}' stroke-width='{1.2 if s.thin else 2.2}'{stroke}/>")
        for a, b, note in points:
            if s.marks:
                out.append(_marker(MARKERS[style % len(MARKERS)], to_x(a), to_y(b), color))
            if note:
                out.append(_text(to_x(a) + 7, to_y(b) - 7, note, color=color))
        ends.append((to_y(points[-1][1]), s.name, color))
    out += [_text(end + 9, at + 4, name, color=color, bold=True) for at, name, color in _apart(ends, top, base)]
    return "".join([*out, "</svg>"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = INK, bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{color}'{weight}>{escape(text)}</text>"


def _points(s: Series, x: Axis, y: Axis) -> list[tuple[float, float, str]]:
    notes = list(s.notes) + [""] * (len(s.x) - len(s.notes))
    return [
        (a, b, note)
        for a, b, note in zip(s.x, s.y, notes, strict=True)
        if math.isfinite(a) and math.isfinite(b) and (a > 0 or not x.log) and (b > 0 or not y.log)
    ]


def _scale(
    ticks: Sequence[float], values: Sequence[float], axis: Axis, start: float, length: float
) -> Callable[[float], float]:
    low, high = min(*ticks, *values), max(*ticks, *values)
    if axis.log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0
    pad = 0.04 if axis.log or not axis.zero else 0.0

    def place(value: float) -> float:
        at = ((math.log(value) if axis.log else value) - low) / span
        return start + length * (pad + at * (1 - 2 * pad))

    return place


def _ticks(values: Sequence[float], axis: Axis) -> list[float]:
    if axis.ticks:
        return list(axis.ticks)
    low, high = min(values), max(values)
    if axis.log:
        tens = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        every = [m * 10.0**e for e in tens for m in (1, 2, 5)]
        below = max((t for t in every if t <= low), default=low)
        above = min((t for t in every if t >= high), default=high)
        inside = [t for t in every if below <= t <= above]
        return inside if len(inside) <= 8 else [t for t in inside if str(f"{t:e}")[0] == "1"] or inside[::3]
    if axis.zero:
        low = min(0.0, low)
    if high == low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _label(value: float) -> str:
    if abs(value) >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _apart(ends: list[tuple[float, str, str]], top: float, bottom: float) -> list[tuple[float, str, str]]:
    """Names at the lines' ends, moved so that none covers another and none leaves the plot."""
    placed: list[tuple[float, str, str]] = []
    floor = top
    for at, name, color in sorted(ends):
        at = max(at, floor)
        placed.append((at, name, color))
        floor = at + 15
    over = placed[-1][0] - bottom if placed else 0.0
    ceiling = bottom
    for i in reversed(range(len(placed))) if over > 0 else ():
        at, name, color = placed[i]
        placed[i] = (min(at, ceiling), name, color)
        ceiling = placed[i][0] - 15
    return placed


def _marker(kind: str, x: float, y: float, color: str) -> str:
    fill = f"fill='{color}'"
    match kind:
        case "circle":
            return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' {fill}/>"
        case "square":
            return f"<rect x='{x - 4:.1f}' y='{y - 4:.1f}' width='8' height='8' {fill}/>"
        case "triangle":
            return f"<path d='M{x:.1f} {y - 5:.1f}l5 9h-10z' {fill}/>"
        case "diamond":
            return f"<path d='M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5-5.5z' {fill}/>"
        case "cross":
            return f"<path d='M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8' stroke='{color}' stroke-width='2'/>"
        case _:
            return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='#fff' stroke='{color}' stroke-width='2'/>"
