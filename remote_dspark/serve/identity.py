"""Who this worker is: digests of what it runs, and the HELLO that follows from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from remote_dspark.drafter.checkpoint import checkpoint_identity
from remote_dspark.drafter.config import DSparkConfig
from remote_dspark.drafter.errors import CheckpointError
from remote_dspark.drafter.model import DSparkDrafter
from remote_dspark.drafter.shapes import synthetic_identity
from remote_dspark.observe import file_digest, process_start_ticks, source_digest, utc_now
from remote_dspark.serve.config import WorkerConfig
from remote_dspark.serve.errors import BootError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.messages import Hello


@dataclass(frozen=True)
class WorkerIdentity:
    """What ``GET /identity`` proves about the running process, and what HELLO offers."""

    config: WorkerConfig
    drafter: DSparkConfig
    draft_sha256: str
    target_sha256: str
    tokenizer_sha256: str
    source_sha256: str
    started_utc: str
    weights: str = "checkpoint"
    """``checkpoint``, or the label of synthetic ones."""
    ranks: dict[str, str] = field(default_factory=dict)
    """Of a pair: ``topology`` (``physical`` or ``emulated``), and ``rank.N.uuid`` of each GPU."""

    def to_document(self) -> dict[str, str | int]:
        """The JSON of ``GET /identity``."""
        config = self.config
        return {
            "program": "remote_dspark.serve",
            "mode": config.mode.value,
            "config_sha256": config.sha256,
            "draft_sha256": self.draft_sha256,
            "target_sha256": self.target_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "source_sha256": self.source_sha256,
            "pid": os.getpid(),
            "start_ticks": process_start_ticks(),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "started_utc": self.started_utc,
            "depth": config.depth,
            "max_requests": config.max_requests,
            "support": config.support,
            "q_semantics": config.q_semantics,
            "weights": self.weights,
            "device": ",".join(config.devices),
            **self.ranks,
            "dtype": config.dtype,
            "threads": config.threads,
        }

    def hello(self) -> Hello:
        """The server's HELLO: identities the client must share, and our limits."""
        config = self.config
        return Hello(
            role=Role.SERVER,
            draft_mode=config.mode,
            vocab_size=self.drafter.vocab_size,
            dense_width=self.drafter.vocab_size,
            id_map_sha256=bytes.fromhex(self.tokenizer_sha256),
            draft_sha256=bytes.fromhex(self.draft_sha256),
            target_sha256=bytes.fromhex(self.target_sha256),
            state_row_bytes=self.drafter.fused_width * 2,
            q_semantics=config.q_semantics,
            max_slots=config.max_requests,
            max_requests=config.max_requests,
            max_depth=config.depth,
            max_support=config.support,
        )


def read_identity(config: WorkerConfig, model: DSparkDrafter) -> WorkerIdentity:
    """Hash what HELLO has to name; the target's weights are not loaded.

    Raises:
        BootError: The target's folder or the tokenizer is missing, or the depth does not fit the model.
    """
    if config.depth > model.config.block_size:
        raise BootError(
            f"limits.depth: expected at most the block size {model.config.block_size}, found {config.depth}"
        )
    if config.synthetic is not None:
        synthetic = synthetic_identity(config.synthetic)
        return WorkerIdentity(
            config=config,
            drafter=model.config,
            draft_sha256=synthetic.draft_sha256,
            target_sha256=synthetic.target_sha256,
            tokenizer_sha256=synthetic.tokenizer_sha256,
            source_sha256=source_digest(),
            started_utc=utc_now(),
            weights=synthetic.label,
            ranks=_ranks(config),
        )
    try:
        target_sha256 = checkpoint_identity(config.target).sha256
        tokenizer_sha256 = file_digest(config.tokenizer)
    except (CheckpointError, OSError) as cause:
        raise BootError(f"model.target or model.tokenizer: {cause}") from cause
    return WorkerIdentity(
        config=config,
        drafter=model.config,
        draft_sha256=model.identity.sha256,
        target_sha256=target_sha256,
        tokenizer_sha256=tokenizer_sha256,
        source_sha256=source_digest(),
        started_utc=utc_now(),
        ranks=_ranks(config),
    )


def _ranks(config: WorkerConfig) -> dict[str, str]:
    if not config.is_pair:
        return {}
    if config.is_emulated:
        return {"topology": "emulated"}
    uuids = [torch.cuda.get_device_properties(name).uuid for name in config.devices]
    return {"topology": "physical"} | {f"rank.{rank}.uuid": f"GPU-{uuid}" for rank, uuid in enumerate(uuids)}
