"""Prometheus text of the worker. Counters live in the engine, the handler and the wire; here they get their names.

These are the worker's own names (``dspark_worker_*``): the gates read the target server's counters. This module needs
no torch, so that a booting worker can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remote_dspark.contract import ServerState

if TYPE_CHECKING:
    from remote_dspark.drafter.engine import DraftEngine

PREFIX = "dspark_worker"


def render_state(state: ServerState) -> str:
    """One gauge per state, 1 for the current one."""
    lines = [f"# TYPE {PREFIX}_state gauge"]
    lines += [f'{PREFIX}_state{{state="{each.value}"}} {int(each is state)}' for each in ServerState]
    return "\n".join(lines) + "\n"


def render_engine(engine: DraftEngine) -> str:
    """Counters and gauges of the engine."""
    counters = vars(engine.counters) | {
        "markov_cache_hits": engine.markov.hits,
        "markov_cache_misses": engine.markov.misses,
    }
    lines: list[str] = []
    for name, value in counters.items():
        lines += [f"# TYPE {PREFIX}_{name}_total counter", f"{PREFIX}_{name}_total {value}"]
    gauges = {"free_seats": engine.num_free_seats, "markov_cache_bytes": engine.markov.size_bytes}
    for name, value in gauges.items():
        lines += [f"# TYPE {PREFIX}_{name} gauge", f"{PREFIX}_{name} {value}"]
    return "\n".join(lines) + "\n"


def render_codes(name: str, counts: Mapping[str, int]) -> str:
    """A counter labelled by code; copies first, as another thread may add one."""
    lines = [f"# TYPE {PREFIX}_{name}_total counter"]
    lines += [f'{PREFIX}_{name}_total{{code="{code}"}} {value}' for code, value in sorted(dict(counts).items())]
    return "\n".join(lines) + "\n"
