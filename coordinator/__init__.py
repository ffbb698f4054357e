"""Every effect of the control side: command line, SSH, journal, store, clock, rendering."""

__version__ = "0.1.0"
