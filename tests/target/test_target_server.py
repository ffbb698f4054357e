"""The target server and the drafter worker as real processes, OFF and ON.

Turns red when: greedy output differs from the model's own, a stream differs from a whole response, a refusal loses its
code, a cancelled request keeps its seat, a dead worker stops the server or goes unnoticed, a drain loses a request.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from pathlib import Path

import pytest
from target_services import TINY, ServerPair

from remote_dspark.contract import DraftMode

pytestmark = [pytest.mark.models, pytest.mark.services]

PROMPT = "def main(self, name):\n    "


@pytest.fixture(scope="session")
def greedy_reference() -> list[int]:
    """48 greedy tokens of the target alone: no drafts, no verifier, one token per forward."""
    import torch
    from tokenizers import Tokenizer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    ids = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")).encode(PROMPT).ids
    start = len(ids)
    with torch.inference_mode():
        for _ in range(48):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return list(ids[start:])


def growth(before: dict[str, int], after: dict[str, int], name: str) -> int:
    return after[name] - before[name]


def test_greedy_output_is_the_models_own(pair: ServerPair, greedy_reference: list[int]) -> None:
    before = pair.metrics()
    document = pair.complete(prompt=PROMPT, max_tokens=48, temperature=0, ignore_eos=True)
    [choice] = document["choices"]
    assert choice["token_ids"] == greedy_reference
    assert choice["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 48
    extension = document["dspark"]
    # Drafts were really used: fewer rounds than tokens, and every round accounted for.
    assert extension["rounds"] < 40
    assert extension["rounds"] + extension["accepted"] >= 48
    after = pair.metrics()
    assert growth(before, after, "dspark_rounds_total") == extension["rounds"]
    assert growth(before, after, "dspark_greedy_rounds_total") == extension["rounds"]
    assert growth(before, after, "dspark_sampled_rounds_total") == 0
    assert growth(before, after, "dspark_accepted_tokens_total") == extension["accepted"]
    assert growth(before, after, "dspark_draft_tokens_total") == 5 * extension["rounds"]
    assert growth(before, after, "dspark_emitted_tokens_total") == 48
    assert growth(before, after, "dspark_failed_rounds_total") == 0


def test_the_switch_decides_what_kind_of_round_a_sampled_request_gets(pair: ServerPair) -> None:
    before = pair.metrics()
    rounds = pair.complete(prompt=PROMPT, max_tokens=40, ignore_eos=True)["dspark"]["rounds"]
    after = pair.metrics()
    is_on = pair.mode == DraftMode.ON
    assert growth(before, after, "dspark_sampled_rounds_total") == (rounds if is_on else 0)
    assert growth(before, after, "dspark_greedy_rounds_total") == (0 if is_on else rounds)
    proposed = [growth(before, after, f"dspark_proposed_at_position_total.{i}") for i in range(5)]
    accepted = [growth(before, after, f"dspark_accepted_at_position_total.{i}") for i in range(5)]
    assert proposed == [rounds, *accepted[:4]]


def test_a_stream_is_the_whole_response_in_pieces(pair: ServerPair) -> None:
    whole = pair.complete(prompt=PROMPT, max_tokens=30, temperature=0)
    pieces = pair.stream(prompt=PROMPT, max_tokens=30, temperature=0)
    assert "".join(p["choices"][0]["text"] for p in pieces) == whole["choices"][0]["text"]
    token_ids = [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert [p["choices"][0]["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["usage"] == whole["usage"]
    assert 1 < len(pieces) < 30


def test_prompt_ids_and_text_are_the_same_request(pair: ServerPair) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")).encode(PROMPT).ids
    by_ids = pair.complete(prompt=ids, max_tokens=8, temperature=0)
    assert by_ids["choices"] == pair.complete(prompt=PROMPT, max_tokens=8, temperature=0)["choices"]


def test_a_stop_string_ends_the_text_before_it(pair: ServerPair) -> None:
    text = pair.complete(prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)["choices"][0]["text"]
    stop = text[10:13]
    document = pair.complete(prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
    [choice] = document["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_an_unseeded_request_reports_its_random_seed(pair: ServerPair) -> None:
    documents = [pair.complete(prompt=PROMPT, max_tokens=2) for _ in range(2)]
    seeds = [document["dspark"]["seed"] for document in documents]
    assert seeds[0] != seeds[1]
    assert not documents[0]["dspark"]["is_seeded"]
    assert pair.complete(prompt=PROMPT, max_tokens=1, seed=5)["dspark"] | {"generation": 0} == {
        "seed": 5,
        "is_seeded": True,
        "generation": 0,
        "rounds": 1,
        "accepted": pytest.approx(2.5, abs=2.5),
        "target_only_rounds": 0,
    }


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"prompt": ""}, 400, "bad-prompt"),
        ({"prompt": [1, 99_999]}, 400, "bad-prompt"),
        ({"prompt": "a", "top_k": 3}, 400, "unknown-field"),
        ({"prompt": "a", "max_tokens": 600}, 400, "context-length"),
        ({"prompt": [5] * 513, "max_tokens": 1}, 400, "context-length"),
    ],
)
def test_refusals_are_named(pair: ServerPair, fields: dict[str, object], status: int, code: str) -> None:
    before = pair.metrics()["dspark_requests_total"]
    found, document = pair.post(**fields)
    assert (found, document["error"]["code"]) == (status, code)
    assert pair.metrics()["dspark_requests_total"] == before


def test_a_full_context_ends_target_only_and_is_no_failure(pair: ServerPair) -> None:
    before = pair.metrics()
    document = pair.complete(prompt=[5, 6, 7] * 160, max_tokens=32, temperature=0, ignore_eos=True)
    after = pair.metrics()
    assert document["usage"]["total_tokens"] == 512
    assert growth(before, after, "dspark_target_only_rounds_total") > 0
    assert growth(before, after, "dspark_failed_rounds_total") == 0


def test_a_prompt_of_one_token_is_served(pair: ServerPair) -> None:
    document = pair.complete(prompt=[9], max_tokens=12, temperature=0, ignore_eos=True)
    assert document["usage"] == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}
    assert document["dspark"]["target_only_rounds"] == 0


def test_requests_side_by_side_do_not_change_each_other(pair: ServerPair, greedy_reference: list[int]) -> None:
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        fields = {"temperature": 0} if index % 2 else {"seed": index}
        document = pair.complete(prompt=PROMPT, max_tokens=48, ignore_eos=True, **fields)
        found[index] = document["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(7))
    assert [found[index] for index in (1, 3, 5)] == [greedy_reference] * 3


def test_identity_models_and_metrics_name_the_running_process(pair: ServerPair) -> None:
    identity = json.loads(pair.get("/identity")[1])
    assert identity["pid"] == pair.target.process.pid
    config = (pair.folder / "target.toml").read_bytes()
    assert identity["config_sha256"] == hashlib.sha256(config).hexdigest()
    assert identity["mode"] == pair.mode
    fields = Path(f"/proc/{identity['pid']}/stat").read_text().rpartition(")")[2].split()
    assert identity["start_ticks"] == int(fields[19])
    assert json.loads(pair.get("/v1/models")[1])["data"][0]["id"] == "tiny"
    assert pair.get("/nothing")[0] == 404


def test_a_client_that_goes_away_frees_its_seat(pair: ServerPair) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": 480, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    response.readline()
    before = pair.metrics()["dspark_emitted_tokens_total"]
    response.close()
    connection.close()
    deadline = time.monotonic() + 10
    while json.loads(pair.get("/health")[1])["active"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert json.loads(pair.get("/health")[1])["active"] == 0
    assert pair.metrics()["dspark_emitted_tokens_total"] - before < 480
