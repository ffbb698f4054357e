"""From a configuration to an engine that has answered: load, compile and capture, warm up. Runs on the engine's thread.

Nothing is served before all of this has succeeded; every failure is a `BootError` that names the field to look at.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import numpy as np
import torch

from remote_dspark.contract import DRAFT_TEMPERATURE, DraftMode
from remote_dspark.drafter.checkpoint import load_drafter
from remote_dspark.drafter.compute import BlockCompute
from remote_dspark.drafter.engine import DraftEngine, DraftRequest, EngineCounters
from remote_dspark.drafter.errors import DrafterError
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.pair import PairShape
from remote_dspark.drafter.pair_emulated import EmulatedModel, EmulatedShape, emulated_pair
from remote_dspark.drafter.synthetic import synthetic_drafter
from remote_dspark.serve.config import WorkerConfig
from remote_dspark.serve.errors import BootError

WARM_UP_POSITIONS: Final = 64
WARM_UP_ROUNDS: Final = 3


def load_model(config: WorkerConfig) -> DSparkDrafter:
    """The drafter of a configuration.

    Raises:
        BootError: A bad checkpoint, or no such device.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        for name in config.devices:
            if (torch.device(name).index or 0) >= num_devices:
                raise BootError(f"model.device: expected one of {num_devices} CUDA devices, found {name!r}")
        torch.cuda.set_device(device.index or 0)
    dtype = getattr(torch, config.dtype)
    try:
        if config.synthetic is not None:
            return synthetic_drafter(config.synthetic, device, dtype)
        return load_drafter(config.model, device, dtype)
    except DrafterError as cause:
        raise BootError(f"model.path: {cause}") from cause


def build_engine(config: WorkerConfig, model: DSparkDrafter) -> DraftEngine:
    """An engine that has drafted, with counters at zero.

    Raises:
        BootError: The model cannot draft even made-up states, or the device path does not compute it.
    """
    try:
        engine = DraftEngine(
            model,
            config.max_requests,
            support=config.support,
            semantics=config.q_semantics,
            markov_cache_bytes=config.markov_cache_bytes,
            max_positions=config.max_positions or None,
            compute=_device_compute(config, model),
        )
        _warm_up(engine, config)
    except DrafterError as cause:
        raise BootError(f"model.path: warm-up failed: {cause}") from cause
    engine.counters = EngineCounters()
    return engine


def _device_compute(config: WorkerConfig, model: DSparkDrafter) -> BlockCompute | None:
    """The device path where there is a device; kernels are not imported otherwise."""
    if config.is_pair:
        return _pair_compute(config, model)
    if config.device == "cpu":
        return None
    from remote_dspark.drafter.device import DeviceCompute

    limit = model.config.max_positions
    return DeviceCompute(
        model,
        config.max_requests,
        support=config.support,
        semantics=config.q_semantics,
        cache_bytes=config.markov_cache_bytes,
        max_positions=min(config.max_positions or limit, limit),
        max_depth=config.depth,
        sampled=config.mode is DraftMode.ON,
    )


def _pair_compute(config: WorkerConfig, model: DSparkDrafter) -> BlockCompute:
    """Both ranks. The switch changes nothing here: every row of a pair is exchanged, greedy ones too."""
    limit = model.config.max_positions
    shape = PairShape(
        num_seats=config.max_requests,
        support=config.support,
        semantics=config.q_semantics,
        cache_bytes=config.markov_cache_bytes,
        max_positions=min(config.max_positions or limit, limit),
        max_depth=config.depth,
    )
    if config.is_emulated:
        return emulated_pair(
            EmulatedModel(synthetic=config.synthetic) if config.synthetic else EmulatedModel(path=str(config.model)),
            model.config.fused_width,
            EmulatedShape(**asdict(shape)),
        )
    from remote_dspark.drafter.pair_devices import physical_pair
    from remote_dspark.drafter.pair_rank import RankShape

    devices = [torch.device(name).index or 0 for name in config.devices]
    return physical_pair(model, devices, RankShape(**asdict(shape), bound=config.peer_bound_ns))


def _warm_up(engine: DraftEngine, config: WorkerConfig) -> None:
    """A few rounds of a full batch on made-up states, greedy and, where configured, sampled."""
    values = np.random.default_rng(0).standard_normal((WARM_UP_POSITIONS, engine.model.config.fused_width))
    # the upper half of an FP32 pattern is a BF16 pattern
    rows = np.ascontiguousarray((values.astype("<f4").view("<u4") >> 16).astype("<u2")).view(np.uint8)
    temperatures = [0.0] if config.mode is DraftMode.OFF else [0.0, float(DRAFT_TEMPERATURE)]
    seats = [engine.open(seed=0, generation=1) for _ in range(config.max_requests)]
    for seat in seats:
        engine.append_states(seat, 1, 0, rows)
    for round_number in range(WARM_UP_ROUNDS * len(temperatures)):
        tau = temperatures[round_number % len(temperatures)]
        batch = seats[: 1 + round_number % len(seats)]
        engine.step([DraftRequest(seat, 1, round_number, WARM_UP_POSITIONS, 0, tau) for seat in batch], config.depth)
    for seat in seats:
        engine.close(seat, 1)
