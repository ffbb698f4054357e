"""Measured receipts from this machine: a first hold, then measurement holds over its GPUs, signed and verified.

    python benchmarks/gpu_receipts.py FOLDER kernels worker [--device 0]
    python benchmarks/gpu_receipts.py FOLDER worker pair pair-worker

One hold measures one GPU, the next one the pair: a worker on the pair must propose what the receipt of the solo worker
says. The machine is its own host (transport ``local``) and a small web server stands for its production, so that stop,
proof and restore are real. Needs the coordinator's dependencies. FOLDER gets site, plans, signing key and ``store``;
copy ``store`` as it is. Exits with the first command's code that is not 0. Where there is no GPU, the programs called
``emulated-`` show the whole way on a named device; a solo CPU worker is the reference in torch, so it is not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomlkit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from coordinator.clock import SystemClock
from coordinator.config import read_site
from coordinator.init_files import gpu_uuids
from coordinator.production import production
from coordinator.rehearsal_site import free_ports
from coordinator.render import Reporter
from coordinator.session import open_sessions
from remote_dspark.qualify.worker_identity import IDENTITY_FILE

ROOT = Path(__file__).resolve().parents[1]
BOUND_S = 540
"""Of one program; the guard ends it then."""

SOLO = str(ROOT / "benchmarks" / "gpu_solo.py")
KNOWN = "SOLO-IDENTITY"
"""Stands for the newest solo receipt's record of what its worker proposed."""

SAME = ["--identity-expected", KNOWN]
SMALL = [
    *("--synthetic", "tiny", "--batches", "1", "--repetitions", "1", "--context", "8"),
    *("--identity", "15", "--identity-rounds", "1", "--timeout", "300"),
]
"""As little as shows every step, for ranks that are interpreted."""

PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "kernels": ("solo", [str(ROOT / "benchmarks" / "gpu.py"), "--require-hold"]),
    "kernels-quick": (
        "solo",
        [str(ROOT / "benchmarks" / "gpu.py"), "--require-hold", "--quick", "--stress-seconds", "5"],
    ),
    "worker": ("solo", [SOLO, "--require-hold", "--identity", "12000"]),
    "worker-off": ("solo", [SOLO, "--require-hold", "--mode", "greedy-v1"]),
    "worker-v129280": ("solo", [SOLO, "--require-hold", "--synthetic", "v129280"]),
    "worker-v129280-off": ("solo", [SOLO, "--require-hold", "--synthetic", "v129280", "--mode", "greedy-v1"]),
    "pair": ("pair", ["-m", "remote_dspark.qualify.pair", "--physical", "--require-hold"]),
    "pair-worker": (
        "pair",
        [SOLO, "--devices", "cuda:0,cuda:1", "--physical", "--require-hold", "--identity", "12000", *SAME],
    ),
    "emulated-pair": ("pair", ["-m", "remote_dspark.qualify.pair", "--require-hold"]),
    "emulated-worker": ("solo", [SOLO, "--devices", "cpu", "--require-hold", *SMALL]),
    "emulated-pair-worker": ("pair", [SOLO, "--devices", "cpu,cpu", "--require-hold", *SMALL]),
}
"""Name to topology and argv after the interpreter."""


PASSED = ("TRITON_CACHE_DIR", "LD_LIBRARY_PATH", "HOME")
"""Variables of this shell that the programs get: where the compiler keeps its work and the driver lies."""


def site_document(folder: Path, signers: Path, locked: list[str]) -> dict[str, Any]:
    """This machine as the only host; a hold locks the devices named."""
    (port,) = free_ports(1)
    return {
        "schema": "coordinator/site/v1",
        "name": "gpu-machine",
        "signers": str(signers),
        "hosts": [
            {
                "name": "here",
                "transport": "local",
                "python": sys.executable,
                "state_dir": str(folder / "guard-state"),
                "work_dir": str(folder / "work"),
                "roles": ["target", "drafter"],
                "devices": locked,
                "services": [
                    {
                        "name": "web",
                        "kind": "process",
                        "start": [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)],
                        "cwd": str(folder / "web"),
                        "env": {},
                        "log": str(folder / "web.log"),
                        "ports": [port],
                        "probe": {"url": f"http://127.0.0.1:{port}/", "expect_contains": "Directory listing"},
                        "drain_s": 5,
                        "stop_s": 10,
                        "start_s": 20,
                        "watch_s": 1,
                    }
                ],
            }
        ],
    }


def recorded_identity(store: Path) -> Path:
    """The sample that the newest solo receipt binds as what its worker proposed.

    Raises:
        LookupError: No such receipt.
    """
    for path in sorted((store / "receipts").glob("*-worker-measurement-*.json"), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        # a signature lies beside its receipt and has no predicate
        predicate = document.get("predicate", {"samples": (), "body": {}})
        for sample in predicate["samples"]:
            if predicate["body"]["topology"] == "solo" and sample["name"] == IDENTITY_FILE:
                return store / "samples" / str(sample["sha256"])
    raise LookupError(f"{store}: expected a solo worker's receipt with {IDENTITY_FILE}, found none; measure it first")


def plan_document(name: str, programs: list[str], locked: list[str], store: Path) -> dict[str, Any]:
    """A hold without programs, or one whose programs see the locked devices only."""
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    env = kept | {"CUDA_VISIBLE_DEVICES": ",".join(locked)}
    bounds = {"preflight": 60, "lease": 20, "snapshot": 30, "arm-dead-man": 30, "stop": 40}
    first = {
        "schema": "coordinator/plan/v1",
        "name": name,
        "purpose": "first-hold",
        "bound_s": 400,
        "restore_reserve_s": 120,
        "orphan_after_s": 30,
        "holds": {"1": []},
        "step_bounds_s": bounds,
    }
    if not programs:
        return first

    def argv(program: str) -> list[str]:
        words = PROGRAMS[program][1]
        return ["{python}", *(str(recorded_identity(store)) if word == KNOWN else word for word in words)]

    return first | {
        "purpose": "measurement",
        "bound_s": 400 + BOUND_S * len(programs),
        "step_bounds_s": bounds | {"measure": BOUND_S},
        "measurements": [
            {"name": program, "role": "drafter", "topology": PROGRAMS[program][0], "argv": argv(program),
             "timeout_s": BOUND_S, "env": env}
            for program in programs
        ],
    }  # fmt: skip


def coordinator(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command of the coordinator, its words shown."""
    print("$ coordinator", *argv, flush=True)
    return subprocess.run([sys.executable, "-m", "coordinator", *argv], cwd=ROOT, text=True, check=False, **options)


def main() -> int:
    """Writes the files, runs the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--device", type=int, action="append", help="lock this one only; may be repeated; default: all")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    (folder / "web").mkdir(parents=True)
    key, signers = folder / "operator.pem", folder / "signers.toml"
    made = coordinator("keys", "new", "bench", "--out", str(key), stdout=subprocess.PIPE)
    signers.write_text("version = 1\n\n" + made.stdout, encoding="utf-8")
    site = folder / "site.toml"
    found = gpu_uuids() or ["cpu0"]
    locked = [found[index] for index in arguments.device or range(len(found))]
    document = site_document(folder, signers, locked)
    policy = ROOT / "policies" / "first-hold.toml"
    document["policy_pins"] = {"first-hold": hashlib.sha256(policy.read_bytes()).hexdigest()}
    site.write_text(tomlkit.dumps(document), encoding="utf-8")
    store = folder / "store"
    common, state = ["--site", str(site), "--store", str(store)], ["--state", str(folder / "marks")]
    holds: list[tuple[str, list[str]]] = [("first-hold", [])]
    for topology, group in itertools.groupby(arguments.programs, key=lambda program: PROGRAMS[program][0]):
        holds.append((f"measure-{topology}-{len(holds)}", list(group)))

    def campaign(name: str, programs: list[str]) -> int:
        plan = folder / f"{name}.toml"
        plan.write_text(tomlkit.dumps(plan_document(name, programs, locked, store)), encoding="utf-8")
        return coordinator("campaign", *common, *state, "--key", str(key), "--plan", str(plan)).returncode

    clock = SystemClock()
    with open_sessions(read_site(site)[0], clock) as sessions, production(sessions, Reporter(clock.utc)):
        code = coordinator("doctor", *common, "--key", str(key)).returncode
        for name, programs in holds:
            code = code or campaign(name, programs)
    verified = coordinator("receipts", "verify", str(store), "--signers", str(signers), *state).returncode
    return code or verified


if __name__ == "__main__":
    raise SystemExit(main())
