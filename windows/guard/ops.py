"""The journal of operations: intent before, result after, so that a repeated call is answered and never done twice.

The operation's lock is held while it runs; a second call with the same id waits for the first. On a full disk the verbs
that end a hold go on without a journal; all others refuse.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os

from windows.guard import clock, files, table
from windows.guard.errors import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

WAIT_S = 3600.0
KEPT = 400
"""Finished operations kept for repeated calls; older ones are dropped when a hold opens."""

WITHOUT_JOURNAL = frozenset(["restore", "close", "recover", "abort", "clear", "break", "end-run"])


def journalled(state: State, request: Json, perform: Callable[[bool], Json]) -> Json:
    """Run ``perform(adopt)`` once per operation id; the reply document.

    Args:
        state: The state folder.
        request: The parsed request.
        perform: Does the verb; ``adopt`` is true when an earlier call died half-way and starting twice would be harm.
    """
    path = state.path("ops", request["op"])
    question = json.dumps([request["verb"], request["claim"], request["args"]], sort_keys=True)
    digest = hashlib.sha256(question.encode()).hexdigest()
    with files.locked(path + ".lock", WAIT_S):
        known = files.read_json(path + ".json")
        if known is not None:
            _require_same(known, request, digest)
            if known["reply"] is not None:
                return dict(known["reply"], replayed=True)
        adopt = known is not None and request["verb"] in table.ONCE
        entry: Json = {"verb": request["verb"], "args_sha256": digest, "utc": clock.utc_now(), "reply": None}
        if known is None:
            _note(state, path, entry, request["verb"])
        reply = answer(lambda: perform(adopt))
        entry["reply"] = reply
        _note(state, path, entry, "restore")
        return reply


def answer(perform: Callable[[], Json]) -> Json:
    """The reply document of a call: its result or its refusal."""
    try:
        return {"ok": True, "result": perform()}
    except Refusal as refusal:
        return {"ok": False, "error": refusal.to_document()}


def _require_same(known: Json, request: Json, digest: str) -> None:
    if (known["verb"], known["args_sha256"]) != (request["verb"], digest):
        raise Refusal(
            "OP_MISMATCH",
            "this operation id was used for something else",
            f"{known['verb']} {known['args_sha256'][:12]}",
            f"{request['verb']} {digest[:12]}",
            "use a new operation id for each intended effect",
        )


def _note(state: State, path: str, entry: Json, verb: str) -> None:
    try:
        state.write(path + ".json", entry)
    except OSError as error:
        if verb not in WITHOUT_JOURNAL:
            raise Refusal(
                "NO_SPACE",
                "the intent could not be written",
                "space on the state folder's disk",
                str(error),
                "free space; restore works without it",
            ) from error


def prune(state: State) -> None:
    """Forget the oldest finished operations."""
    folder = state.path("ops")
    names = [name for name in os.listdir(folder) if name.endswith(".json")]
    with contextlib.suppress(OSError):
        names.sort(key=lambda name: os.stat(os.path.join(folder, name)).st_mtime_ns)
        for name in names[: max(0, len(names) - KEPT)]:
            files.remove(os.path.join(folder, name), sync=False)
            files.remove(os.path.join(folder, name[: -len(".json")] + ".lock"), sync=False)
