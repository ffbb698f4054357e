"""The report page: everything is in it, nothing runs in it, and strings from hosts stay strings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "receipts" / "poison"))

import make_poison
from receipt_kit import EXAMPLES, Log, draft, gpu_host

from coordinator.cli import run
from coordinator.report import render
from coordinator.report_html import STYLE
from coordinator.report_sections import Facts
from coordinator.store import Store
from receipts.fields import Kind

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m\u202eevil\u2066"
VOID = {"meta"}


class Page(HTMLParser):
    """Collects tags, attributes and text; refuses tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def hostile_log() -> Log:
    """A campaign in which every free text is hostile."""
    log = Log()
    world = make_poison.campaign()
    ids: dict[str, tuple[Kind, str]] = {}
    for step in world.steps:
        changes = step.changes | {"scope": HOSTILE, "not_claimed": (HOSTILE,), "argv": (HOSTILE,)}
        if step.kind is Kind.ARM:
            changes["hosts"] = (gpu_host().model_copy(update={"gpus": tuple(
                gpu.model_copy(update={"uuid": HOSTILE + gpu.uuid, "clocks_mhz": {"sm_mhz": 1980}})
                for gpu in gpu_host().gpus)}),)  # fmt: skip
        parents = tuple(make_poison.parent(*ids[name], name) for name in step.parents)
        ids[step.name] = (step.kind, log.append(draft(step.kind, step.body, parents=parents, **changes)))
    log.samples["x"] = make_poison.RAW
    return log


def made(log: Log) -> str:
    report, verified = log.walk(sums=None)
    return render(Facts(report, verified, lambda _: make_poison.RAW), HOSTILE, "2026-06-01T12:00:00Z")


def test_the_page_is_well_formed_and_nothing_in_it_can_run_or_load() -> None:
    """Red when a string reaches the page without going through ``text``."""
    text = made(hostile_log())
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "link", "form", "a:visited"}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")  # type: ignore[union-attr]
        assert not {"src", "srcset", "style", "action"} & attributes.keys()
    assert not set(text) & {"\x1b", "\u202e", "\u2066"}
    assert "default-src &#x27;none&#x27;" in text
    assert "alert(1)" in "".join(page.words)
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_every_part_is_there() -> None:
    log = hostile_log()
    text = made(log)
    words = " ".join(Page(text).words)
    needles = (
        "INTEGRITY ONLY",
        "HOLD windows",
        "A1 greedy-v1",
        "B2 sampled-top32-v2",
        "1980 MHz",
        "+10.00 %",
        "BETTER",
    )
    for needle in (*needles, "Not claimed", "sha256"):
        assert needle in words, needle
    assert text.count("<svg") == 3
    assert all(receipt.id in words for receipt in log.receipts)


def test_an_empty_and_a_broken_log_still_make_a_page() -> None:
    assert "UNKNOWN" in made(Log())
    log = hostile_log()
    log.entries.pop(4)
    text = made(log)
    assert "chain-gap" in text


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_of_every_text_colour() -> None:
    """WCAG AA wants 4.5 to 1; red when a colour is softened below it."""
    for rule in re.findall(r"\{[^}]*\}", STYLE):
        ink, ground = re.search(r"[; {]color: (#\w{6})", rule), re.search(r"background: (#\w{6})", rule)
        if ink:
            light, dark = luminance(ground[1] if ground else "#ffffff"), luminance(ink[1])
            assert (light + 0.05) / (dark + 0.05) >= 4.5, rule


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made_store = Store(tmp_path / "store")
    made_store.append(draft(Kind.HOLD, EXAMPLES[Kind.HOLD], scope=HOSTILE))
    return made_store.path


def test_the_command(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run(["receipts", "report", str(out), "--store", str(store)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    next(path for path in (store / "receipts").iterdir()).unlink()
    assert run(["receipts", "report", str(out), "--store", str(store)]) == 60
    assert run(["receipts", "report", str(out), "--store", str(tmp_path / "none")]) == 2


@pytest.mark.hosts
def test_a_browser_shows_it_as_text(tmp_path: Path) -> None:
    """Headless Chromium builds the same page and runs nothing. Needs the Debian packages of the hosts lane."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "scripts/install-debian-packages installs chromium"
    path = tmp_path / "report.html"
    path.write_text(made(hostile_log()))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "&lt;script&gt;alert(1)" in done.stdout
    assert "<script" not in done.stdout
    assert done.stdout.count("<svg") == 3


@pytest.mark.hosts
def test_it_prints_and_needs_no_script(tmp_path: Path) -> None:
    """Red when the page has less to show without scripts, or a part of it does not reach the paper."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "scripts/install-debian-packages installs chromium"
    path, pdf = tmp_path / "report.html", tmp_path / "report.pdf"
    path.write_text(made(hostile_log()))
    shots = []
    for name, options in (("with", []), ("without", ["--disable-javascript"])):
        shot = tmp_path / f"{name}.png"
        browser = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / name}"]
        argv = [*browser, *options, f"--screenshot={shot}", "--window-size=720,3000", f"file://{path}"]
        subprocess.run(argv, capture_output=True, check=True, timeout=100)
        shots.append(shot.read_bytes())
    assert shots[0] == shots[1]
    argv = [*browser, f"--print-to-pdf={pdf}", "--no-pdf-header-footer", f"file://{path}"]
    subprocess.run(argv, capture_output=True, check=True, timeout=100)
    num_pages = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert 3 <= num_pages <= 40
