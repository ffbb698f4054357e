"""Checks of the kernels against the exact oracle: used by qualification on GPU hosts and, on small rows, by CI.

Each function makes seeded inputs, poisons the outputs, runs the kernel and returns one `contract.Check` with counts of
what was compared. Counts, draws, acceptance and residual are compared bit for bit, computed by the oracle from the
weights that the device emitted; the weights themselves are compared with FP64 within `WEIGHT_ULP`.

Not covered: speed, graphs (`graphs`), frequencies (`frequency`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from remote_dspark.contract import Q_FLOOR_FIRST, WEIGHT_ONE, Check
from remote_dspark.kernels import naive, naive_verifier
from remote_dspark.kernels.markov_head import launch_markov_position
from remote_dspark.kernels.markov_product import fill_bias_rows
from remote_dspark.kernels.rows import RowError, SampledRows, pack_control
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position
from remote_dspark.kernels.verifier import VerifierBuffers, VerifierSettings, emitted_weights, launch_verify
from remote_dspark.oracle.errors import InvalidRowError
from remote_dspark.oracle.philox import derive_key, proposal_draw
from remote_dspark.oracle.sample_row import row_from_weights

WEIGHT_ULP = 4
"""Largest difference of a weight from FP64, in ulp of FP32 of the same argument, plus one unit for the floor."""


@dataclass(frozen=True)
class HeadCase:
    """Inputs of one position.

    Attributes:
        logits: bf16 [B, V + padding]; the padding is NaN, so that reading it shows.
        bias: bf16 [B, V + padding], likewise.
        fields: Keyword arguments of `naive.sampled_head` and `rows.pack_control`.
        vocab_size: Real columns.
    """

    logits: torch.Tensor
    bias: torch.Tensor
    fields: dict[str, Any]
    vocab_size: int


def make_case(seed: int, num_rows: int, vocab_size: int, kind: str = "plain", padding: int = 24) -> HeadCase:
    """Seeded inputs on the CPU.

    Args:
        seed: Any integer.
        num_rows: B.
        vocab_size: V.
        kind: ``plain``; ``ties`` (few distinct values); ``flat`` (all equal); ``masked`` (most columns -inf, one row
            with fewer than k finite ones); ``wide`` (values over the whole BF16 range); ``greedy`` (odd rows at
            temperature 0); ``bad`` (row 0 NaN, row 1 +inf, row 2 all -inf, where they exist).
        padding: Columns after V, all NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(num_rows, vocab_size, generator=generator) * 3
    bias = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "ties":
        base, bias = (base / 3).round(), (bias / 2).round()
    elif kind == "flat":
        base, bias = base * 0, bias * 0
    elif kind == "masked":
        base[torch.rand(num_rows, vocab_size, generator=generator) < 0.9] = -torch.inf
        base[0, 7:] = -torch.inf
        base[0, 3] = 1.0
    elif kind == "wide":
        base = base * torch.exp2(torch.randint(-120, 120, base.shape, generator=generator).float())
    logits = torch.full((num_rows, vocab_size + padding), torch.nan, dtype=torch.bfloat16)
    rows = torch.full_like(logits, torch.nan)
    logits[:, :vocab_size] = naive.round_to_bf16(base).to(torch.bfloat16)
    rows[:, :vocab_size] = naive.round_to_bf16(bias).to(torch.bfloat16)
    if kind == "bad":
        # far from the top of the row: a kernel that looks only at its candidates would not see it
        rows[0, vocab_size - 1] = torch.nan
        if num_rows > 1:
            rows[1, vocab_size // 2] = torch.inf
        if num_rows > 2:
            logits[2, :vocab_size] = -torch.inf
    greedy = torch.zeros(num_rows, dtype=torch.bool)
    if kind == "greedy":
        greedy[1::2] = True
    fields = {
        "tau": torch.tensor([0.7, 1.0, 0.35, 2.0] * 2)[:num_rows],
        "keys": torch.tensor([derive_key(seed * 1000 + row, 7) for row in range(num_rows)]),
        "rounds": torch.arange(num_rows) + seed,
        "positions": torch.arange(num_rows) * 1000 + 5,
        "greedy": greedy,
    }
    return HeadCase(logits, rows, fields, vocab_size)


def run_case(case: HeadCase, settings: HeadSettings, device: str) -> SampledRows:
    """Runs the cached kernel on one case into poisoned outputs and brings the rows to the CPU."""
    num_rows = case.logits.shape[0]
    buffers = HeadBuffers(settings, 1, num_rows, device)
    buffers.poison()
    control = pack_control(**case.fields).to(device)
    launch_position(settings, buffers, 0, case.logits.to(device), case.bias.to(device), control)
    return buffers.rows(0)


def row_mismatch(case: HeadCase, rows: SampledRows, row: int, semantics: str, k: int) -> str:
    """What is wrong with one emitted row, or an empty string.

    Support and flags are compared with the reference, weights with FP64, everything else with the oracle on the
    emitted weights.
    """
    size = case.vocab_size
    fields = {name: value[row : row + 1] for name, value in case.fields.items()}
    wanted = naive.sampled_head(
        case.logits[row : row + 1, :size], case.bias[row : row + 1, :size], k=k, semantics=semantics, **fields
    )
    for name in ("error", "count"):
        if int(getattr(rows, name)[row]) != int(getattr(wanted, name)[0]):
            return f"{name} {int(getattr(rows, name)[row])}, expected {int(getattr(wanted, name)[0])}"
    if not torch.equal(rows.ids[row], wanted.ids[0]):
        return f"ids {rows.ids[row].tolist()}, expected {wanted.ids[0].tolist()}"
    count = int(wanted.count[0])
    if count == 0:
        # greedy or refused: no entries, and nothing drawn
        blank = int(rows.tickets[row].abs().sum()) == 0 and int(rows.token[row]) == int(wanted.token[0])
        return "" if blank else f"token {int(rows.token[row])} with entries, expected {int(wanted.token[0])} without"
    return _distribution_mismatch(case, rows, row, count, semantics)


def _distribution_mismatch(case: HeadCase, rows: SampledRows, row: int, count: int, semantics: str) -> str:
    """Weights, tickets and token of one sampled row."""
    assert rows.weights is not None
    ids = rows.ids[row, :count].numpy().astype(np.int64)
    weights = rows.weights[row, :count].numpy()
    values = naive.corrected_logits(case.logits[row : row + 1], case.bias[row : row + 1])[0, ids].numpy()
    with np.errstate(over="ignore"):
        exponents = ((values - values.max()) / case.fields["tau"][row].numpy()).astype(np.float32)
    ideal = np.exp(exponents.astype(np.float64)) * WEIGHT_ONE
    allowed = WEIGHT_ULP * 2.0**-24 * ideal + 1
    if (np.abs(weights - ideal) > allowed).any():
        return f"weights differ from FP64 by {np.abs(weights - ideal).max():.1f} units"
    key = tuple(int(word) for word in case.fields["keys"][row])
    draw = proposal_draw((key[0], key[1]), int(case.fields["rounds"][row]), int(case.fields["positions"][row]))
    # rank 1 by value, ties to the lowest id, never by weight
    first = int(values.argmax())
    try:
        wanted = row_from_weights(ids, weights, first, semantics, draw)
    except InvalidRowError as fault:
        return f"the oracle refuses the emitted weights: {fault}"
    tickets = rows.tickets[row, :count].numpy()
    if tickets[tickets > 0].tolist() != wanted.tickets.tolist() or ids[tickets > 0].tolist() != wanted.ids.tolist():
        return f"tickets {tickets.tolist()}, expected {wanted.tickets.tolist()}"
    if int(rows.token[row]) != wanted.token:
        return f"token {int(rows.token[row])}, expected {wanted.token} at draw {draw}"
    return ""


def check_head(
    device: str,
    vocab_size: int,
    *,
    tile: int,
    num_rows: int = 4,
    seeds: range = range(2),
    kinds: tuple[str, ...] = ("plain", "ties", "flat", "masked", "wide", "greedy", "bad"),
    semantics: str = Q_FLOOR_FIRST,
    k: int = 32,
    num_warps: int = 4,
) -> Check:
    """Every row of every case against oracle and reference, and two logical shards against one."""
    compared = 0
    for kind in kinds:
        for seed in seeds:
            # rows with and without padding: loads are wide only where rows are aligned
            case = make_case(seed, num_rows, vocab_size, kind, padding=0 if seed % 2 else 24)
            one = _settings(vocab_size, tile, 1, semantics, k, num_warps)
            rows = run_case(case, one, device)
            for row in range(num_rows):
                problem = row_mismatch(case, rows, row, semantics, k)
                if problem:
                    return Check("head-exact", "no mismatch", f"{kind} seed {seed} row {row}: {problem}"[:200], False)
                compared += 1
            two = run_case(case, _settings(vocab_size, tile, 2, semantics, k, num_warps), device)
            if not same_rows(rows, two):
                return Check("head-exact", "two shards = one", f"{kind} seed {seed} differs", False)
    return Check("head-exact", "no mismatch", f"no mismatch in {compared} rows, shards equal", compared > 0)


def _settings(vocab_size: int, tile: int, num_shards: int, semantics: str, k: int, num_warps: int) -> HeadSettings:
    """Settings that emit weights."""
    tiling = Tiling(vocab_size, tile, num_shards, num_warps)
    return HeadSettings(tiling, k=k, semantics=semantics, emit_weights=True)


def same_rows(left: SampledRows, right: SampledRows) -> bool:
    """Whether two results are equal bit for bit."""
    names = ("ids", "tickets", "q", "count", "token", "weights", "error", "stamp")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def check_markov(
    device: str,
    vocab_size: int,
    *,
    tile: int,
    rank: int = 256,
    seeds: range = range(2),
    part: int = 64,
    num_warps: int = 8,
) -> Check:
    """Uncached rows: the fused product against the reference bit for bit, mixed with rows from a cache it filled.

    Batches of 1 to 4 rows, one and two logical shards; the first cached token's row comes from `fill_bias_rows`.
    """
    compared = 0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        w1, w2 = (
            (torch.randn(vocab_size, rank, generator=generator) / 4).to(torch.bfloat16).contiguous() for _ in range(2)
        )
        tokens = torch.randint(0, vocab_size, (2,), generator=generator, dtype=torch.int32)
        cache = torch.zeros((2, vocab_size), dtype=torch.bfloat16, device=device)
        fill_bias_rows(tokens.to(device), w1.to(device), w2.to(device), cache, tile=tile)
        if not torch.equal(naive.markov_bias(w1[tokens.long()], w2).view(torch.int16), cache.cpu().view(torch.int16)):
            return Check("markov-exact", "bias rows equal", f"seed {seed}: bits differ", False)
        slots = torch.full((vocab_size,), -1, dtype=torch.int32)
        slots[int(tokens[1])] = 1
        for num_rows in (1, 2, 3, 4):
            case = make_case(seed, num_rows, vocab_size, padding=24 if seed % 2 else 0)
            previous = torch.randint(0, vocab_size, (num_rows,), generator=generator, dtype=torch.int32)
            previous[num_rows - 1] = tokens[1] if num_rows > 1 else tokens[0]
            bias = naive.markov_bias(w1[previous.long()], w2)
            wanted = naive.sampled_head(case.logits[:, :vocab_size], bias, **case.fields)
            for num_shards in (1, 2):
                settings = _settings(vocab_size, tile, num_shards, Q_FLOOR_FIRST, 32, num_warps)
                buffers = HeadBuffers(settings, 1, num_rows, device)
                buffers.poison()
                control = pack_control(**case.fields).to(device)
                arguments = (control, previous.to(device), w1.to(device), w2.to(device), slots.to(device), cache)
                launch_markov_position(settings, buffers, 0, case.logits.to(device), *arguments, part=part)
                found = buffers.rows(0)
                same = all(
                    torch.equal(getattr(found, name), getattr(wanted, name)) for name in ("ids", "count", "error")
                )
                # the cached head on the reference's bias rows has the same weights, to the last bit
                if not same or not same_rows(found, run_case(replace(case, bias=bias), settings, device)):
                    where = f"seed {seed} rows {num_rows} shards {num_shards}"
                    return Check("markov-exact", "support equal, rows those of cached bias", f"{where}: differs", False)
                compared += num_rows
    return Check("markov-exact", "no mismatch", f"no mismatch in {compared} rows", compared > 0)


@dataclass(frozen=True)
class VerifyCase:
    """Inputs of one verification, on the CPU; see `verifier.launch_verify`."""

    target: torch.Tensor
    control: torch.Tensor
    proposed: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    count: torch.Tensor
    vocab_size: int

    def arguments(
        self, device: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors in the order of `launch_verify`, on a device."""
        rows, drafts = (self.target, self.control), (self.proposed, self.ids, self.q, self.count)
        target, control = (field.to(device) for field in rows)
        proposed, ids, q, count = (field.to(device) for field in drafts)
        return target, control, proposed, ids, q, count


def make_verify_case(
    seed: int, num_requests: int, depth: int, vocab_size: int, noise: float = 0.5, padding: int = 3
) -> VerifyCase:
    """A seeded round: drafts sampled by the reference, target rows near the drafter's, the last request greedy.

    Args:
        seed: Any integer.
        num_requests: R.
        depth: D; requests have depths D, D - 1, ... (at least 1).
        vocab_size: V.
        noise: Distance of target from draft logits; larger rejects more.
        padding: NaN columns after V.
    """
    generator = torch.Generator().manual_seed(seed)
    depths = [max(depth - request, 1) for request in range(num_requests)]
    firsts = [sum(drafts + 1 for drafts in depths[:request]) for request in range(num_requests)]
    num_rows = sum(drafts + 1 for drafts in depths)
    base = torch.randn(num_rows, vocab_size, generator=generator) * 3
    target = torch.full((num_rows, vocab_size + padding), torch.nan)
    target[:, :vocab_size] = base + noise * torch.randn(num_rows, vocab_size, generator=generator)
    keys = torch.tensor([derive_key(seed * 77 + request, 3) for request in range(num_requests)])
    greedy = torch.arange(num_requests) == num_requests - 1 if num_requests > 1 else torch.zeros(1, dtype=torch.bool)
    k = 32
    proposed = torch.zeros((num_requests, depth), dtype=torch.int32)
    ids, q = torch.zeros((num_requests, depth, k), dtype=torch.int32), torch.zeros((num_requests, depth, k))
    count = torch.zeros((num_requests, depth), dtype=torch.int32)
    for request, (first, drafts) in enumerate(zip(firsts, depths, strict=True)):
        rows = naive.sampled_head(
            naive.round_to_bf16(base[first : first + drafts]).to(torch.bfloat16),
            torch.zeros((drafts, vocab_size), dtype=torch.bfloat16),
            tau=torch.full((drafts,), 0.7),
            keys=keys[request].expand(drafts, 2),
            rounds=torch.full((drafts,), seed),
            positions=torch.arange(drafts) + 40 * request,
            greedy=greedy[request].expand(drafts),
        )
        ids[request, :drafts], q[request, :drafts] = rows.ids, rows.q
        count[request, :drafts], proposed[request, :drafts] = rows.count, rows.token
    control = pack_control(
        tau=torch.full((num_requests,), 0.7),
        keys=keys,
        rounds=torch.full((num_requests,), seed),
        positions=torch.arange(num_requests) * 40,
        greedy=greedy,
        num_draft=torch.tensor(depths),
        first_row=torch.tensor(firsts),
    )
    return VerifyCase(target, control, proposed, ids, q, count, vocab_size)


def verify_mismatch(case: VerifyCase, settings: VerifierSettings, device: str) -> str:
    """Runs the verifier twice into poisoned outputs; what differs from the reference on the emitted weights."""
    arguments = case.arguments(device)
    num_requests, num_rows = case.proposed.shape[0], case.target.shape[0]
    buffers = VerifierBuffers(settings, num_requests, num_rows, device)
    weights = emitted_weights(settings, arguments[0]).cpu()
    problem = _weights_mismatch(case, weights)
    _, row_error = naive_verifier.target_weights(case.target[:, : case.vocab_size])
    wanted = naive_verifier.verify_weights(
        weights, row_error, *case.arguments("cpu")[1:], num_shards=settings.tiling.num_shards
    )
    for _ in range(2):
        buffers.poison()
        launch_verify(settings, buffers, *arguments)
        found = buffers.outputs()
        good = wanted.error == 0
        for name in ("error", "num_accepted", "tokens", "zero_residual", "stamp"):
            if not torch.equal(getattr(found, name).cpu(), getattr(wanted, name)):
                return f"{name} {getattr(found, name).tolist()}, expected {getattr(wanted, name).tolist()}"
        if not torch.equal(found.totals.cpu()[good], wanted.totals[good]):
            return "totals differ"
    return problem


def _weights_mismatch(case: VerifyCase, weights: torch.Tensor) -> str:
    """Emitted target weights of good rows against FP64."""
    rows = case.target[:, : case.vocab_size]
    good = rows.isfinite().all(dim=1)
    exponents = (rows - rows.amax(dim=1, keepdim=True))[good].to(torch.float64)
    ideal = exponents.exp() * WEIGHT_ONE
    excess = (weights[good] - ideal).abs() - (WEIGHT_ULP * 2.0**-24 * ideal + 1)
    return "" if not bool((excess > 0).any()) else f"weights exceed the bound by {float(excess.max()):.1f} units"


def check_verifier(
    device: str, vocab_size: int, *, tile: int, num_requests: int = 4, depth: int = 5, seeds: range = range(4)
) -> Check:
    """Verifier against oracle arithmetic, in one and in two logical shards, with refused rows and proposals.

    On CUDA in one launch and in a launch for each stage; elsewhere there is only the second form.
    """
    compared = 0
    forms = (True, False) if torch.device(device).type == "cuda" else (False,)
    for seed in seeds:
        for num_shards, one_launch in product((1, 2), forms):
            settings = VerifierSettings(Tiling(vocab_size, tile, num_shards, 8), depth, one_launch=one_launch)
            for spoil in ("none", "nan", "q"):
                case = make_verify_case(seed, num_requests, depth, vocab_size, noise=(0.1, 0.5, 1.5, 0.0)[seed % 4])
                if spoil == "nan":
                    case.target[1, vocab_size // 3] = torch.nan
                elif spoil == "q":
                    case.q[0, 0, 0] += 2.0**-24
                problem = verify_mismatch(case, settings, device)
                if problem:
                    form = "one launch" if one_launch else "stages"
                    found = f"seed {seed} shards {num_shards} {form} spoil {spoil}: {problem}"[:200]
                    return Check("verifier-exact", "no mismatch", found, False)
                compared += num_requests
    return Check("verifier-exact", "no mismatch", f"no mismatch in {compared} requests", compared > 0)


def check_bad_rows_are_sticky(rows: SampledRows) -> Check:
    """Refused rows carry a flag, no entries and an in-range token 0."""
    refused = rows.error != int(RowError.NONE)
    clean = bool((rows.token[refused] == 0).all()) and int(rows.tickets[refused].abs().sum()) == 0
    return Check("refused-rows", "token 0 without entries", f"{int(refused.sum())} rows, clean {clean}", clean)
