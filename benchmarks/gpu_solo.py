"""One drafter worker, measured whole: starts the worker, runs ``qualify.whole_worker``, ends the worker.

    python benchmarks/gpu_solo.py [--mode sampled-top32-v2] [--synthetic qwen3-4b] [--output DIR] [--require-hold]
    python benchmarks/gpu_solo.py --devices cuda:0,cuda:1 --physical --identity-expected FILE ...

With two devices the worker is a pair (``cpu,cpu``: an emulated one). ``--identity N`` records what it proposes for N
positions; FILE is that record of another worker, which must be the same. Weights are synthetic in the real shape, so
the times are real and the tokens mean nothing; the observation says so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from remote_dspark.contract import ServerState
from remote_dspark.observe import ObserveError
from remote_dspark.qualify import whole_worker
from remote_dspark.qualify.worker_client import read_status

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0


def toml(document: dict[str, Any]) -> str:
    """The few kinds of values that these files hold; JSON spells them as TOML does."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in document.items() if not isinstance(value, dict)]
    tables = [f"[{key}]\n{toml(value)}" for key, value in document.items() if isinstance(value, dict)]
    return "\n".join([*plain, *tables]) + "\n"


def wait_ready(health: str, process: subprocess.Popen[bytes]) -> None:
    """Until the worker says that it serves.

    Raises:
        RuntimeError: It ended, or did not get there in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"expected a worker that serves, found exit code {process.returncode}")
        with suppress(ObserveError):
            if read_status(health, "/health", 5.0)["state"] == ServerState.READY.value:
                return
        time.sleep(0.1)
    raise RuntimeError(f"expected a worker that serves within {START_S:.0f} s, found none at {health}")


def main() -> int:
    """Starts, measures, ends; the code is the measurement's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="sampled-top32-v2")
    parser.add_argument("--synthetic", default="qwen3-4b")
    parser.add_argument("--devices", default="cuda", help="one device, or the two of a pair")
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--batches", default="1,2,3,4")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--identity", type=int, default=0, metavar="POSITIONS")
    parser.add_argument("--identity-rounds", type=int, default=40)
    parser.add_argument("--identity-expected", default="", metavar="FILE")
    parser.add_argument("--spin-us", type=int, help="the worker's listen.spin_us; default: its own")
    parser.add_argument("--timeout", type=int, default=10, metavar="SECONDS", help="of one call")
    arguments, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="dspark-solo-") as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        health = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        folder = Path(name)
        devices, batches = arguments.devices.split(","), [int(batch) for batch in arguments.batches.split(",")]
        known = {"identity_expected": arguments.identity_expected} if arguments.identity_expected else {}
        worker = {
            "modes": [arguments.mode],
            "model": {"synthetic": arguments.synthetic, "dtype": "bfloat16"}
            | ({"devices": devices} if len(devices) > 1 else {"device": devices[0]}),
            "listen": {"address": f"unix:{folder}/worker.sock"}
            | ({} if arguments.spin_us is None else {"spin_us": arguments.spin_us}),
            "metrics": {"address": health},
            "limits": {"max_positions": 0 if arguments.synthetic == "tiny" else 4096, "markov_cache_bytes": 1 << 30}
            | {"max_requests": max(batches)},
        }
        probe = {
            "address": f"unix:{folder}/worker.sock",
            "status": health,
            "mode": arguments.mode,
            "synthetic": arguments.synthetic,
            "depths": [5],
            "batches": batches,
            "repetitions": arguments.repetitions,
            "warmup": min(6, arguments.repetitions),
            "context": arguments.context,
            "timeout_s": arguments.timeout,
            "identity_positions": arguments.identity,
            "identity_rounds": arguments.identity_rounds,
        } | known
        (folder / "worker.toml").write_text(toml(worker), encoding="utf-8")
        (folder / "probe.toml").write_text(toml(probe), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH") or str(ROOT)}
        command = [sys.executable, "-m", "remote_dspark.serve", "--config", str(folder / "worker.toml")]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        try:
            wait_ready(health, process)
            return whole_worker.main(["--config", str(folder / "probe.toml"), *rest])
        finally:
            process.terminate()
            process.wait(timeout=180)


if __name__ == "__main__":
    raise SystemExit(main())
