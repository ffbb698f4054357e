"""A host with a docker daemon of its own, from Debian's packages unpacked beside the checkout's other builds.

The daemon keeps off what a host of the lab cannot change (/proc/sys, iptables); containers use the host's network and
read its programs through bind mounts, so that an image without a byte serves, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.hosts.estate import PYTHON, SERVE, fill_disk
from tests.hosts.machine import Machine, wait_for

UNPACKED = Path(__file__).parents[2] / "build" / "docker"
_INSIDE = Path("/opt/docker")
"""Where a host has it: the checkout itself may lie below a folder that hosts have of their own."""
BOX_PORT = 8003

_PATHS = f"{_INSIDE}/usr/bin:{_INSIDE}/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_DAEMON = (
    f"{_INSIDE}/usr/sbin/dockerd --iptables=false --ip6tables=false --ip-forward=false --bridge=none "
    "--storage-driver=vfs"
)
_UNIT = f"""[Service]
Environment=PATH={_PATHS}
ExecStart={_DAEMON}
Delegate=yes
KillMode=process
Restart=always
RestartSec=200ms
[Install]
WantedBy=multi-user.target
"""
_FIELDS = "{{.Id}} {{.Name}} {{.State.Status}} {{.Image}} {{.Path}} {{json .Args}} {{json .HostConfig}}"


def why_not() -> str | None:
    """Why no docker daemon can be started here, or None."""
    return None if (UNPACKED / "usr/sbin/dockerd").exists() else "needs build/docker, see scripts/unpack-docker"


def fill_docker_disk(upper: Path) -> None:
    """The disk of a host of root's production, with the daemon enabled."""
    fill_disk(upper)
    units = upper / "etc/systemd/system"
    (units / "docker.service").write_text(_UNIT)
    (units / "multi-user.target.wants/docker.service").symlink_to("../docker.service")
    program = upper / "usr/local/bin/docker"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.symlink_to(_INSIDE / "usr/bin/docker")
    shutil.copytree(UNPACKED, upper / _INSIDE.relative_to("/"), symlinks=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    """A second name costs nothing; on another file system it is a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def docker(machine: Machine, *argv: str, check: bool = True) -> str:
    """The docker command on the host's console."""
    return machine.inside("/usr/local/bin/docker", *argv, check=check)


def run_box(machine: Machine, *options: str, mode: str = "plain") -> None:
    """A fresh container ``box`` that serves on its port."""
    wait_for(lambda: docker(machine, "info", "--format", "{{.ID}}", check=False).strip(), 30, "the daemon answers")
    if not docker(machine, "images", "-q", "base").strip():
        folders = "usr lib lib64 srv bin tmp etc"
        machine.inside("sh", "-c", f"mkdir -p /srv/image && cd /srv/image && mkdir -p {folders}")
        machine.inside("sh", "-c", "tar -C /srv/image -c . | /usr/local/bin/docker import - base")
    docker(machine, "rm", "-f", "box", check=False)
    mounts = [word for path in ("/usr", "/lib", "/lib64") for word in ("-v", f"{path}:{path}:ro")]
    argv = ["run", "-d", "--name", "box", "--network=host", *mounts, "-v", "/srv:/srv", *options, "base"]
    docker(machine, *argv, PYTHON, "-I", "-S", SERVE, "box", str(BOX_PORT), mode)
    wait_for(lambda: "served by box" in answer(machine), 20, "the container serves")


def answer(machine: Machine) -> str:
    """What the container's port says; empty when nobody listens."""
    script = f"exec 3<>/dev/tcp/127.0.0.1/{BOX_PORT} && echo x >&3 && cat <&3 | tail -1"
    return machine.inside("bash", "-c", script, check=False)


def seen(machine: Machine) -> str:
    """Everything about the container that a hold must leave as it was."""
    return docker(machine, "inspect", "--type=container", "--format", _FIELDS, "box", check=False)


def state_of(machine: Machine) -> tuple[str, str]:
    """Status and restart policy."""
    (found,) = json.loads(docker(machine, "inspect", "--type=container", "box"))
    return found["State"]["Status"], found["HostConfig"]["RestartPolicy"]["Name"]


def box(**changes: Any) -> dict[str, Any]:
    """The container, as the site file describes it."""
    return {
        "name": "box",
        "kind": "docker",
        "container": "box",
        "ports": [BOX_PORT],
        "drain_s": 2,
        "stop_s": 8,
        "start_s": 10,
        "watch_s": 1,
        "stop_order": 3,
        "probe": {"url": f"http://127.0.0.1:{BOX_PORT}/", "timeout_s": 2, "expect_contains": "served by box"},
        **changes,
    }
