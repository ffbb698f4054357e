"""Measured receipts from this machine: a first hold, then one measurement hold over its GPUs, signed and verified.

    python benchmarks/gpu_receipts.py FOLDER kernels worker pair [--device 0]

The machine is its own host (transport ``local``) and a small web server stands for its production, so that stop, proof
and restore are real. Needs the coordinator's dependencies. FOLDER gets site, plans, signing key and ``store``; copy
``store`` as it is. Exits with the first command's code that is not 0. Where there is no GPU, ``emulated-pair`` shows
the whole way on a named device.
"""

from __future__ import annotations

import argparse
import hashlib
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

ROOT = Path(__file__).resolve().parents[1]
BOUND_S = 540
"""Of one program; the guard ends it then."""

PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "kernels": ("solo", [str(ROOT / "benchmarks" / "gpu.py"), "--require-hold"]),
    "kernels-quick": (
        "solo",
        [str(ROOT / "benchmarks" / "gpu.py"), "--require-hold", "--quick", "--stress-seconds", "5"],
    ),
    "worker": ("solo", [str(ROOT / "benchmarks" / "gpu_solo.py"), "--require-hold"]),
    "pair": ("pair", ["-m", "remote_dspark.qualify.pair", "--physical", "--require-hold"]),
    "emulated-pair": ("pair", ["-m", "remote_dspark.qualify.pair", "--require-hold"]),
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


def plan_documents(names: list[str], locked: list[str]) -> dict[str, dict[str, Any]]:
    """The first hold and the measurement hold, whose programs see the locked devices only."""
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    env = kept | {"CUDA_VISIBLE_DEVICES": ",".join(locked)}
    bounds = {"preflight": 60, "lease": 20, "snapshot": 30, "arm-dead-man": 30, "stop": 40}
    first = {
        "schema": "coordinator/plan/v1",
        "name": "first-hold",
        "purpose": "first-hold",
        "bound_s": 400,
        "restore_reserve_s": 120,
        "orphan_after_s": 30,
        "holds": {"1": []},
        "step_bounds_s": bounds,
    }
    programs = [
        {"name": name, "role": "drafter", "topology": PROGRAMS[name][0], "argv": ["{python}", *PROGRAMS[name][1]],
         "timeout_s": BOUND_S, "env": env}
        for name in names
    ]  # fmt: skip
    measure = first | {
        "name": "measure",
        "purpose": "measurement",
        "bound_s": 400 + BOUND_S * len(names),
        "step_bounds_s": bounds | {"measure": BOUND_S},
        "measurements": programs,
    }
    return {"first": first, "measure": measure}


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
    for name, plan in plan_documents(arguments.programs, locked).items():
        (folder / f"{name}.toml").write_text(tomlkit.dumps(plan), encoding="utf-8")
    common = ["--site", str(site), "--store", str(folder / "store")]
    state = ["--state", str(folder / "marks")]
    steps = [
        ["doctor", *common, "--key", str(key)],
        *(["campaign", *common, *state, "--key", str(key), "--plan", str(folder / f"{name}.toml")]
          for name in ("first", "measure")),
        ["receipts", "verify", str(folder / "store"), "--signers", str(signers), *state],
    ]  # fmt: skip
    clock = SystemClock()
    with open_sessions(read_site(site)[0], clock) as sessions, production(sessions, Reporter(clock.utc)):
        return next((code for step in steps if (code := coordinator(*step).returncode) != 0), 0)


if __name__ == "__main__":
    raise SystemExit(main())
