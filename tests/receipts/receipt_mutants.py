"""Seeded mutants of receipts: bytes damaged, values exchanged, structure bent. Same seed, same mutants.

``judge`` holds the line of the whole package: a mutant is refused with ``ReceiptError``, or it is a receipt whose
encoding is exactly the mutant; and no mutant has the digest of what it was made from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from receipts.canonical import receipt_id, statement_bytes
from receipts.errors import ReceiptError
from receipts.model import Statement
from receipts.reader import read_receipt

HOSTILE: Final[Sequence[bytes]] = (
    b"NaN", b"-Infinity", b"1e999", b"1.0", b"-0", b"9007199254740992", b"-9007199254740992", b"1" * 5000, b"null",
    b"true", b'""', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\\u0000"', b'"\xe2\x80\xae"', b"[" * 40,
    b"{}", b"[]", b'{"a":1,"a":2}', b'{"a":1,"\\u0061":2}', b'{"\xc3\xa9":1}', b"\xef\xbb\xbf", b"\x00", b"\n", b"//x",
    b"'x'", b"01", b"+1", b".5", b'"../../etc/passwd"', b'"2026-02-30T00:00:00Z"', b'"2026-01-01T00:00:00"',
)  # fmt: skip
"""Fragments that strict readers are known to trip over."""


def mutants(originals: Sequence[bytes], seed: int) -> Iterator[tuple[bytes, bytes]]:
    """Endless pairs of original and mutant."""
    rng = random.Random(seed)
    while True:
        original = rng.choice(originals)
        mutant = rng.choice(_MUTATIONS)(original, rng)
        # Sometimes twice: many faults hide behind another one.
        if rng.random() < 0.3:
            mutant = rng.choice(_MUTATIONS)(mutant, rng)
        if mutant != original:
            yield original, mutant


def judge(original: bytes, mutant: bytes) -> str:
    """``same`` for a mutant that is itself a receipt, else the code of its refusal; anything else raises.

    Raises:
        AssertionError: The line does not hold.
    """
    recorded = receipt_id(original)
    try:
        read_receipt(mutant, expected_id=recorded)
    except ReceiptError:
        pass
    else:
        raise AssertionError("a mutant has the recorded digest of its original")
    try:
        receipt = read_receipt(mutant)
    except ReceiptError as error:
        return error.code.value
    statement = Statement.model_construct(subjects=receipt.subjects, predicate=receipt.predicate)
    assert statement_bytes(statement) == mutant, "accepted, and encodes to other bytes"
    return "same"


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = rng.choice((len(data), min(len(data), start + rng.randrange(1, 40))))
    return data[:start] + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(HOSTILE) + data[at:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.randrange(1, 200))
    return data[:end] + data[start:end] * rng.choice((1, 2, 50)) + data[end:]


def _token(data: bytes, rng: random.Random) -> bytes:
    # Where a value begins: after a colon or a comma.
    places = [i + 1 for i, byte in enumerate(data) if byte in b":,["]
    if not places:
        return _insert(data, rng)
    start = rng.choice(places)
    end = start
    while end < len(data) and data[end] not in b",]}":
        end += 1
    return data[:start] + rng.choice(HOSTILE) + data[end:]


def _document(data: bytes, rng: random.Random) -> bytes:
    """Change one leaf or key and write it canonically again: what only the model can refuse, or may accept."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _flip(data, rng)
    holder, key = _place(document, rng)
    if holder is None:
        return _cut(data, rng)
    choice = rng.randrange(6)
    if choice == 0 and isinstance(holder, dict):
        holder["extra"] = 1
    elif choice == 1:
        del holder[key]
    elif choice == 2 and isinstance(holder, dict):
        holder[str(key) + "x"] = holder.pop(key)
    else:
        holder[key] = rng.choice((0, -1, 1, True, None, "", "x", [], {}, 2**53, "MEASURED", "PASS", "0" * 64, 10**6))
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _place(document: Any, rng: random.Random) -> tuple[Any, Any]:
    holder: Any = None
    key: Any = None
    value = document
    while isinstance(value, dict | list) and value:
        holder, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
        if rng.random() < 0.25:
            break
    return holder, key


def _spell(data: bytes, rng: random.Random) -> bytes:
    """The same document in other bytes."""
    try:
        document = json.loads(data)
        return rng.choice(
            (
                lambda: json.dumps(document).encode(),
                lambda: json.dumps(document, indent=1, sort_keys=True).encode(),
                lambda: data + b"\n",
                lambda: b" " + data,
                lambda: json.dumps(document, sort_keys=False, separators=(",", ":")).encode() + b" ",
                lambda: data.replace(b"/", b"\\/"),
            )
        )()
    except (ValueError, RecursionError):
        return data + b"\n"


_MUTATIONS: Final[Sequence[Callable[[bytes, random.Random], bytes]]] = (
    _flip, _flip, _cut, _insert, _repeat, _token, _token, _document, _document, _spell,
)  # fmt: skip
