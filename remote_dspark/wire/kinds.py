"""The small enumerations of wire v2, with their numbers on the wire."""

from __future__ import annotations

from enum import IntEnum


class FrameType(IntEnum):
    """Byte 6 of every v2 frame."""

    HELLO = 1
    OPEN = 2
    STATE = 3
    STEP = 4
    REPLY = 5
    COMPLETE = 6
    COMMIT = 7
    RESET = 8
    CANCEL = 9
    PING = 10
    DRAIN = 11
    ERROR = 12


class Role(IntEnum):
    """Which end of a connection: the verifier connects (CLIENT), the drafter worker listens (SERVER)."""

    CLIENT = 1
    SERVER = 2


class RowKind(IntEnum):
    """How a reply row describes q. GREEDY has no entries and is legal only where STEP asked for temperature 0."""

    SPARSE = 1
    DENSE = 2
    GREEDY = 3


class Status(IntEnum):
    """Explicit outcome inside COMPLETE."""

    OK = 0
    FAILED = 1
