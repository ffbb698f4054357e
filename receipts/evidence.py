"""What a receipt's own facts allow it to claim, and how old it is.

Host facts decide the evidence class, not the word that was written; see DESIGN section 3, rule 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from receipts import bodies
from receipts.model import Predicate

_RANK: Final = re.compile(r"rank\.\d+\.uuid")


def overclaims(predicate: Predicate) -> list[str]:
    """Why a receipt cannot be MEASURED evidence, from its own host facts; empty when it can."""
    body, messages = predicate.body, []
    gpus = {gpu.uuid for host in predicate.hosts for gpu in host.gpus}
    observed: tuple[bodies.Observation, ...] = getattr(body, "observations", ())
    if isinstance(body, bodies.HoldBody | bodies.HostFactsBody | bodies.RecoveryBody) and not predicate.hosts:
        messages.append("MEASURED, and no host is described")
    is_gpu_kind = isinstance(body, bodies.PairQualificationBody | bodies.WorkerMeasurementBody | bodies.ArmBody)
    if is_gpu_kind and not gpus:
        messages.append("MEASURED, and no GPU is described")
    messages += [f"MEASURED, computed on {o.compute} on {o.host}" for o in observed if o.compute != "cuda"]
    needs_two = isinstance(body, bodies.PairQualificationBody) or (
        isinstance(body, bodies.WorkerMeasurementBody) and body.topology == "pair"
    )
    if needs_two and len(gpus) == 1:
        messages.append("a physical pair needs two GPUs, found one UUID")
    return messages


def physical_ranks(predicate: Predicate) -> int:
    """Distinct GPUs of its hosts that every observation names as the ranks of a physical pair; 0 when one does not.

    A host with two GPUs is not enough: both ranks may have run on one of them, or on none. Nor are GPUs of two hosts:
    ranks reach each other inside one. And what was observed outside a hold, or in another, counts nothing.
    """
    gpus = {host.name: {gpu.uuid for gpu in host.gpus} for host in predicate.hosts}
    observed: tuple[bodies.Observation, ...] = getattr(predicate.body, "observations", ())
    counts = []
    for observation in observed:
        is_physical = observation.labels.get("topology") == "physical" and observation.compute == "cuda"
        is_held = observation.hold_id is not None and predicate.position.hold_id in {None, observation.hold_id}
        ranks = {text for name, text in observation.labels.items() if _RANK.fullmatch(name)}
        counts.append(len(ranks) if is_physical and is_held and ranks <= gpus.get(observation.host, set()) else 0)
    return min(counts, default=0)


def values_of(predicate: Predicate) -> list[Mapping[str, int]]:
    """Every table of integers in a body that may bind figures to raw files."""
    body = predicate.body
    tables = [body.values] if isinstance(body, bodies.ArmBody | bodies.HostFactsBody) else []
    observed = getattr(body, "observations", ())
    return [*tables, *(observation.values for observation in observed)]


def age_s(earlier_utc: str, now_utc: str) -> int:
    """Whole seconds from one receipt time to another; negative when it lies ahead."""
    delta = datetime.fromisoformat(now_utc[:19]) - datetime.fromisoformat(earlier_utc[:19])
    return int(delta.total_seconds())
