"""What the guard says of its host: shared memory that is somebody's, and what is left of nobody."""

from __future__ import annotations

import mmap
import os

from windows.guard.facts import shared_memory_leftovers


def _names(folder) -> list[str]:
    return [item["name"] for item in shared_memory_leftovers(str(folder))]


def test_shared_memory_is_left_over_only_when_no_process_has_it(tmp_path):
    for name in ("sem.mapped", "open", "left"):
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "left")
    with (tmp_path / "sem.mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (tmp_path / "open").open("rb"), mapped:
        assert _names(tmp_path) == ["left"]
    assert _names(tmp_path) == ["left", "open", "sem.mapped"]
    assert shared_memory_leftovers(str(tmp_path))[0] == {"name": "left", "size_bytes": 4096, "uid": os.getuid()}


def test_a_mapping_under_another_name_counts(tmp_path):
    """As a container sees it: another path, the same file."""
    (tmp_path / "psm_1").write_bytes(bytes(4096))
    other = tmp_path / "elsewhere"
    other.mkdir()
    os.link(tmp_path / "psm_1", other / "x")
    with (other / "x").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert _names(tmp_path) == []
    assert _names(tmp_path) == ["psm_1"]


def test_no_such_folder_has_no_leftovers(tmp_path):
    assert _names(tmp_path / "none") == []
