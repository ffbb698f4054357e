"""Raw samples: JSON Lines of integers, or of flat objects of integers, and the figures that follow from them.

A receipt binds a figure to its raw file by the name of the value: ``raw.<file>.<figure>`` for a file of integers and
``raw.<file>.<column>.<figure>`` for a file of objects, with the figures of ``FIGURES``. The verifier computes every
such value again from the bytes; one that differs refuses the receipt's verdict.

Percentiles are nearest-rank: element ``ceil(p * n / 100)`` of the sorted values, so every figure is one of the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from receipts.errors import Code, ReceiptError
from receipts.fields import Row, Sample
from receipts.reader import MAX_BYTES, read_document

MAX_LINE_BYTES: Final = 64 * 1024
MAX_LINES: Final = 5_000_000
MAX_SAMPLE_BYTES: Final = 1 << 28
"""A raw file is read whole: 256 MiB are fifty bytes for each of the most lines."""


def _percentile(percent: int) -> Callable[[Sequence[int]], int]:
    return lambda ordered: ordered[-(-percent * len(ordered) // 100) - 1]


FIGURES: Final[Mapping[str, Callable[[Sequence[int]], int]]] = {
    "count": len,
    "sum": sum,
    "min": lambda ordered: ordered[0],
    "max": lambda ordered: ordered[-1],
    "p50": _percentile(50),
    "p90": _percentile(90),
    "p95": _percentile(95),
    "p99": _percentile(99),
}
"""Name of a figure and how it follows from the sorted values, of which there is at least one."""


def parse_samples(content: bytes) -> dict[str, list[int]]:
    """Columns of a raw file. A file of plain integers has the one column ``""``.

    Raises:
        ReceiptError: NOT_JSON for a line that is not an integer or a flat object of integers, or a torn last line.
    """
    columns: dict[str, list[int]] = {}
    for number, line in enumerate(_lines(content), 1):
        value = _line(line, number)
        for name, item in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(item, bool) or not isinstance(item, int):
                raise ReceiptError(Code.NOT_JSON, f"expected integers, found {type(item).__name__}", f"line {number}")
            columns.setdefault(name, []).append(item)
    return columns


def _lines(content: bytes) -> Iterator[bytes]:
    if content and not content.endswith(b"\n"):
        raise ReceiptError(Code.TORN, "expected a newline at the end of the last line")
    if content.count(b"\n") > MAX_LINES:
        raise ReceiptError(Code.TOO_MANY, f"expected at most {MAX_LINES} lines")
    yield from content.splitlines()


def _line(line: bytes, number: int) -> Any:
    # Most files hold one plain integer per line; the strict parser is for everything else.
    if line.isdigit() and len(line) <= 15 and (line[0] != 48 or len(line) == 1):
        return int(line)
    try:
        return read_document(line, min(MAX_LINE_BYTES, MAX_BYTES))
    except ReceiptError as error:
        raise error.at(f"line {number}") from error


def figures(columns: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Every figure of every column: ``<figure>`` or ``<column>.<figure>``."""
    result = {}
    for column, values in columns.items():
        ordered = sorted(values)
        for name, compute in FIGURES.items():
            result[f"{column}.{name}" if column else name] = compute(ordered)
    return result


def check_figures(values: Mapping[str, int], samples: Sequence[Sample], contents: Mapping[str, bytes]) -> list[Row]:
    """One row for every ``raw.*`` value: as stated, as computed again.

    Args:
        values: The receipt's values.
        samples: Its raw files.
        contents: Bytes by file name; a name that is missing gives rows with ``ok`` None.
    """
    rows: list[Row] = []
    computed: dict[str, dict[str, int]] = {}
    for key in sorted(key for key in values if key.startswith("raw.")):
        sample = max((s for s in samples if key.startswith(f"raw.{s.name}.")), key=lambda s: len(s.name), default=None)
        if sample is None:
            rows.append(Row(field=key, expected="a raw file of this receipt", found="none of that name", ok=False))
            continue
        if sample.name not in contents:
            rows.append(Row(field=key, expected=str(values[key]), found="raw file not here", ok=None))
            continue
        if sample.name not in computed:
            computed[sample.name] = figures(parse_samples(contents[sample.name]))
        found = computed[sample.name].get(key.removeprefix(f"raw.{sample.name}."))
        rows.append(
            Row(field=key, expected=str(values[key]), found=str(found), ok=found == values[key], source=sample.sha256)
        )
    return rows


def check_sample(sample: Sample, content: bytes) -> str:
    """What is wrong with a raw file; empty when its digest, size, lines and numbers are right."""
    if hashlib.sha256(content).hexdigest() != sample.sha256:
        return f"expected sha256 {sample.sha256}, found another"
    if len(content) != sample.size_bytes or content.count(b"\n") != sample.num_samples:
        return f"expected {sample.size_bytes} bytes in {sample.num_samples} lines, found {len(content)}"
    try:
        parse_samples(content)
    except ReceiptError as error:
        return str(error)
    return ""
