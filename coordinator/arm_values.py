"""What fills the placeholders of a plan's commands: the values of a hold, of an arm, and the staged load manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coordinator.errors import GateFailed
from coordinator.session import HostSession
from remote_dspark.contract import DraftMode
from windows.compiled import CompiledPlan
from windows.site import Role


def hold_values(compiled: CompiledPlan, hold_id: str, number: int) -> dict[str, str | int]:
    """Placeholders that are the same for a whole hold."""
    return {
        "plan_sha256": compiled.sha256,
        "hold": number,
        "hold_id": hold_id,
        "target_address": address_of(compiled.hosts_of(Role.TARGET)),
        "drafter_address": address_of(compiled.hosts_of(Role.DRAFTER)),
    }


def arm_values(
    compiled: CompiledPlan, manifest: Path, session: HostSession, label: str, mode: DraftMode
) -> dict[str, str | int]:
    """Placeholders of one arm; stages the load manifest on the host of the load program."""
    load = compiled.plan.load
    assert load is not None
    return {
        "arm": label,
        "pair": label[1:],
        "mode": mode.value,
        "manifest": stage_manifest(manifest, session, load.manifest_sha256),
        "manifest_sha256": load.manifest_sha256,
        "concurrency": load.concurrency,
        "requests": load.requests,
        "warm_up_requests": load.warm_up_requests,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seeds": ",".join(str(seed) for seed in load.seeds),
    }


def stage_manifest(path: Path, session: HostSession, expected: str) -> str:
    """Put the load manifest onto a host by digest; returns its path there.

    Raises:
        GateFailed: It is not the one the plan was compiled with.
    """
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise GateFailed(
            "the load manifest changed after the plan was compiled", where=str(path), expected=expected, found=found
        )
    staged = f"{session.spec.work_dir}/manifests/{found}{path.suffix}"
    session.host.put(data, staged)
    return staged


def address_of(hosts: tuple[object, ...]) -> str:
    """Address of the first host of a role; loopback for this machine."""
    first = hosts[0] if hosts else None
    return str(getattr(first, "address", None) or "127.0.0.1")
