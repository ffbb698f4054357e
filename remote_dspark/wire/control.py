"""Payloads of the small frames: everything but STATE and REPLY.

Rules: ``pack_x`` and ``parse_x`` are exact inverses; every field is checked against its range here, every reserved
byte is zero, text is printable ASCII padded with NUL. What depends on earlier frames is the session's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from remote_dspark.contract import Q_SEMANTICS, DraftMode
from remote_dspark.wire import layout
from remote_dspark.wire.errors import BadFieldError, BadHelloError, BadSizeError
from remote_dspark.wire.kinds import FrameType, Role, Status
from remote_dspark.wire.layout import Layout
from remote_dspark.wire.limits import (
    CREDITS_CEILING,
    DEPTH_CEILING,
    MAX_SHARDS,
    NUM_BATCH_SLOTS,
    REQUESTS_CEILING,
    SLOTS_CEILING,
    STATE_CHUNK_CEILING,
    SUPPORT_CEILING,
    VOCAB_CEILING,
)
from remote_dspark.wire.messages import (
    Cancel,
    Commit,
    Complete,
    Drain,
    Error,
    Hello,
    Message,
    Open,
    Ping,
    Reset,
    Step,
    StepRequest,
)

TEMPERATURE_CEILING_PPM: Final = 100_000_000
_MODES: Final = {DraftMode.OFF: 0, DraftMode.ON: 1}
_MODE_OF: Final = {number: mode for mode, number in _MODES.items()}
_ACKNOWLEDGED: Final = frozenset({FrameType.STEP, FrameType.OPEN, FrameType.STATE, FrameType.RESET, FrameType.CANCEL})
_BYTE_TEXT: Final = frozenset({"q_semantics", "verifier", "target_semantics", "rng_abi", "precision"})


def pack_text(text: str, size: int) -> bytes:
    """ASCII of at most ``size`` bytes (struct pads with NUL)."""
    if len(text) > size or not text.isascii() or (text and not text.isprintable()):
        raise BadFieldError(f"text must be at most {size} printable ASCII characters, found {text[:80]!r}")
    return text.encode("ascii")


def parse_text(raw: bytes, name: str) -> str:
    """Inverse of `pack_text`; refuses bytes after the first NUL and anything unprintable."""
    text, _, rest = raw.partition(b"\0")
    if rest.strip(b"\0") or not text.isascii() or (text and not text.decode("ascii").isprintable()):
        raise BadFieldError(f"{name}: expected NUL-padded printable ASCII, found {raw[:40]!r}")
    return text.decode("ascii")


def _require(ok: bool, name: str, expected: str, found: object) -> None:
    if not ok:
        raise BadFieldError(f"{name}: expected {expected}, found {found}")


def _fields(table: Layout, payload: memoryview) -> dict[str, Any]:
    """Named fields of a fixed part; refuses nonzero reserved ones."""
    values = table.codec.unpack_from(payload)
    result: dict[str, Any] = {}
    for (name, _), value in zip(table.fields, values[: len(table.fields)], strict=True):
        if name == "reserved":
            _require(value == 0, f"{table.name} reserved", "0", value)
        else:
            result[name] = value
    return result


def _pack(table: Layout, **values: Any) -> bytes:
    return table.codec.pack(*(0 if name == "reserved" else values[name] for name, _ in table.fields))


# -- HELLO ----------------------------------------------------------------------------------------------------------


def pack_hello(message: Hello) -> bytes:
    """HELLO's payload."""
    require_hello(message)
    starts = (*message.shard_starts, *([0] * (layout.SHARD_FIELDS - len(message.shard_starts))))
    values: dict[str, Any] = {name: getattr(message, name, 0) for name, _ in layout.HELLO.fields[:-1]}
    values.update({name: pack_text(values[name], 32) for name in _BYTE_TEXT})
    values.update(draft_mode=_MODES[message.draft_mode], num_shards=len(message.shard_starts))
    fixed = [0 if name == "reserved" else values[name] for name, _ in layout.HELLO.fields[:-1]]
    return layout.HELLO.codec.pack(*fixed, *starts)


def parse_hello(payload: memoryview) -> Hello:
    """Inverse of `pack_hello`."""
    *fixed, s0, s1, s2, s3, s4, s5, s6, s7 = layout.HELLO.codec.unpack(payload)
    values: dict[str, Any] = {}
    for (name, _), value in zip(layout.HELLO.fields[:-1], fixed, strict=True):
        if name == "reserved":
            _require(value == 0, "HELLO reserved", "0", value)
        values[name] = value
    del values["reserved"]
    num, starts = values.pop("num_shards"), (s0, s1, s2, s3, s4, s5, s6, s7)
    _require(1 <= num <= MAX_SHARDS and not any(starts[num:]), "num_shards", f"1..{MAX_SHARDS}, rest zero", num)
    _require(values["draft_mode"] in _MODE_OF, "draft_mode", "0 or 1", values["draft_mode"])
    _require(values["role"] in (1, 2), "role", "1 or 2", values["role"])
    for name in ("draft_adapted", "allow_dense"):
        _require(values[name] in (0, 1), name, "0 or 1", values[name])
        values[name] = bool(values[name])
    values.update({name: parse_text(values[name], name) for name in _BYTE_TEXT})
    values.update(draft_mode=_MODE_OF[values["draft_mode"]], role=Role(values["role"]), shard_starts=starts[:num])
    message = Hello(**values)
    require_hello(message)
    return message


def require_hello(message: Hello) -> None:
    """Ranges of HELLO's own fields.

    Raises:
        BadHelloError: names the field, what is allowed and what was found.
    """
    ranges = {
        "vocab_size": (1, VOCAB_CEILING),
        "dense_width": (message.vocab_size, 2 * VOCAB_CEILING),
        "state_row_bytes": (2, message.max_state_chunk_bytes),
        "max_state_chunk_bytes": (2, STATE_CHUNK_CEILING),
        "max_reply_bytes": (1, 2**32 - 1),
        "state_credits": (1, CREDITS_CEILING),
        "max_slots": (1, SLOTS_CEILING),
        "max_requests": (1, REQUESTS_CEILING),
        "max_depth": (1, DEPTH_CEILING),
        "max_support": (1, SUPPORT_CEILING),
    }
    for name, (low, high) in ranges.items():
        if not low <= getattr(message, name) <= high:
            raise BadHelloError(f"{name}: expected {low}..{high}, found {getattr(message, name)}")
    if message.state_row_bytes % 2:
        raise BadHelloError(f"state_row_bytes: bf16 rows have an even size, found {message.state_row_bytes}")
    for name in ("id_map_sha256", "draft_sha256", "target_sha256"):
        if len(getattr(message, name)) != 32:
            raise BadHelloError(f"{name}: expected 32 bytes, found {len(getattr(message, name))}")
    if message.q_semantics not in Q_SEMANTICS:
        raise BadHelloError(f"q_semantics: expected one of {', '.join(Q_SEMANTICS)}, found {message.q_semantics!r}")
    starts = message.shard_starts
    ascending = all(a < b for a, b in zip(starts, (*starts[1:], message.vocab_size), strict=True))
    if not 1 <= len(starts) <= MAX_SHARDS or starts[0] != 0 or not ascending:
        raise BadHelloError(f"shard_starts: expected 1..{MAX_SHARDS} ascending ids from 0, found {starts}")
    if (message.session == 0) != (message.role is Role.CLIENT):
        raise BadHelloError(f"session: expected 0 from a client, nonzero from a server, found {message.session}")


# -- STEP -----------------------------------------------------------------------------------------------------------


def pack_step(message: Step) -> bytes:
    """STEP's payload: fixed part, then one part per request."""
    require_step(message)
    head = layout.STEP.codec.pack(
        message.session, message.batch, message.batch_slot, len(message.requests), message.depth, 0
    )
    part = layout.STEP_REQUEST.codec.pack
    return head + b"".join(
        part(
            r.generation,
            r.round,
            r.anchor_position,
            r.context_version,
            r.prefix_digest,
            r.slot,
            r.support_policy,
            r.draft_temperature_ppm,
            r.anchor_token,
            0,
        )
        for r in message.requests
    )


def parse_step(payload: memoryview) -> Step:
    """Inverse of `pack_step`."""
    session, batch, batch_slot, num, depth, reserved = layout.STEP.codec.unpack_from(payload)
    _require(reserved == 0, "STEP reserved", "0", reserved)
    expected = layout.STEP.size + num * layout.STEP_REQUEST.size
    if len(payload) != expected:
        raise BadSizeError(f"STEP of {num} requests: expected {expected} payload bytes, found {len(payload)}")
    requests = []
    for values in layout.STEP_REQUEST.codec.iter_unpack(payload[layout.STEP.size :]):
        generation, round_, position, context, prefix, slot, support, temperature, anchor, rest = values
        _require(rest == 0, "STEP request reserved", "0", rest)
        requests.append(StepRequest(slot, generation, round_, position, anchor, prefix, temperature, support, context))
    message = Step(session, batch_slot, batch, depth, tuple(requests))
    require_step(message)
    return message


def require_step(message: Step) -> None:
    """Ranges of STEP's own fields."""
    _require(0 <= message.batch_slot < NUM_BATCH_SLOTS, "batch_slot", "0 or 1", message.batch_slot)
    _require(1 <= len(message.requests) <= REQUESTS_CEILING, "num_requests", "1..8", len(message.requests))
    _require(1 <= message.depth <= DEPTH_CEILING, "depth", f"1..{DEPTH_CEILING}", message.depth)
    for request in message.requests:
        anchor, size, ppm = request.anchor_token, len(request.prefix_digest), request.draft_temperature_ppm
        if anchor < 0 or size != 32 or not 0 <= ppm <= TEMPERATURE_CEILING_PPM:
            _require(anchor >= 0, "anchor_token", ">= 0", anchor)
            _require(size == 32, "prefix_digest", "32 bytes", size)
            _require(0 <= ppm <= TEMPERATURE_CEILING_PPM, "draft_temperature_ppm", "at most 100 000 000", ppm)


# -- one struct each ------------------------------------------------------------------------------------------------


def pack_open(message: Open) -> bytes:
    """OPEN's payload."""
    return _pack(layout.OPEN, **_attributes(message, layout.OPEN))


def parse_open(payload: memoryview) -> Open:
    """Inverse of `pack_open`."""
    values = _fields(layout.OPEN, payload)
    ppm = values["draft_temperature_ppm"]
    _require(ppm <= TEMPERATURE_CEILING_PPM, "draft_temperature_ppm", "at most 100 000 000", ppm)
    return Open(**values)


def pack_complete(message: Complete) -> bytes:
    """COMPLETE's payload."""
    _require(len(message.reply_digest) == 16, "reply_digest", "16 bytes", len(message.reply_digest))
    # Packed by hand, as it is unpacked: the last thing that a verifier waits for.
    return layout.COMPLETE.codec.pack(
        message.session,
        message.batch,
        message.generation,
        message.round,
        message.position,
        message.context_version,
        message.reply_size_bytes,
        message.reply_digest,
        message.acknowledges,
        message.status,
        message.batch_slot,
        0,
        message.slot,
        message.credits,
    )


def parse_complete(payload: memoryview) -> Complete:
    """Inverse of `pack_complete`."""
    # Unpacked by hand, see `pack_complete`.
    (
        session,
        batch,
        generation,
        round_,
        position,
        context,
        size,
        digest,
        acknowledges,
        status,
        batch_slot,
        reserved,
        slot,
        credits,
    ) = layout.COMPLETE.codec.unpack(payload)
    if reserved or acknowledges not in _ACKNOWLEDGED or status not in (0, 1) or batch_slot >= NUM_BATCH_SLOTS:
        _require(reserved == 0, "COMPLETE reserved", "0", reserved)
        _require(acknowledges in _ACKNOWLEDGED, "acknowledges", "an acknowledged type", acknowledges)
        _require(status in (0, 1), "status", "0 or 1", status)
        _require(batch_slot < NUM_BATCH_SLOTS, "batch_slot", "0 or 1", batch_slot)
    return Complete(
        session=session,
        acknowledges=FrameType(acknowledges),
        status=Status(status),
        batch_slot=batch_slot,
        batch=batch,
        slot=slot,
        generation=generation,
        round=round_,
        position=position,
        context_version=context,
        reply_size_bytes=size,
        reply_digest=digest,
        credits=credits,
    )


def pack_commit(message: Commit) -> bytes:
    """COMMIT's payload."""
    return _pack(layout.COMMIT, **_attributes(message, layout.COMMIT))


def parse_commit(payload: memoryview) -> Commit:
    """Inverse of `pack_commit`."""
    values = _fields(layout.COMMIT, payload)
    _require(values["is_bonus"] in (0, 1), "is_bonus", "0 or 1", values["is_bonus"])
    values["is_bonus"] = bool(values["is_bonus"])
    return Commit(**values)


def pack_reset(message: Reset) -> bytes:
    """RESET's payload."""
    return _pack(layout.RESET, **_attributes(message, layout.RESET))


def parse_reset(payload: memoryview) -> Reset:
    """Inverse of `pack_reset`."""
    return Reset(**_fields(layout.RESET, payload))


def pack_cancel(message: Cancel) -> bytes:
    """CANCEL's payload."""
    return _pack(layout.CANCEL, **_attributes(message, layout.CANCEL))


def parse_cancel(payload: memoryview) -> Cancel:
    """Inverse of `pack_cancel`."""
    return Cancel(**_fields(layout.CANCEL, payload))


def pack_ping(message: Ping) -> bytes:
    """PING's payload."""
    return _pack(layout.PING, **_attributes(message, layout.PING))


def parse_ping(payload: memoryview) -> Ping:
    """Inverse of `pack_ping`."""
    values = _fields(layout.PING, payload)
    _require(values["is_answer"] in (0, 1), "is_answer", "0 or 1", values["is_answer"])
    values["is_answer"] = bool(values["is_answer"])
    return Ping(**values)


def pack_drain(message: Drain) -> bytes:
    """DRAIN's payload."""
    return layout.DRAIN.codec.pack(message.session, pack_text(message.reason, 64))


def parse_drain(payload: memoryview) -> Drain:
    """Inverse of `pack_drain`."""
    session, reason = layout.DRAIN.codec.unpack(payload)
    return Drain(session, parse_text(reason, "reason"))


def pack_error(message: Error) -> bytes:
    """ERROR's payload."""
    values = _attributes(message, layout.ERROR)
    values.update(code=pack_text(message.code, 48), detail=pack_text(message.detail, 240))
    return _pack(layout.ERROR, **values)


def parse_error(payload: memoryview) -> Error:
    """Inverse of `pack_error`."""
    values = _fields(layout.ERROR, payload)
    code = parse_text(values["code"], "code")
    named = bool(code) and code.replace("_", "a").isalnum() and code == code.lower()
    _require(named, "code", "lower-case letters, digits and _", code)
    _require(values["is_fatal"] in (0, 1), "is_fatal", "0 or 1", values["is_fatal"])
    values.update(code=code, detail=parse_text(values["detail"], "detail"), is_fatal=bool(values["is_fatal"]))
    return Error(**values)


def _attributes(message: Message, table: Layout) -> dict[str, Any]:
    return {name: getattr(message, name) for name, _ in table.fields if name != "reserved"}


PACK: Final[dict[type[Any], tuple[FrameType, Callable[[Any], bytes]]]] = {
    Hello: (FrameType.HELLO, pack_hello),
    Open: (FrameType.OPEN, pack_open),
    Step: (FrameType.STEP, pack_step),
    Complete: (FrameType.COMPLETE, pack_complete),
    Commit: (FrameType.COMMIT, pack_commit),
    Reset: (FrameType.RESET, pack_reset),
    Cancel: (FrameType.CANCEL, pack_cancel),
    Ping: (FrameType.PING, pack_ping),
    Drain: (FrameType.DRAIN, pack_drain),
    Error: (FrameType.ERROR, pack_error),
}

PARSE: Final[dict[FrameType, Callable[[memoryview], Message]]] = {
    FrameType.HELLO: parse_hello,
    FrameType.OPEN: parse_open,
    FrameType.STEP: parse_step,
    FrameType.COMPLETE: parse_complete,
    FrameType.COMMIT: parse_commit,
    FrameType.RESET: parse_reset,
    FrameType.CANCEL: parse_cancel,
    FrameType.PING: parse_ping,
    FrameType.DRAIN: parse_drain,
    FrameType.ERROR: parse_error,
}
