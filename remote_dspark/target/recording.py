"""Records one wire session to a file, for a frozen replay.

Frames are kept in memory until the session ends, so that recording costs a round a copy and no disk access; the file
then appears whole. A connection attempt that failed is forgotten.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

from remote_dspark.observe import write_atomically
from remote_dspark.wire.capture import CaptureWriter


class SessionRecording:
    """The frames of the latest connection; `close` writes them.

    Args:
        path: Trace file; replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = io.BytesIO()
        self._writer: CaptureWriter | None = None

    def tap(self) -> CaptureWriter:
        """A tap for a new connection; what an earlier one recorded is dropped."""
        self._stream = io.BytesIO()
        self._writer = CaptureWriter(self._stream, time.monotonic_ns)
        return self._writer

    def close(self) -> None:
        """Write the trace; nothing if there was no connection."""
        if self._writer is not None:
            self._writer.close()
            write_atomically(self._path, self._stream.getvalue())
            self._writer = None
