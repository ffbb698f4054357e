"""Step times, throttle masks, the campaign's lock, and which receipts count as evidence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.arm_facts import is_throttled
from coordinator.campaign_lock import campaign_lock
from coordinator.clock import ManualClock
from coordinator.errors import AdmissionRefused, HardwareHeld
from coordinator.evidence import EvidenceWriter
from coordinator.evidence_search import find_evidence
from coordinator.store import Store
from coordinator.trial import phase_times
from receipts import bodies
from receipts.fields import Evidence, Kind
from windows.plan import RequiredEvidence, StepKind

SOURCE = "a" * 64


def test_every_step_of_the_load_program_gets_a_time_and_none_is_lost() -> None:
    """Red when a phase is dropped: its bound would have no evidence, or the sum would fall short of the whole."""
    values = {
        "warmup.elapsed_ns": 10,
        "greedy.elapsed_ns": 20,
        "headline.elapsed_ns": 300,
        "profiled.elapsed_ns": 40,
        "profiled.at_ns": 1000,
        "final.at_ns": 1005,
    }
    times = phase_times({"values": values}, 500)
    assert times[StepKind.HEADLINE] == 300
    assert times[StepKind.BASELINE] == times[StepKind.FINAL] == 5
    assert sum(times.values()) == 500


@pytest.mark.parametrize(
    ("mask", "throttled"),
    [
        ("0x0000000000000000", False),
        ("0x0000000000000001", False),
        ("0x0000000000000004", True),
        ("0x40", True),
        ("N/A", True),
    ],
)
def test_throttle_masks(mask: str, throttled: bool) -> None:
    """Red when idleness counts as throttling, or an unreadable mask as none."""
    assert is_throttled(mask) is throttled


def test_a_second_campaign_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from coordinator.campaign_lock import campaign_lock\n"
        "from coordinator.clock import SystemClock\n"
        f"with campaign_lock(Path({str(tmp_path)!r}), 'first', SystemClock()):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    with (
        pytest.raises(HardwareHeld, match=rf"first of .* pid {holder.pid}"),
        campaign_lock(tmp_path, "b", ManualClock()),
    ):
        pytest.fail("two campaigns at once")
    holder.kill()
    holder.wait(10)
    holder.stdin.close()
    holder.stdout.close()
    # The kernel released it with the process: nothing has to be cleaned up by hand.
    with campaign_lock(tmp_path, "b", ManualClock()):
        pass


@pytest.fixture
def writer(tmp_path: Path) -> EvidenceWriter:
    clock = ManualClock(utc="2026-05-01T00:00:00.000Z")
    return EvidenceWriter(Store(tmp_path / "store"), SOURCE, clock, "campaign", is_rehearsal=True)


def write_budget(writer: EvidenceWriter, measured_ns: int) -> str:
    step = bodies.StepBudget(step="stop", bound_ns=100, measured_ns=measured_ns, basis="measured")
    body = bodies.BudgetBody(steps=(step,), restore_reserve_ns=10, total_ns=110, limit_ns=200)
    return writer.write(
        Kind.BUDGET,
        body,
        started=writer.now(),
        scope="test",
        not_claimed=("anything",),
        evidence=writer.procedure_evidence(),
    )


def required(**fields: object) -> RequiredEvidence:
    return RequiredEvidence.model_validate({"kind": "budget", "classes": ("REHEARSED",), **fields})


def test_fitting_evidence_is_found(writer: EvidenceWriter) -> None:
    receipt = write_budget(writer, 50)
    found = find_evidence(writer.store, [required()], source_sha256=SOURCE, now_utc="2026-05-01T01:00:00Z")
    assert found[Kind.BUDGET].receipt == receipt


@pytest.mark.parametrize(
    ("measured_ns", "fields", "source", "why"),
    [
        (150, {}, SOURCE, "verdict FAIL"),
        (50, {"classes": ("MEASURED",)}, SOURCE, "evidence REHEARSED"),
        (50, {}, "b" * 64, "made by other sources"),
        (50, {"max_age_s": 60}, SOURCE, "3600 s old"),
    ],
)
def test_near_misses_refuse_and_say_why(
    writer: EvidenceWriter, measured_ns: int, fields: dict[str, object], source: str, why: str
) -> None:
    """Red when any of the four conditions is not looked at."""
    write_budget(writer, measured_ns)
    with pytest.raises(AdmissionRefused) as caught:
        find_evidence(writer.store, [required(**fields)], source_sha256=source, now_utc="2026-05-01T01:00:00Z")
    assert why in caught.value.found


def test_a_damaged_store_has_no_evidence(writer: EvidenceWriter) -> None:
    """Red when evidence is taken from a store whose chain is not whole."""
    write_budget(writer, 50)
    write_budget(writer, 60)
    sorted((writer.store.path / "receipts").iterdir())[0].unlink()
    with pytest.raises(AdmissionRefused, match="does not verify"):
        find_evidence(writer.store, [required()], source_sha256=SOURCE, now_utc="2026-05-01T01:00:00Z")


def test_no_store_has_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(AdmissionRefused, match="no host was contacted"):
        find_evidence(Store(tmp_path / "none"), [required()], source_sha256=SOURCE, now_utc="2026-05-01T01:00:00Z")


def test_evidence_class_follows_the_compute(writer: EvidenceWriter) -> None:
    """Red when a CPU run could be called MEASURED or REHEARSED."""
    assert writer.computation_evidence([{"compute": "cpu"}]) is Evidence.EMULATED
    assert writer.computation_evidence([{"compute": "cuda"}, {"compute": "interpreted"}]) is Evidence.EMULATED
    assert writer.computation_evidence([{"compute": "cuda"}]) is Evidence.REHEARSED
    assert writer.computation_evidence([]) is Evidence.EMULATED
