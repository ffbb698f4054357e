"""One real host in namespaces of this machine: its own systemd (or none), sshd, disk, cgroup tree, boot id and link.

Rules: the link goes silent before a power-off, as a real one does; processes are ended by pid and start time only;
the disk (the upper layer of an overlay over this machine's root) outlives power-offs; a host dies with the test process
that booted it, so boot from a thread that lives as long as the host: the main one. Not covered: a kernel and clock of
its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
DISK = "256m"

# Becomes the host's PID 1 at its end. Arguments: folder, host name, program.
INIT = r"""
set -e
D=$1; NAME=$2; R=$D/root; shift 2
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$D/disk/upper,workdir=$D/disk/work" "$R"
cd "$R"
mount -t proc proc proc
mount --bind proc/sys proc/sys && mount -o remount,ro,bind proc/sys
mount -t sysfs -o ro sysfs sys
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
  mount -t cgroup2 cgroup2 sys/fs/cgroup
else
  mount -t tmpfs tmpfs sys/fs/cgroup
  mkdir sys/fs/cgroup/unified sys/fs/cgroup/systemd
  mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
  mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
mount -t tmpfs -o size=64m tmpfs run
mount -t tmpfs -o size=64m tmpfs tmp
mkdir run/sshd
cat /proc/sys/kernel/random/uuid > run/boot_id
mount --bind run/boot_id proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do touch "dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
hostname "$NAME"
exec setpriv --bounding-set=-sys_time,-sys_module,-sys_boot chroot . /usr/bin/env -i container=lab \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""

SYSTEMD = "/lib/systemd/systemd --system --unit=lab.target --log-target=console --log-level=notice --show-status=no"
BARE = "/bin/bash -c"
BARE_LOOP = "while :; do /usr/sbin/sshd -D -e -f /etc/ssh/lab_config; sleep 0.2; done"
"""PID 1 of a host without a service manager: it keeps sshd up and reaps orphans, nothing more."""

# A cgroup of its own in every hierarchy, entered before the namespace of cgroups is made.
LAUNCH = r"""
set -e
NAME=$1; shift
for group in /sys/fs/cgroup /sys/fs/cgroup/*; do
  [ -d "$group/$NAME" ] && echo $$ > "$group/$NAME/cgroup.procs"
done
exec "$@"
"""

SSHD_UNIT = """[Service]
ExecStart=/usr/sbin/sshd -D -e -f /etc/ssh/lab_config
Restart=always
RestartSec=200ms
KillMode=process
"""

SSHD_CONFIG = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100:100:200
MaxSessions 64
"""

GENERATORS = {kind: Path("/usr/lib/systemd", f"{kind}-generators") for kind in ("system", "user")}
"""They write units for disks and packages of the machine below, which a host has none of, at every reload."""

MASKED = (
    "systemd-sysctl",
    "systemd-modules-load",
    "systemd-udevd",
    "systemd-udev-trigger",
    "systemd-random-seed",
    "systemd-timesyncd",
    "systemd-journal-flush",
    "systemd-update-utmp",
    "e2scrub_reap",
)


class LabError(Exception):
    """A host of the lab did not do what it was told: the lab's fault, never a finding about the code under test."""


def wait_for(condition: Callable[[], object], timeout_s: float, what: str, *, every_s: float = 0.02) -> None:
    """Polls until ``condition`` holds.

    Raises:
        LabError: It did not within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)


def system(*argv: str, check: bool = True) -> str:
    """Run one command of this machine."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def start_ticks(pid: int) -> int | None:
    """Start time of a living process, None for a dead one or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process that was seen a moment ago; false when it has ended since."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Machine:
    """One host.

    Attributes:
        name: Its host name; also names its devices and control groups together with ``lab``.
        address: IPv4 address on the lab's bridge.
        identity: Private key for user root.
        host_key: Type and base64 body of the pinned key.
        image: Adds files to a fresh disk, given its root.
        is_bare: It has no service manager.
    """

    def __init__(self, lab: str, folder: Path, name: str, bridge: str, address: str) -> None:
        self.name = name
        self.address = address
        self._tag = f"{lab}{name}"
        self._bridge = bridge
        self._dir = folder / name
        self._disk = self._dir / "disk"
        self._process: subprocess.Popen[bytes] | None = None
        self.image: Callable[[Path], None] | None = None
        self.is_bare = False
        self.identity = folder / "identity"
        (self._dir / "root").mkdir(parents=True, exist_ok=True)
        self._disk.mkdir(exist_ok=True)
        for key in (self.identity, self._dir / "hostkey"):
            if not key.exists():
                system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(key))
        kind, body = (self._dir / "hostkey.pub").read_text().split()[:2]
        self.host_key = (kind, body)

    # -- power -------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it is powered on."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Power on; returns at once, `wait_ready` waits."""
        assert not self.is_up
        self._prepare_disk()
        self._prepare_network()
        self._make_cgroups()
        script, launch = self._dir / "init.sh", self._dir / "launch.sh"
        script.write_text(INIT)
        launch.write_text(LAUNCH)
        argv = ["setpriv", "--pdeathsig", "KILL", "sh", str(launch), self._tag]
        argv += ["ip", "netns", "exec", self._tag, "unshare", "-f", "-p", "-m", "-u", "-i", "-C", "--kill-child"]
        program = [*BARE.split(), BARE_LOOP] if self.is_bare else SYSTEMD.split()
        with (self._dir / "console.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*argv, "sh", str(script), str(self._dir), self.name, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self._dir / "pid").write_text(f"{self._process.pid} {start_ticks(self._process.pid)}")

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Until sshd greets."""
        wait_for(self._greets, timeout_s, f"{self.name} boots (see {self._dir}/console.log)")

    def boot(self) -> None:
        """Power on and wait."""
        self.start()
        self.wait_ready()

    def power_off(self) -> None:
        """Hard: the link goes silent, then every process dies. The disk stays."""
        self.cut()
        if self._process is not None:
            init = self.init_pid()
            if init is not None:
                send(init, signal.SIGKILL)
            wait_for(lambda: init is None or start_ticks(init) is None, 30, f"{self.name} dies")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait(30)
            self._process = None
        self._forget_network()
        self._remove_cgroups()
        (self._dir / "pid").unlink(missing_ok=True)

    def wipe(self) -> None:
        """Forget the disk of a powered-off host."""
        if self._disk.is_mount():
            system("umount", "-l", str(self._disk))

    def remove_leftovers(self) -> None:
        """End what an earlier run that was killed left under this name."""
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = (int(word) for word in (self._dir / "pid").read_text().split())
            if start_ticks(pid) == ticks:
                for process in (*children(pid), pid):
                    send(process, signal.SIGKILL)
        self.power_off()
        self.wipe()

    # -- link --------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull the network cable: packets vanish in both directions, nobody is told."""
        system("ip", "link", "set", self._tag, "down", check=False)

    def heal(self) -> None:
        """Plug it in again, and forget that neighbours were unreachable, as a switch's link-up does."""
        system("ip", "link", "set", self._tag, "up")
        system("ip", "neigh", "flush", "dev", self._bridge, check=False)

    # -- looking inside, without the link -----------------------------------------------------------------------

    def init_pid(self) -> int | None:
        """Pid, on this machine, of the host's PID 1."""
        if self._process is None:
            return None
        found = children(self._process.pid)
        return found[0] if found else None

    def inside(self, *argv: str, check: bool = True, stdin: bytes = b"") -> str:
        """Run a command inside the host as a console would, whatever its link does."""
        pid = self.init_pid()
        if pid is None:
            raise LabError(f"{self.name} is off")
        enter = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-C", f"--root=/proc/{pid}/root", "--wd=/"]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        done = subprocess.run([*enter, *argv], input=stdin, capture_output=True, check=False, env=env, timeout=60)
        if check and done.returncode:
            raise LabError(f"{self.name}: {' '.join(argv)}: {done.returncode} {done.stderr.decode()[-400:]}")
        return done.stdout.decode("utf-8", "replace")

    def path(self, inside: str) -> Path:
        """Where a file of the host lies for this machine, seen through its PID 1."""
        return Path(f"/proc/{self.init_pid()}/root{inside}")

    def pids(self, text: str) -> list[int]:
        """Pids, on this machine, of processes of this host whose command line contains ``text``."""
        found = []
        init = self.init_pid()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "ns/pid").readlink() != Path(f"/proc/{init}/ns/pid").readlink():
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if text in line:
                found.append(int(entry.name))
        return found

    # -- parts -------------------------------------------------------------------------------------------------

    def _greets(self) -> bool:
        if not self.is_up:
            raise LabError(f"{self.name} died while it booted, see {self._dir}/console.log")
        try:
            with socket.create_connection((self.address, 22), timeout=0.5) as link:
                return link.recv(4) == b"SSH-"
        except OSError:
            return False

    def _prepare_disk(self) -> None:
        upper = self._disk / "upper"
        if self._disk.is_mount():
            return
        system("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self._disk))
        for folder in ("upper/etc/ssh", "upper/etc/systemd/system", "upper/root/.ssh", "work"):
            (self._disk / folder).mkdir(parents=True)
        units = upper / "etc/systemd/system"
        # Nothing of this machine's own units starts inside: an opaque folder hides what lies below.
        os.setxattr(units, "trusted.overlay.opaque", b"y")
        for name in MASKED:
            (units / f"{name}.service").symlink_to("/dev/null")
        for kind, folder in GENERATORS.items():
            masks = upper / f"etc/systemd/{kind}-generators"
            masks.mkdir()
            for generator in folder.glob("*"):
                (masks / generator.name).symlink_to("/dev/null")
        (units / "lab-sshd.service").write_text(SSHD_UNIT)
        wanted = "lab-sshd.service multi-user.target"
        (units / "lab.target").write_text(f"[Unit]\nRequires=basic.target\nWants={wanted}\nAllowIsolate=yes\n")
        (upper / "etc/ssh/lab_config").write_text(SSHD_CONFIG)
        for suffix in ("", ".pub"):
            shutil.copyfile(self._dir / f"hostkey{suffix}", upper / f"etc/ssh/ssh_host_ed25519_key{suffix}")
        (upper / "etc/ssh/ssh_host_ed25519_key").chmod(0o600)
        shutil.copyfile(f"{self.identity}.pub", upper / "root/.ssh/authorized_keys")
        (upper / "root").chmod(0o700)
        (upper / "root/.ssh").chmod(0o700)
        for name in (".bashrc", ".profile", ".bash_profile"):
            (upper / "root" / name).write_text("")
        (upper / "etc/hostname").write_text(f"{self.name}\n")
        (upper / "etc/machine-id").write_text(f"{os.urandom(16).hex()}\n")
        if self.image is not None:
            self.image(upper)

    def _prepare_network(self) -> None:
        self._forget_network()
        system("ip", "netns", "add", self._tag)
        system("ip", "link", "add", self._tag, "type", "veth", "peer", "name", "eth0", "netns", self._tag)
        system("ip", "link", "set", self._tag, "master", self._bridge, "up")
        system("ip", "-n", self._tag, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            system("ip", "-n", self._tag, "link", "set", device, "up")
        system("ip", "neigh", "flush", "dev", self._bridge, check=False)

    def _forget_network(self) -> None:
        system("ip", "link", "del", self._tag, check=False)
        system("ip", "netns", "del", self._tag, check=False)

    def _make_cgroups(self) -> None:
        for hierarchy in hierarchies():
            group = hierarchy / self._tag
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists() and hierarchy != CGROUPS:
                    (group / name).write_text((hierarchy / name).read_text())

    def _remove_cgroups(self) -> None:
        def gone() -> bool:
            left = [group for root in hierarchies() if (group := root / self._tag).is_dir()]
            for group in left:
                for folder, _, _ in os.walk(group, topdown=False):
                    with contextlib.suppress(OSError):
                        Path(folder).rmdir()
            return not any(group.is_dir() for group in left)

        wait_for(gone, 30, f"the control groups of {self.name} are empty")


def hierarchies() -> list[Path]:
    """Roots of this machine's control groups: one where they are unified, several otherwise."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [folder for folder in CGROUPS.iterdir() if (folder / "cgroup.procs").exists()]


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
