"""``docs/wire.md`` against the codec. Red when either changes alone."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

import remote_dspark.wire.refusals
from remote_dspark.wire import layout, v1
from remote_dspark.wire.errors import RemoteProtocolError, Scope
from remote_dspark.wire.kinds import FrameType, RowKind
from remote_dspark.wire.limits import payload_bytes

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
LAYOUTS = {table.name: table for table in vars(layout).values() if isinstance(table, layout.Layout)}


def tables():
    """Heading to (stated size, rows of offset, size, code, field)."""
    found = {}
    for name, size, body in re.findall(r"^### (.+?) \((\d+) bytes\)\n\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        cells = [[c.strip() for c in line.strip("|\n").split("|")] for line in body.splitlines()[2:]]
        found[name] = (int(size), [(int(c[0]), int(c[1]), c[2].strip("`"), c[3]) for c in cells])
    return found


def test_every_layout_is_documented_and_nothing_else():
    assert set(tables()) == set(LAYOUTS) | {"v1 reply", "v1 request"}
    assert {t.name for t in layout.FIXED.values()} <= set(LAYOUTS)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_byte_tables(name):
    size, rows = tables()[name]
    assert size == LAYOUTS[name].size
    assert rows == LAYOUTS[name].rows()


@pytest.mark.parametrize(("name", "codec"), [("v1 reply", v1.HEAD), ("v1 request", v1.REQUEST)])
def test_v1_tables(name, codec):
    size, rows = tables()[name]
    assert size == codec.size == struct.calcsize("<" + "".join(code for _, _, code, _ in rows))
    assert codec.format == "<" + "".join(code for _, _, code, _ in rows)
    assert [offset for offset, _, _, _ in rows] == [sum(s for _, s, _, _ in rows[:i]) for i in range(len(rows))]


def test_numpy_sees_the_same_bytes_as_the_tables():
    for table, dtype in ((layout.REPLY_ROW, layout.ROW_DTYPE), (layout.REPLY_ENTRY, layout.ENTRY_DTYPE)):
        assert dtype.itemsize == table.size
        assert {n: dtype.fields[n][1] for n in dtype.names} == {name: offset for offset, _, _, name in table.rows()}


def test_frame_numbers():
    assert {name: int(number) for name, number in re.findall(r"\b([A-Z]+) (\d+)[,.]", TEXT.split("## Frames")[1])} == {
        t.name: int(t) for t in FrameType
    }


def test_the_size_table_of_the_specification():
    rows = re.findall(r"^\| (dense|sparse)[^|]*?(\d+)(?: columns)? \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 6
    for kind, width, one, four in rows:
        row_kind = RowKind.DENSE if kind == "dense" else RowKind.SPARSE
        assert payload_bytes(row_kind, num_requests=1, depth=5, width=int(width)) == int(one)
        assert payload_bytes(row_kind, num_requests=4, depth=5, width=int(width)) == int(four)
    assert {(int(one), int(four)) for _, _, one, four in rows} == {
        (2_585_600, 10_342_400), (640, 2_560), (1_280, 5_120), (2_560, 10_240), (10_240, 40_960), (1_292_800, 5_171_200)
    }  # fmt: skip
    assert 2 * payload_bytes(RowKind.DENSE, num_requests=4, depth=5, width=129_280) == 20_684_800
    assert payload_bytes(RowKind.GREEDY, num_requests=4, depth=5, width=32) == 0


def test_every_refusal_is_listed_under_its_scope():
    section = TEXT.split("## Refusals")[1]
    parts = dict(
        zip(
            Scope, re.split(r"^(?:The connection ends|The proposal|A late frame)", section, flags=re.M)[1:], strict=True
        )
    )
    for scope, text in parts.items():
        listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        assert listed == {code for code, kind in RemoteProtocolError.all_codes.items() if kind.scope is scope}


def test_every_refusal_is_raised_somewhere():
    folder = Path(remote_dspark.wire.refusals.__file__).parent
    used = "".join(p.read_text() for p in folder.glob("*.py") if p.name not in ("errors.py", "refusals.py"))
    assert not [kind.__name__ for kind in RemoteProtocolError.all_codes.values() if kind.__name__ not in used]
