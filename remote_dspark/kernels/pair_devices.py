"""The GPUs of a physical pair: what they must be, and peer access between them.

Facts are read from the CUDA driver, nvidia-smi and the process list, then judged by `require_pair`, which touches
nothing. Refused: fewer than two distinct GPUs, MIG, MPS, no peer access, no native peer atomics, and a bound above
half of any display watchdog. Multicast is never used. Nothing here changes a setting of a device.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

WATCHDOG_NS = 2_000_000_000
"""Shortest display watchdog in use; the driver says only whether a device has one."""

MPS_PROCESSES = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")

_KERNEL_EXEC_TIMEOUT = 17
_P2P_ACCESS_SUPPORTED = 2
_P2P_NATIVE_ATOMIC_SUPPORTED = 3
_ALREADY_ENABLED = 704


class PairRefusedError(RuntimeError):
    """These devices cannot be a physical pair; the message says what was expected and found."""


@dataclass(frozen=True)
class PairFacts:
    """What was read about the devices of a pair, in rank order.

    Attributes:
        uuids: UUID of each device; all distinct on a physical pair.
        mig_modes: nvidia-smi's ``mig.mode.current`` of each; ``hidden`` for a device that it does not list.
        has_watchdog: Whether kernels have a run-time limit, of each.
        peer_access: For each ordered pair of different devices, whether one can address the other's memory.
        native_atomics: The same for atomic operations.
        mps_processes: MPS processes of this machine.
    """

    uuids: tuple[str, ...]
    mig_modes: tuple[str, ...]
    has_watchdog: tuple[bool, ...]
    peer_access: tuple[bool, ...]
    native_atomics: tuple[bool, ...]
    mps_processes: tuple[str, ...]


def require_pair(facts: PairFacts, bound_ns: int) -> None:
    """Judges facts.

    Args:
        facts: From `read_facts`.
        bound_ns: Longest wait of a kernel.

    Raises:
        PairRefusedError: With every reason.
    """
    reasons = []
    if len(set(facts.uuids)) < max(2, len(facts.uuids)):
        reasons.append(f"expected at least two distinct GPUs, found {', '.join(facts.uuids) or 'none'}")
    if any(mode not in ("Disabled", "[N/A]", "N/A") for mode in facts.mig_modes):
        reasons.append(f"expected MIG to be off, found {', '.join(facts.mig_modes)}")
    if facts.mps_processes:
        reasons.append(f"expected no MPS, found {', '.join(facts.mps_processes)}")
    if not all(facts.peer_access):
        reasons.append("expected peer access between all devices, found some without")
    if not all(facts.native_atomics):
        reasons.append("expected native atomics between all devices, found some without")
    if any(facts.has_watchdog) and bound_ns > WATCHDOG_NS // 2:
        reasons.append(f"expected a bound of at most {WATCHDOG_NS // 2} ns beside a watchdog, found {bound_ns}")
    if reasons:
        raise PairRefusedError("; ".join(reasons))


def read_facts(devices: Sequence[int]) -> PairFacts:
    """Reads the facts of CUDA devices, in rank order.

    Raises:
        PairRefusedError: The driver or nvidia-smi does not answer.
    """
    uuids = tuple(f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices)
    modes = _mig_modes()
    driver = _Driver()
    ordered = [(one, other) for one in devices for other in devices if one != other]
    return PairFacts(
        uuids=uuids,
        mig_modes=tuple(modes.get(uuid, "hidden") for uuid in uuids),
        has_watchdog=tuple(driver.attribute(_KERNEL_EXEC_TIMEOUT, device) != 0 for device in devices),
        peer_access=tuple(driver.p2p(_P2P_ACCESS_SUPPORTED, *pair) != 0 for pair in ordered),
        native_atomics=tuple(driver.p2p(_P2P_NATIVE_ATOMIC_SUPPORTED, *pair) != 0 for pair in ordered),
        mps_processes=mps_processes(Path("/proc")),
    )


def enable_peer_access(devices: Sequence[int]) -> None:
    """Enables peer access both ways between all devices, reads it back, and moves a word each way.

    Raises:
        PairRefusedError: The driver refuses, or a word does not arrive.
    """
    driver = _Driver()
    for one in devices:
        for other in devices:
            if one == other:
                continue
            driver.enable_peer(one, other)
            word = torch.full((1,), 1 + other, device=f"cuda:{one}")
            if int(torch.zeros(1, dtype=word.dtype, device=f"cuda:{other}").copy_(word)) != 1 + other:
                raise PairRefusedError(f"peer access: a word from device {one} did not arrive on {other}")


def dedicated_inbox(num_words: int, device: int) -> tuple[torch.Tensor, torch.cuda.MemPool]:
    """A zeroed int64 tensor in an allocation of its own, and the pool that must live as long as the peer writes it."""
    pool = torch.cuda.MemPool()
    with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):
        inbox = torch.zeros(num_words, dtype=torch.int64, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    return inbox, pool


class _Driver:
    """The five driver calls that torch does not offer."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as cause:
            raise PairRefusedError(f"expected the CUDA driver, found {cause}") from cause
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: object, also: int = 0) -> int:
        code = int(getattr(self._library, name)(*arguments))
        if code not in (0, also):
            raise PairRefusedError(f"{name}: expected success, found CUDA error {code}")
        return code

    def attribute(self, attribute: int, device: int) -> int:
        """An attribute of a device."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(device))
        return value.value

    def p2p(self, attribute: int, one: int, other: int) -> int:
        """An attribute of the link from one device to another."""
        value = ctypes.c_int()
        link = ctypes.c_int(attribute), ctypes.c_int(one), ctypes.c_int(other)
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(value), *link)
        return value.value

    def enable_peer(self, one: int, other: int) -> None:
        """Lets a device address another's memory; the second call must find it enabled."""
        contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
        for context, device in zip(contexts, (one, other), strict=True):
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self._call("cuCtxPushCurrent_v2", contexts[0])
        try:
            self._call("cuCtxEnablePeerAccess", contexts[1], ctypes.c_uint(0), also=_ALREADY_ENABLED)
            found = self._call("cuCtxEnablePeerAccess", contexts[1], ctypes.c_uint(0), also=_ALREADY_ENABLED)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
            for device in (one, other):
                self._call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(device))
        if found != _ALREADY_ENABLED:
            raise PairRefusedError(f"peer access {one} -> {other}: expected it to be enabled, read back {found}")


def _mig_modes() -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=uuid,mig.mode.current", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise PairRefusedError(f"MIG mode: expected an answer of nvidia-smi, found {cause}") from cause
    rows = [line.split(",") for line in answer.stdout.splitlines() if line.strip()]
    return {row[0].strip(): row[1].strip() for row in rows}


def mps_processes(processes: Path) -> tuple[str, ...]:
    """Names of MPS processes in a /proc; a process's name there is cut at 15 characters."""
    short = {name[:15] for name in MPS_PROCESSES}
    found = []
    for entry in processes.glob("[0-9]*/comm"):
        try:
            name = entry.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            # it ended meanwhile
            continue
        if name in short:
            found.append(f"{name} ({entry.parent.name})")
    return tuple(sorted(found))
