"""The drafter: DeepSpec-format DSpark checkpoints, their forward pass, and the engine that turns STEP into rows.

``config`` and ``errors`` need no torch; ``checkpoint`` and ``model`` hold the network; ``markov`` holds the one sum
that feeds a rounding (DECISIONS 7); ``engine`` holds slots, generations and rounds. Nothing here knows sockets.
"""
