"""A closed-loop load driver for an OpenAI-compatible completion server: fixed prompts, fixed seeds, raw samples.

Closed loop: ``concurrency`` threads each send the next request of the manifest when their last one has ended. Tokens
are counted by the ids in the stream, not by chunks. All times are monotonic nanoseconds of this process. Standard
library only; one connection per request, because a kept-alive one would hide the server's accept path.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from remote_dspark.qualify.manifest import LoadEntry, Manifest

DATA: Final = b"data: "
DONE: Final = b"[DONE]"


class LoadError(Exception):
    """A request did not end as a complete response; the message names the request and what was found."""


@dataclass(frozen=True)
class Sampling:
    """What is asked for besides prompt and seed. ``temperature`` is a decimal string, so that it can be hashed."""

    max_tokens: int
    temperature: str


@dataclass(frozen=True)
class RequestRecord:
    """One request as this driver saw it.

    Attributes:
        index: Number in the load.
        start_ns: Before the connection is made.
        first_token_ns: When the first chunk with a token had arrived.
        end_ns: When the stream was over.
        token_ids: Everything generated.
        arrivals: (time, number of tokens) of each chunk.
        num_rounds: Rounds, as the server accounts for them.
        num_prompt_tokens: As the server accounts for them.
    """

    index: int
    start_ns: int
    first_token_ns: int
    end_ns: int
    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[int, int], ...]
    num_rounds: int
    num_prompt_tokens: int

    def inter_token_ns(self) -> list[int]:
        """Gaps between tokens after the first chunk.

        A chunk of n tokens that arrives g after the one before gives n gaps whose sum is exactly g: tokens of one
        round arrive together, and n - 1 gaps of zero would only measure the chunking.
        """
        gaps: list[int] = []
        for (before, _), (after, count) in itertools.pairwise(self.arrivals):
            share, rest = divmod(after - before, count)
            gaps += [share + (1 if index < rest else 0) for index in range(count)]
        return gaps


class Client:
    """One server; every call is bounded by ``timeout_s`` per socket operation."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET.

        Raises:
            LoadError: No answer.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as cause:
            raise LoadError(f"GET {self._host}:{self._port}{path}: expected an answer, found {cause!r}") from cause
        finally:
            connection.close()

    def complete(self, index: int, entry: LoadEntry, sampling: Sampling) -> RequestRecord:
        """Stream one completion to its end.

        Raises:
            LoadError: Refused, cut off, or not what a complete stream looks like.
        """
        body = {
            "prompt": entry.prompt,
            "seed": entry.seed,
            "max_tokens": sampling.max_tokens,
            "temperature": float(sampling.temperature),
            "stream": True,
            # A completion that ends early would make two arms do different work.
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        start_ns = time.monotonic_ns()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise LoadError(f"request {index}: expected 200, found {response.status} {response.read(300)!r}")
            return _read_stream(index, start_ns, response)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as cause:
            raise LoadError(f"request {index}: expected a complete stream, found {cause!r}") from cause
        finally:
            connection.close()


def _read_stream(index: int, start_ns: int, response: http.client.HTTPResponse) -> RequestRecord:
    token_ids: list[int] = []
    arrivals: list[tuple[int, int]] = []
    last: dict[str, Any] = {}
    while line := response.readline():
        now_ns = time.monotonic_ns()
        if not line.startswith(DATA):
            continue
        if line.strip() == DATA + DONE:
            return RequestRecord(
                index=index,
                start_ns=start_ns,
                first_token_ns=arrivals[0][0] if arrivals else now_ns,
                end_ns=now_ns,
                token_ids=tuple(token_ids),
                arrivals=tuple(arrivals),
                num_rounds=int(last["dspark"]["rounds"]),
                num_prompt_tokens=int(last["usage"]["prompt_tokens"]),
            )
        last = json.loads(line[len(DATA) :])
        if "error" in last:
            raise LoadError(f"request {index}: expected tokens, found {last['error']}")
        found = last["choices"][0]["token_ids"]
        token_ids += found
        if found:
            arrivals.append((now_ns, len(found)))
    raise LoadError(f"request {index}: the stream ended before [DONE], after {len(token_ids)} tokens")


@dataclass(frozen=True)
class LoadRun:
    """One phase: its records in index order and its bounds in monotonic ns."""

    records: tuple[RequestRecord, ...]
    start_ns: int
    end_ns: int

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(record.token_ids) for record in self.records)


def run_closed_loop(
    client: Client, manifest: Manifest, indices: Sequence[int], sampling: Sampling, concurrency: int
) -> LoadRun:
    """Send ``indices`` of the manifest's load, ``concurrency`` at a time.

    Raises:
        LoadError: The first request that failed; the other threads stop before their next one.
    """
    pending = iter(indices)
    lock = threading.Lock()
    records: list[RequestRecord] = []
    failures: list[LoadError] = []

    def work() -> None:
        while True:
            with lock:
                index = None if failures else next(pending, None)
            if index is None:
                return
            try:
                record = client.complete(index, manifest.entry(index), sampling)
            except LoadError as cause:
                with lock:
                    failures.append(cause)
                return
            with lock:
                records.append(record)

    start_ns = time.monotonic_ns()
    threads = [threading.Thread(target=work, name=f"load-{n}") for n in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return LoadRun(tuple(sorted(records, key=lambda record: record.index)), start_ns, time.monotonic_ns())
