"""Kernel tests run on a CUDA device where there is one, and under Triton's CPU interpreter elsewhere.

The interpreter must be chosen before the first kernel module is imported. It proves indexing, masks and integer
arithmetic; it does not prove memory ordering or speed.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    torch.set_num_threads(1)
    return "cuda" if torch.cuda.is_available() else "cpu"
