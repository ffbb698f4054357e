"""One contract for every way to a host: this machine, a real sshd behind a link that breaks, and the simulated link."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import CoordinatorError, HostKeyMismatch, HostUnreachable
from coordinator.host import CommandResult, Host, Outcome
from coordinator.local import LocalHost
from coordinator.ssh import SshHost, SshTarget
from tests.hosts.lab import Lab
from tests.hosts.machine import Machine, send, system, wait_for
from tests.hosts.simulated import SimulatedHost

PYTHON = str(Path(sys.executable).resolve())
"""The interpreter behind the environment: a test host has a /tmp of its own, where a clone may live."""

NOTICED_S = 6.0
SLACK_S = 1.5


def target_of(machine: Machine) -> SshTarget:
    kind, body = machine.host_key
    return SshTarget(machine.name, machine.address, 22, "root", kind, body, machine.identity)


@pytest.fixture
def machine(lab: Lab) -> Iterator[Machine]:
    (found,) = lab.machines_named("c0")
    yield found
    if found.is_up:
        found.heal()


@pytest.fixture
def ssh(machine: Machine) -> Iterator[SshHost]:
    host = SshHost(target_of(machine))
    yield host
    host.close()


@pytest.fixture(params=["local", "simulated", "ssh", "ssh-noisy"])
def host(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Host]:
    """Each way in turn; ``ssh-noisy`` has a login shell that talks."""
    if request.param in ("local", "simulated"):
        yield LocalHost("here") if request.param == "local" else SimulatedHost("here")
        return
    machine: Machine = request.getfixturevalue("machine")
    profile = machine.path("/root/.bashrc")
    profile.write_text("echo 'Welcome, all is well'\necho trouble >&2\n" if request.param == "ssh-noisy" else "")
    host = SshHost(target_of(machine))
    yield host
    host.close()
    profile.write_text("")


@pytest.fixture
def folder(host: Host, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """An empty folder over there."""
    if not isinstance(host, SshHost):
        return str(tmp_path)
    path = f"/srv/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    assert host.run(["mkdir", "-p", path], timeout_s=20).code == 0
    return path


def sh(host: Host, script: str, *arguments: str, timeout_s: float = 20, stdin: bytes = b"") -> CommandResult:
    return host.run(["/bin/sh", "-c", script, "sh", *arguments], timeout_s=timeout_s, stdin=stdin)


def test_exit_code_and_streams(host: Host) -> None:
    """Red when a code is lost, or the streams are mixed up."""
    result = sh(host, "echo out; echo err >&2; exit 7")
    assert (result.outcome, result.code, result.truncated) == (Outcome.EXITED, 7, False)
    assert result.stdout.endswith(b"out\n")
    assert b"err" not in result.stdout
    assert result.stderr.endswith(b"err\n")
    assert 0 < result.elapsed_ns < 20e9


def test_arguments_arrive_as_they_were(host: Host) -> None:
    """Red when any shell on the way reads an argument."""
    hard = ["a b", "$HOME", "`id`", "'", '"', "\\", "*", "", "-n", "é\u202e", "x\ny", "%i", "!"]
    result = host.run([PYTHON, "-c", "import sys; print(ascii(sys.argv[1:]))", *hard], timeout_s=20)
    assert result.stdout.endswith(f"{hard!a}\n".encode())


def test_input_reaches_the_command_and_ends(host: Host) -> None:
    """Red when input is cut, doubled or never ended."""
    data = os.urandom(3 << 20)
    result = host.run(["sha256sum"], stdin=data, timeout_s=30)
    assert hashlib.sha256(data).hexdigest().encode() in result.stdout
    assert sh(host, "cat; echo end").stdout.endswith(b"end\n")


def test_a_command_that_ignores_its_input_is_not_a_lost_link(host: Host) -> None:
    """Red when a closed input is taken for a closed connection."""
    result = host.run(["true"], stdin=b"x" * (4 << 20), timeout_s=20)
    assert (result.outcome, result.code) == (Outcome.EXITED, 0)


def test_ten_megabytes_on_stderr_block_nothing(host: Host) -> None:
    """Red when one stream is read only after the other, or the cap does not hold."""
    script = "head -c 10485760 /dev/zero >&2; echo done"
    result = host.run(["/bin/sh", "-c", script], timeout_s=60, cap_bytes=1 << 20)
    assert (result.outcome, result.code, result.truncated) == (Outcome.EXITED, 0, True)
    assert result.stdout.endswith(b"done\n")
    assert len(result.stderr) == 1 << 20


def test_both_streams_at_once_arrive_whole(host: Host) -> None:
    """Red when the end of a command cuts what it wrote last."""
    result = sh(host, "for i in 1 2 3 4 5 6 7 8; do head -c 100000 /dev/zero; head -c 100000 /dev/zero >&2; done")
    assert result.stdout.count(0) == result.stderr.count(0) == 800_000


def test_a_killed_command_is_not_a_failed_one(host: Host) -> None:
    """Red when death by a signal looks like an exit code."""
    result = sh(host, "kill -KILL $$")
    assert result.outcome is Outcome.SIGNALLED
    assert result.code in (None, signal.SIGKILL)


def test_a_missing_program_never_reads_as_success(host: Host) -> None:
    """Red when a program that does not exist exits 0."""
    result = host.run(["/no/such/program"], timeout_s=20)
    assert result.outcome is Outcome.NOT_STARTED or (result.outcome is Outcome.EXITED and result.code == 127)


def test_the_deadline_is_ours(host: Host) -> None:
    """Red when a silent command outlives its time, or its output so far is lost."""
    begun = time.monotonic()
    result = sh(host, "echo before; exec sleep 30", timeout_s=1)
    assert (result.outcome, result.code) == (Outcome.TIMED_OUT, None)
    assert time.monotonic() - begun < 1 + SLACK_S
    assert result.stdout.endswith(b"before\n")


def test_a_talkative_command_meets_the_deadline_too(host: Host) -> None:
    """Red when the deadline is only looked at while nothing arrives."""
    begun = time.monotonic()
    result = host.run(["yes"], timeout_s=1, cap_bytes=1000)
    assert result.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - begun < 1 + SLACK_S


def test_a_grandchild_that_keeps_the_stream_open_is_not_waited_for(host: Host) -> None:
    """Red when the call lasts as long as a daemon that the command left behind."""
    begun = time.monotonic()
    result = sh(host, "sleep 20 & echo left; exit 3", timeout_s=15)
    assert (result.outcome, result.code) == (Outcome.EXITED, 3)
    assert time.monotonic() - begun < 5
    assert result.stdout.endswith(b"left\n")


def test_eight_commands_at_once(host: Host) -> None:
    """Red when commands of several threads share anything."""
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: sh(host, f"echo {number}; exit {number}"), range(8)))
    assert [result.code for result in results] == list(range(8))
    assert [result.stdout.split()[-1] for result in results] == [str(number).encode() for number in range(8)]


def test_put_is_whole_and_has_its_mode(host: Host, folder: str) -> None:
    """Red when a file arrives changed, with another mode, or leaves a temporary beside it."""
    data = os.urandom(1_500_000)
    path = f"{folder}/deep/er/file name"
    assert host.put(data, path, mode=0o555) == hashlib.sha256(data).hexdigest()
    assert sh(host, 'sha256sum < "$1"; stat -c %a "$1"', path).stdout.split()[-3:] == [
        hashlib.sha256(data).hexdigest().encode(),
        b"-",
        b"555",
    ]
    assert host.put(b"second", path) == hashlib.sha256(b"second").hexdigest()
    assert sh(host, 'ls -A "$1"', f"{folder}/deep/er").stdout.splitlines()[-1:] == [b"file name"]


def test_put_where_nothing_can_be_written_refuses(host: Host) -> None:
    """Red when a failed upload returns."""
    with pytest.raises(CoordinatorError):
        host.put(b"x", "/proc/nowhere/file")


def test_fetch_takes_only_what_was_announced(host: Host, folder: str, tmp_path: Path) -> None:
    """Red when a file with another digest or size comes back as if it were the one."""
    data, path, back = os.urandom(1_000_000), f"{folder}/raw", tmp_path / "back" / "raw"
    digest = host.put(data, path)
    if isinstance(host, SshHost) and b"Welcome" in sh(host, ":").stdout:
        # A shell that talks on stdout damages plain transfers: refused, never believed. The guard's frames survive it.
        with pytest.raises(CoordinatorError):
            host.fetch(path, back, sha256=digest, size_bytes=len(data))
        assert not back.exists()
        return
    host.fetch(path, back, sha256=digest, size_bytes=len(data))
    assert back.read_bytes() == data
    for wrong in ({"sha256": "0" * 64, "size_bytes": len(data)}, {"sha256": digest, "size_bytes": len(data) - 1}):
        with pytest.raises(CoordinatorError):
            host.fetch(path, tmp_path / "other", **wrong)  # type: ignore[arg-type]
        assert not (tmp_path / "other").exists()


def test_read_is_bounded(host: Host, folder: str) -> None:
    """Red when a large file is read whole, or a missing one reads as empty."""
    host.put(b"x" * 1000, f"{folder}/small")
    assert host.read(f"{folder}/small", max_bytes=2000).endswith(b"x" * 1000)
    with pytest.raises(CoordinatorError):
        host.read(f"{folder}/small", max_bytes=999)
    with pytest.raises(CoordinatorError):
        host.read(f"{folder}/missing", max_bytes=10)


def test_the_fingerprint_is_the_one_openssh_prints(ssh: SshHost, machine: Machine) -> None:
    """Red when the pinned key is shown in another form than people compare."""
    shown = machine.inside("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub")
    assert ssh.fingerprint() == shown.split()[1]
    assert LocalHost("here").fingerprint() == "local"


@pytest.mark.parametrize("kind", ["ecdsa-sha2-nistp256", "ssh-rsa"])
def test_keys_of_other_types(kind: str, machine: Machine, tmp_path: Path) -> None:
    """Red when only one type of host key can be pinned."""
    name = {"ecdsa-sha2-nistp256": "ecdsa", "ssh-rsa": "rsa"}[kind]
    system("ssh-keygen", "-q", "-t", name, "-N", "", "-f", str(tmp_path / "key"))
    with second_sshd(machine, (tmp_path / "key").read_bytes(), f"{name}-key", 2022) as port:
        body = (tmp_path / "key.pub").read_text().split()[1]
        host = SshHost(replace(target_of(machine), port=port, key_type=kind, key_base64=body))
        try:
            assert host.run(["hostname"], timeout_s=20).stdout == b"c0\n"
        finally:
            host.close()


class second_sshd:  # noqa: N801 - used like a function
    """Another sshd on another port, with a key of its own."""

    def __init__(self, machine: Machine, key: bytes, name: str, port: int) -> None:
        self._machine, self._key, self._name, self._port = machine, key, name, port

    def __enter__(self) -> int:
        path = f"/run/{self._name}"
        self._machine.inside("sh", "-c", f"umask 077; cat > {path}", stdin=self._key)
        argv = ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/lab_config", "-p", str(self._port)]
        # Its command line's key is added to the configured ones, so the file's own line is dropped.
        self._machine.inside("sh", "-c", f"sed '/^HostKey/d' /etc/ssh/lab_config > {path}.config")
        argv[4] = f"{path}.config"
        self._machine.inside("systemd-run", "-q", f"--unit={self._name}", *argv, "-h", path)
        wait_for(
            lambda: f":{self._port}" in self._machine.inside("ss", "-tln"), 10, f"sshd on port {self._port} listens"
        )
        return self._port

    def __exit__(self, *_exc: object) -> None:
        self._machine.inside("systemctl", "stop", self._name)


def test_another_host_key_is_never_talked_to(machine: Machine, tmp_path: Path) -> None:
    """Red when a host with another key gets a login or a command."""
    system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    body = (tmp_path / "other.pub").read_text().split()[1]
    target = target_of(machine)
    for wrong in (replace(target, key_base64=body), replace(target, key_type="ecdsa-sha2-nistp256")):
        host = SshHost(wrong)
        with pytest.raises(HostKeyMismatch):
            host.run(["touch", "/run/was-here"], timeout_s=20)
        host.close()
    assert not machine.path("/run/was-here").exists()


def test_a_refused_login_says_so(machine: Machine, tmp_path: Path) -> None:
    """Red when a key that opens nothing looks like a dead host or falls back to another login."""
    system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "stranger"))
    host = SshHost(replace(target_of(machine), identity_file=tmp_path / "stranger"))
    with pytest.raises(HostUnreachable, match="SSH refused"):
        host.run(["true"], timeout_s=20)
    host.close()


def test_nobody_there(lab: Lab, machine: Machine) -> None:
    """Red when a first contact that fails is anything but unreachable."""
    absent = replace(target_of(machine), address=machine.address.rpartition(".")[0] + ".250")
    for target in (absent, replace(target_of(machine), port=9)):
        host = SshHost(target, connect_timeout_s=2)
        with pytest.raises(HostUnreachable):
            host.run(["true"], timeout_s=20)


def _time_of(action: Callable[[], CommandResult], before: Callable[[], None]) -> tuple[CommandResult, float]:
    """The result of a running command, and how long after ``before`` it came."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(action)
        time.sleep(0.5)  # the fault is to hit a command that runs, not one that starts
        before()
        begun = time.monotonic()
        result = running.result(60)
    return result, time.monotonic() - begun


@pytest.mark.parametrize("fault", ["cut", "power-off", "sshd-stopped", "sshd-killed"])
def test_a_lost_link_is_noticed_and_not_guessed(fault: str, ssh: SshHost, machine: Machine) -> None:
    """Red when a silent connection is waited on to the command's own deadline, or its outcome is invented."""
    assert ssh.run(["true"], timeout_s=20).code == 0
    connections = [pid for pid in machine.pids("sshd:") if pid not in machine.pids("[listener]")]
    assert connections

    def signal_all(number: signal.Signals) -> None:
        assert [pid for pid in connections if send(pid, number)], "no connection was left to disturb"

    actions: dict[str, Callable[[], None]] = {
        "cut": machine.cut,
        "power-off": machine.power_off,
        "sshd-stopped": lambda: signal_all(signal.SIGSTOP),
        "sshd-killed": lambda: signal_all(signal.SIGKILL),
    }
    try:
        result, took_s = _time_of(lambda: sh(ssh, "echo begun; exec sleep 40", timeout_s=40), actions[fault])
        assert (result.outcome, result.code) == (Outcome.LINK_LOST, None)
        assert took_s < NOTICED_S + SLACK_S
        again = time.monotonic()
        if fault in ("cut", "power-off"):
            # Still broken: an outcome again, in bounded time, and no exception once there was a connection.
            assert ssh.run(["true"], timeout_s=5).outcome is Outcome.LINK_LOST
            assert time.monotonic() - again < 15
    finally:
        if fault == "sshd-stopped":
            for pid in connections:
                send(pid, signal.SIGKILL)
        if not machine.is_up:
            machine.boot()
        machine.heal()
    assert ssh.run(["echo", "back"], timeout_s=20).stdout == b"back\n"


def test_a_simulated_cut_is_like_a_real_one(tmp_path: Path) -> None:
    """Red when the simulated link invents an outcome, or answers at a first contact where a real one cannot."""
    host = SimulatedHost("here")
    host.is_cut = True
    with pytest.raises(HostUnreachable):
        host.run(["true"], timeout_s=20)
    host.is_cut = False
    assert host.run(["true"], timeout_s=20).code == 0
    host.is_cut = True
    result = host.run(["touch", str(tmp_path / "was-here")], timeout_s=20)
    assert (result.outcome, result.code) == (Outcome.LINK_LOST, None)
    assert not (tmp_path / "was-here").exists()
    with pytest.raises(CoordinatorError):
        host.put(b"x", str(tmp_path / "file"))
    host.is_cut = False
    assert host.run(["echo", "back"], timeout_s=20).stdout == b"back\n"


def test_another_key_after_a_reboot_stops_us(ssh: SshHost, machine: Machine) -> None:
    """Red when a reconnection is less careful than the first connection."""
    assert ssh.run(["true"], timeout_s=20).code == 0
    key = machine.path("/etc/ssh/ssh_host_ed25519_key")
    original = key.read_bytes()
    machine.inside("sh", "-c", "rm /etc/ssh/ssh_host_ed25519_key; ssh-keygen -q -t ed25519 -N '' -f /run/new")
    machine.inside("cp", "/run/new", "/etc/ssh/ssh_host_ed25519_key")
    machine.power_off()
    machine.boot()
    try:
        with pytest.raises(HostKeyMismatch):
            ssh.run(["true"], timeout_s=20)
    finally:
        machine.path("/etc/ssh/ssh_host_ed25519_key").write_bytes(original)
        machine.power_off()
        machine.boot()
