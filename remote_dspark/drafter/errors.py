"""Everything the drafter refuses, by name.

::

    DrafterError
    ├── CheckpointError            a model folder cannot be served
    │   ├── ConfigFieldError       a field of config.json is missing, unknown or contradicts another
    │   ├── UnsupportedHeadError   a Markov head this build does not compute
    │   ├── VocabularyError        the checkpoint's vocabulary is not the one asked for
    │   ├── TruncatedFileError     a file's length or header contradicts its contents
    │   ├── MissingTensorError     an expected tensor is absent
    │   ├── UnexpectedTensorError  a tensor this build would silently ignore
    │   ├── TensorFormatError      wrong shape or dtype
    │   └── UnsupportedShapeError  a model that the device path does not compute
    ├── DeviceFaultError           the device answered something else than was asked; nothing is known about it any more
    └── EngineError                a call contradicts the engine's state
        ├── CapacityError          no free slot, or a position past the model's limit
        ├── StaleError             an old generation, round or prefix
        ├── StateGapError          target hidden states are missing or overlap
        └── RowError               a row could not be computed; the whole reply is discarded

A message says expected, found, where, and what to do next. Each class has a stable ``code`` for counters and logs.
"""

from __future__ import annotations

from typing import ClassVar


class DrafterError(Exception):
    """Root of the tree."""

    code: ClassVar[str] = "drafter"


class CheckpointError(DrafterError):
    """A model folder cannot be served."""

    code: ClassVar[str] = "checkpoint"


class ConfigFieldError(CheckpointError):
    """A field of config.json is missing, unknown or contradicts another."""

    code: ClassVar[str] = "config_field"

    def __init__(self, where: str, field: str, expected: object, found: object) -> None:
        super().__init__(f"{where}: field {field!r}: expected {expected}, found {found!r}; re-export the checkpoint")
        self.field = field


class UnsupportedHeadError(CheckpointError):
    """A Markov head this build does not compute."""

    code: ClassVar[str] = "unsupported_head"


class VocabularyError(CheckpointError):
    """The checkpoint's vocabulary is not the one asked for."""

    code: ClassVar[str] = "vocabulary"


class TruncatedFileError(CheckpointError):
    """A file's length or header contradicts its contents."""

    code: ClassVar[str] = "truncated_file"


class MissingTensorError(CheckpointError):
    """An expected tensor is absent."""

    code: ClassVar[str] = "missing_tensor"


class UnexpectedTensorError(CheckpointError):
    """A tensor this build would silently ignore."""

    code: ClassVar[str] = "unexpected_tensor"


class TensorFormatError(CheckpointError):
    """A tensor has the wrong shape or dtype."""

    code: ClassVar[str] = "tensor_format"


class UnsupportedShapeError(CheckpointError):
    """A model that the device path does not compute."""

    code: ClassVar[str] = "unsupported_shape"


class DeviceFaultError(DrafterError):
    """The device answered something else than was asked; nothing is known about it any more."""

    code: ClassVar[str] = "device_fault"


class EngineError(DrafterError):
    """A call contradicts the engine's state."""

    code: ClassVar[str] = "engine"


class CapacityError(EngineError):
    """No free slot, or a position past the model's limit."""

    code: ClassVar[str] = "capacity"


class StaleError(EngineError):
    """An old generation, round or prefix."""

    code: ClassVar[str] = "stale"


class StateGapError(EngineError):
    """Target hidden states are missing or overlap."""

    code: ClassVar[str] = "state_gap"


class RowError(EngineError):
    """A row could not be computed; the whole reply is discarded."""

    code: ClassVar[str] = "row"
