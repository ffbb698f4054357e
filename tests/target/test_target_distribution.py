"""The server's output distribution at T = 1 is the target's: one chi-square test per mode, through both processes.

n completions of one fixed prompt under different seeds; the first two tokens are counted in cells. Expected counts come
from the target model alone. A cell is a pair of tokens with at least 8 expected; the rest of each first token, and the
rest of all, are cells of their own when they reach 8, and are pooled otherwise. False alarm: 1e-6 per mode.

ON: n = 900, 40 cells; OFF: n = 500, 22 cells. Power (ESTIMATED, normal approximation of the noncentral statistic): a
deviation of effect size w = sqrt(sum (p' - p)^2 / p) is found with probability 0.99 from w = 0.35 (ON) and 0.44 (OFF)
on. Turns red when: a correction is drawn from p instead of the residual, drafts are accepted without the test, or the
bonus token comes from another row.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

import numpy as np
import pytest
from target_services import TINY, ServerPair

from remote_dspark.contract import DraftMode

pytestmark = [pytest.mark.models, pytest.mark.services]

PROMPT = "# The "
NUM_REQUESTS = {DraftMode.ON: 900, DraftMode.OFF: 500}
MIN_EXPECTED = 8.0
FALSE_ALARM = 1e-6
MIN_CELLS = 15
Token = int | None


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with ``degrees`` > statistic), by the series of the regularised lower incomplete gamma function."""
    a, x = degrees / 2, statistic / 2
    term = total = 1 / a
    for n in range(1, 10_000):
        term *= x / (a + n)
        total += term
        if term < total * 1e-16:
            break
    lower = total * math.exp(-x + a * math.log(x) - math.lgamma(a))
    return max(1 - lower, 0.0)


def test_the_tail_function_knows_published_quantiles() -> None:
    # Upper 5 % and 0.1 % points of the usual tables.
    for degrees, point, tail in ((1, 3.841, 0.05), (10, 18.307, 0.05), (50, 67.505, 0.05), (30, 59.703, 0.001)):
        assert upper_tail(point, degrees) == pytest.approx(tail, rel=2e-3)


@pytest.fixture(scope="session")
def target_law() -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """p(x) of the first token and p(y | x) of the second for every x that can fill a cell; float64 softmax."""
    import torch
    from tokenizers import Tokenizer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    ids = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")).encode(PROMPT).ids

    def law(prefix: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
        return np.asarray(torch.softmax(logits.double(), dim=0).numpy())

    first = law(ids)
    enough = np.flatnonzero(first * max(NUM_REQUESTS.values()) >= MIN_EXPECTED)
    return first, {int(x): law([*ids, int(x)]) for x in enough}


def cells_of(law: tuple[np.ndarray, dict[int, np.ndarray]], num: int) -> dict[tuple[Token, Token], float]:
    """Expected count of each cell; None stands for every token without a cell of its own."""
    first, second = law
    cells: dict[tuple[Token, Token], float] = {}
    for x, given in second.items():
        pairs = {(x, int(y)): num * first[x] * given[y] for y in np.flatnonzero(num * first[x] * given >= MIN_EXPECTED)}
        rest = num * first[x] - sum(pairs.values())
        cells |= pairs
        if rest >= MIN_EXPECTED:
            cells[x, None] = rest
    cells[None, None] = num - sum(cells.values())
    return cells


def sample(pair: ServerPair, num: int) -> list[tuple[int, int]]:
    """First two tokens of ``num`` completions, four at a time."""
    found: list[tuple[int, int]] = []
    seeds = iter(range(num))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            document = pair.complete(prompt=PROMPT, max_tokens=2, temperature=1, seed=seed, ignore_eos=True)
            x, y = document["choices"][0]["token_ids"]
            with lock:
                found.append((x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return found


def test_output_distribution_is_the_targets(
    pair: ServerPair, target_law: tuple[np.ndarray, dict[int, np.ndarray]]
) -> None:
    num = NUM_REQUESTS[DraftMode(pair.mode)]
    cells = cells_of(target_law, num)
    assert len(cells) >= MIN_CELLS
    before = pair.metrics()
    found = sample(pair, num)
    assert len(found) == num
    after = pair.metrics()
    # The statement is about speculative rounds: drafts were both accepted and rejected, and none was missing.
    accepted = after["dspark_accepted_at_position_total.0"] - before["dspark_accepted_at_position_total.0"]
    proposed = after["dspark_proposed_at_position_total.0"] - before["dspark_proposed_at_position_total.0"]
    assert num // 10 < accepted < proposed - num // 10
    assert after["dspark_failed_rounds_total"] == before["dspark_failed_rounds_total"]
    counts: Counter[tuple[Token, Token]] = Counter()
    for x, y in found:
        options: list[tuple[Token, Token]] = [(x, y), (x, None), (None, None)]
        counts[next(cell for cell in options if cell in cells)] += 1
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell, expected in cells.items())
    tail = upper_tail(statistic, len(cells) - 1)
    print(f"mode {pair.mode}: n {num}, cells {len(cells)}, chi-square {statistic:.1f}, upper tail {tail:.3g}")
    assert tail > FALSE_ALARM
