"""SHA256SUMS: the list that lets anybody check a store with ``sha256sum -c`` alone."""

from __future__ import annotations

from receipts.errors import Code, ReceiptError


def parse_sums(content: bytes) -> dict[str, str]:
    """SHA256SUMS as path -> digest.

    Raises:
        ReceiptError: SUMS_MISMATCH for a torn or malformed line, or two digests for one path.
    """
    sums: dict[str, str] = {}
    try:
        lines = content.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise ReceiptError(Code.SUMS_MISMATCH, "expected ASCII", "SHA256SUMS") from error
    if lines.pop():
        raise ReceiptError(Code.TORN, "expected a newline at the end of the last line", "SHA256SUMS")
    for number, line in enumerate(lines, 1):
        digest, separator, path = line.partition("  ")
        if len(digest) != 64 or not separator or not path or sums.get(path, digest) != digest:
            raise ReceiptError(Code.SUMS_MISMATCH, f"expected one 'digest  path' per path, line {number}", "SHA256SUMS")
        sums[path] = digest
    return sums
