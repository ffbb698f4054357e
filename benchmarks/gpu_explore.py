"""Times variants of tile, warps and overlap, to choose the defaults; prints a table, keeps nothing."""

from __future__ import annotations

import sys
import time

import torch
import triton
import triton.language as tl

from benchmarks.gpu_inputs import DEPTH, VOCAB, HeadInputs, make_head_inputs
from benchmarks.gpu_timing import time_graph
from remote_dspark.kernels import checks, sampled_head
from remote_dspark.kernels.markov_head import launch_markov_position
from remote_dspark.kernels.sampled_head import HeadBuffers, HeadSettings, Tiling, launch_position
from remote_dspark.kernels.verifier import VerifierBuffers, VerifierSettings, launch_verify, target_max_kernel


def cached_body(inputs: HeadInputs, settings: HeadSettings, num_sets: int):
    rows = inputs.control.shape[0]
    buffers = HeadBuffers(settings, DEPTH, rows, "cuda")

    def body() -> None:
        for chain in range(num_sets):
            previous = inputs.anchors[chain]
            for step in range(DEPTH):
                launch_position(
                    settings,
                    buffers,
                    step,
                    inputs.logits[chain, step],
                    inputs.cache,
                    inputs.control,
                    previous=previous,
                    slots=inputs.slots,
                )
                previous = buffers.token[step]

    return body


def markov_body(inputs: HeadInputs, settings: HeadSettings, num_sets: int, prefetch: int, part: int, registers):
    rows = inputs.control.shape[0]
    buffers = HeadBuffers(settings, DEPTH, rows, "cuda")

    def body() -> None:
        for chain in range(num_sets):
            previous = inputs.anchors[chain]
            for step in range(DEPTH):
                launch_markov_position(
                    settings,
                    buffers,
                    step,
                    inputs.logits[chain, step],
                    inputs.control,
                    previous,
                    inputs.w1,
                    inputs.w2,
                    inputs.no_slots,
                    inputs.cache,
                    prefetch,
                    part,
                    registers,
                )
                previous = buffers.token[step]

    return body


def report(name: str, body, calls: int) -> None:
    try:
        timing = time_graph(body, calls, replays=50)
        print(f"{name:60s} {timing.per_call_us:8.2f} us  spread {timing.spread_us:.2f}", flush=True)
    except Exception as error:  # noqa: BLE001 - a variant that does not build is a line of the table
        print(f"{name:60s} {type(error).__name__}: {str(error)[:150]}", flush=True)


def cached(variants, rows_list) -> None:
    for rows in rows_list:
        inputs = make_head_inputs(rows, 8)
        for tile, warps, overlap in variants:
            settings = HeadSettings(Tiling(VOCAB, tile, 1, warps), overlap=overlap)
            report(f"cached B={rows} tile={tile} warps={warps} overlap={overlap}", cached_body(inputs, settings, 8), 40)


def markov(variants, rows_list) -> None:
    for rows in rows_list:
        inputs = make_head_inputs(rows, 4)
        for tile, warps, overlap, prefetch, part, registers in variants:
            settings = HeadSettings(Tiling(VOCAB, tile, 1, warps), overlap=overlap)
            name = f"markov B={rows} tile={tile} warps={warps} overlap={overlap} prefetch={prefetch} part={part} regs={registers}"
            report(name, markov_body(inputs, settings, 4, prefetch, part, registers), 20)


def verifier(variants) -> None:
    case = checks.make_verify_case(0, 4, 5, VOCAB, padding=0)
    control = case.control.clone()
    control[:, 11] = 5
    control[:, 12] = torch.arange(4) * 6
    control[:, 6] = 0
    base = torch.randn(24, VOCAB, device="cuda") * 3
    count = case.count.clone()
    arguments = [field.cuda() for field in (control, case.proposed, case.ids, case.q, count)]
    # every draft row the same valid row, so that all 20 acceptance tests are real
    for request in range(4):
        for step in range(5):
            arguments[1][request, step] = case.proposed[0, 0]
            arguments[2][request, step] = case.ids[0, 0]
            arguments[3][request, step] = case.q[0, 0]
            arguments[4][request, step] = case.count[0, 0]
    for tile, warps, overlap in variants:
        settings = VerifierSettings(Tiling(VOCAB, tile, 1, warps), 5, overlap=overlap)
        buffers = VerifierBuffers(settings, 4, 24, "cuda")

        def body(settings=settings, buffers=buffers) -> None:
            for _ in range(20):
                launch_verify(settings, buffers, base, *arguments)

        report(f"verify 4x6 tile={tile} warps={warps} overlap={overlap}", body, 20)
        if not overlap:
            shape = (VOCAB, VOCAB, settings.tiling.num_tiles)

            def maxima(settings=settings, buffers=buffers, shape=shape) -> None:
                for _ in range(20):
                    target_max_kernel[(settings.tiling.num_tiles, 24)](
                        base,
                        base.stride(0),
                        buffers.top,
                        *shape,
                        TILE=settings.tiling.tile,
                        OVERLAP=False,
                        num_warps=settings.tiling.num_warps,
                    )

            report(f"  its first kernel alone tile={tile} warps={warps}", maxima, 20)


@triton.jit
def read_kernel(source_ptr, out_ptr, length, BLOCK: tl.constexpr):
    """Reads a block of int32 and keeps its maximum: the cheapest honest use of every byte."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + at, mask=at < length, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.max(values, axis=0))


def read_body(tensors, block: int, warps: int):
    words = [tensor.view(torch.int32).reshape(-1) for tensor in tensors]
    programs = triton.cdiv(words[0].numel(), block)
    out = torch.zeros(programs, device="cuda", dtype=torch.int32)

    def body() -> None:
        for call in range(20):
            source = words[call % len(words)]
            read_kernel[(programs,)](source, out, source.numel(), BLOCK=block, num_warps=warps)

    return body


def reads() -> None:
    w2 = [torch.randn(VOCAB, 256, device="cuda").to(torch.bfloat16) for _ in range(4)]
    for block, warps in ((8192, 8), (16384, 8)):
        report(f"read one W2 block={block}", read_body(w2[:1], block, warps), 20)
        report(f"read four W2 in turn block={block}", read_body(w2, block, warps), 20)
    rows = torch.randn(24, VOCAB, device="cuda")
    report("read 24 target rows (hot)", read_body([rows], 4096, 8), 20)


def ceilings() -> None:
    big = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    out = torch.empty_like(big)
    report("copy 1 GiB", lambda: [out.copy_(big) for _ in range(20)] and None, 20)
    w2 = torch.randn(VOCAB, 256, device="cuda").to(torch.bfloat16)
    others = [torch.randn(VOCAB, 256, device="cuda").to(torch.bfloat16) for _ in range(4)]
    hidden = torch.randn(256, 4, device="cuda").to(torch.bfloat16)
    report("w2 product x4 (library)", lambda: [others[i % 4] @ hidden for i in range(20)] and None, 20)
    report("w2 product x1 (library)", lambda: [others[i % 4] @ hidden[:, 0] for i in range(20)] and None, 20)
    tiny = torch.zeros(1, device="cuda")
    report("empty-ish kernel", lambda: [tiny.add_(1) for _ in range(40)] and None, 40)
    del w2


if __name__ == "__main__":
    begin = time.time()
    for what in sys.argv[1:]:
        if what == "check":
            print(checks.check_head("cuda", VOCAB, tile=2048, seeds=range(1)), flush=True)
            print(checks.check_markov("cuda", VOCAB, tile=1024, seeds=range(1)), flush=True)
            print(checks.check_verifier("cuda", 20_011, tile=4096, seeds=range(2)), flush=True)
        elif what == "ceilings":
            ceilings()
        elif what == "reads":
            reads()
        elif what == "cached":
            cached([(2048, 4, False), (2048, 8, False), (4096, 8, False)], (1, 4))
        elif what == "markov":
            markov([(512, 8, False, 0, 64, 128), (1024, 8, False, 0, 64, None)], (1,))
            markov([(1024, 8, False, 0, 64, None), (512, 8, False, 0, 64, 128)], (4,))
        elif what == "verify":
            verifier([(2048, 8, False), (2048, 8, True), (4096, 8, True), (4096, 8, False), (2048, 4, True)])
        print(f"[{what}: {time.time() - begin:.0f} s]", flush=True)
    print(sampled_head.__name__)
