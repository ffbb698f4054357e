"""What happens inside a measurement hold: the plan's programs, one after the other, each with its receipt.

Nothing is booted and nothing is compared: a program uses the held devices itself, and what it observed is judged by
its own checks. The first one that fails ends the hold.
"""

from __future__ import annotations

from coordinator.hold_programs import HoldPrograms
from windows.hold_table import HoldEvent
from windows.plan import StepKind


class MeasurementBody(HoldPrograms):
    """One pass through the inside of a measurement hold."""

    def run(self) -> None:
        """Run every measurement.

        Raises:
            GateFailed: One did not pass; restore follows.
        """
        self._window.note(HoldEvent.QUALIFY_STARTED)
        for measurement in self._plan.measurements:
            self._campaign.interrupt.check()
            self._require_time(self._plan.step_bounds_s[StepKind.MEASURE], measurement.name)
            self._qualify_with(measurement, measurement.name, StepKind.MEASURE, measurement.topology)
        self._window.note(HoldEvent.QUALIFIED)
