"""What checking evidence costs: verification of long logs in time, memory and growth, one append, and a named peer.

The peer does part of the same job: ``sha256sum -c`` only hashes, and the ``json`` module with pydantic alone reads one
receipt loosely (no canonical form, no duplicate keys, no chain). Stores are real folders. The short run verifies 10k,
30k and 100k receipts, the long one (``--full``, part of ``make soak``) 300k as well; both compare the time per
receipt of the smallest and the largest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.store import Store
from coordinator.store_snapshot import RECEIPT_NAME, receipt_stem, sequence_of
from receipts import bodies
from receipts.build import build_receipt
from receipts.canonical import receipt_id, statement_bytes
from receipts.chain import Head
from receipts.fields import ChainLink, Host, Kind, Parent, Row, Subject, Verdict
from receipts.model import PREDICATES, Statement
from receipts.reader import read_receipt

CORES = 2
"""Processes that examine receipts: the goal is stated for two cores."""
SOURCE = hashlib.sha256(b"benchmark").hexdigest()
ARCHIVE = Path(__file__).resolve().parent.parent / "receipts" / "archive" / "rehearsal"
COMPARE_EVERY = 1000
"""Each costs a verifier some 10 ms; they are here so that the tables which they need are in the figures."""
ROWS = 8
"""Rows in the table of one receipt: with them a receipt is about as long as the median one of a rehearsal."""


def ordinary_draft() -> bytes:
    """A hold-sized receipt of ordinary length."""
    table = tuple(Row(field=f"check-{n}", expected="as recorded before", found="as recorded before", ok=True)
                  for n in range(ROWS))  # fmt: skip
    held = bodies.HeldHost(host="alpha", epoch=3, stop_proof=table, restore_proof=table, debt=False)
    body = bodies.HoldBody(
        hold_id="hold-1", final_state="CLOSED", deadline_ns=5400 * 10**9, restore_reserve_ns=180 * 10**9,
        timeline=(bodies.StateChange(state="closed", monotonic_ns=9),), hosts=(held,),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "tool": {"name": "coordinator", "version": "0.1.0", "source_sha256": SOURCE}, "plan_sha256": SOURCE,
        "hosts": (Host(name="alpha", machine_id="m" * 32, boot_id="b" * 36),), "argv": ("coordinator", "campaign"),
        "started_utc": "2026-06-01T11:00:00.000Z", "ended_utc": "2026-06-01T11:00:05.000Z", "elapsed_ns": 5,
        "exit": {"kind": "exited", "code": 0}, "evidence": "REHEARSED", "scope": "one hold of a benchmark",
        "not_claimed": ("anything",), "verdict": Verdict(outcome="PASS"), "body": body,
    }  # fmt: skip
    return build_receipt(Kind.HOLD, fields, [Subject(name="x", sha256=SOURCE)])


def make_store(path: Path, number: int) -> Path:
    """The archived rehearsal, continued to ``number`` linked receipts without the store's syncs.

    Ordinary receipts have two parents; every ``COMPARE_EVERY``-th one is the rehearsal's comparison over again, for
    which a verifier opens the four arms that it names.
    """
    shutil.copytree(ARCHIVE, path)
    for folder in ("samples", "pending"):
        (path / folder).mkdir(exist_ok=True)
    head, draft = Store(path).head(), read_receipt(ordinary_draft())
    comparison = next(read_receipt(file.read_bytes()) for file in (path / "receipts").glob("*-comparison-*.json")
                      if RECEIPT_NAME.fullmatch(file.name))  # fmt: skip
    previous, ids = head.head, list[str]()
    with (path / "SHA256SUMS").open("a") as sums:
        for sequence in range(head.count, number):
            changes: dict[str, Any] = {"chain": ChainLink(log=head.log, sequence=sequence, previous=previous)}
            model = comparison
            if sequence % COMPARE_EVERY:
                places = {len(ids) // 2, len(ids) // 3} if ids else set()
                changes["parents"] = tuple(Parent(kind=Kind.HOLD, sha256=ids[at], role="before") for at in places)
                model = draft
            predicate = model.predicate.model_copy(update=changes)
            content = statement_bytes(Statement.model_construct(subjects=model.subjects, predicate=predicate))
            previous = receipt_id(content)
            if model is draft:
                ids.append(previous)
            name = f"receipts/{receipt_stem(sequence, predicate.kind, previous)}.json"
            (path / name).write_bytes(content)
            sums.write(f"{previous}  {name}\n")
    (path / "HEAD").write_bytes(Head(head.log, number, previous).encode())
    return path


def shorten(store: Path, path: Path, number: int) -> Path:
    """A store of the first receipts of another one: the same files under second names."""
    for folder in ("receipts", "samples", "pending"):
        (path / folder).mkdir(parents=True)
    lines: list[str] = []
    last = ""
    for line in (store / "SHA256SUMS").read_text().splitlines(keepends=True):
        name = Path(line[66:].rstrip())
        if RECEIPT_NAME.fullmatch(name.name):
            if sequence_of(name.name) == number:
                break
            last = line[:64]
        (path / name).hardlink_to(store / name)
        lines.append(line)
    (path / "SHA256SUMS").write_text("".join(lines))
    (path / "HEAD").write_bytes(Head(Store(store).head().log, number, last).encode())
    return path


@dataclass(frozen=True)
class Cost:
    """What one whole verification took: CPU and wall seconds, peak memory in bytes, all its processes together."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def verify_with_processes(path: Path, jobs: int) -> Cost:
    """One whole verification as the command does it, start included.

    Args:
        path: The store.
        jobs: Processes that examine receipts; with 1 there is no other process.
    """
    code = (
        "import sys; from pathlib import Path; from coordinator.store_verify import verify_store\n"
        "v = verify_store(Path(sys.argv[1]), jobs=int(sys.argv[2])); assert v.is_whole, v.report.findings[:3]"
    )
    before, start, peak = _children_s(), time.perf_counter(), 0
    with subprocess.Popen([sys.executable, "-c", code, str(path), str(jobs)]) as process:
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"verification of {path} exited with {process.returncode}")
    return Cost(_children_s() - before, time.perf_counter() - start, peak)


def _tree_bytes(pid: int) -> int:
    """Resident bytes of a process and its children now; a page that two share counts twice."""
    total, ahead = 0, [str(pid)]
    while ahead:
        proc = Path("/proc", ahead.pop())
        try:
            total += int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
            ahead += (proc / "task" / proc.name / "children").read_text().split()
        except OSError:
            continue  # it ended meanwhile
    return total


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def append_ms(path: Path, times: int) -> list[float]:
    """Milliseconds of single durable appends to an existing store."""
    store, draft, taken = Store(path), ordinary_draft(), []
    for _ in range(times):
        start = time.perf_counter()
        store.append(draft)
        taken.append((time.perf_counter() - start) * 1000)
    return taken


def hash_only_s(path: Path) -> float:
    """CPU seconds that ``sha256sum -c`` takes for the same store."""
    before = _children_s()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=path, check=True, capture_output=True)
    return _children_s() - before


def read_us() -> tuple[float, float]:
    """Microseconds of one strict read, and of json and pydantic alone on the same bytes."""
    content = ordinary_draft()
    model = PREDICATES[Kind.HOLD, 1]
    strict, loose = [], []
    for _ in range(300):
        start = time.perf_counter()
        read_receipt(content)
        middle = time.perf_counter()
        model.model_validate(json.loads(content)["predicate"])
        loose.append((time.perf_counter() - middle) * 1e6)
        strict.append((middle - start) * 1e6)
    return statistics.median(strict), statistics.median(loose)


def _result(
    name: str, value: float, unit: str, goal: float | None, peer: str = "", ratio: float | None = None
) -> dict[str, Any]:
    met = None if goal is None else value <= goal
    return {"name": name, "value": round(value, 3), "unit": unit, "goal": goal, "met": met, "peer": peer,
            "ratio": None if ratio is None else round(ratio, 2)}  # fmt: skip


def _sizes(folder: Path, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    whole, costs = make_store(folder / "whole", max(sizes)), dict[int, Cost]()
    size = (whole / "receipts").iterdir().__next__().stat().st_size
    yield _result("receipt of ordinary size", size, "bytes", None)
    for number in sizes:
        path = whole if number == max(sizes) else shorten(whole, folder / str(number), number)
        cost = costs[number] = verify_with_processes(path, CORES)
        is_judged = number == 100_000
        what = f"verify {number} receipts, chain and parents"
        yield _result(f"{what}, {CORES} cores", cost.wall_s, "s", 30.0 if is_judged else None)
        yield _result(f"{what}, CPU", cost.cpu_s, "s", None,
                      "sha256sum -c (hashes only)", cost.cpu_s / hash_only_s(path))  # fmt: skip
        goal_mib = 300.0 if number <= 100_000 else None
        yield _result(f"peak memory of all processes, {number} receipts", cost.peak_bytes / (1 << 20), "MiB", goal_mib)
        # An append writes new files only: receipts that are shared with another length stay as they are.
        taken = sorted(append_ms(path, 40))
        yield _result(
            f"append one receipt at {number}, median", statistics.median(taken), "ms", 5.0 if is_judged else None
        )
        yield _result(f"append one receipt at {number}, p90", taken[len(taken) * 9 // 10], "ms", None)
    small, large = min(sizes), max(sizes)
    growth = (costs[large].cpu_s / large) / (costs[small].cpu_s / small)
    yield _result(f"CPU time per receipt, {large} over {small}", growth, "ratio", 1.3)


def measure(*, full: bool = False) -> list[dict[str, Any]]:
    """Every figure."""
    strict, loose = read_us()
    results = [_result("strict read of one receipt", strict, "us", None, "json + pydantic, loose", strict / loose)]
    with tempfile.TemporaryDirectory(prefix="bench-receipts-") as folder:
        sizes = (10_000, 30_000, 100_000, 300_000) if full else (10_000, 30_000, 100_000)
        results += list(_sizes(Path(folder), sizes))
    return results


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    sys.stdout.write(json.dumps(measure(full=full), indent=1) + "\n")
    sys.stderr.write(f"peak of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB\n")


if __name__ == "__main__":
    main()
