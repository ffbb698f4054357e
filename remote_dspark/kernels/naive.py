"""Torch references of every kernel: readable, vectorised over rows, exact after one exponential.

The drafter on a CPU samples with these; kernels are compared with them, and both with `oracle`. BF16 rounding is done
on integers because a cast's rounding differs between backends, and the Markov product has a fixed order of additions
because its sum feeds a rounding (DECISIONS 7).

Covered: sampled head, dense producer, verifier. Not covered: speed, devices other than the caller's tensors'.
"""

from __future__ import annotations

import torch

from remote_dspark.contract import Q_FLOOR_FIRST, Q_SEMANTICS, TICKET_BITS, TICKET_TOTAL, WEIGHT_ONE, Domain
from remote_dspark.kernels.rows import RowError, SampledRows

_MASK32 = 0xFFFFFFFF
_EXCLUDED = -(1 << 31)
"""Key of a column that cannot be selected (-inf): below the key of every finite value."""

LANES = 32
"""Partial sums of the Markov product: index i of 256 goes to lane i mod 32, in ascending order of i."""

Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Either bias rows bf16 [B, V], or (W1[prev] bf16 [B, r], W2 bf16 [V, r]) with r a multiple of 32."""


def round_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """FP32 values rounded to BF16, nearest even, kept in FP32; NaN stays NaN.

    Args:
        values: float32, any shape.

    Returns:
        A new float32 tensor whose low 16 bits are 0 (NaN excepted).
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _MASK32
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return torch.where(values.isnan(), values, rounded.to(torch.int32).view(torch.float32))


def markov_bias(w1_rows: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Markov bias ``W1[prev] . W2``: FP32 products and sums in a fixed order, rounded to BF16.

    A product of two BF16 values is exact in FP32, so a fused multiply-add gives the same bits as these two steps.

    Args:
        w1_rows: bf16 [B, r], rows of W1 of the previous tokens.
        w2: bf16 [V, r].

    Returns:
        bf16 [B, V]: what a cache stores and what the kernel computes, bit for bit.
    """
    rank = w2.shape[1]
    if rank % LANES:
        raise ValueError(f"the Markov rank must be a multiple of {LANES}, found {rank}")
    weights = w2.to(torch.float32)
    rows = []
    for row in w1_rows.to(torch.float32):
        lanes = torch.zeros((w2.shape[0], LANES), dtype=torch.float32, device=w2.device)
        for start in range(0, rank, LANES):
            lanes = lanes + weights[:, start : start + LANES] * row[start : start + LANES]
        # pairs of neighbours, five levels
        while lanes.shape[1] > 1:
            lanes = lanes[:, 0::2] + lanes[:, 1::2]
        rows.append(lanes[:, 0])
    # the low half of a rounded value is zero, so this cast has nothing left to round
    return round_to_bf16(torch.stack(rows)).to(torch.bfloat16)


def corrected_logits(logits: torch.Tensor, bias: Bias) -> torch.Tensor:
    """Base logits plus Markov bias, rounded to BF16, in FP32.

    Args:
        logits: bf16 [B, V].
        bias: See `Bias`.

    Returns:
        float32 [B, V].
    """
    rows = bias if isinstance(bias, torch.Tensor) else markov_bias(*bias)
    return round_to_bf16(logits.to(torch.float32) + rows.to(torch.float32))


def philox(counter: tuple[torch.Tensor, torch.Tensor, int, int], keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 over rows; equal to `oracle.philox.philox4x32`.

    Args:
        counter: (round [B], position [B], domain, draw); tensors are taken modulo 2**32.
        keys: integer [B, 2].

    Returns:
        Four int64 [B] words in [0, 2**32).
    """
    c0, c1 = (word.to(torch.int64) & _MASK32 for word in counter[:2])
    c2, c3 = torch.full_like(c0, int(counter[2])), torch.full_like(c0, counter[3])
    k0, k1 = (keys[:, i].to(torch.int64) & _MASK32 for i in range(2))
    for _ in range(10):
        # int64 multiplication wraps modulo 2**64, which keeps all 64 bits of the unsigned product
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & _MASK32, (product1 >> 32) & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK32, high0 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of the values; -0 equals +0, -inf is excluded. NaN has no meaning here."""
    # adding +0 turns -0 into +0
    bits = (values + 0.0).contiguous().view(torch.int32).to(torch.int64)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(values == -torch.inf, _EXCLUDED, keys)


def select_support(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest values of each row, ties to the lowest id, in ascending id.

    Args:
        values: float32 [B, V] without NaN.
        k: Entries wanted.

    Returns:
        ids: int64 [B, min(k, V)]; V in the columns beyond the row's finite values.
        first: int64 [B], index into ids of rank 1.
    """
    vocab_size = values.shape[1]
    keys = order_keys(values)
    columns = torch.arange(vocab_size, device=values.device)
    packed = (keys << 32) | (_MASK32 - columns)
    top = torch.topk(packed, min(k, vocab_size), dim=1, sorted=True).values
    ids = _MASK32 - (top & _MASK32)
    ids = torch.where((top >> 32) == _EXCLUDED, vocab_size, ids)
    leader = ids[:, :1]
    ids = ids.sort(dim=1).values
    return ids, (ids < leader).sum(dim=1)


def fixed_weights(values: torch.Tensor, top: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """``floor(exp((l - max) / tau) * 2**38)`` in int64 (DECISIONS 1).

    Args:
        values: float32 [B, n].
        top: float32 [B, 1], the row's maximum.
        tau: float32 [B, 1].
    """
    exponentials = torch.exp((values - top) / tau)
    return torch.floor(exponentials.to(torch.float64) * WEIGHT_ONE).to(torch.int64)


def allocate_tickets(weights: torch.Tensor, first: torch.Tensor, semantics: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tickets of each row in int64, and whether the remainder is in range.

    Args:
        weights: int64 [B, n], padded with 0; the total of every row is positive.
        first: int64 [B], index of rank 1.
        semantics: One of `contract.Q_SEMANTICS`.

    Returns:
        int64 [B, n] and bool [B].
    """
    if semantics not in Q_SEMANTICS:
        raise ValueError(f"expected one of {Q_SEMANTICS}, found {semantics!r}")
    total = weights.sum(dim=1, keepdim=True)
    scaled = weights << TICKET_BITS
    counts = torch.div(scaled, total, rounding_mode="floor")
    left = TICKET_TOTAL - counts.sum(dim=1)
    in_range = (left >= 0) & (left < weights.shape[1])
    if semantics == Q_FLOOR_FIRST:
        counts.scatter_add_(1, first[:, None], left[:, None])
    else:
        # a stable sort of the negated remainders keeps equal ones in id order
        order = torch.argsort(-(scaled - counts * total), dim=1, stable=True)
        one_each = (torch.arange(weights.shape[1], device=weights.device)[None] < left[:, None]).to(torch.int64)
        counts.scatter_add_(1, order, one_each)
    return counts, in_range


def _value_errors(values: torch.Tensor) -> torch.Tensor:
    """`RowError` flag of corrected rows, int32 [B]; a NaN is named before an infinity, as the oracle does."""
    error = torch.where((values == -torch.inf).all(dim=1), int(RowError.ZERO_MASS), 0)
    error = torch.where((values == torch.inf).any(dim=1), int(RowError.POSITIVE_INFINITY), error)
    return torch.where(values.isnan().any(dim=1), int(RowError.NAN), error).to(torch.int32)


def sampled_head(
    logits: torch.Tensor,
    bias: Bias,
    *,
    tau: torch.Tensor,
    keys: torch.Tensor,
    rounds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    k: int = 32,
    semantics: str = Q_FLOOR_FIRST,
    stamp: torch.Tensor | None = None,
    error: torch.Tensor | None = None,
) -> SampledRows:
    """One draft position of B requests: support, tickets, token.

    Args:
        logits: bf16 [B, V], real vocabulary columns only; not modified.
        bias: Bias rows bf16 [B, V], or (W1[prev] bf16 [B, r], W2 bf16 [V, r]).
        tau: float32 [B], draft temperatures; ignored where greedy.
        keys: integer [B, 2], u32 values from `oracle.philox.derive_key`.
        rounds: integer [B], taken modulo 2**32 (the host refuses exhaustion before).
        positions: integer [B], absolute position of the predicted token.
        greedy: bool [B]; such a row is the argmax without entries or draw.
        k: Support size; k >= V gives a dense row.
        semantics: One of `contract.Q_SEMANTICS`.
        stamp: int64 [B, 3] copied to the result, zeros by default.
        error: int32 [B] earlier flags of the same requests: sticky.

    Returns:
        New tensors on the device of ``logits``; rows with flags are zero with an in-range token 0.
    """
    values = corrected_logits(logits, bias)
    vocab_size = values.shape[1]
    flags = _value_errors(values)
    sampled = ~greedy.to(torch.bool)
    bad_tau = sampled & ~((tau > 0) & (tau < torch.inf))
    flags = flags | torch.where(bad_tau, int(RowError.TEMPERATURE), 0).to(torch.int32)
    if error is not None:
        flags = flags | error.to(torch.int32)
    # refused rows go through the arithmetic on harmless values, so that the good ones need no branch
    usable = flags == 0
    values = torch.where(usable[:, None], values, 0.0)
    ids, first = select_support(values, k)
    present = ids < vocab_size
    gathered = values.gather(1, ids.clamp(max=vocab_size - 1))
    top = values.amax(dim=1, keepdim=True)
    safe_tau = torch.where(usable & sampled, tau.to(torch.float32), 1.0)
    weights = torch.where(present, fixed_weights(gathered, top, safe_tau[:, None]), 0)
    tickets, in_range = allocate_tickets(weights, first, semantics)
    flags = flags | torch.where(sampled & usable & ~in_range, int(RowError.REMAINDER), 0).to(torch.int32)
    draw = philox((rounds, positions, Domain.PROPOSAL, 0), keys)[0] >> 8
    index = (tickets.cumsum(dim=1) <= draw[:, None]).sum(dim=1).clamp(max=ids.shape[1] - 1)
    leader = ids.gather(1, first[:, None])[:, 0]
    token = torch.where(sampled, ids.gather(1, index[:, None])[:, 0], leader)
    return _as_rows(ids, tickets, weights, present, token, flags, sampled, k, stamp)


def _as_rows(
    ids: torch.Tensor,
    tickets: torch.Tensor,
    weights: torch.Tensor,
    present: torch.Tensor,
    token: torch.Tensor,
    flags: torch.Tensor,
    sampled: torch.Tensor,
    k: int,
    stamp: torch.Tensor | None,
) -> SampledRows:
    """Blanks greedy and refused rows and widens to k columns."""
    shown = present & (sampled & (flags == 0))[:, None]
    widen = (0, k - ids.shape[1])
    ids, tickets, weights = (
        torch.nn.functional.pad(torch.where(shown, field, 0), widen) for field in (ids, tickets, weights)
    )
    counts = tickets.to(torch.int32)
    return SampledRows(
        ids=ids.to(torch.int32),
        tickets=counts,
        q=counts.to(torch.float32) / TICKET_TOTAL,
        count=shown.sum(dim=1).to(torch.int32),
        token=torch.where(flags == 0, token, 0).to(torch.int32),
        weights=weights,
        error=flags,
        stamp=torch.zeros((ids.shape[0], 3), dtype=torch.int64) if stamp is None else stamp.clone(),
    )


def dense_head(
    logits: torch.Tensor,
    bias: Bias,
    **inputs: torch.Tensor,
) -> SampledRows:
    """The dense producer: `sampled_head` over the whole vocabulary, counts by largest remainder.

    The reference for k = V; ``semantics`` is always `Q_STANDARD`.
    """
    return sampled_head(logits, bias, k=logits.shape[1], semantics=Q_SEMANTICS[0], **inputs)
