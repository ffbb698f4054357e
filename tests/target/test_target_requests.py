"""Requests, metrics text and text streaming: the parts of the server without a model.

Turns red when: an unknown field is accepted, a refusal loses its code, a metric is missing or misnamed, a stop string
or half a character reaches the client.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remote_dspark.contract import Metric
from remote_dspark.target.errors import ModelError, RequestError
from remote_dspark.target.metrics import Counters, parse_metrics
from remote_dspark.target.requests import SEED_BITS, parse_request
from remote_dspark.target.text import TextStream, Tokenizer


def parse(**fields: object) -> object:
    return parse_request(json.dumps({"prompt": "a", **fields}).encode(), "tiny")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"top_k": 5}, "unknown-field", "top_k"),
        ({"n": 2}, "unsupported-value", "n"),
        ({"n": True}, "unsupported-value", "n"),
        ({"top_p": 0.9}, "unsupported-value", "top_p"),
        ({"logprobs": 1}, "unsupported-value", "logprobs"),
        ({"prompt": ""}, "bad-prompt", "prompt"),
        ({"prompt": []}, "bad-prompt", "prompt"),
        ({"prompt": [1, True]}, "bad-prompt", "prompt"),
        ({"prompt": ["a"]}, "bad-prompt", "prompt"),
        ({"max_tokens": 0}, "out-of-range", "max_tokens"),
        ({"max_tokens": 1.5}, "out-of-range", "max_tokens"),
        ({"temperature": -1}, "out-of-range", "temperature"),
        ({"temperature": 0.001}, "out-of-range", "temperature"),
        ({"temperature": True}, "out-of-range", "temperature"),
        ({"seed": -1}, "out-of-range", "seed"),
        ({"seed": 1 << SEED_BITS}, "out-of-range", "seed"),
        ({"stream": 1}, "bad-type", "stream"),
        ({"stop": [""]}, "bad-stop", "stop"),
        ({"stop": list("abcde")}, "bad-stop", "stop"),
        ({"model": "other"}, "unknown-model", "model"),
    ],
)
def test_every_refusal_has_a_code_and_a_field(fields: dict[str, object], code: str, field: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse(**fields)
    assert (refusal.value.code, refusal.value.field) == (code, field)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_request(body, "tiny")
    assert refusal.value.code == "bad-json"


def test_single_valued_fields_of_the_api_are_accepted() -> None:
    request = parse_request(
        json.dumps(
            {"prompt": [1, 2], "n": 1, "top_p": 1.0, "echo": False, "logprobs": None, "model": "tiny", "stop": "x"}
        ).encode(),
        "tiny",
    )
    assert (request.prompt, request.prompt_ids, request.stops) == (None, (1, 2), ("x",))
    assert (request.max_tokens, request.temperature, request.is_seeded) == (16, 1.0, False)


def test_unseeded_requests_do_not_share_a_seed() -> None:
    seeds = {parse_request(b'{"prompt": "a"}', "tiny").seed for _ in range(50)}
    assert len(seeds) == 50


def test_metrics_text_has_every_name_of_the_contract_from_the_start() -> None:
    counters = Counters(depth=3)
    found = parse_metrics(counters.render())
    expected = {str(m) for m in Metric} - {
        Metric.ACCEPTED_AT_POSITION,
        Metric.PROPOSED_AT_POSITION,
        Metric.REPLIES_REJECTED,
    }
    for metric in (Metric.ACCEPTED_AT_POSITION, Metric.PROPOSED_AT_POSITION):
        expected |= {f"{metric}.{position}" for position in range(3)}
    assert found == dict.fromkeys(expected, 0)


def test_counters_grow_and_survive_the_round_trip() -> None:
    counters = Counters(depth=1)
    counters.add(Metric.ROUNDS, 3)
    counters.add(Metric.REPLIES_REJECTED, label="step_timeout")
    counters.add(Metric.ACCEPTED_AT_POSITION, 2, "0")
    found = parse_metrics(counters.render())
    assert found["dspark_rounds_total"] == 3
    assert found["dspark_replies_rejected_total.step_timeout"] == 1
    assert found["dspark_accepted_at_position_total.0"] == 2
    for amount, label in ((-1, None), (1, "x")):
        with pytest.raises(ValueError, match="counter"):
            counters.add(Metric.ROUNDS, amount, label)
    with pytest.raises(ValueError, match="metrics"):
        parse_metrics("dspark_rounds_total 1.5\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One id per byte: the hardest case for half characters."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer(path)


def stream(tokenizer: Tokenizer, text: str, stops: list[str]) -> list[str]:
    pieces = []
    out = TextStream(tokenizer, stops)
    ids = tokenizer.encode(text)
    for index, token in enumerate(ids):
        stopped = out.push(token)
        pieces.append(out.take(final=stopped or index == len(ids) - 1))
        if stopped:
            break
    return pieces


def test_half_characters_wait_for_their_other_half(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, "aé€😀z", [])
    assert "".join(pieces) == "aé€😀z"
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "z"]


def test_a_stop_string_is_never_sent_not_even_its_beginning(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, "one END two", ["END", "never"])
    assert "".join(pieces) == "one "
    assert "E" not in "".join(pieces)
    pieces = stream(tokenizer, "an ENemy", ["END"])
    assert "".join(pieces) == "an ENemy"
    assert pieces[3] == ""


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")
