"""Plans, the hold state machine, schedules, gates and comparison statistics. Pure: no I/O, no clock."""
