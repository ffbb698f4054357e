"""``python -m remote_dspark.train corpus|fit``: build the text, or train the pair from it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from remote_dspark.train.recipe import Recipe


def main(argv: list[str] | None = None) -> int:
    """Parse, run one stage, print its summary as one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m remote_dspark.train", description=__doc__)
    stages = parser.add_subparsers(dest="stage", required=True)
    corpus = stages.add_parser("corpus", help="write tokenizer and token files from this interpreter's library")
    corpus.add_argument("--out", type=Path, required=True)
    fit = stages.add_parser("fit", help="train target and drafter")
    fit.add_argument("--corpus", type=Path, required=True)
    fit.add_argument("--out", type=Path, required=True)
    fit.add_argument("--device", default="cuda")
    fit.add_argument("--target-seconds", type=float, default=70.0, help="upper bound; the schedule shrinks to fit")
    fit.add_argument("--draft-seconds", type=float, default=120.0, help="upper bound; the schedule shrinks to fit")
    fit.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="override a recipe field")
    options = parser.parse_args(argv)
    if options.stage == "corpus":
        from remote_dspark.train.corpus import build_corpus

        summary = build_corpus(options.out, Recipe())
    else:
        from remote_dspark.train.fit import fit_pair

        overrides: dict[str, Any] = dict(_override(item) for item in options.set)
        recipe = replace(Recipe(), **overrides)
        summary = fit_pair(
            options.corpus,
            options.out,
            recipe,
            options.device,
            target_seconds=options.target_seconds,
            draft_seconds=options.draft_seconds,
        )
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return 0


def _override(item: str) -> tuple[str, Any]:
    name, _, text = item.partition("=")
    if name not in Recipe.__dataclass_fields__:
        raise SystemExit(f"--set {item}: expected a field of the recipe, found {name!r}")
    value = json.loads(text)
    return name, tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
