"""What a physical pair refuses, and what its compiled exchange must contain.

Turns red when: MIG, MPS, one GPU twice, a missing link or a bound beside a watchdog is let through; a barrier, a scope
or a message is missing in the PTX and nobody says so; addresses or epochs become part of the compiled kernel; an
unprimed chain runs; an inbox or a nonce of the wrong kind is taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.models

BOUND_NS = 50_000_000


@pytest.fixture
def facts():
    from remote_dspark.kernels.pair_devices import PairFacts

    return PairFacts(
        uuids=("GPU-a", "GPU-b"),
        mig_modes=("Disabled", "Disabled"),
        has_watchdog=(False, False),
        peer_access=(True, True),
        native_atomics=(True, True),
        mps_processes=(),
    )


def test_a_good_pair_is_let_through(facts):
    from remote_dspark.kernels.pair_devices import WATCHDOG_NS, require_pair

    require_pair(facts, BOUND_NS)
    require_pair(facts, 10 * WATCHDOG_NS)
    require_pair(replace(facts, has_watchdog=(True, False)), WATCHDOG_NS // 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"uuids": ("GPU-a", "GPU-a")}, "two distinct GPUs"),
        ({"uuids": ("GPU-a",)}, "two distinct GPUs"),
        ({"uuids": ()}, "two distinct GPUs"),
        ({"mig_modes": ("Disabled", "Enabled")}, "MIG"),
        ({"mig_modes": ("hidden", "Disabled")}, "MIG"),
        ({"mps_processes": ("nvidia-cuda-mps (7)",)}, "MPS"),
        ({"peer_access": (True, False)}, "peer access"),
        ({"native_atomics": (False, True)}, "native atomics"),
    ],
)
def test_what_is_no_pair(facts, change, reason):
    from remote_dspark.kernels.pair_devices import PairRefusedError, require_pair

    with pytest.raises(PairRefusedError, match=reason):
        require_pair(replace(facts, **change), BOUND_NS)


def test_a_bound_above_half_of_a_watchdog(facts):
    from remote_dspark.kernels.pair_devices import WATCHDOG_NS, PairRefusedError, require_pair

    with pytest.raises(PairRefusedError, match="watchdog"):
        require_pair(replace(facts, has_watchdog=(False, True)), WATCHDOG_NS // 2 + 1)


def test_mps_is_found_by_the_names_of_processes(tmp_path: Path):
    from remote_dspark.kernels.pair_devices import mps_processes

    for number, name in (("7", "nvidia-cuda-mps"), ("8", "python3"), ("self", "nvidia-cuda-mps")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(f"{name}\n")
    assert mps_processes(tmp_path) == ("nvidia-cuda-mps (7)",)


def test_ranks_of_the_wrong_kind():
    import torch

    from remote_dspark.kernels.pair_rank import EPOCH_LIMIT, PairRank, PairSettings, inbox_words

    settings = PairSettings(75, tile=32)
    inbox = torch.zeros(inbox_words(2), dtype=torch.int64)
    for box, nonce, limit in (
        (inbox[:-1], 1, EPOCH_LIMIT),
        (inbox.to(torch.int32), 1, EPOCH_LIMIT),
        (inbox, 0, EPOCH_LIMIT),
        (inbox, 1 << 31, EPOCH_LIMIT),
        (inbox, 1, EPOCH_LIMIT + 1),
    ):
        with pytest.raises(ValueError, match="expected"):
            PairRank(settings, 0, 1, 2, box, nonce, limit)
    rank = PairRank(settings, 0, 1, 2, inbox, 1)
    with pytest.raises(ValueError, match="connect it"):
        rank.connection()
    with pytest.raises(ValueError, match="built for 2 rows"):
        rank.require_rows(torch.zeros((3, 16), dtype=torch.int32))
    for options in ({"k": 64}, {"bound": 0}):
        with pytest.raises(ValueError, match="found"):
            PairSettings(75, tile=64, **options)


def test_errors_are_for_life():
    import torch

    from remote_dspark.kernels.pair_rank import PairError, PairRank, PairSettings, inbox_words

    inbox = torch.zeros(inbox_words(1), dtype=torch.int64)
    rank = PairRank(PairSettings(75, tile=32), 0, 1, 1, inbox, 1)
    rank.stop()
    assert rank.errors() == PairError.NONE
    # what the peer would write when it stops
    inbox[-64] = int(PairError.PEER_TIMEOUT)
    assert rank.errors() == PairError.PEER_FAULT
    for action in (rank.stop, rank.restart):
        with pytest.raises(ValueError, match="build a new pair"):
            action()


def test_an_unprimed_chain_is_refused():
    from remote_dspark.kernels.pair_chain import PairChain, PhysicalPair, UnprimedPairError

    # no device is touched before the refusal
    chain = PairChain(PhysicalPair.__new__(PhysicalPair), lambda rank, index: None, 1)
    for action in (chain.run, chain.capture):
        with pytest.raises(UnprimedPairError, match="prime"):
            action()


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from remote_dspark.kernels.pair_head import RUN_TIME, pair_head_kernel as kernel
constants = dict(K=32, TILE=512, N=256, TILE_DIRECT=False, MERGE_DIRECT=False, BY_SLOT=True, FLOOR_FIRST=True,
                 EMIT_WEIGHTS=False)
wide = {"merged_ptr", "union_ptr", "weights_ptr", "stamp_ptr", "result_ptr", "state_ptr"}
def kind(name):
    if name in constants: return "constexpr"
    if name in ("logits_ptr", "bias_ptr"): return "*i16"
    if name == "q_ptr": return "*fp32"
    if name in wide: return "*i64"
    if name in ("inbox", "peer"): return "i64"
    return "*i32" if name.endswith("_ptr") else "i32"
signature = {parameter.name: kind(parameter.name) for parameter in kernel.params}
compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
fixed = [p.name for p in kernel.params if p.name in RUN_TIME and not p.do_not_specialize]
json.dump({"ptx": compiled.asm["ptx"], "specialised": fixed}, sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, object]:
    """The exchange as compiled for an H200, by a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_compiled_exchange_has_its_barriers(compiled):
    from remote_dspark.kernels.pair_barriers import barrier_faults

    assert barrier_faults(compiled["ptx"]) == []
    assert compiled["specialised"] == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (".sys.release.", ".gpu.release.", "releases at system scope"),
        (".sys.acquire.", ".gpu.acquire.", "acquires at system scope"),
        ("bar.sync", "// bar.sync", "a barrier between the last store and the release"),
        ("bar.sync", "// bar.sync", "a barrier between the acquire and the next load"),
        ("ret;", "multimem.st.global; ret;", "multicast"),
    ],
)
def test_a_missing_barrier_is_a_fault(compiled, old, new, fault):
    from remote_dspark.kernels.pair_barriers import barrier_faults

    ptx = str(compiled["ptx"])
    assert old in ptx
    assert any(fault in found for found in barrier_faults(ptx.replace(old, new)))
