"""The local host keeps the ``Host`` contract: outcomes are told apart, streams drained and capped, files whole."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from coordinator.errors import CoordinatorError
from coordinator.host import Outcome
from coordinator.local import LocalHost


@pytest.fixture
def host() -> LocalHost:
    return LocalHost("here")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_exit_code_and_both_streams(host: LocalHost) -> None:
    """Red when stderr is merged into stdout or the code is dropped."""
    result = host.run(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), timeout_s=20)
    assert (result.outcome, result.code) == (Outcome.EXITED, 3)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


def test_a_signal_is_not_an_exit_code(host: LocalHost) -> None:
    """Red when a negative return code is reported as EXITED."""
    result = host.run(python("import os; os.kill(os.getpid(), 9)"), timeout_s=20)
    assert (result.outcome, result.code) == (Outcome.SIGNALLED, 9)


def test_ten_megabytes_on_stderr_do_not_block(host: LocalHost) -> None:
    """Red when the streams are read one after the other."""
    result = host.run(
        python("import sys; sys.stderr.write('x' * 10_000_000); print('done')"), timeout_s=30, cap_bytes=1000
    )
    assert result.outcome is Outcome.EXITED
    assert result.stdout == b"done\n"
    assert len(result.stderr) == 1000
    assert result.truncated


def test_deadline_kills_the_whole_session(host: LocalHost, tmp_path: Path) -> None:
    """Red when only the first process is killed and its child lives on."""
    note = tmp_path / "child"
    code = (
        "import os, pathlib, time\n"
        "pid = os.fork()\n"
        f"if pid == 0: pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    result = host.run(python(code), timeout_s=1.5)
    assert (result.outcome, result.code) == (Outcome.TIMED_OUT, None)
    child = int(note.read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_missing_program_never_started(host: LocalHost) -> None:
    assert host.run(["/no/such/program"], timeout_s=5).outcome is Outcome.NOT_STARTED


def test_input_larger_than_a_pipe_reaches_the_command(host: LocalHost) -> None:
    """Red when the input is written before the output is drained."""
    data = bytes(range(256)) * 4096
    result = host.run(python("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"), stdin=data, timeout_s=20)
    assert result.stdout == data


def test_put_is_whole_and_says_its_digest(host: LocalHost, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    digest = host.put(b"content", str(target), mode=0o640)
    assert digest == hashlib.sha256(b"content").hexdigest()
    assert target.read_bytes() == b"content"
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_fetch_refuses_another_content(host: LocalHost, tmp_path: Path) -> None:
    """Red when the digest is not compared, or a refused file is left behind."""
    source = tmp_path / "source"
    source.write_bytes(b"what came")
    wanted = hashlib.sha256(b"what was announced").hexdigest()
    with pytest.raises(CoordinatorError, match="not the one"):
        host.fetch(str(source), tmp_path / "copy", sha256=wanted, size_bytes=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
