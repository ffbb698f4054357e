"""What keeps a worker from serving.

::

    ServeError
    ├── ConfigError   the configuration file is wrong; nothing was started
    └── BootError     the model, the device or an address could not be taken
"""

from __future__ import annotations


class ServeError(Exception):
    """Root of the tree."""


class ConfigError(ServeError):
    """The configuration file is wrong; nothing was started."""


class BootError(ServeError):
    """The model, the device or an address could not be taken."""
