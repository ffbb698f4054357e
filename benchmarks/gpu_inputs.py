"""Inputs of the GPU benchmark in production shapes: 129,280 tokens, a cache of over 1 GB, rotating logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remote_dspark.kernels.rows import pack_control
from remote_dspark.oracle.philox import derive_key

VOCAB = 129_280
RANK = 256
CACHE_ROWS = 4_200
DEPTH = 5


@dataclass(frozen=True)
class HeadInputs:
    """Everything a chain reads.

    Attributes:
        logits: bf16 [sets, depth, B, V]; rotated from chain to chain.
        cache: bf16 [CACHE_ROWS, V], 1.09 GB.
        slots: int32 [V], a random cache row for every token.
        no_slots: int32 [V], all -1.
        anchors: int32 [sets, B].
        control: int32 [B, 16].
        w1: bf16 [V, RANK].
        w2: bf16 [V, RANK].
    """

    logits: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    no_slots: torch.Tensor
    anchors: torch.Tensor
    control: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


def make_head_inputs(num_rows: int, num_sets: int, ties: bool = False) -> HeadInputs:
    """Random inputs on the GPU; with ``ties`` only a handful of distinct values per row."""
    torch.manual_seed(1234)
    logits = torch.randn(num_sets, DEPTH, num_rows, VOCAB, device="cuda") * 3
    cache = torch.randn(CACHE_ROWS, VOCAB, device="cuda", dtype=torch.bfloat16)
    if ties:
        logits, cache = (logits / 3).round(), (cache / 2).round()
    return HeadInputs(
        logits=logits.to(torch.bfloat16),
        cache=cache,
        slots=torch.randint(0, CACHE_ROWS, (VOCAB,), device="cuda", dtype=torch.int32),
        no_slots=torch.full((VOCAB,), -1, device="cuda", dtype=torch.int32),
        anchors=torch.randint(0, VOCAB, (num_sets, num_rows), device="cuda", dtype=torch.int32),
        control=make_control(num_rows),
        w1=torch.randn(VOCAB, RANK, device="cuda").to(torch.bfloat16),
        w2=(torch.randn(VOCAB, RANK, device="cuda") / 16).to(torch.bfloat16),
    )


def make_control(num_rows: int) -> torch.Tensor:
    """Control block of sampled requests at tau 0.7."""
    return pack_control(
        tau=torch.full((num_rows,), 0.7),
        keys=torch.tensor([derive_key(row, 1) for row in range(num_rows)]),
        rounds=torch.full((num_rows,), 9),
        positions=torch.full((num_rows,), 100),
        greedy=torch.zeros(num_rows, dtype=torch.bool),
    ).cuda()
