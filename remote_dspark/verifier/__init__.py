"""Verification of proposals against the target distribution: greedy drafts (OFF) and q-aware (ON)."""
