"""Evidence: what a receipt is, its bytes, chain, signature, verification and gates.

Pure: bytes in, values out. Files, locks, clocks and terminals live in ``coordinator``. Nothing here knows a host, a
plan or a kernel; kinds and evidence classes are this package's own words.

Start at ``receipts.model`` (what a receipt says), ``receipts.build`` (how one is made), ``receipts.reader`` (how one is
read) and ``receipts.verify`` (what a whole set proves).
"""
