"""Qualification programs: they run on hosts, observe, and write one observation file each. They never decide."""
