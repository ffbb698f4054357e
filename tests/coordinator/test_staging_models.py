"""Models go to a host by digest: sent once, whole or not at all, continued after a cut, refused when others."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator import staging_models
from coordinator.clock import SystemClock
from coordinator.errors import AdmissionRefused, HostUnreachable
from coordinator.host import CommandResult, Outcome
from coordinator.local import LocalHost
from coordinator.staging_models import look_for_model, stage_model
from windows.models import Model

CONTENTS = {"config.json": b"{}", "shards/0001.safetensors": bytes(range(256)) * 700, "empty.txt": b""}


class SwiftClock(SystemClock):
    """Does not wait between attempts."""

    def sleep(self, seconds: float) -> None:
        del seconds


class CountingHost(LocalHost):
    """This machine; counts commands and loses chosen answers, before the command or after it."""

    def __init__(self) -> None:
        super().__init__("here")
        self.num_commands = 0
        self.sent_bytes = 0
        self.lose_before: set[int] = set()
        self.lose_after: set[int] = set()

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, cap_bytes: int = 4 << 20
    ) -> CommandResult:
        self.num_commands += 1
        lost = CommandResult(Outcome.LINK_LOST, None, b"", b"cut", False, 0)
        if self.num_commands in self.lose_before:
            return lost
        self.sent_bytes += len(stdin)
        result = super().run(argv, stdin=stdin, timeout_s=timeout_s, cap_bytes=cap_bytes)
        return lost if self.num_commands in self.lose_after else result


def write_model(folder: Path, contents: dict[str, bytes] = CONTENTS) -> Model:
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    files = [
        {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        for path, data in contents.items()
    ]
    return Model.model_validate_json(
        json.dumps({"name": "draft", "role": "drafter", "source": str(folder), "files": files})
    )


def stage(host: LocalHost, work: Path, model: Model, *, reserve_bytes: int = 0) -> Path:
    said: list[str] = []
    folder = stage_model(
        host,
        sys.executable,
        str(work),
        model,
        plan_folder=work,
        reserve_bytes=reserve_bytes,
        clock=SwiftClock(),
        say=said.append,
    )
    return Path(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_arrives_whole_and_is_sent_once(tmp_path: Path) -> None:
    """Red when a file is missing, changed, writable, left in parts, or sent although it is there."""
    model, host = write_model(tmp_path / "source"), CountingHost()
    folder = stage(host, tmp_path / "work", model)
    assert files_of(folder) == CONTENTS
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o444}
    host.num_commands = 0
    for path in (tmp_path / "source").rglob("*.*"):
        path.unlink()  # a host that has everything needs no source
    assert stage(host, tmp_path / "work", model) == folder
    assert host.num_commands == 1


@pytest.mark.parametrize("number", range(2, 9))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_a_lost_link_left_is_continued(
    moment: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an answer that got lost loses the model, doubles a piece, or makes everything be sent again."""
    monkeypatch.setattr(staging_models, "CHUNK_BYTES", 50_000)
    model, host = write_model(tmp_path / "source"), CountingHost()
    getattr(host, f"lose_{moment}").add(number)
    assert files_of(stage(host, tmp_path / "work", model)) == CONTENTS
    request = 2000
    assert host.sent_bytes < model.size_bytes + 50_000 + request


def test_an_upload_that_was_given_up_is_continued_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a second attempt begins again, or the first leaves a file under its name."""
    monkeypatch.setattr(staging_models, "CHUNK_BYTES", 50_000)
    model, host = write_model(tmp_path / "source"), CountingHost()
    host.lose_before = set(range(5, 100))
    with pytest.raises(HostUnreachable) as caught:
        stage(host, tmp_path / "work", model)
    assert "continues there" in caught.value.next_step
    lacking = look_for_model(LocalHost("here"), sys.executable, str(tmp_path / "work"), model)
    (left,) = [have for file, have in lacking.files.items() if file.size_bytes > 50_000]
    assert left == 100_000
    again = CountingHost()
    assert files_of(stage(again, tmp_path / "work", model)) == CONTENTS
    assert again.sent_bytes < model.size_bytes - left + 2000


def test_a_source_that_is_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """Red when bytes that the plan does not name appear under a model's name."""
    model = write_model(tmp_path / "source")
    (tmp_path / "source/config.json").write_bytes(b"[]")
    with pytest.raises(AdmissionRefused) as caught:
        stage(LocalHost("here"), tmp_path / "work", model)
    assert caught.value.found == hashlib.sha256(b"[]").hexdigest()
    assert caught.value.exit_code == 10
    assert "config.json" not in files_of(tmp_path / "work")
    assert not list((tmp_path / "work").rglob("*.part"))


@pytest.mark.parametrize(("left", "found"), [(None, "no such file"), (b"{", "1 bytes")])
def test_a_source_that_is_missing_or_cut_is_refused_before_anything_is_sent(
    left: bytes | None, found: str, tmp_path: Path
) -> None:
    """Red when an hour of uploading ends at a file that was never there."""
    model, host = write_model(tmp_path / "source"), CountingHost()
    (tmp_path / "source/config.json").unlink()
    if left is not None:
        (tmp_path / "source/config.json").write_bytes(left)
    with pytest.raises(AdmissionRefused) as caught:
        stage(host, tmp_path / "work", model)
    assert caught.value.found == found
    assert host.num_commands == 1


def test_a_file_that_rotted_on_the_host_is_replaced(tmp_path: Path) -> None:
    """Red when a name and a size are taken for a digest."""
    model, host = write_model(tmp_path / "source"), LocalHost("here")
    folder = stage(host, tmp_path / "work", model)
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_bytes(b"[]")
    assert files_of(stage(host, tmp_path / "work", model)) == CONTENTS


def test_a_disk_without_room_refuses_before_anything_is_sent(tmp_path: Path) -> None:
    """Red when a model fills the disk that restoring production may need."""
    model, host = write_model(tmp_path / "source"), CountingHost()
    with pytest.raises(AdmissionRefused, match="does not fit"):
        stage(host, tmp_path / "work", model, reserve_bytes=1 << 60)
    assert host.num_commands == 1


def test_two_uploads_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """Red when two coordinators write into one partial file."""
    model, host = write_model(tmp_path / "source"), LocalHost("here")
    file = next(file for file in model.files if file.path == "config.json")
    part = Path(f"{model.folder(str(tmp_path / 'work'))}/config.json.{file.sha256[:16]}.part")
    part.parent.mkdir(parents=True)
    with part.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(HostUnreachable, match="does not get through") as caught:
            stage(host, tmp_path / "work", model)
    assert "another upload" in caught.value.found
    assert files_of(stage(host, tmp_path / "work", model)) == CONTENTS


def test_an_interpreter_that_cannot_look_is_refused_by_name(tmp_path: Path) -> None:
    """Red when a wrong `python` in the site file is reported as a missing model."""
    model = write_model(tmp_path / "source")
    with pytest.raises(AdmissionRefused, match="cannot look for model draft"):
        look_for_model(LocalHost("here"), "/no/such/python", str(tmp_path), model)
