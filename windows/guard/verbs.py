"""Every verb: the table decides whether it may run, the claim whether it is this caller's, then one call does it."""

from __future__ import annotations

import os

from windows.guard import (
    by_hand,
    clock,
    deadman,
    ending,
    facts,
    files,
    lease,
    ops,
    process_service,
    production,
    release,
    runs,
    spec,
    status,
    table,
)
from windows.guard.errors import Refusal
from windows.guard.probe import probe_once, probe_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from windows.guard.state import State

    Json = dict[str, Any]

MAX_WITNESSED_LOGS = 64

PINNED = frozenset(["confirm", "snapshot", "arm", "stop", "run"])
"""Verbs that go forward: only the guard that opened the hold may do them."""


class Call:
    """One request against one state folder."""

    def __init__(self, state: State, request: Json, digest: str) -> None:
        self.state, self.digest = state, digest
        self.verb: str = request["verb"]
        self.op: str | None = request["op"]
        self.claim: Json | None = request["claim"]
        self.args: Json = request["args"]
        self.adopt = False
        self.record: Json = {}

    def perform(self, adopt: bool = False) -> Json:
        """Check and do it.

        Raises:
            Refusal: Anything the protocol lists.
        """
        self.adopt = adopt
        if self.verb in table.CLAIMED:
            self._require_claim()
        self._require_state()
        handler = getattr(self, "do_" + self.verb.replace("-", "_"))
        result: Json = handler()
        return result

    def _require_claim(self) -> None:
        try:
            self.record = lease.require_claim(self.state, self.claim)
        except Refusal as refusal:
            if self.verb == "close" and refusal.code == "HOLD_ENDED":
                return
            raise
        if self.verb in PINNED and self.record["guard_sha256"] != self.digest:
            raise Refusal(
                "GUARD_VERSION",
                "another guard opened this hold",
                self.record["guard_sha256"],
                self.digest,
                "use the guard that opened it, or restore and close",
            )

    def _require_state(self) -> None:
        name = self.state.state_name()
        code = table.refusal_code(name, self.verb)
        if code is None or self.verb == "acquire" or (self.verb == "close" and not self.record):
            return
        source = self.state.record() or self.state.debt()
        allowed = ", ".join(sorted(table.ALLOWED[self.verb]))
        raise Refusal(
            code, f"{self.verb} is not possible now", f"state {allowed}", name, status.next_step(name, source)
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def do_hello(self) -> Json:
        """Who answers."""
        spec.take(self.args, {})
        return facts.hello(self.state, self.digest)

    def do_facts(self) -> Json:
        """Facts of the host."""
        spec.take(self.args, {})
        return facts.facts(self.state)

    def do_status(self) -> Json:
        """What a person needs."""
        spec.take(self.args, {})
        return status.describe(self.state)

    def do_events(self) -> Json:
        """Records of the event log."""
        spec.take(self.args, {"since": "int"})
        records = self.state.events(self.args["since"])
        return {"records": records, "next": records[-1]["seq"] + 1 if records else self.args["since"]}

    def do_prove(self) -> Json:
        """Inside exactly this hold?"""
        return status.prove(self.state, self.args)

    def do_wait(self) -> Json:
        """How a run is doing."""
        spec.take(self.args, {"run": "str", "wait_s": "num"})
        return runs.wait(self.state, self.args["run"], self.args["wait_s"])

    def do_service_status(self) -> Json:
        """A process service now, with one probe."""
        service = self._process()
        found = process_service.look(self.state, service)
        answer = probe_once(service) if service["probe"] and found["state"] == "running" else None
        return self._service(service, process_service.check_expected(self.state, service), answer)

    # -- the hold, forwards ---------------------------------------------------------------------------------------

    def do_acquire(self) -> Json:
        """Open a hold."""
        result = lease.acquire(self.state, self.args, str(self.op), self.digest)
        ops.prune(self.state)
        return result

    def do_confirm(self) -> Json:
        """No longer provisional."""
        spec.take(self.args, {})
        return lease.confirm(self.state, self.record)

    def do_heartbeat(self) -> Json:
        """The coordinator lives."""
        return lease.beat(self.state, self.record, self.args)

    def do_snapshot(self) -> Json:
        """Record production."""
        spec.take(self.args, {})
        production.preflight(self.state, self.record["services"])
        taken = production.take_snapshot(self.state, self.record)
        with self.state.host_lock():
            current = lease.require_claim(self.state, self.claim)
            current.update(snapshot=taken["snapshot"], state=table.SNAPSHOTTED)
            self.state.write_record(current)
        self.state.event("snapshot", self.record, sha256=taken["sha256"])
        return taken

    def do_arm(self) -> Json:
        """Arm and self-test the dead-man."""
        spec.take(self.args, {})
        return deadman.arm(self.state, self.record)

    def do_stop(self) -> Json:
        """Stop production and prove it."""
        spec.take(self.args, {})
        self._require_holder()
        return production.stop(self.state, self.record)

    def do_run(self) -> Json:
        """Start an owned program."""
        self._require_holder()
        return runs.start(self.state, self.record, self.args, str(self.op), self.adopt)

    def do_end_run(self) -> Json:
        """End an owned program."""
        spec.take(self.args, {"run": "str"})
        return runs.end(self.state, self.record["hold_id"], self.args["run"], "end-run")

    def _require_holder(self) -> None:
        if not release.holder_alive(self.state, self.record["hold_id"]):
            raise Refusal(
                "HOLDER_DEAD", "the holder of the locks is gone", "a live holder", "none", "restore and close"
            )

    # -- the hold, backwards --------------------------------------------------------------------------------------

    def do_restore(self) -> Json:
        """Put production back."""
        spec.take(self.args, {})
        return ending.restore(self.state, self.record)

    def do_close(self) -> Json:
        """Release, with the proof."""
        spec.take(self.args, {})
        return ending.close(self.state, self.record or None, self.claim or {})

    def do_recover(self) -> Json:
        """Close exactly that hold, without its claim."""
        spec.take(self.args, {"hold_id": "str", "epoch": "int?"})
        return ending.recover(self.state, self.args["hold_id"], self.args["epoch"], "recovered", "", "recover")

    def do_abort(self) -> Json:
        """As recover, with a reason."""
        spec.take(self.args, {"hold_id": "str", "reason": "str"})
        return ending.recover(self.state, self.args["hold_id"], None, "aborted", self.args["reason"], "abort")

    def do_clear(self) -> Json:
        """End the debt without proof."""
        spec.take(self.args, {"hold_id": "str", "reason": "str"})
        return ending.clear(self.state, self.args["hold_id"], self.args["reason"])

    def do_break(self) -> Json:
        """Take the host away from its holder."""
        spec.take(self.args, {"hold_id": "str", "reason": "str"})
        return ending.break_hold(self.state, self.args["hold_id"], self.args["reason"])

    # -- beside the hold ------------------------------------------------------------------------------------------

    def do_witness(self) -> Json:
        """Store or read the head of one chain, which never goes back; the newest chains are kept."""
        spec.take(self.args, {"log": "str", "head": "str?", "sequence": "int?"})
        log, head, sequence = self.args["log"], self.args["head"], self.args["sequence"]
        with self.state.host_lock():
            logs = files.read_json(self.state.path("witness.json")) or {}
            known = logs.get(log) or {"head": None, "sequence": None, "utc": None}
            if head is None or sequence is None:
                return {"log": log, **known}
            last = known["sequence"] if known["sequence"] is not None else -1
            if sequence < last or (sequence == last and head != known["head"]):
                raise Refusal(
                    "WITNESS_CONFLICT",
                    "the chain went back or forked",
                    f"after {last} {known['head']}",
                    f"{sequence} {head}"[:120],
                    "verify the store against this witness",
                )
            document = {"head": head, "sequence": sequence, "utc": clock.utc_now()}
            newest = sorted({**logs, log: document}.items(), key=lambda item: item[1]["utc"])[-MAX_WITNESSED_LOGS:]
            self.state.write(self.state.path("witness.json"), dict(newest))
            return {"log": log, **document}

    def do_service_start(self) -> Json:
        """Bring up a process service outside a hold."""
        service = self._process()
        if self.adopt and process_service.look(self.state, service)["state"] != "running":
            raise Refusal(
                "OP_UNKNOWN_OUTCOME",
                "an earlier start died half-way",
                "a running service",
                "none",
                "look at its log, then start it with a new operation id",
            )
        process_service.start(self.state, service)
        rows = process_service.wait_listening(self.state, service, service["start_s"])
        answer = probe_until(service, service["start_s"], lambda: process_service.is_running(self.state, service))
        return self._service(service, rows, answer)

    def do_service_stop(self) -> Json:
        """Stop a process service outside a hold."""
        service = self._process()
        return self._service(service, process_service.stop(self.state, service), None)

    def _process(self) -> Json:
        spec.take(self.args, {"service": "dict"})
        service = spec.check_service(self.args["service"])
        if service["kind"] != "process":
            raise spec.bad("args.service.kind", "process", service["kind"])
        return service

    def _service(self, service: Json, rows: list[Json], answer: Json | None) -> Json:
        found = process_service.look(self.state, service)
        shown = {key: found[key] for key in ("state", "pid", "start_ticks")}
        return dict(shown, rows=rows, probes=[answer] if answer else [])

    def do_uninstall(self) -> Json:
        """Remove everything the guard wrote on this host."""
        spec.take(self.args, {})
        by_hand.remove(self.state)
        return {"removed": ending.uninstall(self.state, keep=os.path.join("ops", f"{self.op}"))}
