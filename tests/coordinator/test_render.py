"""Strings from hosts are shown inert, tables never cut a digest, and a closed pipe changes nothing."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from coordinator.render import inert, table_lines, write_line


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred", "\\u{1b}[31mred"),
        ("a\u202eb", "a\\u{202e}b"),
        ("bell\x07", "bell\\u{7}"),
        ("cr\rlf", "cr\\u{d}lf"),
        ("zero\u200bwidth", "zero\\u{200b}width"),
    ],
)
def test_hostile_strings_are_inert(hostile: str, shown: str) -> None:
    assert inert(hostile) == shown


def test_a_digest_is_never_wrapped_or_cut() -> None:
    """Red when the table folds to the terminal's width."""
    digest = "a" * 64
    assert any(digest in line for line in table_lines("t", ("name", "digest"), [("x" * 80, digest)]))


def test_markup_of_a_host_is_text() -> None:
    assert any("[bold]x[/bold]" in line for line in table_lines("t", ("a",), [("[bold]x[/bold]",)]))


def test_a_closed_pipe_does_not_stop_the_program() -> None:
    """Red when write_line lets BrokenPipeError through: the last line would be missing and the exit code 1."""
    code = (
        "import sys\n"
        "from coordinator.render import write_line\n"
        "for n in range(20000): write_line(sys.stdout, 'line %d' % n)\n"
        "print('reached the end', file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read().strip() == "reached the end"
    process.stderr.close()
    assert process.wait(20) == 0


def test_a_table_in_an_encoding_without_lines_is_still_a_table() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for line in table_lines("t", ("host", "what"), [("├─ here", "é")]):
        write_line(stream, line)
    stream.seek(0)
    shown = stream.read()
    assert "\\u2500" not in shown
    assert "|- here" in shown
    assert "\\xe9" in shown
