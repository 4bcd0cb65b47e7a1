"""Small pieces of HTML. Text is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megatron_cg.tools.report.theme import DARK, LIGHT, variables


def paragraph(text: str, css: str = "") -> str:
    """One paragraph of plain text."""
    return f"<p{_class(css)}>{escape(text)}</p>\n"


def section(name: str, title: str, body: str) -> str:
    """A part of the page, which the list at its head leads to."""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}</section>\n'


def figure(pictures: str, caption: str) -> str:
    """A picture, made elsewhere, with its caption of plain text."""
    return f"<figure>\n{pictures}<figcaption>{escape(caption)}</figcaption>\n</figure>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table that becomes one block a row where the page is narrow; first cells are headings."""
    made = [f"<thead><tr>{''.join(f'<th scope="col">{escape(cell)}</th>' for cell in head)}"]
    made.append("</tr></thead>\n<tbody>\n")
    for row in rows:
        first, *rest = row
        cells = "".join(
            f'<td data-label="{escape(label)}"{_class(_WORD * _is_word(cell))}>{escape(cell)}</td>'
            for label, cell in zip(head[1:], rest, strict=True)
        )
        made.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>\n')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{''.join(made)}</tbody></table>\n"


def details(summary: str, body: str) -> str:
    """What is folded away until it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}</details>\n"


def bullets(items: Iterable[str]) -> str:
    """A list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>\n"


_WORD = "word"
"""The class of a cell that is not to be broken."""


def _is_word(cell: str) -> bool:
    return cell.isalpha() and len(cell) <= 20


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


STYLE = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 50rem; color: var(--ink);
  background: var(--page); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
  overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.2rem; margin: 2.75rem 0 .5rem; padding-top: .75rem;
  border-top: 1px solid var(--grid); }}
p, ul {{ margin: .5rem 0; }}
a {{ color: var(--run); }}
.muted {{ color: var(--muted); }}
.verdict {{ margin: 1rem 0; padding: .75rem 1rem; background: var(--panel);
  border-left: .35rem solid var(--muted); border-radius: .25rem; }}
.verdict strong {{ display: block; font-size: 1.15rem; }}
.verdict.good {{ border-color: var(--good); }} .verdict.good strong {{ color: var(--good); }}
.verdict.bad {{ border-color: var(--bad); }} .verdict.bad strong {{ color: var(--bad); }}
.tiles {{ display: grid; gap: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(14rem, 46%), 1fr));
  margin: 1rem 0; padding: 0; }}
.tiles div {{ background: var(--panel); border-radius: .25rem; padding: .6rem .75rem; }}
.tiles dt, .tiles .note {{ color: var(--muted); font-size: .85rem; line-height: 1.35; }}
.tiles dd {{ margin: 0; }}
.tiles .value {{ font-size: 1.35rem; font-weight: 600; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; padding: 0; list-style: none; }}
nav a {{ display: inline-block; padding: .2rem 0; }}
figure {{ margin: 1rem 0; break-inside: avoid; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figure svg text {{ font-family: inherit !important; }}
figcaption {{ color: var(--muted); font-size: .9rem; margin-top: .35rem; }}
svg.narrow {{ display: none; }}
table {{ border-collapse: collapse; width: 100%; margin: .75rem 0; font-size: .92rem; }}
caption {{ text-align: left; color: var(--muted); padding: .25rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }}
th {{ font-weight: 600; }}
tbody th {{ min-width: 7rem; }}
td.word {{ white-space: nowrap; }}
code {{ font: .9em ui-monospace, "DejaVu Sans Mono", monospace; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; padding: .3rem 0; color: var(--run); }}
:focus-visible {{ outline: 2px solid var(--run); outline-offset: 2px; }}
@media (max-width: 34rem) {{
  svg.wide {{ display: none; }} figure svg.narrow {{ display: block; }}
  thead {{ position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }}
  table, caption, tbody, tr, th, td {{ display: block; }}
  tr {{ border-bottom: 1px solid var(--grid); padding: .4rem 0; }}
  tbody th, td {{ border: 0; padding: .1rem 0; }}
  td::before {{ content: attr(data-label) ": "; color: var(--muted); }}
}}
@media print {{
  :root {{ {variables(LIGHT)} }}
  body {{ max-width: none; padding: 0; font-size: 10pt; }}
  nav {{ display: none; }}
  section {{ break-inside: auto; }} h2 {{ break-after: avoid; }} tr {{ break-inside: avoid; }}
  svg.wide {{ display: block !important; }} svg.narrow {{ display: none !important; }}
}}
"""
"""The page's style. Nothing in it is loaded from anywhere."""


def document(title: str, body: str) -> str:
    """The whole page; what it may load is nothing, and the browser is told so."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
