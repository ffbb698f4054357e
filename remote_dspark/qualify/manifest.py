"""The load manifest: the prompts and seeds that every arm of a campaign sends, identified by its file's digest.

``python -m remote_dspark.qualify.manifest --prompts FILE --output FILE`` makes one from prompts in JSON Lines; the
same input gives the same bytes. An arm reads it, hashes the bytes it read, and sends nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from remote_dspark.observe import ObserveError

SCHEMA: Final = "remote-dspark/load-manifest/v1"
SEED_MASK: Final = (1 << 53) - 1


@dataclass(frozen=True)
class LoadEntry:
    """One request of the load: its prompt and its seed."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Manifest:
    """A read manifest.

    Attributes:
        entries: In order.
        sha256: Digest of the file's bytes.
        source: Where the text comes from, and its licence.
        seeds: Seeds to use in turn instead of the entries' own; usually empty.
    """

    entries: tuple[LoadEntry, ...]
    sha256: str
    source: str
    seeds: tuple[int, ...] = ()

    def with_seeds(self, seeds: tuple[int, ...]) -> Manifest:
        """The same prompts under other seeds; none keeps the manifest's."""
        return replace(self, seeds=seeds)

    def entry(self, index: int) -> LoadEntry:
        """Request ``index`` of an endless load: entries in turn, with another seed in every turn."""
        turn, place = divmod(index, len(self.entries))
        entry = self.entries[place]
        seed = self.seeds[index % len(self.seeds)] if self.seeds else entry.seed
        return LoadEntry(entry.prompt, (seed + turn) & SEED_MASK)


def load_manifest(path: Path) -> Manifest:
    """Read and check one manifest.

    Raises:
        ObserveError: Unreadable, another schema, or an entry that is no prompt with a seed.
    """
    try:
        data = path.read_bytes()
        document = json.loads(data)
    except (OSError, ValueError) as cause:
        raise ObserveError(f"{path}: expected a load manifest, found {cause}") from cause
    if not isinstance(document, dict) or set(document) != {"schema", "source", "requests"}:
        raise ObserveError(f"{path}: expected the fields schema, source and requests")
    if document["schema"] != SCHEMA or not document["requests"]:
        raise ObserveError(f"{path}: expected schema {SCHEMA} and at least one request")
    entries = tuple(_entry(path, index, item) for index, item in enumerate(document["requests"]))
    return Manifest(entries, hashlib.sha256(data).hexdigest(), str(document["source"]))


def _entry(path: Path, index: int, item: Any) -> LoadEntry:
    is_entry = isinstance(item, dict) and set(item) == {"prompt", "seed"}
    if not is_entry or not isinstance(item["prompt"], str) or not item["prompt"]:
        raise ObserveError(f"{path}: request {index}: expected a prompt and a seed, found {item!r}")
    if type(item["seed"]) is not int or not 0 <= item["seed"] <= SEED_MASK:
        raise ObserveError(f"{path}: request {index}: expected a seed of 0..2^53-1, found {item['seed']!r}")
    return LoadEntry(item["prompt"], item["seed"])


def make_manifest(prompts: list[str], source: str) -> bytes:
    """The bytes of a manifest; each seed follows from its place and its prompt."""
    requests = []
    for index, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{SCHEMA} {index} {prompt}".encode()).digest()
        requests.append({"prompt": prompt, "seed": int.from_bytes(digest[:8], "little") & SEED_MASK})
    document = {"schema": SCHEMA, "source": source, "requests": requests}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def main(argv: list[str]) -> int:
    """Make one manifest."""
    parser = argparse.ArgumentParser(prog="remote_dspark.qualify.manifest")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON Lines of {"prompt": text}')
    parser.add_argument("--source", required=True, help="where the text comes from, and its licence")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    args.output.write_bytes(make_manifest([json.loads(line)["prompt"] for line in lines], args.source))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
