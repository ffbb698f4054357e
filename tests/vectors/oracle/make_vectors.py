"""Makes the oracle's test vectors: `python tests/vectors/oracle/make_vectors.py` rewrites the JSON files beside it.

A vector is what another implementation (a kernel, a verifier in another language) is compared with, so the files hold
inputs and outputs only: integers, lists, and FP32 values as the 32 bits of their encoding. The known answers of
Philox are literals here, copied from the Random123 distribution, not computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from remote_dspark.contract import Q_SEMANTICS, Q_STANDARD, WEIGHT_ONE, Domain
from remote_dspark.oracle.adversarial import adversarial_logits
from remote_dspark.oracle.philox import acceptance_draw, derive_key, philox4x32, proposal_draw, wide_draw
from remote_dspark.oracle.sample_row import SampledRow, sample_row
from remote_dspark.oracle.tickets import allocate
from remote_dspark.oracle.verify import DraftRow, verify_round
from remote_dspark.oracle.weights import fixed_weights

HERE = Path(__file__).parent
ONES = 0xFFFFFFFF

KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def bits(logits: np.ndarray) -> list[int]:
    """FP32 values as their 32-bit encodings: exact, and legal JSON for infinities."""
    return [int(value) for value in logits.astype(np.float32).view(np.uint32)]


def philox_vectors() -> dict[str, Any]:
    """Known answers, keys, and one draw of every kind."""
    for counter, key, words in KNOWN_ANSWERS:
        if list(philox4x32(tuple(counter), tuple(key))) != words:
            raise SystemExit(f"philox4x32({counter}, {key}) is not the published answer; no vectors are written")
    seeds = [(0, 0), (1, 0), (0, 1), (42, 7), (2**64 - 1, 2**64 - 1)]
    places = [(0, 0), (1, 17), (2**32 - 1, 2**32 - 1)]
    return {
        "known_answers": [{"counter": c, "key": k, "words": w} for c, k, w in KNOWN_ANSWERS],
        # decimal strings: 64-bit integers do not survive every JSON reader
        "keys": [{"seed": str(s), "generation": str(g), "key": list(derive_key(s, g))} for s, g in seeds],
        "draws": [
            {
                "key": list(key),
                "round": round,
                "position": position,
                "proposal24": proposal_draw(key, round, position),
                "acceptance32": acceptance_draw(key, round, position),
                "correction64": str(wide_draw(key, round, position, Domain.CORRECTION)),
                "bonus64": str(wide_draw(key, round, position, Domain.BONUS)),
            }
            for key in (derive_key(*seed) for seed in seeds[:4])
            for round, position in places
        ],
    }


def ticket_vectors() -> list[dict[str, Any]]:
    """Weights to counts in both semantics; zero counts still in place."""
    rows = [[1], [1, 1, 1], [5, 7, 7], [0, WEIGHT_ONE, 0], [1] * 5, [WEIGHT_ONE] * 33, [1, WEIGHT_ONE], [3, 0, 3, 2]]
    vectors = []
    for weights in rows:
        first = weights.index(max(weights))
        counts = {name: allocate(np.array(weights, dtype=np.int64), name, first).tolist() for name in Q_SEMANTICS}
        vectors.append({"weights": weights, "first_rank_index": first, "tickets": counts})
    return vectors


def row_document(row: SampledRow) -> dict[str, Any]:
    """A sampled row as JSON values."""
    return {
        "ids": row.ids.tolist(),
        "tickets": row.tickets.tolist(),
        "weights": row.weights.tolist(),
        "token": row.token,
        "draw": row.draw,
        "error": row.error,
    }


def row_vectors() -> list[dict[str, Any]]:
    """Logits to a sampled row: the adversarial families, a greedy row, and every refusal."""
    cases = [(*adversarial_logits(2026, index, 48), 16 + 16 * (index % 2)) for index in range(20)]
    plain = np.linspace(-3, 2, 40).astype(np.float32)
    bad = [plain.copy() for _ in range(3)]
    bad[0][39], bad[1][0], bad[2][:] = np.nan, np.inf, -np.inf
    cases += [(plain, 0.0, 32), *((row, 0.7, 32) for row in bad)]
    vectors = []
    for index, (logits, tau, k) in enumerate(cases):
        key, semantics = derive_key(2026, index), Q_SEMANTICS[index % 2]
        row = sample_row(logits, tau, k, semantics, key, 3, 100 + index)
        vectors.append(
            {
                "logit_bits": bits(logits),
                "tau_bits": bits(np.array([tau]))[0],
                "k": k,
                "semantics": semantics,
                "key": list(key),
                "round": 3,
                "position": 100 + index,
                "row": row_document(row),
            }
        )
    return vectors


def round_vectors() -> list[dict[str, Any]]:
    """Whole rounds of depth 5 over 64 tokens at different temperatures on the two sides."""
    vectors = []
    for index in range(12):
        rng, key = np.random.default_rng((2026, index)), derive_key(index, 0)
        drafts = (rng.standard_normal((5, 64)) * 2).astype(np.float32)
        noise = (0.0, 0.3, 1.0)[index % 3]
        targets = (np.vstack([drafts, drafts[:1]]) + noise * rng.standard_normal((6, 64))).astype(np.float32)
        rows = [sample_row(row, 0.7, 32, Q_STANDARD, key, index, 50 + place) for place, row in enumerate(drafts)]
        weights = [fixed_weights(row, 1.0) for row in targets]
        proposed = [row.token for row in rows]
        outcome = verify_round(weights, [DraftRow(row.ids, row.tickets) for row in rows], proposed, key, index, 50)
        vectors.append(
            {
                "target_weights": [row.tolist() for row in weights],
                "draft_rows": [{"ids": row.ids.tolist(), "tickets": row.tickets.tolist()} for row in rows],
                "proposed": proposed,
                "key": list(key),
                "round": index,
                "first_position": 50,
                "num_accepted": outcome.num_accepted,
                "tokens": list(outcome.tokens),
                "final_kind": outcome.final_kind.value,
                "acceptance_draws": list(outcome.acceptance_draws),
                "final_draw": str(outcome.final_draw),
            }
        )
    return vectors


def make() -> dict[str, bytes]:
    """File names and their bytes."""
    documents = {
        "philox.json": philox_vectors(),
        "tickets.json": ticket_vectors(),
        "rows.json": row_vectors(),
        "rounds.json": round_vectors(),
    }
    return {name: (json.dumps(document, sort_keys=True) + "\n").encode() for name, document in documents.items()}


def main() -> int:
    """Writes the files."""
    for name, content in make().items():
        (HERE / name).write_bytes(content)
        sys.stderr.write(f"{name}: {len(content)} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
