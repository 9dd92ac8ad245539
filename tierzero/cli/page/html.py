"""The frame of the page: its styles, light and dark, and the few pieces of HTML that it is built from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# a colour for light pages, one for dark ones; told apart without red and green
COLOURS = {
    "compute": ("#2f6fb7", "#6aa8ea"),
    "fetch": ("#d9790b", "#f0a13c"),
    "update": ("#a8326e", "#e07bb0"),
    "gradient": ("#6b4fb3", "#a890ea"),
    "activation": ("#b0455f", "#ec8aa2"),
    "d2h": ("#0e8c8c", "#4cc4c4"),
    "engine": ("#6f7780", "#9aa3ad"),
    "save": ("#8a6d1d", "#cdb054"),
    "forward": ("#2f6fb7", "#6aa8ea"),
    "backward": ("#1c4479", "#3f78b8"),
    "recompute": ("#7fb0e3", "#a8cdf5"),
    "read": ("#d9790b", "#f0a13c"),
    "write": ("#a8326e", "#e07bb0"),
}
NAMES = {
    "compute": "compute and the rest of the loop",
    "fetch": "waiting for parameters",
    "update": "waiting for updates",
    "gradient": "waiting for gradients",
    "activation": "waiting for activations",
    "d2h": "copying gradients out",
    "engine": "the engine's hooks and scheduling",
    "save": "saving and reading at rest",
}

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1c2024; --soft: #5b636c;
  --line: #dfe2e6; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2125; --ink: #e7eaed; --soft: #a2abb4; --line: #343b42; DARK }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0 .75rem; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin-top: 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.4rem, 1fr)); gap: .75rem;
  margin: 1rem 0 .5rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0 0; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem;
  vertical-align: -1px; }
.chart { display: grid; grid-template-columns: 4.2rem 1fr; margin-top: .75rem; }
.plot { position: relative; border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.plot svg, .row svg { display: block; width: 100%; height: 100%; overflow: visible; }
.ys, .xs { position: relative; color: var(--soft); font-size: .8rem; font-variant-numeric: tabular-nums; }
.ys span { position: absolute; right: .5rem; transform: translateY(-50%); white-space: nowrap; }
.xs { grid-column: 2; height: 2.6rem; }
.xs span { position: absolute; top: .2rem; transform: translateX(-50%); white-space: nowrap; }
.xs em { position: absolute; bottom: 0; left: 0; right: 0; text-align: center; font-style: normal; }
.xs span.end { transform: translateX(-100%); }
path { fill: none; stroke-width: 1.6px; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1px; }
.dots { stroke-width: 6px; stroke-linecap: round; }
.row { border-bottom: 1px solid var(--line); }
.rows { display: grid; grid-template-columns: 9rem 1fr; }
.rows .xs { grid-column: 2; height: 1.6rem; }
.rows > div:nth-child(odd) { font-size: .85rem; padding: .15rem .5rem .15rem 0; overflow-wrap: anywhere;
  align-self: center; }
.bar { background: var(--line); border-radius: 3px; height: .7rem; position: relative; overflow: hidden;
  min-width: 8rem; }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--compute); }
.bar.over i { background: var(--update); }
@media (max-width: 36rem) {
  .rows, .rows .xs { grid-template-columns: 1fr; grid-column: 1; }
  .rows > div:nth-child(odd) { padding: .3rem 0 0; color: var(--soft); }
  .chart { grid-template-columns: 3.4rem 1fr; }
  .between { display: none; }
  th, td { padding: .25rem .4rem; white-space: normal; }
  main { padding: 1rem .5rem 2rem; }
}
"""


def _styles() -> str:
    def variables(which: int) -> str:
        return " ".join(f"--{name}: {colours[which]};" for name, colours in COLOURS.items())

    kinds = "\n".join(
        f".f-{name} {{ fill: var(--{name}); background: var(--{name}); }} .s-{name} {{ stroke: var(--{name}); }}"
        for name in COLOURS
    )
    return _STYLE.replace("LIGHT", variables(0)).replace("DARK", variables(1)) + kinds


def page(title: str, body: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_styles()}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def section(title: str, *body: str) -> str:
    """A titled part of the page; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{''.join(body)}</section>"


def paragraph(text: str) -> str:
    """Plain text, in the quieter colour."""
    return f'<p class="soft">{escape(text)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text in cells."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """(what, value) in boxes."""
    boxes = (
        f'<div class="tile"><span class="soft">{escape(name)}</span><b>{escape(text)}</b></div>'
        for name, text in values
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def legend(names: Sequence[tuple[str, str]]) -> str:
    """(colour's name, text)."""
    items = (f'<li><i class="f-{colour}"></i>{escape(text)}</li>' for colour, text in names)
    return f'<ul class="legend">{"".join(items)}</ul>'


def bar(share: float) -> str:
    """How much of a whole is used; over 1 is shown as full, in another colour."""
    over = " over" if share > 1 else ""
    return f'<div class="bar{over}"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></div>'
