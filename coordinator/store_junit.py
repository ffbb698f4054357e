"""JUnit report of a verification: one test case per receipt, one for the log as a whole.

FAIL is ``<failure>``, UNKNOWN is ``<error>``: both turn a CI job red. Text from receipts is inert and escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from coordinator.errors import UsageError
from coordinator.render import inert
from receipts.fields import Outcome
from receipts.findings import Finding, LogReport

if TYPE_CHECKING:
    from coordinator.store_verify import Case


def write_junit(path: Path, report: LogReport, cases: Sequence[Case], *, elapsed_ns: int) -> None:
    """Write the report; findings that belong to no readable receipt are the log's."""
    claimed = {id(finding) for case in cases for finding in case.findings}
    loose = [finding for finding in report.findings if id(finding) not in claimed]
    blocks = [_case(named.name, named.facts.kind, found) for named, found in cases if named.facts]
    blocks.append(_case("log", "chain, head, sums, marks", loose))
    num_failed = sum("<failure" in block for block in blocks)
    num_errors = sum("<error" in block and "<failure" not in block for block in blocks)
    head = (
        f'<testsuite name="receipts" tests="{len(blocks)}" failures="{num_failed}" errors="{num_errors}"'
        f' skipped="0" time="{elapsed_ns / 1e9:.3f}">'
    )
    text = "\n".join(["<?xml version='1.0' encoding='UTF-8'?>", head, *blocks, "</testsuite>", ""])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the JUnit report cannot be written: {error.strerror}", where=str(path)) from error


def _case(name: str, kind: str, findings: Iterable[Finding]) -> str:
    opening = f"<testcase classname={quoteattr('receipts.' + _text(kind))} name={quoteattr(_text(name))}"
    marks = "".join(_mark(finding) for finding in findings)
    return f"{opening}>{marks}</testcase>" if marks else f"{opening}/>"


def _mark(finding: Finding) -> str:
    tag = "error" if finding.outcome is Outcome.UNKNOWN else "failure"
    text = _text(f"{finding.where}: {finding.message}")
    return f"<{tag} type={quoteattr(finding.code.value)} message={quoteattr(text)}>{escape(text)}</{tag}>"


def _text(text: str) -> str:
    # XML 1.0 has no character for these two, not even escaped.
    return inert(text).replace("\n", " ").replace("\ufffe", "\\u{fffe}").replace("\uffff", "\\u{ffff}")
