"""Devices: their locks by UUID, what nvidia-smi says about them, and who uses them.

Where there is no GPU, a device is a name (``cpu:0``) and only its lock is real. nvidia-smi is the only program asked;
what it calls not supported is null, never zero.
"""

from __future__ import annotations

import os
import subprocess

from windows.guard import files, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

_FIELDS = (
    "uuid",
    "pci.bus_id",
    "name",
    "driver_version",
    "vbios_version",
    "memory.total",
    "clocks.current.sm",
    "clocks.current.memory",
    "clocks.max.sm",
    "power.limit",
    "ecc.mode.current",
    "mig.mode.current",
    "compute_mode",
    "persistence_mode",
    "clocks_throttle_reasons.active",
)
COMPARED = ("uuid", "pci", "driver", "vbios", "power_limit_mw", "ecc", "mig", "compute_mode", "persistence")
"""GPU facts that must be after a hold what they were before it; the guard records them and never sets them."""


def is_gpu(device: str) -> bool:
    """True for a GPU or MIG UUID."""
    return device.startswith(("GPU-", "MIG-"))


def lock_path(state: State, device: str) -> str:
    """The lock file of one device."""
    return state.path("devices", device.replace("/", "_") + ".lock")


def lock_all(state: State, names: list[str]) -> tuple[list[int], str | None]:
    """Lock every device in one fixed order, all or nothing: (descriptors, None) or ([], the busy device)."""
    held: list[int] = []
    for name in sorted(names):
        descriptor = files.try_lock(lock_path(state, name))
        if descriptor is None:
            for other in held:
                os.close(other)
            return [], name
        held.append(descriptor)
    return held, None


def _ask(query: str, fields: tuple[str, ...]) -> list[list[str | None]] | None:
    """Rows of one nvidia-smi query; None when there is no nvidia-smi or it fails."""
    program = spawn.find_program("nvidia-smi", spawn.base_environment()["PATH"])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return parse_table(done.stdout.decode("utf-8", "replace"), len(fields))


def parse_table(text: str, width: int) -> list[list[str | None]]:
    """Rows of a query's output; a line with fewer cells is a remark, and extra commas belong to the last cell."""
    rows = [line.split(",", width - 1) for line in text.splitlines()]
    return [[_value(cell) for cell in row] for row in rows if len(row) == width]


def _value(cell: str) -> str | None:
    text = cell.strip()
    return None if not text or text.startswith("[") or text in ("N/A", "Not Supported") else text


def _scaled(text: str | None, factor: int) -> int | None:
    try:
        return None if text is None else round(float(text) * factor)
    except ValueError:
        return None


def gpus() -> list[Json]:
    """Every GPU with its identity, clocks and modes; empty where there is none."""
    result = []
    for cells in _ask("gpu", _FIELDS) or []:
        result.append(
            {
                "uuid": cells[0],
                "pci": cells[1],
                "name": cells[2],
                "driver": cells[3],
                "vbios": cells[4],
                "memory_total_bytes": _scaled(cells[5], 1 << 20),
                "clocks": {
                    "sm_mhz": _scaled(cells[6], 1),
                    "mem_mhz": _scaled(cells[7], 1),
                    "max_sm_mhz": _scaled(cells[8], 1),
                },
                "power_limit_mw": _scaled(cells[9], 1000),
                "ecc": cells[10],
                "mig": cells[11],
                "compute_mode": cells[12],
                "persistence": cells[13],
                "throttle": cells[14],
            }
        )
    return result


def gpu_processes() -> list[Json] | None:
    """Compute processes on the GPUs; None when they cannot be listed although there are GPUs."""
    rows = _ask("compute-apps", ("pid", "gpu_uuid", "process_name"))
    if rows is None:
        return None
    named = [(pid, uuid, name) for pid, uuid, name in rows if pid is not None and pid.isdigit()]
    return [{"pid": int(pid), "uuid": uuid, "name": name or ""} for pid, uuid, name in named]


def foreign_processes(names: list[str], owned: set[int]) -> list[Json] | None:
    """Compute processes on these devices that are not in ``owned``; [] without GPUs among them; None when unknown."""
    wanted = {name for name in names if is_gpu(name)}
    if not wanted:
        return []
    running = gpu_processes()
    if running is None:
        return None
    return [process for process in running if process["uuid"] in wanted and process["pid"] not in owned]


def compare(before: list[Json], now: list[Json]) -> list[Json]:
    """Rows: every recorded GPU fact against now."""
    by_uuid = {gpu["uuid"]: gpu for gpu in now}
    rows = []
    for gpu in before:
        current = by_uuid.get(gpu["uuid"], {})
        for field in COMPARED:
            same = gpu[field] == current.get(field)
            row = {
                "service": "host",
                "field": f"{gpu['uuid']} {field}",
                "expected": str(gpu[field]),
                "found": str(current.get(field)),
                "ok": same,
            }
            rows.append(row)
    return rows
