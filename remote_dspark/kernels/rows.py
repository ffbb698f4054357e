"""What goes into and comes out of a sampled position: the control block, the rows, the error flags.

The control block is one int32 [B, 16] tensor because a graph replay then needs one copy of 64 bytes per request, and
a program one load. Its layout is here and nowhere else.

Rules: tensors are never moved between devices here; ids are global; a row with an error flag carries no entries.
Not covered: how rows travel (`wire`), and how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch

from remote_dspark.contract import MAX_TEST_REQUESTS, TICKET_TOTAL

CONTROL_WORDS = 16
"""Words of one request in the control block: 64 bytes, two memory sectors."""


class Control(IntEnum):
    """Word offsets in the control block. Unsigned values are stored by bit pattern."""

    KEY0 = 0
    KEY1 = 1
    ROUND_LOW = 2
    ROUND_HIGH = 3
    POSITION = 4
    """Absolute position of the first draft token; position i of a chain adds i."""
    TAU_BITS = 5
    """FP32 bit pattern of the draft temperature; ignored in a greedy row."""
    GREEDY = 6
    GENERATION_LOW = 7
    GENERATION_HIGH = 8
    EPOCH_LOW = 9
    EPOCH_HIGH = 10
    NUM_DRAFT = 11
    """Verifier: draft tokens of this request."""
    FIRST_ROW = 12
    """Verifier: index of this request's first target row, so that a rank may hold any subset of the requests."""


class RowError(IntFlag):
    """Why a row defines no distribution; the device's form of `oracle.errors.RowFault`. Sticky for the request."""

    NONE = 0
    NAN = 1
    POSITIVE_INFINITY = 2
    ZERO_MASS = 4
    """Every real column is -inf."""
    REMAINDER = 8
    """Tickets left after flooring are outside [0, entries): a broken computation."""
    TEMPERATURE = 16
    """tau is not a positive finite number in a sampled row."""
    CONTINUATION = 32
    """The previous token is outside the vocabulary."""
    PROPOSAL = 64
    """Verifier: a draft row or draft token that cannot have been drawn (order, range, total, or q(x) = 0)."""
    MISSING = 128
    """Verifier: a target row of the request does not exist, or its result never came."""
    PEER = 256
    """Physical pair: the position was not exchanged, or not acknowledged; see `pair_rank.PairError`."""


@dataclass(frozen=True)
class SampledRows:
    """Rows of one position for B requests.

    Attributes:
        ids: int32 [B, k], strictly ascending in the first ``count`` columns, 0 after them.
        tickets: int32 [B, k], counts of 2**24; entries of the support without a ticket stay as 0.
        q: float32 [B, k], ``tickets / 2**24`` exactly.
        count: int32 [B], entries of the support: min(k, finite logits); 0 in greedy and refused rows.
        token: int32 [B], the drawn token; in a refused row an in-range 0 that is no proposal.
        weights: int64 [B, k] fixed-point weights of the entries, or None when they were not requested.
        error: int32 [B], `RowError` flags.
        stamp: int64 [B, 3]: generation, round, epoch of the inputs this row was computed from.
    """

    ids: torch.Tensor
    tickets: torch.Tensor
    q: torch.Tensor
    count: torch.Tensor
    token: torch.Tensor
    weights: torch.Tensor | None
    error: torch.Tensor
    stamp: torch.Tensor

    def sparse_row(self, row: int) -> tuple[list[int], list[int]]:
        """Ids and positive tickets of one row, as the wire wants them (entries without a ticket dropped)."""
        ids, tickets = self.ids[row].tolist(), self.tickets[row].tolist()
        kept = [(token, count) for token, count in zip(ids, tickets, strict=True) if count > 0]
        return [token for token, _ in kept], [count for _, count in kept]


@dataclass(frozen=True)
class VerifiedRounds:
    """What one verification commits, for R requests of depth up to D.

    Attributes:
        num_accepted: int32 [R], accepted draft tokens.
        tokens: int32 [R, D + 1], ``num_accepted`` draft tokens, then the correction or bonus token, then 0.
        zero_residual: int32 [R], 1 where the residual was empty after a rejection and p was sampled instead.
        error: int32 [R], `RowError` flags; a request with flags commits nothing (0 accepted, tokens 0).
        totals: int64 [R, D + 1], S of each target row, 0 beyond the depth.
        stamp: int64 [R, 3]: generation, round, epoch.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    zero_residual: torch.Tensor
    error: torch.Tensor
    totals: torch.Tensor
    stamp: torch.Tensor


def _u32_words(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of int64 values, by bit pattern in int32."""
    wide = values.to(torch.int64)
    # truncation to 32 bits keeps the bit pattern
    return wide.to(torch.int32), (wide >> 32).to(torch.int32)


def pack_control(
    *,
    tau: torch.Tensor,
    keys: torch.Tensor,
    rounds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    generations: torch.Tensor | None = None,
    epochs: torch.Tensor | None = None,
    num_draft: torch.Tensor | None = None,
    first_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """Builds the control block.

    Args:
        tau: float32 [B] draft temperatures; a greedy row's value is ignored.
        keys: integer [B, 2], u32 values.
        rounds: integer [B], in [0, 2**32): exhaustion refuses.
        positions: integer [B], absolute position of the first draft token.
        greedy: bool [B], rows at temperature 0.
        generations: integer [B] for the stamp, 0 by default.
        epochs: integer [B] for the stamp, 0 by default.
        num_draft: integer [B], draft tokens to verify; verifier only.
        first_row: integer [B], first target row; verifier only.

    Returns:
        A new int32 [B, 16] on the device of ``tau``.

    Raises:
        ValueError: Shapes, more requests than `MAX_TEST_REQUESTS`, or a round or position that does not fit 32 bits.
    """
    num_rows = tau.shape[0]
    if not 0 < num_rows <= MAX_TEST_REQUESTS or keys.shape != (num_rows, 2):
        raise ValueError(f"expected 1..{MAX_TEST_REQUESTS} requests and keys [B, 2], found {num_rows}, {keys.shape}")
    for name, values in (("rounds", rounds), ("positions", positions)):
        wide = values.to(torch.int64)
        if values.shape != (num_rows,) or bool(((wide < 0) | (wide >= 1 << 32)).any()):
            raise ValueError(f"{name} must be [B] in [0, 2**32), found {values.tolist()}; reset the generation")
    control = torch.zeros((num_rows, CONTROL_WORDS), dtype=torch.int32, device=tau.device)
    control[:, Control.KEY0 : Control.KEY1 + 1] = keys.to(torch.int64).to(torch.int32)
    control[:, Control.TAU_BITS] = tau.to(torch.float32).contiguous().view(torch.int32)
    control[:, Control.POSITION] = positions.to(torch.int64).to(torch.int32)
    control[:, Control.GREEDY] = greedy.to(torch.int32)
    for offset, narrow in ((Control.NUM_DRAFT, num_draft), (Control.FIRST_ROW, first_row)):
        if narrow is not None:
            control[:, offset] = narrow.to(torch.int32)
    wide_fields = ((Control.ROUND_LOW, rounds), (Control.GENERATION_LOW, generations), (Control.EPOCH_LOW, epochs))
    for offset, field in wide_fields:
        if field is not None:
            control[:, offset], control[:, offset + 1] = _u32_words(field)
    return control


def stamp_of(control: torch.Tensor) -> torch.Tensor:
    """int64 [B, 3]: generation, round and epoch of a control block."""
    wide = control.to(torch.int64)
    pairs = [Control.GENERATION_LOW, Control.ROUND_LOW, Control.EPOCH_LOW]
    return torch.stack([(wide[:, low] & 0xFFFFFFFF) | (wide[:, low + 1] << 32) for low in pairs], dim=1)


def require_rows(rows: SampledRows) -> SampledRows:
    """Checks what any consumer may rely on; for hosts and tests, not for the hot path.

    Raises:
        ValueError: A row without an error whose tickets are negative or do not sum to 2**24 (greedy rows: to 0).
    """
    totals = rows.tickets.to(torch.int64).sum(dim=1)
    wanted = torch.where((rows.error == 0) & (rows.count > 0), TICKET_TOTAL, 0)
    if bool((totals != wanted).any()) or bool((rows.tickets < 0).any()):
        raise ValueError(f"expected ticket sums {wanted.tolist()}, found {totals.tolist()}; discard the whole reply")
    return rows
