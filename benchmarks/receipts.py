"""What receipts cost: verifying a long log, appending to it, encoding one, checking a signature.

A log of ordinary receipts (two hosts with two GPUs each, gates, counters, a parent) is written to disk as a store would
hold it, then verified by the same code as ``coordinator receipts verify`` in a fresh process, whose peak memory is read
from the kernel. Peers, in this same run: ``rfc8785`` for encoding, ``securesystemslib`` for signatures, SQLite with
``synchronous=FULL`` on the same disk for a durable append.

``python -m benchmarks.receipts 10000 100000 300000`` verifies logs of these lengths.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOG = "0123456789abcdef" * 2
VERIFY_GOAL_S = 30.0
MEMORY_GOAL_MIB = 300.0
APPEND_GOAL_MS = 5.0


def draft() -> bytes:
    """An ordinary receipt, not yet in a log."""
    from receipts.bodies import ArmBody
    from receipts.build import build_receipt
    from receipts.fields import Exit, Gpu, Host, Kind, Parent, Position, Row, Subject, Tool, Verdict
    from receipts.model import ArmPredicate

    gpus = tuple(
        Gpu(uuid=f"GPU-{n}" * 6, pci=f"0000:{n}:00.0", name="Example", driver="570.1", vbios="96.00", ecc="on",
            mig="off", compute_mode="exclusive", clocks_mhz={"sm": 1980, "mem": 2619})
        for n in range(2)
    )  # fmt: skip
    hosts = tuple(
        Host(name=f"host-{n}", machine_id=f"{n}" * 32, boot_id="b" * 36, host_key="SHA256:" + "k" * 43, gpus=gpus)
        for n in range(2)
    )
    counters = {f"counter.{n}": 1000 + n for n in range(12)}
    predicate = ArmPredicate(
        tool=Tool(name="coordinator", version="0.1.0", source_sha256="a" * 64), plan_sha256="1" * 64,
        position=Position(window="c1/hold-1", hold_number=1, arm="A1"), hosts=hosts, argv=("coordinator", "campaign"),
        environment={"LANG": "C.UTF-8"}, started_utc="2026-06-01T10:00:00Z", ended_utc="2026-06-01T10:05:00Z",
        elapsed_ns=300 * 10**9, exit=Exit(kind="exited", code=0), evidence="MEASURED", scope="a benchmark",
        not_claimed=("anything",), parents=(Parent(kind=Kind.ARM, sha256="5" * 64, role="before"),),
        verdict=Verdict(outcome="PASS"),
        body=ArmBody(
            mode="greedy-v1", baseline=counters, headline=counters, profiled=counters, final=counters,
            gates=tuple(Row(field=f"gate.{n}", expected="0", found="0", ok=True) for n in range(6)),
        ),
    )  # fmt: skip
    return build_receipt(Kind.ARM, predicate, [Subject(name="plan", sha256="1" * 64)])


def write_log(folder: Path, length: int) -> None:
    """A store of ``length`` linked receipts, written without the store's locks and syncs to save the reader's time."""
    content, unlinked = draft(), b'"chain":{"log":"' + b"0" * 32 + b'","previous":null,"sequence":0}'
    before, after = content.split(unlinked)
    for name in ("receipts", "samples", "pending"):
        (folder / name).mkdir(parents=True)
    lines, ids, previous = [], [], "null"
    for sequence in range(length):
        # The parent is some earlier receipt; the first one has none.
        parent = ids[sequence * 7 // 8].encode() if ids else b""
        link = f'"chain":{{"log":"{LOG}","previous":{previous},"sequence":{sequence}}}'.encode()
        with_parent = after.replace(b"5" * 64, parent) if ids else _without_parent(after)
        receipt = before + link + with_parent
        digest = hashlib.sha256(receipt).hexdigest()
        name = f"{sequence:08d}-arm-{digest[:12]}.json"
        with (folder / "receipts" / name).open("wb", buffering=0) as file:
            file.write(receipt)
        lines.append(f"{digest}  receipts/{name}\n")
        ids.append(digest)
        previous = f'"{digest}"'
    (folder / "SHA256SUMS").write_text("".join(lines))
    head = {"count": length, "head": ids[-1], "log": LOG}
    (folder / "HEAD").write_text(json.dumps(head, separators=(",", ":")) + "\n")


def _without_parent(after: bytes) -> bytes:
    start = after.index(b'"parents":[') + len(b'"parents":[')
    return after[:start] + after[after.index(b"]", start) :]


def verify_here(folder: Path) -> dict[str, Any]:
    """Verify in this process; what the parent process asks for."""
    from coordinator.store_verify import verify_store

    start = time.perf_counter()
    report = verify_store(folder).report
    elapsed = time.perf_counter() - start
    # The high-water mark of this program alone: ru_maxrss would count the parent this process was forked from.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    return {
        "elapsed_s": elapsed,
        "peak_mib": peak_kib / 1024,
        "receipts": report.num_receipts,
        "findings": len(report.findings),
    }


def verify_log(folder: Path, length: int) -> dict[str, Any]:
    """Verify in a fresh process and insist that all of it was verified and sound."""
    command = [sys.executable, "-m", "benchmarks.receipts", "--verify", str(folder)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if (found["receipts"], found["findings"]) != (length, 0):
        raise RuntimeError(f"expected {length} sound receipts, found {found}")
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk that holds the checkout: a memory file system would make the syncs free."""
    base = Path("build")
    base.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-receipts-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def append_ms(store_folder: Path, count: int = 60) -> list[float]:
    """Times of single appends to a log that is already long."""
    from coordinator.store import Store

    store, content, times = Store(store_folder), draft_without_parent(), []
    for _ in range(count):
        start = time.perf_counter()
        store.append(content)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def draft_without_parent() -> bytes:
    """The ordinary receipt for a log in which its parent does not exist."""
    return _without_parent_whole(draft())


def _without_parent_whole(content: bytes) -> bytes:
    start = content.index(b'"parents":[')
    return content[:start] + _without_parent(content[start:])


def sqlite_ms(folder: Path, count: int = 60) -> list[float]:
    """Times of single durable inserts of the same bytes into SQLite."""
    content, times = draft(), []
    connection = sqlite3.connect(folder / "peer.sqlite")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE receipts (id TEXT PRIMARY KEY, content BLOB)")
    for number in range(count):
        start = time.perf_counter()
        with connection:
            connection.execute("INSERT INTO receipts VALUES (?, ?)", (str(number), content))
        times.append((time.perf_counter() - start) * 1e3)
    connection.close()
    return sorted(times)


def median_us(call: Callable[[], object], count: int = 400) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def row(
    name: str, value: float, unit: str, goal: float | None, peer: str = "", ratio: float | None = None
) -> dict[str, Any]:
    met = None if goal is None else value <= goal
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": met, "peer": peer, "ratio": ratio}


def measure_one() -> list[dict[str, Any]]:
    """Encoding and signatures of a single receipt, beside their peers."""
    import rfc8785
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    from receipts.canonical import canonical_bytes
    from receipts.reader import read_receipt
    from receipts.signing import Ed25519Signer, parse_allowed_signers, verify_envelope

    content = draft()
    document = json.loads(content)
    ours, theirs = median_us(lambda: canonical_bytes(document)), median_us(lambda: rfc8785.dumps(document), 60)
    signer = Ed25519Signer(Ed25519PrivateKey.generate())
    public = signer.private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    allowed = parse_allowed_signers(
        f'version = 1\n[[signer]]\nname = "bench"\nrole = "ci"\npublic_key = """\n{public}"""\n'.encode()
    )
    envelope = signer.sign(content)
    raw = signer.private_key.public_key().public_bytes_raw().hex()
    key = SSlibKey(signer.keyid, "ed25519", "ed25519", {"public": raw})
    checked = median_us(lambda: verify_envelope(envelope, content, allowed, log=LOG, sequence=0))
    peer = median_us(lambda: Envelope.from_dict(json.loads(envelope)).verify([key], 1), 60)
    return [
        row(f"receipt read and validated, {len(content)} bytes", median_us(lambda: read_receipt(content)), "us", None),
        row("receipt canonical encode", ours, "us", None, "rfc8785", theirs / ours),
        row("receipt signature verified", checked, "us", None, "securesystemslib", peer / checked),
    ]


def measure(lengths: tuple[int, ...] = (10_000, 100_000)) -> list[dict[str, Any]]:
    """Every figure; about a minute on one core with the default lengths."""
    results, per_receipt = measure_one(), {}
    with scratch() as folder:
        for length in lengths:
            log = folder / f"log-{length}"
            write_log(log, length)
            found = verify_log(log, length)
            per_receipt[length] = found["elapsed_s"] / length
            is_judged = length == 100_000
            results.append(
                row(f"verify {length} receipts", found["elapsed_s"], "s", VERIFY_GOAL_S if is_judged else None)
            )
            results.append(
                row(f"peak memory of that, {length}", found["peak_mib"], "MiB", MEMORY_GOAL_MIB if is_judged else None)
            )
        growth = per_receipt[max(lengths)] / per_receipt[min(lengths)]
        results.append(row(f"cost per receipt, {max(lengths)} against {min(lengths)}", growth, "ratio", 1.5))
        times, peers = append_ms(folder / f"log-{max(lengths)}"), sqlite_ms(folder)
        middle, peer = times[len(times) // 2], peers[len(peers) // 2]
        name = f"append to a log of {max(lengths)}, durable, p50"
        results.append(row(name, middle, "ms", APPEND_GOAL_MS, "SQLite synchronous=FULL", peer / middle))
        results.append(row("same, p95", times[len(times) * 95 // 100], "ms", None))
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--verify"]:
        print(json.dumps(verify_here(Path(sys.argv[2]))))
    else:
        os.chdir(Path(__file__).resolve().parents[1])
        for line in measure(tuple(int(text) for text in sys.argv[1:]) or (10_000, 100_000)):
            print(line)
