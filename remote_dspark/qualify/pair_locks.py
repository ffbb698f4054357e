"""Whether a hold has locked every GPU that a pair runs on. No torch here: a worker's probe asks it too."""

from __future__ import annotations

from collections.abc import Sequence

from remote_dspark.observe import HoldProof, ObserveError


def require_locked(uuids: Sequence[str], hold: HoldProof) -> None:
    """Refuses devices that the hold has not locked.

    Raises:
        ObserveError: Names them.
    """
    missing = [uuid for uuid in uuids if uuid not in hold.devices]
    if missing:
        raise ObserveError(
            f"hold {hold.hold_id}: expected locks on both GPUs, found none on {', '.join(missing)}; "
            "name both in the site file's devices"
        )
