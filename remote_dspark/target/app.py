"""HTTP in front of the engine: completions, models, health, metrics, identity.

Rules: a handler parses, hands over, and renders; it never touches the model. Every refusal has a stable code in
``error.code``. Token ids travel beside text, in whole responses and in every streamed chunk, so that a load driver
counts tokens and not chunks.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from remote_dspark.contract import ServerState
from remote_dspark.target.engine import BusyError, Engine
from remote_dspark.target.errors import RequestError
from remote_dspark.target.identity import Identity
from remote_dspark.target.metrics import Counters
from remote_dspark.target.requests import MAX_BODY_BYTES, CompletionRequest, parse_request
from remote_dspark.target.seat import Emitted, Failure, Finish, Seat

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
DISCONNECT_POLL_S: Final = 1.0


def build_app(engine: Engine, identity: Identity, counters: Counters) -> Starlette:
    """The application; it starts nothing."""
    handlers = _Handlers(engine, identity, counters)
    return Starlette(
        routes=[
            Route("/v1/completions", handlers.completions, methods=["POST"]),
            Route("/v1/models", handlers.models),
            Route("/health", handlers.health),
            Route("/metrics", handlers.metrics),
            Route("/identity", handlers.identity),
        ]
    )


class _Handlers:
    def __init__(self, engine: Engine, identity: Identity, counters: Counters) -> None:
        self._engine = engine
        self._identity = identity
        self._counters = counters
        self._created = int(time.time())

    async def health(self, _: Request) -> Response:
        state = self._engine.state
        document = {"state": state.value, **self._engine.load}
        return JSONResponse(document, status_code=200 if state is ServerState.READY else 503)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._counters.render(), media_type=METRICS_TYPE)

    async def identity(self, _: Request) -> Response:
        return JSONResponse(self._identity.to_document())

    async def models(self, _: Request) -> Response:
        name = self._identity.config.model_name
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "remote-dspark"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, http: Request) -> Response:
        events: asyncio.Queue[Emitted | Failure] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: Emitted | Failure) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            request = parse_request(await _read_body(http), self._identity.config.model_name)
            seat = self._engine.submit(request, sink)
        except RequestError as cause:
            return _error(400, cause.code, str(cause), cause.field)
        except BusyError as cause:
            return _error(503, "busy", str(cause), None)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = self._identity.config.model_name
        if request.stream:
            return StreamingResponse(_stream(head, seat, events), media_type="text/event-stream")
        return await _whole(http, head, seat, events)


async def _read_body(http: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestError("body-too-large", f"expected at most {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _whole(http: Request, head: dict[str, Any], seat: Seat, events: asyncio.Queue[Emitted | Failure]) -> Response:
    text: list[str] = []
    token_ids: list[int] = []
    while True:
        try:
            event = await asyncio.wait_for(events.get(), DISCONNECT_POLL_S)
        except TimeoutError:
            if await http.is_disconnected():
                seat.is_cancelled = True
                return Response(status_code=499)
            continue
        if isinstance(event, Failure):
            return _error(500, event.code, event.message, None)
        text.append(event.text)
        token_ids.extend(event.token_ids)
        if event.finish:
            choices = [_choice("".join(text), token_ids, event.finish)]
            return JSONResponse({**head, "choices": choices, **_accounting(seat)})


async def _stream(head: dict[str, Any], seat: Seat, events: asyncio.Queue[Emitted | Failure]) -> AsyncIterator[bytes]:
    try:
        while True:
            event = await events.get()
            if isinstance(event, Failure):
                yield _sse(_error_document(event.code, event.message, None))
                return
            document = {**head, "choices": [_choice(event.text, list(event.token_ids), event.finish)]}
            if event.finish:
                document |= _accounting(seat)
            yield _sse(document)
            if event.finish:
                yield b"data: [DONE]\n\n"
                return
    finally:
        # Reached on a disconnect as well; a finished seat ignores it.
        seat.is_cancelled = True


def _choice(text: str, token_ids: list[int], finish: Finish | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": token_ids, "logprobs": None, "finish_reason": finish}


def _accounting(seat: Seat) -> dict[str, Any]:
    request: CompletionRequest = seat.request
    usage = {
        "prompt_tokens": seat.num_prompt,
        "completion_tokens": seat.num_emitted,
        "total_tokens": seat.num_prompt + seat.num_emitted,
    }
    extension = {
        "seed": request.seed,
        "is_seeded": request.is_seeded,
        "generation": seat.generation,
        "rounds": seat.num_rounds,
        "accepted": seat.num_accepted,
        "target_only_rounds": seat.num_target_only,
    }
    return {"usage": usage, "dspark": extension}


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, code: str, message: str, field: str | None) -> Response:
    return JSONResponse(_error_document(code, message, field, status), status_code=status)


def _error_document(code: str, message: str, field: str | None, status: int = 500) -> dict[str, Any]:
    kind = "invalid_request_error" if status == 400 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
