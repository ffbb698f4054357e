"""``coordinator receipts graph``: what builds on what, as a tree. A receipt is drawn once; later it is only named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import UsageError
from coordinator.render import inert, print_json, write_line
from coordinator.store import Store
from coordinator.store_list import readable
from receipts.errors import ReceiptError
from receipts.reader import Receipt
from windows.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Node:
    """One receipt in the graph."""

    id: str
    label: str
    parents: tuple[tuple[str, str], ...]
    """Role and id."""


def print_graph(store: Path, root: str | None, *, json: bool) -> int:
    """Print the receipts nobody builds on, each with its parents below it; or only the tree of one."""
    import sys

    nodes = read_nodes(store)
    roots = [_one(nodes, root)] if root else tips(nodes)
    if json:
        edges = [{"child": n.id, "role": role, "parent": parent} for n in nodes.values() for role, parent in n.parents]
        print_json({"roots": roots, "nodes": {n.id: n.label for n in nodes.values()}, "edges": edges})
        return int(ExitCode.DONE)
    for line in tree_lines(nodes, roots):
        write_line(sys.stdout, line)
    return int(ExitCode.DONE)


def read_nodes(store: Path) -> dict[str, Node]:
    """Every readable receipt of a store, oldest first.

    Raises:
        UsageError: There is no store.
    """
    try:
        found = [receipt for _, receipt in readable(Store(store)) if isinstance(receipt, Receipt)]
    except ReceiptError as error:
        raise UsageError("no store could be read", found=str(error), where=str(store)) from error
    return {receipt.id: node(receipt) for receipt in found}


def node(receipt: Receipt) -> Node:
    """The graph's view of a receipt."""
    predicate = receipt.predicate
    place = f" hold {predicate.position.hold_number}" if predicate.position.hold_number is not None else ""
    arm = f" arm {predicate.position.arm}" if predicate.position.arm else ""
    label = f"{predicate.kind}{place}{arm}  {predicate.verdict.outcome.value}  {predicate.evidence.value}"
    return Node(receipt.id, label, tuple((parent.role, parent.sha256) for parent in predicate.parents))


def tips(nodes: Mapping[str, Node]) -> list[str]:
    """Receipts that no other one builds on, newest first."""
    named = {parent for item in nodes.values() for _, parent in item.parents}
    return [receipt_id for receipt_id in reversed(list(nodes)) if receipt_id not in named]


def tree_lines(nodes: Mapping[str, Node], roots: list[str]) -> Iterator[str]:
    """The drawing. Iterative, because a chain of parents may be longer than the interpreter's stack."""
    drawn: set[str] = set()
    waiting = [(root, "", "", "") for root in reversed(roots)]
    while waiting:
        receipt_id, lead, branch, role = waiting.pop()
        item = nodes.get(receipt_id)
        named = f"{role}: " if role else ""
        if item is None:
            yield f"{lead}{branch}{inert(named)}{receipt_id[:16]}  MISSING"
            continue
        is_repeated = receipt_id in drawn and bool(item.parents)
        yield f"{lead}{branch}{inert(named)}{receipt_id[:16]}  {item.label}{'  (drawn above)' if is_repeated else ''}"
        if is_repeated:
            continue
        drawn.add(receipt_id)
        below = lead + ("" if not branch else "   " if branch == "└─ " else "│  ")
        children = [(parent, below, "├─ ", r) for r, parent in item.parents]
        if children:
            children[-1] = (*children[-1][:2], "└─ ", children[-1][3])
        waiting += reversed(children)


def _one(nodes: Mapping[str, Node], wanted: str) -> str:
    fitting = [receipt_id for receipt_id in nodes if receipt_id.startswith(wanted.lower())]
    if len(fitting) != 1:
        raise UsageError("expected one receipt of this id", found=f"{len(fitting)} for {wanted[:80]}")
    return fitting[0]
