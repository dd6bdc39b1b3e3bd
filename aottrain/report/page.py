"""What the pages are made of: the frame, tables that become lists where there is no room, cards, folded text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from aottrain.report.charts import breakable
from aottrain.report.style import CSS


@dataclass(frozen=True)
class Column:
    """Of a table."""

    name: str
    share: float = 0
    """Of its width in percent, 0 where the contents decide."""
    number: bool = False


def page(title: str, body: Iterable[str], *, script: str = "", style: str = "", again_s: int = 0) -> str:
    """A whole HTML document; nothing is loaded from elsewhere. A script is the only one that the browser runs there:
    none that came in with a name or a message.

    again_s: seconds after which the script asks for the page anew, from where it came; 0 for a file, which stays."""
    guarded = _only(script, "connect-src 'self'; " if again_s else "") if script else ""
    head = f'<noscript><meta http-equiv="refresh" content="{again_s}"></noscript>\n' if again_s else ""
    body = [_following(again_s), *body] if again_s else body
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>aottrain: {escape(title)}</title>\n'
        f'{guarded}{head}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>{CSS}{style}</style></head>\n'
        f'<body class="aottrain"><main>\n{in_order(joined(body))}\n</main>'
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def in_order(body: str) -> str:
    """The document with no level of headings left out, as who listens to a page needs it: what looks like a third level
    is a second where it follows the title. Its look stays, by its class."""
    last, level = 0, 0

    def told(match: re.Match[str]) -> str:
        nonlocal last, level
        if not match["end"]:
            level = min(int(match["level"]), last + 1)
            last = level
        look = f' class="h{match["level"]}"' if level != int(match["level"]) and not match["end"] else ""
        return f"<{match['end']}h{level}{look}>"

    return re.sub(r"<(?P<end>/?)h(?P<level>[1-6])>", told, body)


def _following(again_s: int) -> str:
    """Whether the page follows what runs. Who reads turns that off, and so does whoever uses the page's tools."""
    return (
        f'<p class="dim"><label><input type="checkbox" checked autocomplete="off" data-follow="{again_s}"> '
        f'look again every {again_s} s</label> <span role="status" data-followed="1"></span></p>'
    )


def _only(script: str, more: str = "") -> str:
    """The policy that lets a browser run this text and no other, and load nothing but for what `more` says."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; {more}style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">\n'


def inner_of(document: str) -> str:
    """The contents of a document that `page` made, as parts of another one: its title is one of a section there."""
    inner = document.partition("<main>")[2].rpartition("</main>")[0]
    return inner.replace("<h1>", "<h2>").replace("</h1>", "</h2>")


def within(body: Iterable[str], *, style: str = "") -> str:
    """The same to be shown inside another page, which its style leaves alone, as it does the order of its headings."""
    inner = re.sub(r"<h([1-6])>", r'<p class="h\1">', joined(body))
    inner = re.sub(r"</h[1-6]>", "</p>", inner)
    return f'<div class="aottrain"><style>{CSS}{style}</style>\n{inner}\n</div>\n'


def joined(parts: Iterable[str]) -> str:
    """One after the other, without the empty ones."""
    return "\n".join(part for part in parts if part)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, which are HTML. Where the page is narrow each row is a list of names and values. A column that
    nothing stands in is left out, unless widths are given, which are the same from table to table."""
    fixed = all(column.share for column in columns)
    if rows and not fixed:
        filled = [i for i in range(len(columns)) if any(row[i] for row in rows)]
        columns, rows = [columns[i] for i in filled], [[row[i] for i in filled] for row in rows]
    widths = "".join(f'<col style="width:{column.share}%">' for column in columns) if fixed else ""
    head = "".join(f'<th class="number">{c.name}</th>' if c.number else f"<th>{c.name}</th>" for c in columns)
    lines = []
    for row in rows:
        cells = "".join(_cell(column, cell) for column, cell in zip(columns, row, strict=True))
        lines.append(f"<tr>{cells}</tr>\n")
    kind = f'<table class="fixed"><colgroup>{widths}</colgroup>' if fixed else "<table>"
    return f'<div class="table">{kind}<thead><tr>{head}</tr></thead><tbody>\n{"".join(lines)}</tbody></table></div>'


def _cell(column: Column, content: str) -> str:
    classes = " ".join(filter(None, ["number" if column.number else "", "" if content else "empty"]))
    mark = f' class="{classes}"' if classes else ""
    return f'<td data-label="{escape(column.name, quote=True)}"{mark}><div>{content}</div></td>'


def long_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, shown: int, rest: str) -> str:
    """The first `shown` rows, and the others folded under the line `rest`."""
    if len(rows) <= shown + 2:  # a line that says so would take as much room
        return table(columns, rows)
    return table(columns, rows[:shown]) + folded(rest, table(columns, rows[shown:]))


def folded(title: str, content: str, note: str = "", *, open_: bool = False) -> str:
    """`content` under a line that opens it."""
    small = f"<small>{escape(note)}</small>" if note else ""
    state = " open" if open_ else ""
    return f"<details{state}><summary>{escape(title)}{small}</summary>{content}</details>"


def heading(title: str, note: str = "") -> str:
    """With a note in small print."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<h3>{escape(title)}{small}</h3>"


def card(title: str, figure: str, note: str) -> str:
    """A figure that is looked at first; it and the note are HTML."""
    title = f'<p class="title">{escape(title)}</p>'
    return f'<div class="card">{title}<div class="figure">{figure}</div><p>{note}</p></div>'


def mono(text: str) -> str:
    """Code, which may end a line within its names."""
    return f'<span class="mono">{breakable(text)}</span>' if text else ""


def pre(content: str, kind: str = "") -> str:
    """HTML with its own line ends. Wide lines scroll, so the keyboard comes to it, too."""
    named = f' class="{kind}"' if kind else ""
    return f'<pre{named} tabindex="0">{content}</pre>'
