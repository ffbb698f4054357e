"""How a qualification program writes what it saw: one observation file and its raw samples.

Lives here: the recorder of checks, values, labels and samples; the digest of the running source tree; the facts of
the device. That a hold is proven through the guard is ``qualify.hold``'s part.

Rules of this file: it never decides and never writes a receipt. A file appears under its final name only when it is
complete (write, fsync, rename). Refusal is an `ObserveError`; a check that did not run is recorded as not run, never
left out. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from remote_dspark.contract import (
    ENV_OUTPUT_DIR,
    Check,
    ComputeKind,
    Observation,
    ObservationKind,
    SampleFile,
)

OBSERVATION_FILE: Final = "observation.json"
MAX_TEXT: Final = 200
MAX_INTEGER: Final = 2**53 - 1
"""Receipts refuse larger integers (RFC 8785 numbers are doubles), so they are refused where they arise."""

_SAMPLE_NAME: Final = re.compile(r"[a-z0-9._-]+")
_NVIDIA_SMI_FIELDS: Final = (
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "vbios_version",
    "clocks.sm",
    "clocks.mem",
    "ecc.mode.current",
    "mig.mode.current",
    "compute_mode",
)


class ObserveError(Exception):
    """The observation cannot be made or written; the message says what was expected, what was found and what to do.

    ObserveError
    └── HoldNotProvenError (qualify.hold): the guard did not confirm the hold and epoch of this process
    """


@dataclass(frozen=True)
class HoldProof:
    """A hold id and fence epoch that the guard of this host confirmed, and the devices that it has locked."""

    hold_id: str
    epoch: int
    devices: tuple[str, ...] = ()


def source_digest(root: Path | None = None) -> str:
    r"""SHA-256 over the Python sources of a package, by relative path and content.

    Args:
        root: Package folder; the running ``remote_dspark`` by default.

    Returns:
        Hex digest of the lines ``<sha256 of file>  <relative path>\n`` in ascending path order.

    Raises:
        ObserveError: There is no source below ``root``.
    """
    folder = Path(__file__).resolve().parent if root is None else root
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.py"))
    if not names:
        raise ObserveError(f"source digest: expected Python files below {folder}, found none")
    tree = hashlib.sha256()
    for name in names:
        tree.update(f"{file_digest(folder / name)}  {name}\n".encode())
    return tree.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of one file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def utc_now() -> str:
    """The wall clock as RFC 3339 with ``Z``, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def process_start_ticks(pid: int | None = None) -> int:
    """Start time of a process in clock ticks since boot (``/proc/<pid>/stat`` field 22): a pid's identity."""
    text = Path(f"/proc/{os.getpid() if pid is None else pid}/stat").read_text(encoding="ascii", errors="replace")
    # The command name may hold spaces and parentheses; fields are counted after its last parenthesis.
    return int(text.rpartition(")")[2].split()[19])


def device_facts(compute: ComputeKind) -> dict[str, str]:
    """Facts of the first visible GPU; empty for anything but CUDA.

    Raises:
        ObserveError: CUDA was asked for and ``nvidia-smi`` does not answer.
    """
    if compute is not ComputeKind.CUDA:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise ObserveError(f"device facts: expected an answer of nvidia-smi, found {cause}") from cause
    found = [value.strip() for value in answer.stdout.splitlines()[0].split(",")]
    return dict(zip(_NVIDIA_SMI_FIELDS, found, strict=True))


def output_folder(argument: str | None, environ: Mapping[str, str]) -> Path:
    """The folder to write to: ``--output`` or, inside a hold, ``DSPARK_OUTPUT_DIR``.

    Raises:
        ObserveError: Neither is given, or the folder already holds an observation.
    """
    chosen = argument or environ.get(ENV_OUTPUT_DIR)
    if not chosen:
        raise ObserveError(f"output folder: expected --output DIR or {ENV_OUTPUT_DIR}, found neither")
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / OBSERVATION_FILE).exists():
        raise ObserveError(f"{folder / OBSERVATION_FILE}: exists; an observation is written once, choose a new folder")
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Publish ``data`` under ``path``: readers see nothing or all of it, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Recorder:
    """Collects one program's observation and writes it once.

    Args:
        kind: Which program.
        program: Module name.
        argv: Arguments as run; the caller leaves secrets out.
        compute: Where the numbers are computed.
        folder: Output folder, from `output_folder`.
        hold: The proven hold, or None.

    Attributes:
        compute: May be set once the program has learned where its numbers come from.
    """

    def __init__(
        self,
        kind: ObservationKind,
        program: str,
        *,
        argv: Sequence[str],
        compute: ComputeKind,
        folder: Path,
        hold: HoldProof | None,
    ) -> None:
        self._kind = kind
        self._program = program
        self._argv = tuple(argv)
        self.compute = compute
        self._folder = folder
        self._hold = hold
        self._started_utc = utc_now()
        self._started_ns = time.monotonic_ns()
        self._checks: list[Check] = []
        self._values: dict[str, int] = {}
        self._labels: dict[str, str] = {}
        self._samples: list[SampleFile] = []

    def check(self, name: str, *, expected: object, found: object, ok: bool | None = None) -> bool:
        """Record one comparison; without ``ok`` it is equality. Returns whether it held."""
        held = (expected == found) if ok is None else ok
        self._checks.append(Check(name, _short(expected), _short(found), held))
        return held

    def check_not_run(self, name: str, *, expected: object, reason: str) -> None:
        """Record a comparison that could not be made: UNKNOWN to every gate."""
        self._checks.append(Check(name, _short(expected), _short(f"not run: {reason}"), None))

    def value(self, name: str, number: int) -> None:
        """Record one integer.

        Raises:
            ObserveError: Not an integer, too large for a receipt, or the name is taken.
        """
        if isinstance(number, bool) or not isinstance(number, int) or abs(number) > MAX_INTEGER:
            raise ObserveError(f"value {name}: expected an integer within 2^53-1, found {number!r}")
        if name in self._values:
            raise ObserveError(f"value {name}: recorded twice")
        self._values[name] = number

    def label(self, name: str, text: str) -> None:
        """Record one short string."""
        self._labels[name] = _short(text)

    def samples(self, name: str, unit: str, rows: Iterable[int | Mapping[str, int]]) -> SampleFile:
        """Write one raw sample file (JSON Lines) and bind it by digest.

        Raises:
            ObserveError: Bad file name, or a number that is not an integer.
        """
        if not _SAMPLE_NAME.fullmatch(name):
            raise ObserveError(f"sample file {name!r}: expected a name of [a-z0-9._-]+")
        lines = [_sample_line(name, row) for row in rows]
        data = "".join(lines).encode()
        write_atomically(self._folder / name, data)
        record = SampleFile(name, unit, hashlib.sha256(data).hexdigest(), len(lines), len(data))
        self._samples.append(record)
        return record

    def write(self) -> Observation:
        """Write ``observation.json`` and return what it says."""
        observation = Observation(
            kind=self._kind,
            program=self._program,
            argv=self._argv,
            source_sha256=source_digest(),
            compute=self.compute,
            device=device_facts(self.compute),
            started_utc=self._started_utc,
            elapsed_ns=time.monotonic_ns() - self._started_ns,
            hold_id=self._hold.hold_id if self._hold else None,
            hold_epoch=self._hold.epoch if self._hold else None,
            checks=tuple(self._checks),
            values=dict(self._values),
            labels=dict(self._labels),
            samples=tuple(self._samples),
        )
        document = json.dumps(observation.to_document(), sort_keys=True, indent=1, ensure_ascii=True)
        write_atomically(self._folder / OBSERVATION_FILE, document.encode() + b"\n")
        return observation


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _sample_line(name: str, row: int | Mapping[str, int]) -> str:
    numbers = [row] if isinstance(row, int) else list(row.values())
    if any(isinstance(n, bool) or not isinstance(n, int) or abs(n) > MAX_INTEGER for n in numbers):
        raise ObserveError(f"sample file {name}: expected integers within 2^53-1, found {row!r}")
    return json.dumps(row if isinstance(row, int) else dict(row), sort_keys=True, separators=(",", ":")) + "\n"
