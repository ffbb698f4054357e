"""The operator's own command, told when the dead-man fired or a host is degraded. Its failure changes nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess

from windows.guard import clock, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TIMEOUT_S = 10


def send(plan: dict[str, Any], event: str) -> None:
    """Run the notification command with one JSON object on stdin, at most ten seconds."""
    if not plan.get("notify"):
        return
    message = {"event": event, "hold_id": plan["hold_id"], "epoch": plan["epoch"], "utc": clock.utc_now()}
    environment = dict(spawn.base_environment(), DSPARK_EVENT=event, DSPARK_HOLD_ID_NOTIFIED=str(plan["hold_id"]))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            plan["notify"],
            input=json.dumps(message).encode("ascii"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
            env=environment,
            start_new_session=True,
        )
