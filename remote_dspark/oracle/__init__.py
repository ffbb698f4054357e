"""The exact oracle: what kernels, drafter and verifier are judged by.

Integers and rationals only, after one FP32 exponential. Nothing here is fast on purpose; `tickets.allocate_rows` and
`philox.philox4x32_array` are the two vectorised forms, and both are proved equal to the scalar ones bit for bit.
In formulas p is the target distribution and q the draft distribution.

Not covered: how logits are computed, how rows travel, and any device.
"""
