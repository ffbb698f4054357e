"""What a recorded session must show, recomputed from the target model alone and from the oracle.

A hidden state of the wrong row costs acceptance and a draw under the wrong counter costs reproducibility; neither is
ever an error or a wrong distribution, so only these checks would notice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from target_services import TINY

from remote_dspark.oracle.philox import derive_key
from remote_dspark.oracle.verify import DraftRow, verify_round
from remote_dspark.oracle.weights import fixed_weights
from remote_dspark.wire.capture import Record, replay_capture
from remote_dspark.wire.messages import Commit, Open, Reply, State, Step
from remote_dspark.wire.reply import reply_row


class SessionTrace:
    """A decoded session and the target model, run without drafts and without a cache."""

    def __init__(self, records: list[Record]) -> None:
        import torch
        from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

        self._messages = [message for _, message in replay_capture(records)]
        self._model: Any = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
        self._torch = torch

    def _forward(self, ids: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)

    def _of(self, kind: type, generation: int) -> list[Any]:
        return [m for m in self._messages if isinstance(m, kind) and m.generation == generation]

    def require_true_states(self, generation: int, completion: list[int]) -> None:
        """The rows sent for each committed position are the target's own hidden states there."""
        sent = self._of(State, generation)
        ids = np.concatenate([message.token_ids for message in sent])
        bits = np.concatenate([message.rows for message in sent]).view("<u2")
        assert [message.position for message in sent] == np.cumsum([0] + [len(m.token_ids) for m in sent[:-1]]).tolist()
        layers = json.loads((TINY / "drafter" / "config.json").read_text())["target_layer_ids"]
        hidden = self._forward(ids.tolist()).hidden_states
        expected = self._torch.cat([hidden[layer + 1][0] for layer in layers], dim=-1).numpy()
        found = (bits.astype(np.uint32) << 16).view(np.float32)
        # bf16 keeps 8 significant bits; rows of neighbouring positions or layers differ by far more.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7)
        # The prompt comes first; the states of the last round are not sent, as nothing is drafted from them.
        assert any(ids[start:].tolist() == completion[: len(ids) - start] for start in range(1, 8))

    def require_oracle_outcomes(self, generation: int) -> int:
        """Every COMMIT of a request at T = 1 is the oracle's decision over the q of its REPLY. Returns their number."""
        [opened] = self._of(Open, generation)
        key = derive_key(opened.seed, generation)
        ids: list[int] = []
        num_commits = 0
        for message in self._messages:
            if isinstance(message, State) and message.generation == generation:
                ids += message.token_ids.tolist()
            elif isinstance(message, Step) and message.requests[0].generation == generation:
                [asked] = message.requests
                prefix = [*ids, asked.anchor_token]
                assert len(prefix) == asked.anchor_position + 1
                reply = next(m for m in self._messages if isinstance(m, Reply) and m.batch == message.batch)
                rows = [reply_row(reply, 0, position) for position in range(reply.depth)]
                tokens = [row.token for row in rows]
                drafts = [DraftRow(row.ids.astype(np.int64), row.tickets) for row in rows]
                logits = self._forward([*prefix, *tokens]).logits[0, asked.anchor_position :].numpy()
                target = [fixed_weights(row, 1.0) for row in logits]
                outcome = verify_round(target, drafts, tokens, key, asked.round, asked.anchor_position + 1)
                committed = self._of(Commit, generation)[num_commits]
                assert (committed.round, committed.num_accepted) == (asked.round, outcome.num_accepted)
                assert committed.next_token == outcome.tokens[-1]
                num_commits += 1
        return num_commits
