"""The command line: one request on stdin, or one of the guard's own background programs.

Everything is imported before anything is read, so that a guard that runs never depends on its file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

from windows.guard import VERSION, clock, deadman, files, framing, holder, ops, process_service, release, spawn, table
from windows.guard.errors import Refusal
from windows.guard.state import State
from windows.guard.supervise import Supervisor
from windows.guard.verbs import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

USAGE = f"""dspark guard {VERSION}: decides on this host who may touch it, stops production and puts it back.

  guard.pyz --state DIR                        one JSON request on stdin, one framed reply on stdout
  guard.pyz --state DIR status-now             what is going on here, for a person
  guard.pyz --state DIR restore-now            put production back and prove it
  guard.pyz --state DIR clear-now HOLD REASON  leave DEGRADED without proof; production is as you left it
"""


def main(arguments: list[str]) -> int:
    """Run one call; the exit code."""
    digest = own_digest()
    if len(arguments) < 2 or arguments[0] != "--state":
        sys.stderr.write(USAGE)
        return 2
    state = State(arguments[1])
    rest = arguments[2:]
    if not rest:
        return serve(state, digest, sys.stdin.buffer.read(framing.MAX_REQUEST_BYTES + 1))
    if rest[0] == "--internal":
        return background(state, digest, rest[1:])
    return by_person(state, digest, rest)


def own_digest() -> str:
    """sha256 of the file this guard runs from; empty when it is not one file."""
    try:
        with open(spawn.program_path(), "rb") as handle:
            return hashlib.sha256(handle.read()).hexdigest()
    except OSError:
        return ""


def serve(state: State, digest: str, data: bytes) -> int:
    """Answer one request; 0 whenever a framed reply was written."""
    reply = answer(state, digest, data)
    try:
        with open(1, "wb", closefd=False) as out:
            out.write(framing.encode_reply(reply))
    except OSError:
        return 1
    return 0


def answer(state: State, digest: str, data: bytes) -> Json:
    """The reply document of one request."""
    try:
        request = framing.parse_request(data)
        if request["verb"] not in table.ALLOWED:
            raise Refusal(
                "BAD_REQUEST",
                "no such verb",
                ", ".join(table.VERBS),
                request["verb"][:60],
                "see docs/guard-protocol.md",
            )
        state.open()
        release.expire_if_due(state)
        call = Call(state, request, digest)
        if request["verb"] in table.UNJOURNALLED or (request["verb"] == "witness" and request["op"] is None):
            return ops.answer(call.perform)
        if request["op"] is None:
            raise Refusal("BAD_REQUEST", "this verb changes something", "an operation id", "null", "give op")
        return ops.journalled(state, request, call.perform)
    except Refusal as refusal:
        return {"ok": False, "error": refusal.to_document()}
    except Exception as error:  # noqa: BLE001 - the one place where our own bugs become an answer
        text = f"{type(error).__name__}: {error} ({_where(error)})"
        bug = Refusal(
            "INTERNAL",
            "the guard failed",
            "no bug",
            text[:300],
            "ask again with the same operation id; report this",
        )
        return {"ok": False, "error": bug.to_document()}


def _where(error: BaseException) -> str:
    """File and line the error came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else "?"


def background(state: State, digest: str, arguments: list[str]) -> int:
    """One of the guard's own programs: holder, deadman, run, fire, boot."""
    role, ident = arguments[0], arguments[1]
    if role == "service":
        process_service.become(state, ident)
    if len(arguments) == 4 and arguments[2] == "--record":
        files.write_json(arguments[3], spawn.own_record(""))
    if role == "holder":
        holder.hold(state, ident)
    elif role == "deadman":
        deadman.watch(state, ident, digest)
    elif role == "run":
        hold_id, _, run = ident.partition("/")
        Supervisor(state, hold_id, run).supervise()
    elif role in ("fire", "boot"):
        return deadman.fire_unit(state, ident, role)
    else:
        return 2
    return 0


def by_person(state: State, digest: str, arguments: list[str]) -> int:
    """The commands for a person on the host: plain text, exit 0 when production is proven back, 50 when not."""
    source = state.debt() or state.record()
    if arguments == ["status-now"]:
        return _say(answer(state, digest, _request("status", {})))
    if arguments == ["restore-now"]:
        if source is None:
            sys.stdout.write("nothing to restore: no open hold and no debt on this host\n")
            return 0
        return _say(
            answer(
                state, digest, _request("abort", {"hold_id": source["hold_id"], "reason": "restore-now on the host"})
            )
        )
    if len(arguments) >= 3 and arguments[0] == "clear-now":
        return _say(
            answer(state, digest, _request("clear", {"hold_id": arguments[1], "reason": " ".join(arguments[2:])}))
        )
    sys.stderr.write(USAGE)
    return 2


def _request(verb: str, args: Json) -> bytes:
    op = None if verb in table.READING else f"by-hand-{clock.boottime_ns()}"
    return json.dumps({"protocol": 1, "verb": verb, "op": op, "claim": None, "args": args}).encode()


def _say(reply: Json) -> int:
    document = reply["result"] if reply["ok"] else reply["error"]
    for key in sorted(document):
        value = document[key]
        for line in value if isinstance(value, list) and value else [value]:
            sys.stdout.write(f"{key}: {json.dumps(line)}\n")
    return 0 if reply["ok"] else 50


def run() -> None:
    """Entry point of the zipapp."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
