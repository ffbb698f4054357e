"""Speculative decoding with a remote DSpark drafter that ships the token and its exact probability.

Importing this package loads neither numpy nor torch; the subpackages load what they need.
"""

__version__ = "0.1.0"
