"""Who this server is: digests of what it runs, and the HELLO that follows from them.

Both checkpoints are identified as the drafter worker identifies its own: SHA-256 over the lines ``<sha256>  <name>`` of
``config.json`` and every safetensors shard. The target layers a drafter reads come from the drafter's configuration.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from remote_dspark.contract import DraftMode
from remote_dspark.drafter.config import DSparkConfig, read_config
from remote_dspark.drafter.errors import DrafterError as CheckpointRefusal
from remote_dspark.observe import file_digest, process_start_ticks, source_digest, utc_now
from remote_dspark.target.config import TargetConfig
from remote_dspark.target.errors import ModelError
from remote_dspark.wire.kinds import Role
from remote_dspark.wire.messages import Hello


@dataclass(frozen=True)
class Identity:
    """What ``GET /identity`` proves about the running process.

    Attributes:
        config: The configuration it was started with.
        drafter: The drafter checkpoint's configuration.
        target_sha256: Checkpoint digest of the target.
        draft_sha256: Checkpoint digest of the drafter.
        tokenizer_sha256: Digest of ``tokenizer.json``.
        source_sha256: Tree digest of the running package.
        pid: Process id.
        start_ticks: Start time of that pid in clock ticks since boot.
        boot_id: Kernel boot id.
        started_utc: Wall clock at start.
    """

    config: TargetConfig
    drafter: DSparkConfig
    target_sha256: str
    draft_sha256: str
    tokenizer_sha256: str
    source_sha256: str
    pid: int
    start_ticks: int
    boot_id: str
    started_utc: str

    def to_document(self) -> dict[str, str | int]:
        """The JSON of ``GET /identity``."""
        config = self.config
        return {
            "program": "remote_dspark.target",
            "mode": config.mode.value,
            "config_sha256": config.sha256,
            "model": config.model_name,
            "target_sha256": self.target_sha256,
            "draft_sha256": self.draft_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "source_sha256": self.source_sha256,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
            "started_utc": self.started_utc,
            "depth": config.depth,
            "draft_temperature_ppm": config.draft_temperature_ppm,
            "q_semantics": config.q_semantics,
            "support": config.support,
            "threads": config.threads,
            "dtype": config.dtype,
            "device": config.device,
            "drafter_address": config.drafter_address,
        }

    def hello(self) -> Hello:
        """The client's HELLO: identities that the worker must share, and our limits."""
        config, drafter = self.config, self.drafter
        return Hello(
            role=Role.CLIENT,
            draft_mode=config.mode,
            vocab_size=drafter.vocab_size,
            dense_width=drafter.vocab_size,
            id_map_sha256=bytes.fromhex(self.tokenizer_sha256),
            draft_sha256=bytes.fromhex(self.draft_sha256),
            target_sha256=bytes.fromhex(self.target_sha256),
            state_row_bytes=drafter.fused_width * 2,
            q_semantics=config.q_semantics,
            max_slots=config.max_requests,
            max_requests=config.max_requests,
            max_depth=config.depth,
            max_support=config.support,
        )


def read_identity(config: TargetConfig) -> Identity:
    """Hash what the configuration names; no weights are loaded.

    Raises:
        ModelError: A checkpoint or tokenizer is missing or not readable.
    """
    try:
        drafter = read_config(config.drafter)
        tokenizer_sha256 = file_digest(config.tokenizer)
    except (CheckpointRefusal, OSError) as cause:
        raise ModelError(f"identity: {cause}") from cause
    if config.depth > drafter.block_size:
        raise ModelError(f"drafter.depth: expected at most the block size {drafter.block_size}, found {config.depth}")
    return Identity(
        config=config,
        drafter=drafter,
        target_sha256=checkpoint_digest(config.model),
        draft_sha256=checkpoint_digest(config.drafter),
        tokenizer_sha256=tokenizer_sha256,
        source_sha256=source_digest(),
        pid=os.getpid(),
        start_ticks=process_start_ticks(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        started_utc=utc_now(),
    )


def checkpoint_digest(folder: Path) -> str:
    """Identity of a checkpoint folder: configuration and shards, hex.

    Raises:
        ModelError: No configuration or no shard.
    """
    names = ["config.json", *sorted(p.name for p in folder.glob("*.safetensors"))]
    if len(names) < 2 or not (folder / names[0]).is_file():
        raise ModelError(f"{folder}: expected config.json and at least one .safetensors file; check the path")
    joined = "".join(f"{file_digest(folder / name)}  {name}\n" for name in sorted(names))
    return hashlib.sha256(joined.encode()).hexdigest()


def is_sampled(config: TargetConfig) -> bool:
    """Whether the switch is ON."""
    return config.mode is DraftMode.ON
