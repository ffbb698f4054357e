"""The zipapp: the same bytes every time, standard library only, Python 3.9, complete in memory once it runs."""

from __future__ import annotations

import ast
import hashlib
import json
import marshal
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windows.guard_archive import archive_name, build_archive, guard_sources


def test_same_bytes_every_time() -> None:
    first = build_archive()
    assert first == build_archive()
    assert archive_name(first) == f"guard-{hashlib.sha256(first).hexdigest()}.pyz"


def imported_names() -> set[str]:
    names: set[str] = set()
    for source in guard_sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return names


def test_standard_library_only() -> None:
    for name in imported_names():
        assert name.startswith("windows.guard") or name.partition(".")[0] in sys.stdlib_module_names, name


def test_nothing_newer_than_python_3_9(tmp_path: Path) -> None:
    for name, source in guard_sources().items():
        (tmp_path / Path(name).name).write_bytes(source)
        ast.parse(source, feature_version=(3, 9))
    vermin = [str(Path(sys.executable).with_name("vermin")), "-t=3.9-", "--violations", "--no-tips", str(tmp_path)]
    done = subprocess.run(vermin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_running_guard_does_not_need_its_file(host: Any) -> None:
    """Every module of the archive is imported at the start: the file may vanish while it runs."""
    listing = (
        "import sys, runpy\n"
        f"sys.argv = [{str(host.archive)!r}, '--help']\n"
        f"sys.path.insert(0, {str(host.archive)!r})\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(name for name in sys.modules if name.startswith('windows.guard.')))\n"
    )
    done = subprocess.run([host.python, "-I", "-c", listing], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    expected = {name[:-3].replace("/", ".") for name in guard_sources()} - {"windows.guard.__init__"}
    assert expected <= loaded, expected - loaded


@pytest.mark.parametrize("damage", ["torn", "foreign", "other"])
def test_a_bad_code_cache_is_ignored(host: Any, damage: str) -> None:
    host.ask("hello", op=None)
    host.ask("hello", op=None)
    (cache,) = [path for path in host.state.iterdir() if path.name.startswith("code-")]
    data = cache.read_bytes()
    damaged = {"torn": data[:-100], "foreign": os.urandom(32) + data[32:], "other": data[:32] + marshal.dumps(7)}
    cache.write_bytes(damaged[damage])
    assert host.ask("hello", op=None)["protocol"] == 1


def test_a_call_is_cheap(host: Any) -> None:
    """CPU of one short call, best of five: well under the 120 ms it may take on an idle core."""
    host.ask("hello", op=None)
    used = []
    for _ in range(5):
        before = os.times()
        host.ask("hello", op=None)
        after = os.times()
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(used) < 0.12, used


def test_usage_goes_to_stderr(host: Any) -> None:
    done = subprocess.run([host.python, "-I", str(host.archive)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "restore-now" in done.stderr


def test_hello_and_facts(host_any: Any) -> None:
    hello = host_any.ask("hello", op=None)
    assert hello["state_dir"] == str(host_any.state)
    facts = host_any.ask("facts", op=None)
    assert facts["memory_available"] <= facts["memory_total"]
    assert facts["boot_id"] == hello["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert json.dumps(facts)
