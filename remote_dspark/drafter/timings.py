"""Where one step's time went: host parts by the host's clock, device parts between points on the stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepTimings:
    """One step inside the engine.

    Attributes:
        num_requests: Requests B.
        depth: Draft positions.
        num_sampled: Requests with a draft temperature.
        num_cached: Drafted positions whose bias row was cached, over all requests.
        state_ns: Host time of the state copies since the step before this one.
        submit_ns: Inputs written and everything launched.
        backbone_ns: Inputs copied, block rows to base logits (device).
        heads_ns: Base logits to tokens and q (device).
        copy_ns: Outputs copied to the host (device).
        wait_ns: Host waiting for the device.
        collect_ns: Outputs validated and laid out for the wire.
    """

    num_requests: int
    depth: int
    num_sampled: int
    num_cached: int
    state_ns: int
    submit_ns: int
    backbone_ns: int
    heads_ns: int
    copy_ns: int
    wait_ns: int
    collect_ns: int

    def to_document(self) -> dict[str, int]:
        """A flat object of integers."""
        return asdict(self)
