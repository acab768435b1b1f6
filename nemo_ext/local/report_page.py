"""The HTML of a report: one file without links to anything, readable where no script runs."""

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #f3f4f6; color: #1f2937; font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 40px }
h1 { font-size: 20px; margin: 0 }
h2 { font-size: 14px; margin: 0 0 6px; font-weight: 600 }
.facts { color: #4b5563; margin: 2px 0 14px }
.finding { margin: 0 0 14px; padding: 10px 14px; background: #eff6ff; border-left: 4px solid #2563eb }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin-bottom: 12px }
.tile, .card { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px }
.tile { padding: 8px 12px }
.tile .label { color: #6b7280; font-size: 12px }
.tile .value { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums }
.tile .detail { color: #6b7280; font-size: 12px; font-variant-numeric: tabular-nums }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 12px; margin-bottom: 12px }
.card { padding: 12px 14px; min-width: 0; overflow-x: auto }
.card svg { width: 100%; height: auto; display: block }
.card p { margin: 4px 0 0; color: #6b7280; font-size: 12px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid #e5e7eb; white-space: nowrap }
th { color: #6b7280; font-weight: 500; font-size: 12px }
th:first-child, td:first-child { text-align: left }
tr.total td { font-weight: 600; background: #f9fafb }
pre { overflow-x: auto; font-size: 12px }
@media (max-width: 500px) { .grid { grid-template-columns: 1fr } }
"""


def page(title: str, facts: str, sections: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="facts">{escape(facts)}</p>\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def finding(text: str) -> str:
    return f'<p class="finding" id="finding">{escape(text)}</p>'


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, detail) each."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
            f'<div class="detail">{escape(detail)}</div></div>'
            for label, value, detail in items
        )
        + "</div>"
    )


def grid(cards: Iterable[str]) -> str:
    return '<div class="grid">' + "\n".join(cards) + "</div>"


def card(title: str, body: str, note: str = "") -> str:
    """A boxed part; `body` is HTML."""
    below = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def table(name: str, head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """`rows`: (cells, whether it is a total). `name` becomes the element's id."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr{' class=total' if total else ''}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        for cells, total in rows
    )
    return f'<table id="{name}"><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>'


def details(title: str, text: str) -> str:
    """Text that a click unfolds."""
    inner = f"<summary>{escape(title)}</summary><pre>{escape(text)}</pre>"
    return f'<section class="card"><details>{inner}</details></section>'
