"""Sampling kernels: from BF16 draft logits to token and exact q, and the verifier's sparse-q acceptance.

One file per operation, with a torch reference of the same meaning in `naive`. Importing this package loads neither
torch nor triton; its modules do.
"""
