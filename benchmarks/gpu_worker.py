"""The drafter worker on one GPU: products, whole blocks and their parts against the byte floor of the same run.

    python benchmarks/gpu_worker.py [--shape qwen3-4b] [--repetitions 60]

The floor is the bytes that a block must read (layer weights, head, W2 once per use) over the copy bandwidth measured
in this run. Checks come first: a block that is wrong is not timed. Synthetic weights: times, not acceptance. Table on
stdout, build/bench_gpu_worker.json beside it. ``--warm`` compiles one part of the kernels and ends, so that several
processes can fill the compiler's cache together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_timing import time_graph
from benchmarks.gpu_worker_checks import run_checks
from benchmarks.gpu_worker_inputs import DEPTH, TILINGS, WARM_PARTS, block_inputs, build, warm
from remote_dspark.drafter.backbone import Backbone
from remote_dspark.drafter.device import DeviceCompute
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.drafter.timings import StepTimings
from remote_dspark.kernels.backbone_matmul import GATED, LOGITS, PARTIAL, MatmulTiling, skinny_matmul, split_of

RESULT = Path("build/bench_gpu_worker.json")
CONTEXT = 512
GOALS = {1: 1.4, 2: 1.6, 3: 1.6, 4: 1.6}
"""Times the floor, by batch."""

HOST_GOAL_US = 150.0
ON_GOAL = 1.05


@dataclass
class Report:
    """Lines as they are measured, and raw samples."""

    lines: list[dict[str, object]]
    samples: dict[str, list[int]]

    def add(self, name: str, value: float, unit: str, note: str = "") -> None:
        """Adds one line and prints it."""
        self.lines.append({"name": name, "value": round(value, 3), "unit": unit, "note": note})
        print(f"{name:52s} {value:10.2f} {unit:5s} {note}", flush=True)


def copy_bandwidth() -> float:
    """Bytes read plus written per second of a large device copy, outside graphs."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(12):
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return 2 * (1 << 30) / (median(found[2:]) / 1000)


def measure_products(report: Report, backbone: Backbone, peak: float) -> None:
    """Each kind of product over the weights of all layers in turn, in several tilings, beside the library's."""
    layers, head = backbone.packed.layers, backbone.model.lm_head.weight
    groups = {
        "qkv": [layer.qkv for layer in layers],
        "out": [layer.out for layer in layers],
        "gate-up": [layer.gate_up for layer in layers],
        "down": [layer.down for layer in layers],
        "head": [head],
    }
    for num_rows in (16, 32):
        for name, weights in groups.items():
            x = torch.randn(num_rows, weights[0].shape[1], device="cuda").to(torch.bfloat16)
            calls = len(weights) * (20 // len(weights))
            size = weights[0].numel() * 2

            def library(weights: list[torch.Tensor] = weights, x: torch.Tensor = x, calls: int = calls) -> None:
                for index in range(calls):
                    F.linear(x, weights[index % len(weights)])

            bodies: dict[str, Callable[[], None]] = {"library": library}
            for label, tiling in TILINGS.items():
                bodies[label] = _own(name, weights, x, tiling.head if name == "head" else tiling.layers, calls)
            for label, body in bodies.items():
                timing = time_graph(body, calls, 20)
                rate = size / (timing.per_call_us * 1e-6)
                report.add(f"{name}, {num_rows} rows, {label}", timing.per_call_us, "us", f"{rate / peak:5.2f} of peak")


def _own(
    name: str, weights: list[torch.Tensor], x: torch.Tensor, tiling: MatmulTiling, calls: int
) -> Callable[[], None]:
    num_columns, inner_size = weights[0].shape
    if name == "head":
        out = torch.zeros(DEPTH, x.shape[0] // 8, num_columns, dtype=torch.bfloat16, device="cuda")
        kind, extra = LOGITS, {"pad": 8, "num_requests": x.shape[0] // 8, "num_positions": DEPTH}
    elif name == "gate-up":
        out, kind, extra = torch.zeros(x.shape[0], num_columns // 2, dtype=torch.bfloat16, device="cuda"), GATED, {}
    else:
        shares = split_of(num_columns, inner_size, tiling)
        out, kind, extra = torch.zeros(shares, x.shape[0], num_columns, device="cuda"), PARTIAL, {}

    def body() -> None:
        for index in range(calls):
            skinny_matmul(x, weights[index % len(weights)], out, kind=kind, tiling=tiling, **extra)

    return body


def time_modes(
    compute: DeviceCompute, batch: int, repetitions: int, *, cached: bool
) -> dict[str, list[tuple[int, StepTimings]]]:
    """Whole steps of OFF and ON in turn (the device's clocks drift): elapsed ns and the step's own account."""
    sequence = compute.sequence(batch, DEPTH)
    modes = {"off": block_inputs(batch, CONTEXT, 0.0), "on": block_inputs(batch, CONTEXT, 0.7)}
    for blocks in modes.values():
        rows, _ = sequence.run(blocks)
        if cached:
            for token in {b.anchor for b in blocks} | set(rows.tokens[:, :-1].ravel().tolist()):
                compute.markov.fill(token)
    found: dict[str, list[tuple[int, StepTimings]]] = {mode: [] for mode in modes}
    for _ in range(repetitions):
        for mode, blocks in modes.items():
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            _, host = sequence.run(blocks)
            elapsed_ns = time.perf_counter_ns() - begin
            found[mode].append((elapsed_ns, sequence.timings(host)))
    return {mode: steps[5:] for mode, steps in found.items()}


def measure_blocks(report: Report, label: str, compute: DeviceCompute, peak: float, repetitions: int) -> None:
    """Whole blocks by batch, switch and cached share."""
    model = compute.backbone.model
    head, w2 = model.lm_head.weight, model.markov_head.markov_w2.weight
    once = compute.backbone.packed.weight_bytes + head.numel() * 2
    for share in (0, 100):
        floor_us = (once + (DEPTH * w2.numel() * 2 if share == 0 else 0)) / peak * 1e6
        report.add(f"{label}: floor, share {share}", floor_us, "us", f"{once / 1e6:.0f} MB + W2")
        for batch in (1, 2, 3, 4):
            found = time_modes(compute, batch, repetitions, cached=share == 100)
            device_us = {}
            for mode, steps in found.items():
                name = f"{label}.{mode}.b{batch}.share{share}"
                parts = {
                    part: median(getattr(t, part) for _, t in steps) / 1000
                    for part in ("submit_ns", "backbone_ns", "heads_ns", "copy_ns", "collect_ns")
                }
                device = parts["backbone_ns"] + parts["heads_ns"] + parts["copy_ns"]
                # by step, so that a step that the host was late for stays one sample
                host = median(e - t.backbone_ns - t.heads_ns - t.copy_ns for e, t in steps) / 1000
                device_us[mode] = device
                report.samples[name] = [elapsed for elapsed, _ in steps]
                goal = GOALS[batch]
                ratio = device / floor_us
                text = " ".join(f"{part[:-3]} {value:.0f}" for part, value in parts.items())
                verdict = "met" if ratio <= goal else "MISSED"
                report.add(
                    f"{name}: device", device, "us", f"{ratio:.2f} x floor ({goal} {verdict}); {text}; host {host:.0f}"
                )
            ratio = device_us["on"] / device_us["off"]
            report.add(
                f"{label}.b{batch}.share{share}: on/off", ratio, "x", "met" if ratio <= ON_GOAL else f"MISSED {ON_GOAL}"
            )
    compute.markov.forget()


def main() -> int:
    """Runs everything; 0 when all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--warm", choices=WARM_PARTS)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--products", action="store_true", help="time single products in every tiling, too")
    parser.add_argument("--tilings", default="default", help="comma-separated names of tilings for whole blocks")
    arguments = parser.parse_args()
    if arguments.warm:
        warm(arguments.warm, arguments.shape, arguments.tilings.split(","))
        return 0
    begin = time.monotonic()
    report = Report([], {})
    model = synthetic_drafter(arguments.shape, "cuda")
    peak = copy_bandwidth()
    report.add("copy bandwidth", peak / 1e12, "TB/s")
    is_right = True
    for label in arguments.tilings.split(","):
        compute = build(model, TILINGS[label])
        print(f"{label}: built at {time.monotonic() - begin:.1f} s", flush=True)
        checks = run_checks(compute, CONTEXT)
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'} {label} {check.name}: {check.found}", flush=True)
        is_right = is_right and all(check.ok for check in checks)
        measure_blocks(report, label, compute, peak, arguments.repetitions)
        print(f"{label}: done at {time.monotonic() - begin:.1f} s", flush=True)
    if arguments.products:
        measure_products(report, compute.backbone, peak)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"shape": arguments.shape, "lines": report.lines, "samples_ns": report.samples}, indent=1) + "\n",
        encoding="ascii",
    )
    print(f"total {time.monotonic() - begin:.1f} s on {torch.cuda.get_device_name()}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
