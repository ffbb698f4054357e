"""What a client may ask for: ``POST /v1/completions`` parsed into one frozen object, or refused by name.

Rules: unknown fields refuse (a silently ignored ``top_k`` would change what was measured); a field that exists in the
OpenAI API but has only one supported value is accepted with that value. Not covered: chat, several prompts, n > 1,
log probabilities, penalties, grammar.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Final

from remote_dspark.target.errors import RequestError

MAX_BODY_BYTES: Final = 4 << 20
MAX_STOPS: Final = 4
MIN_TEMPERATURE: Final = 0.01
MAX_TEMPERATURE: Final = 2.0
SEED_BITS: Final = 53
"""Seeds are written into receipts, whose integers end at 2^53 - 1."""

_SINGLE_VALUED: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1, None),
    "top_p": (1,),
    "echo": (False,),
    "logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (None, {}),
}
_READ: Final = frozenset(
    {"prompt", "max_tokens", "temperature", "seed", "stream", "stop", "ignore_eos", "model", "user"}
)


@dataclass(frozen=True)
class CompletionRequest:
    """One accepted request.

    Attributes:
        prompt: Text, or None when ids were given.
        prompt_ids: Token ids, or None when text was given.
        max_tokens: Tokens to emit, at least 1.
        temperature: Target temperature; 0 is greedy.
        seed: The request's seed; random when the client gave none.
        is_seeded: Whether the client gave it.
        stream: Server-sent events.
        stops: Stop strings, not emitted.
        ignore_eos: Go on after an end-of-text token; load drivers ask for it.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    max_tokens: int
    temperature: float
    seed: int
    is_seeded: bool
    stream: bool
    stops: tuple[str, ...]
    ignore_eos: bool


def parse_request(body: bytes, model_name: str) -> CompletionRequest:
    """Parse one body.

    Raises:
        RequestError: With a stable code and the field.
    """
    if len(body) > MAX_BODY_BYTES:
        raise RequestError("body-too-large", f"expected at most {MAX_BODY_BYTES} bytes, found {len(body)}")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise RequestError("bad-json", f"expected a JSON object, found {cause}") from cause
    if not isinstance(document, dict):
        raise RequestError("bad-json", f"expected a JSON object, found {type(document).__name__}")
    _require_known(document)
    if document.get("model", model_name) != model_name:
        raise RequestError("unknown-model", f"expected {model_name!r}, found {document['model']!r}", "model")
    prompt, prompt_ids = _parse_prompt(document.get("prompt"))
    seed = document.get("seed")
    return CompletionRequest(
        prompt=prompt,
        prompt_ids=prompt_ids,
        max_tokens=_integer(document, "max_tokens", 16, 1, 1 << 20),
        temperature=_temperature(document.get("temperature", 1.0)),
        seed=secrets.randbits(SEED_BITS) if seed is None else _integer(document, "seed", 0, 0, (1 << SEED_BITS) - 1),
        is_seeded=seed is not None,
        stream=_boolean(document, "stream"),
        stops=_parse_stops(document.get("stop")),
        ignore_eos=_boolean(document, "ignore_eos"),
    )


def _require_known(document: dict[str, Any]) -> None:
    for field, value in document.items():
        if field in _READ:
            continue
        if field not in _SINGLE_VALUED:
            raise RequestError("unknown-field", f"field {field!r} is not supported", field)
        allowed = _SINGLE_VALUED[field]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise RequestError("unsupported-value", f"{field}: expected {allowed[0]!r}, found {value!r}", field)


def _parse_prompt(value: object) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(value, str) and value:
        return value, None
    is_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    if is_ids and isinstance(value, list):
        return None, tuple(value)
    raise RequestError("bad-prompt", "expected a non-empty string or a non-empty list of token ids", "prompt")


def _parse_stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("bad-stop", f"expected at most {MAX_STOPS} non-empty strings, found {value!r}", "stop")
    return tuple(stops)


def _integer(document: dict[str, Any], field: str, default: int, low: int, high: int) -> int:
    found = document.get(field, default)
    if type(found) is not int or not low <= found <= high:
        raise RequestError("out-of-range", f"{field}: expected an integer of {low}..{high}, found {found!r}", field)
    return found


def _boolean(document: dict[str, Any], field: str) -> bool:
    found = document.get(field, False)
    if type(found) is not bool:
        raise RequestError("bad-type", f"{field}: expected true or false, found {found!r}", field)
    return found


def _temperature(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isinstance(value, int | float) and (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):
        return float(value)
    raise RequestError(
        "out-of-range",
        f"temperature: expected 0 or {MIN_TEMPERATURE}..{MAX_TEMPERATURE}, found {value!r}",
        "temperature",
    )
