"""The program on each host: who may touch it, what is stopped, what runs, and how production comes back.

It ships alone as one zipapp, standard library only, Python 3.9 or newer. ``docs/guard-protocol.md`` is its contract.
It knows nothing of plans, receipts or the network between hosts.
"""

from __future__ import annotations

VERSION = "1.0.0"
PROTOCOL = 1
