"""HTML as text: the only file of the report that knows markup, and the only way from a string to the page.

Every string goes through ``text``: control characters, escapes and bidirectional marks become visible, then HTML is
escaped. There is no script, no link and no foreign resource; the page's own policy forbids them as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from coordinator.render import inert

STYLE: Final = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 76rem;
  padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 2px solid
  #1a1a1a; padding-bottom: .2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 60rem; } .note { color: #4a4a4a; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; margin: .5rem 0 1rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #c8c8c8;
  overflow-wrap: break-word; max-width: 16rem; } th { border-bottom-color: #1a1a1a; }
code, .digest { overflow-wrap: anywhere; font: .8rem/1.4 ui-monospace, monospace; }
.verdict { font-weight: 700; padding: .05rem .45rem; border-radius: .2rem; border: 2px solid; white-space: nowrap; }
.good { color: #0b5a2a; border-color: #0b5a2a; } .bad { color: #a11212; border-color: #a11212; background: #fff3f2; }
.unknown { color: #6b4500; border-color: #6b4500; background: #fff9e8; }
figure { margin: .8rem 0; overflow-x: auto; } figcaption { font-size: .85rem; color: #4a4a4a; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #1a1a1a; }
nav ul { padding-left: 1.2rem; columns: 2; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
  tr, figure { break-inside: avoid; } thead { display: table-header-group; } nav { display: none; } }
"""

_WORDS: Final = {
    "good": {"PASS", "ADMITTED", "BETTER", "EQUIVALENT_WITHIN_MARGIN", "yes", "CLOSED"},
    "bad": {"FAIL", "DENIED", "WORSE", "INVALID", "NO", "DEGRADED"},
}


def text(value: object) -> str:
    """A string from anywhere, inert and escaped."""
    return escape(inert(str(value)), quote=True)


def verdict(word: object) -> str:
    """A verdict: a word in a frame. The colour repeats what the word says."""
    kind = next((kind for kind, words in _WORDS.items() if str(word) in words), "unknown")
    return f'<span class="verdict {kind}">{text(word)}</span>'


def digest(value: object) -> str:
    """A digest, whole: cut digests cannot be compared."""
    return f'<span class="digest">{text(value)}</span>'


def section(anchor: str, title: str, *parts: str) -> str:
    """One section of the page."""
    return f'<section id="{text(anchor)}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def paragraph(content: str, css: str = "") -> str:
    """A paragraph of escaped text."""
    return f'<p class="{css}">{text(content)}</p>' if css else f"<p>{text(content)}</p>"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are markup already (``text``, ``verdict``, ``digest``)."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        body = f'<tr><td colspan="{len(columns)}">none</td></tr>'
    return f"<table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(svg: str, caption: str) -> str:
    """A drawing with its words."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"


def page(title: str, parts: Iterable[str], contents: Iterable[tuple[str, str]]) -> str:
    """The whole document."""
    links = "".join(f'<li><a href="#{text(anchor)}">{text(name)}</a></li>' for anchor, name in contents)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{text(title)}</h1><nav aria-label="contents"><ul>{links}</ul></nav>'
        f"{''.join(parts)}</main></body></html>\n"
    )
