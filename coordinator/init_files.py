"""``coordinator init``: a commented site.toml and plan.toml to start from, for this machine.

What can be known is filled in (interpreter, folders, GPUs); what only the operator knows is a line that the reader of
the file refuses until it is replaced, so an unfinished file can never open a hold.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.clock import SystemClock
from coordinator.local import LocalHost
from coordinator.render import Reporter

_SITE = """\
# Site file: the hosts, and the production that a hold may stop and must put back. What is not named is never touched.
schema = "coordinator/site/v1"
name = "{name}"
# signers = "/etc/coordinator/signers.toml"  # who may sign: `coordinator keys new` prints an entry
# policy_pins = {{ first-hold = "sha256", live = "sha256" }}  # digests of the policies you reviewed

[[hosts]]
name = "{name}"
transport = "local"            # "ssh" needs address, port, user, host_key = {{ type, base64 }}, identity_file
python = "{python}"            # 3.9 or newer for the guard; it also runs remote_dspark, so torch must be importable
state_dir = "{state_dir}"      # the guard's state: local disk, owned by the user
work_dir = "{work_dir}"        # staged packages, models, outputs
roles = ["target", "drafter"]
devices = [{devices}]          # GPU UUIDs as nvidia-smi -L prints them, or a name where there is no GPU

  # One table per production service, in the words of its kind.
  [[hosts.services]]
  name = "target"
  kind = "systemd-system"      # or "systemd-user" (unit), "docker" (container), "process" (start, cwd, log)
  unit = "REPLACE-ME"          # refused until it names a unit
  ports = [8000]
  stop_order = 1               # lower stops earlier; restore goes the other way
  supervisors = []             # timers and watchdogs that would start it again: suspended first, resumed last
  [hosts.services.probe]       # a real request: only its answer proves production
  url = "http://127.0.0.1:8000/v1/completions"
  method = "POST"
  body = '{{"model": "REPLACE-ME", "prompt": "ping", "max_tokens": 1, "temperature": 0}}'
  expect_contains = "choices"
"""

_PLAN = """\
# First plan of a site: stop and restore only, on declared bounds. Leaves the budget receipt that later plans need.
# Run it with: coordinator campaign --plan plan.toml
schema = "coordinator/plan/v1"
name = "first-hold"
purpose = "first-hold"
bound_s = 3600             # from the first lease to production proven back; enforced by the hosts
restore_reserve_s = 1800   # reserved first, at the end of the bound
orphan_after_s = 120       # silence after which the hosts restore by themselves
[holds]
1 = []
[step_bounds_s]            # a step that takes longer ends the hold
preflight = 60
lease = 30
snapshot = 60
arm-dead-man = 60
stop = 300
"""


def write_examples(directory: Path, *, force: bool, confirm: Callable[[str], bool]) -> int:
    """Write both files; asks before it overwrites.

    Returns:
        0, or 2 when the person declined.
    """
    clock = SystemClock()
    name = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname().lower()).strip("-") or "here"
    values = {
        "name": name,
        "python": sys.executable,
        "state_dir": str(Path.home() / ".local" / "state" / "coordinator-guard"),
        "work_dir": str(Path.home() / ".local" / "share" / "coordinator-work"),
        "devices": ", ".join(f'"{uuid}"' for uuid in gpu_uuids()) or '"cpu0"',
    }
    reporter = Reporter(clock.utc)
    for file, text in (("site.toml", _SITE.format(**values)), ("plan.toml", _PLAN)):
        path = directory / file
        if path.exists() and not force and not confirm(f"{path} exists. Overwrite it?"):
            reporter.step(f"left {path} as it is")
            return 2
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        reporter.step(f"wrote {path}")
    reporter.step("next: replace every REPLACE-ME, then `coordinator plan` and `coordinator doctor`")
    return 0


def gpu_uuids() -> list[str]:
    """UUIDs of this machine's GPUs, in PCI order; none where there is no driver."""
    result = LocalHost("here").run(["nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader"], timeout_s=20)
    rows = (line.split(", ") for line in result.stdout.decode("utf-8", "replace").splitlines())
    return [row[1].strip() for row in sorted(rows) if len(row) == 2]
