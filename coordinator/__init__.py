"""Every effect of the control side: command line, SSH, journal, store, clock, rendering."""
