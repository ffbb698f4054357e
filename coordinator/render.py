"""Everything a person sees: the only file that imports rich.

stdout is data, stderr is for people. Printing never stops a hold: a closed pipe or an unencodable character is
swallowed here and the run goes on. Strings from hosts are data: control characters, terminal escapes and bidirectional
marks are shown as escapes, never obeyed.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

_BIDI = {chr(code) for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}

_PLAIN = str.maketrans("─│├└", "-||`")
"""Lines of tables and trees for an encoding that has none."""


def inert(text: str) -> str:
    """``text`` with everything that could move a cursor, colour a line or reorder it written as an escape."""
    out = []
    for char in text:
        hidden = char in _BIDI or (unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and char != "\n")
        out.append(f"\\u{{{ord(char):x}}}" if hidden else char)
    return "".join(out)


def write_line(stream: TextIO, text: str) -> None:
    """One line; a closed pipe or a narrow encoding changes nothing for the caller."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except UnicodeEncodeError:
        stream.write(text.translate(_PLAIN).encode("ascii", "backslashreplace").decode("ascii") + "\n")
    except (BrokenPipeError, ValueError):
        _detach(stream)


def _detach(stream: TextIO) -> None:
    # The interpreter flushes standard streams at exit; without this a closed pipe would change the exit code.
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(devnull)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    write_line(sys.stdout, json.dumps(document, indent=2, sort_keys=True, ensure_ascii=True))


class Reporter:
    """Progress and results for a person, on stderr; tables on stdout.

    On a terminal each line carries the time used and what is left of the budget; elsewhere the same lines are plain and
    dated, so that a log reads the same.

    Args:
        now_utc: Returns the UTC text for the line's head.
        quiet: Nothing but errors and results (used by ``--json``).
    """

    def __init__(self, now_utc: Any, *, quiet: bool = False) -> None:
        self._now_utc = now_utc
        self._quiet = quiet

    def step(self, text: str, *, host: str = "", left_s: float | None = None) -> None:
        """What happens now, where, and how much of the budget is left."""
        if self._quiet:
            return
        head = self._now_utc()[11:19] if sys.stderr.isatty() else self._now_utc()
        where = f" [{inert(host)}]" if host else ""
        left = f"  ({_minutes(left_s)} left)" if left_s is not None else ""
        write_line(sys.stderr, f"{head}{where} {inert(text)}{left}")

    def error(self, lines: Iterable[str]) -> None:
        """A refusal, one fact a line."""
        for number, line in enumerate(lines):
            write_line(sys.stderr, ("error: " if number == 0 else "") + inert(line))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table on stdout, in full width where there is no terminal so that digests are never wrapped."""
        if self._quiet:
            return
        for line in table_lines(title, columns, rows):
            write_line(sys.stdout, line)


def table_lines(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; title and every cell inert, nothing wrapped or cut."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*(Text(inert(str(cell)).replace("\n", "\\n")) for cell in row))
    buffer = StringIO()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(file=buffer, force_terminal=colour, highlight=False)
    # As wide as it needs to be: a narrower console would drop columns, and a title inside the table would be wrapped.
    console.width = max(console.measure(table, options=console.options.update(max_width=1 << 16)).maximum, 1)
    console.print(table)
    lines = [line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n")]
    return ["", inert(title), *[line for line in lines if line]]


def _minutes(seconds: float) -> str:
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02d}"
