"""The rehearsal's site and plans: this machine as its own host, the tiny pair as production and as the arms.

Everything is generated from facts of this machine (interpreter, free ports, folders) and written as the same TOML files
an operator writes by hand, so that the rest of the coordinator cannot tell a rehearsal from a campaign.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from remote_dspark.contract import DraftMode

DEVICE = "cpu0"
HOST = "here"
_PROBE_BODY = '{"model": "tiny", "prompt": "def main", "max_tokens": 4, "temperature": 0}'


@dataclass(frozen=True)
class Layout:
    """Where a rehearsal keeps its things.

    Attributes:
        root: The rehearsal's folder.
        state_dir: The guard's state: one per user and machine, so that two rehearsals meet.
        python: Interpreter of every program.
        package: Folder that holds ``remote_dspark`` for the production services.
        tiny: The trained pair.
        manifest: The load manifest.
    """

    root: Path
    state_dir: Path
    python: str
    package: str
    tiny: Path
    manifest: Path

    @property
    def work_dir(self) -> Path:
        """What runs inside a hold reads and writes here."""
        return self.root / "work"


def free_ports(count: int) -> list[int]:
    """TCP ports on loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def write_server_files(
    layout: Layout, *, prefix: str, mode: DraftMode, ports: tuple[int, int, int]
) -> tuple[Path, Path]:
    """Write the configuration of one drafter and one target server.

    Args:
        layout: Folders.
        prefix: Start of both file names.
        mode: The switch.
        ports: Wire port of the drafter, its health port, HTTP port of the target.

    Returns:
        Paths of the drafter's and the target's file.
    """
    wire, health, http = ports
    drafter: dict[str, Any] = {
        "modes": [mode.value],
        "model": {"path": str(layout.tiny / "drafter"), "device": "cpu", "threads": 1},
        "listen": {"address": f"127.0.0.1:{wire}"},
        "metrics": {"address": f"127.0.0.1:{health}"},
        "limits": {"max_requests": 4, "depth": 5},
    }
    target: dict[str, Any] = {
        "mode": mode.value,
        "model": {
            "path": str(layout.tiny / "target"),
            "tokenizer": str(layout.tiny / "tokenizer.json"),
            "name": "tiny",
            "threads": 1,
        },
        "listen": {"host": "127.0.0.1", "port": http},
        "drafter": {"address": f"127.0.0.1:{wire}", "checkpoint": str(layout.tiny / "drafter"), "depth": 5},
    }
    folder = layout.work_dir / "config"
    return (
        write_toml(folder / f"{prefix}-drafter.toml", drafter),
        write_toml(folder / f"{prefix}-target.toml", target),
    )


def site_document(layout: Layout, drafter: Path, target: Path, ports: tuple[int, int, int]) -> dict[str, Any]:
    """The site: one local host whose production is the pair in OFF mode."""
    wire, health, http = ports
    env = program_environment(layout)
    common = {
        "kind": "process",
        "cwd": str(layout.work_dir),
        "env": env,
        "drain_s": 10,
        "stop_s": 20,
        "start_s": 90,
        "watch_s": 1,
    }
    return {
        "schema": "coordinator/site/v1",
        "name": "rehearsal",
        "hosts": [
            {
                "name": HOST,
                "transport": "local",
                "python": layout.python,
                "state_dir": str(layout.state_dir),
                "work_dir": str(layout.work_dir),
                "roles": ["target", "drafter"],
                "devices": [DEVICE],
                "services": [
                    {
                        **common,
                        "name": "drafter",
                        "start": [layout.python, "-m", "remote_dspark.serve", "--config", str(drafter)],
                        "log": str(layout.root / "logs" / "production-drafter.log"),
                        "ports": [wire, health],
                        "stop_order": 2,
                        "probe": {
                            "url": f"http://127.0.0.1:{health}/health",
                            "timeout_s": 60,
                            "expect_contains": "ready",
                        },
                    },
                    {
                        **common,
                        "name": "target",
                        "start": [layout.python, "-m", "remote_dspark.target", "--config", str(target)],
                        "log": str(layout.root / "logs" / "production-target.log"),
                        "ports": [http],
                        "stop_order": 1,
                        "probe": {
                            "url": f"http://127.0.0.1:{http}/v1/completions",
                            "method": "POST",
                            "body": _PROBE_BODY,
                            "timeout_s": 60,
                            "expect_contains": "choices",
                        },
                    },
                ],
            }
        ],
    }


def first_hold_document() -> dict[str, Any]:
    """The plan that measures its own budget: stop and restore only, on declared bounds (DECISIONS 12)."""
    return {
        "schema": "coordinator/plan/v1",
        "name": "rehearsal-first-hold",
        "purpose": "first-hold",
        "bound_s": 600,
        "restore_reserve_s": 180,
        "orphan_after_s": 20,
        "holds": {"1": []},
        "step_bounds_s": opening_bounds(),
    }


def opening_bounds() -> dict[str, int]:
    """Declared bounds of the steps every hold has."""
    return {"preflight": 60, "lease": 20, "snapshot": 30, "arm-dead-man": 60, "stop": 90}


def campaign_document(
    layout: Layout, arms: Mapping[str, tuple[Path, Path]], http_port: int, *, quick: bool
) -> dict[str, Any]:
    """The campaign's plan: A1, B1, then B2, A2; the arms differ in two configuration files, one switch apart.

    Args:
        layout: Folders.
        arms: ``A`` and ``B`` to the drafter's and the target's configuration file.
        http_port: Where an arm's target listens.
        quick: Few requests.
    """
    requests = 8 if quick else 48
    base = ["{python}", "-m"]
    env = program_environment(layout, package=False)
    return {
        "schema": "coordinator/plan/v1",
        "name": "rehearsal",
        "bound_s": 3600,
        "restore_reserve_s": 180,
        "orphan_after_s": 20,
        "holds": {"1": ["A1", "B1"], "2": ["B2", "A2"]},
        "arms": {
            "A": {"mode": DraftMode.OFF.value, "settings": arm_settings(arms["A"])},
            "B": {"mode": DraftMode.ON.value, "settings": arm_settings(arms["B"])},
        },
        "services": [
            {
                "name": "drafter",
                "role": "drafter",
                "argv": [*base, "remote_dspark.serve", "--config", "{drafter_config}"],
                "env": env,
                "boot_order": 1,
            },
            {
                "name": "target",
                "role": "target",
                "argv": [*base, "remote_dspark.target", "--config", "{target_config}"],
                "env": env,
                "boot_order": 2,
            },
        ],
        "pair_qualify": {
            "role": "drafter",
            "argv": [*base, "remote_dspark.qualify.pair", "--require-hold", "--output", "{output_dir}"],
            "env": env,
            "timeout_s": 120,
        },
        "load": {
            "manifest": layout.manifest.name,
            "manifest_sha256": hashlib.sha256(layout.manifest.read_bytes()).hexdigest(),
            "concurrency": 2,
            "requests": requests,
            "warm_up_requests": 4,
            "max_tokens": 32,
            "temperature": "1",
            "seeds": [11, 12, 13, 14, 15, 16, 17, 18],
            "program": {
                "role": "target",
                "argv": [
                    *base,
                    "remote_dspark.qualify.arm",
                    "--require-hold",
                    "--url",
                    f"http://127.0.0.1:{http_port}",
                    *option("manifest", "concurrency", "requests", "max_tokens", "temperature", "seeds", "mode"),
                    "--warm-up-requests",
                    "{warm_up_requests}",
                    "--output",
                    "{output_dir}",
                ],
                "env": env,
                # Also how long the hosts wait for a coordinator that died in the middle of an arm (DECISIONS 29).
                "timeout_s": 90 if quick else 300,
            },
        },
        "comparison": {"primary_metric": "tokens-per-round", "margin_ppm": 20_000, "min_rounds": 20 if quick else 100},
        "step_bounds_s": {
            **opening_bounds(),
            "pair-qualify": 120,
            # Generous: a bound that the trial on a busy machine contradicts would refuse the hold.
            "boot": 150,
            "identity": 90,
            "warm-up": 120,
            "greedy-check": 120,
            "baseline": 20,
            "headline": 400,
            "profiled": 120,
            "final": 20,
            "evidence": 30,
            "teardown": 60,
        },
        "required_evidence": [{"kind": "budget", "classes": ["MEASURED", "REHEARSED"], "same_sources": True}],
    }


def option(*names: str) -> list[str]:
    """``--name {name}`` for each placeholder; an underscore becomes a hyphen in the option."""
    return [word for name in names for word in (f"--{name.replace('_', '-')}", f"{{{name}}}")]


def arm_settings(files: tuple[Path, Path]) -> dict[str, str]:
    """The two files an arm differs by."""
    return {"drafter_config": str(files[0]), "target_config": str(files[1])}


def program_environment(layout: Layout, *, package: bool = True) -> dict[str, str]:
    """What every program of the rehearsal gets: one thread, no network, the staged package."""
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**env, "PYTHONPATH": layout.package} if package else env


def write_toml(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a document as TOML, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(tomlkit.dumps(document), encoding="utf-8")
    temporary.replace(path)
    return path
