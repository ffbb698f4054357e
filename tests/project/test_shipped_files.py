"""Rules about the repository itself: what ships enabled, what is imported when, what the documents promise."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from remote_dspark.contract import DraftMode
from windows.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {".toml", ".service", ".timer", ".yml", ".yaml", ".sh", ".cfg", ".ini", ".env", ""}


def shipped() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_shipped_launcher_enables_the_sampled_path() -> None:
    """DECISIONS 23. Red when an example, unit, script or policy sets the switch to ON."""
    looked = [path for path in shipped() if path.suffix in LAUNCHERS and "tests" not in path.relative_to(ROOT).parts]
    assert looked
    for path in looked:
        text = path.read_text(encoding="utf-8", errors="replace")
        assert DraftMode.ON.value not in text, path
        assert not re.search(r"SAMPLED_TOP32\s*=\s*1", text), path


def test_no_module_reads_the_switch_from_the_environment() -> None:
    """OFF is the default and no variable alone changes it. Red when a package looks one up."""
    for path in shipped():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("coordinator", "remote_dspark", "windows"):
            assert not re.search(r"environ.*SAMPLED", path.read_text(encoding="utf-8")), path


HEAVY = {"torch", "paramiko", "cryptography", "numpy", "transformers"}


@pytest.mark.parametrize(
    ("argv", "forbidden"),
    [
        (["--help"], HEAVY | {"pydantic"}),
        (["--version"], HEAVY | {"pydantic"}),
        # Below the root, Typer itself needs pydantic to resolve options.
        (["hold", "--help"], HEAVY),
        (["receipts", "verify", "--help"], HEAVY),
    ],
)
def test_help_imports_nothing_heavy(argv: list[str], forbidden: set[str]) -> None:
    """Red when a command module imports a heavy library at its top: help has to appear at once."""
    code = (
        "import sys\n"
        "from coordinator.cli import run\n"
        f"run({argv!r})\n"
        f"sys.exit(' '.join(sorted({forbidden!r} & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_lists_every_exit_code() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    codes = [int(code) for code in ExitCode]
    missing = [code for code in codes if not re.search(rf"(?<!\d){code}(?!\d)", text)]
    assert not missing


def test_every_relative_link_of_the_documents_leads_somewhere() -> None:
    for path in shipped():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_nothing_names_this_machine_or_how_it_was_made() -> None:
    for path in shipped():
        if path.suffix in {".safetensors", ".whl"} or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for word in ("/work/" + "main", "/tmp/" + "brief", ".libr" + "ary/", "../shared" + "/"):
            assert word not in text, f"{path.relative_to(ROOT)}: {word}"


def test_both_wheels_carry_the_same_version() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    other = tomllib.loads((ROOT / "packaging" / "remote-dspark" / "pyproject.toml").read_text())["project"]["version"]
    from coordinator import __version__ as ours
    from remote_dspark import __version__ as theirs

    assert {root, other, ours, theirs} == {root}


def test_remote_dspark_runs_with_numpy_alone() -> None:
    """Oracle and wire ship alone. Red when either imports torch, pydantic or anything of the control side."""
    code = (
        "import sys\n"
        "hidden = 'torch triton pydantic transformers starlette coordinator receipts windows'.split()\n"
        "for name in hidden:\n"
        "    sys.modules[name] = None\n"
        "import remote_dspark.oracle.sample_row, remote_dspark.oracle.verify, remote_dspark.wire.client\n"
        "import remote_dspark.wire.server\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
