"""Structured logs: one JSON object per line on stderr, never a token or a prompt."""

from __future__ import annotations

import json
import sys
import threading

from remote_dspark.observe import utc_now

_LOCK = threading.Lock()


def log_event(event: str, **fields: str | int) -> None:
    """Write one line. Logging can never end the worker: a closed stderr is ignored."""
    line = json.dumps({"time": utc_now(), "event": event} | fields, ensure_ascii=True)
    with _LOCK:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return
