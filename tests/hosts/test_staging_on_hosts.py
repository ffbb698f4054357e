"""Models go to real hosts by digest before a hold, over links that break, and raw files come back before its end."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator import staging, staging_models
from coordinator.arm_values import hold_values
from coordinator.clock import SystemClock
from coordinator.doctor import model_checks
from coordinator.errors import AdmissionRefused, CoordinatorError
from coordinator.programs import ProgramRunner
from coordinator.render import Reporter
from coordinator.session import connect, open_sessions, stage_programs
from coordinator.show_plan import compile_files
from coordinator.signals import InterruptFlag
from coordinator.staging_models import look_for_model, stage_model
from coordinator.window import Window
from tests.hosts.estate import PYTHON, WORK
from tests.hosts.faults import kill_all, pids_of_role
from tests.hosts.machine import Machine, wait_for
from tests.hosts.trio import Trio
from windows.compiled import CompiledPlan
from windows.hold_table import HoldEvent
from windows.models import Model

SIZE = 12 << 20
CHUNK = 1 << 20

PROGRAM = """
import hashlib, json, pathlib, sys
model, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
data = (model / "shards/weights.bin").read_bytes()
(out / "raw.jsonl").write_bytes(data)
sample = dict(name="raw.jsonl", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), num_samples=1, unit="ns")
(out / "observation.json").write_text(json.dumps(dict(schema=sys.argv[3], samples=[sample], checks=[])))
"""


def write_model(folder: Path) -> dict[str, Any]:
    contents = {"config.json": b"{}", "shards/weights.bin": os.urandom(SIZE)}
    files = []
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        files.append({"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)})
    return {"name": "draft", "role": "drafter", "source": folder.name, "files": files}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(staging_models, "CHUNK_BYTES", CHUNK)
    return Model.model_validate_json(json.dumps(write_model(tmp_path / "draft")))


def compiled_for(trio: Trio, **plan: Any) -> CompiledPlan:
    trio.extra["site"] = {"disk_reserve_bytes": CHUNK}
    trio.prepare(**plan)
    return compile_files(trio.folder / "site.toml", trio.folder / "plan.toml")


def stage(trio: Trio, compiled: CompiledPlan, name: str, model: Model) -> str:
    clock = SystemClock()
    host = connect(compiled.site.host(name), clock)
    try:
        return stage_model(
            host, PYTHON, WORK, model, plan_folder=trio.folder, reserve_bytes=CHUNK, clock=clock, say=lambda _: None
        )
    finally:
        host.close()


def arrived(machine: Machine, model: Model) -> int:
    """Bytes of the large file that are on the host's disk."""
    folder = machine.path(model.folder(WORK))
    return max((path.stat().st_size for path in folder.glob("shards/weights.bin*")), default=0)


def require_whole(machine: Machine, model: Model) -> None:
    folder = machine.path(model.folder(WORK))
    for file in model.files:
        assert hashlib.sha256((folder / file.path).read_bytes()).hexdigest() == file.sha256
    assert not list(folder.rglob("*.part"))


def test_a_link_that_breaks_in_the_middle_is_only_a_delay(trio: Trio, model: Model) -> None:
    """Red when a cut in the middle of an upload costs more than the piece that was under way."""
    compiled = compiled_for(trio)
    machine = trio.machines[1]
    trio.tainted = True
    cuts: list[int] = []

    def cut_once() -> None:
        wait_for(lambda: arrived(machine, model) > 2 * CHUNK, 30, "the upload goes on")
        machine.cut()
        cuts.append(arrived(machine, model))
        threading.Event().wait(7)  # longer than a dead link takes to be noticed
        machine.heal()

    cutter = threading.Thread(target=cut_once)
    cutter.start()
    stage(trio, compiled, machine.name, model)
    cutter.join()
    assert 0 < cuts[0] < SIZE, "the cut came in the middle"
    require_whole(machine, model)


def test_a_host_that_loses_power_keeps_what_it_has(trio: Trio, model: Model) -> None:
    """Red when an upload begins again after a power cut, or half a file has the whole one's name."""
    compiled = compiled_for(trio)
    machine = trio.machines[1]
    trio.tainted = True
    failed: list[CoordinatorError] = []

    def upload() -> None:
        try:
            stage(trio, compiled, machine.name, model)
        except CoordinatorError as error:
            failed.append(error)

    uploader = threading.Thread(target=upload)
    uploader.start()
    wait_for(lambda: arrived(machine, model) > 2 * CHUNK, 30, "the upload goes on")
    machine.power_off()
    uploader.join()
    assert failed, "nobody answered any more"
    trio.reboot(machine)
    host = connect(compiled.site.host(machine.name), SystemClock())
    left = look_for_model(host, PYTHON, WORK, model)
    host.close()
    assert any(have >= CHUNK for have in left.files.values()), left
    stage(trio, compiled, machine.name, model)
    require_whole(machine, model)


def test_a_login_shell_that_talks_does_not_hide_a_model(trio: Trio, model: Model) -> None:
    """Red when what a profile prints is taken for what the host has, or for an answer."""
    compiled = compiled_for(trio)
    machine = trio.machines[0]
    trio.tainted = True
    machine.path("/root/.bashrc").write_text("head -c 300000 /dev/zero; echo '@@guard1 5 x'; echo trouble >&2\n")
    stage(trio, compiled, machine.name, model)
    require_whole(machine, model)


def test_a_disk_that_is_too_small_is_told_before_anything_is_sent(trio: Trio, model: Model) -> None:
    """Red when an upload fills the disk of a host, or `doctor` calls such a host fit."""
    compiled = compiled_for(trio)
    machine = trio.machines[0]
    trio.tainted = True
    machine.inside("sh", "-c", "head -c 250M /dev/zero > /srv/filler")
    with pytest.raises(AdmissionRefused, match="does not fit"):
        stage(trio, compiled, machine.name, model)
    assert arrived(machine, model) == 0
    with open_sessions(compiled.site, SystemClock()) as sessions:
        found = {session.name: model_checks(compiled.site, session, [model])[0].ok for session in sessions}
    assert found[machine.name] is False


def test_a_raw_file_comes_back_over_a_link_that_breaks(trio: Trio, tmp_path: Path) -> None:
    """Red when a connection that dies in the middle of a raw file costs the hold its measurement."""
    compiled = compiled_for(trio)
    machine = trio.machines[1]
    data = os.urandom(48 << 20)
    machine.path("/srv/raw").write_bytes(data)
    killed: list[int] = []

    def cut_once() -> None:
        wait_for(lambda: machine.pids("/bin/cat -- /srv/raw"), 30, "the file is on its way")
        killed.extend(pids_of_role(machine, "sshd"))
        kill_all(killed)

    host = connect(compiled.site.host(machine.name), SystemClock())
    cutter = threading.Thread(target=cut_once)
    cutter.start()
    host.fetch("/srv/raw", tmp_path / "raw", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    cutter.join()
    host.close()
    machine.path("/srv/raw").unlink()
    assert killed
    assert (tmp_path / "raw").read_bytes() == data


def test_a_program_of_a_hold_reads_its_model_and_its_raw_file_comes_back(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model is not where the command names it on every host, or raw files are fetched after teardown."""
    monkeypatch.setattr(staging, "NEEDED_MODULES", ())  # hosts of the lab have the standard library only
    program = {
        "name": "probe",
        "role": "drafter",
        "argv": ["{python}", "-I", "-c", PROGRAM, "{model_draft}", "{output_dir}", "remote-dspark/observation/v1"],
        "timeout_s": 10,
    }
    bounds = {"preflight": 10, "lease": 20, "snapshot": 5, "arm-dead-man": 8, "stop": 6, "measure": 10}
    compiled = compiled_for(
        trio,
        purpose="measurement",
        models=[write_model(tmp_path / "draft")],
        measurements=[program],
        step_bounds_s=bounds,
        orphan_after_s=20,
        provisional_s=20,
        bound_s=110,
    )
    clock = SystemClock()
    reporter = Reporter(clock.utc, quiet=True)
    (model,) = compiled.plan.models
    with open_sessions(compiled.site, clock) as sessions:
        stage_programs(sessions, compiled, trio.folder, reporter, clock)
        for machine in trio.machines:
            require_whole(machine, model)
        window = Window(compiled, 1, sessions, tmp_path / "journals", clock=clock, reporter=reporter, reason="staging")
        with window:
            window.open()
            window.note(HoldEvent.QUALIFY_STARTED)
            values = hold_values(compiled, window.hold_id, 1)
            with InterruptFlag() as interrupt:
                runner = ProgramRunner(window, tmp_path / "keep", interrupt, values)
                record = runner.run(sessions[0], compiled.plan.measurements[0], "probe", {})
            window.note(HoldEvent.QUALIFIED)
            assert trio.status(trio.machines[0])["state"] == "held", "raw files are here before production is back"
            assert record.is_success, record.end
        assert window.exit_code == 0
    (path,) = [path for _, path in record.samples.values()]
    assert path.read_bytes() == (tmp_path / "draft/shards/weights.bin").read_bytes()
    for machine in trio.machines:
        trio.require_restored(machine)
        trio.require_history(machine)
