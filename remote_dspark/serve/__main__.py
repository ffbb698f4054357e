"""``python -m remote_dspark.serve --config worker.toml``."""

from __future__ import annotations

import argparse
from pathlib import Path

from remote_dspark.serve.worker import serve


def main(argv: list[str] | None = None) -> int:
    """Parse, serve until a signal, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m remote_dspark.serve", description=serve.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the worker's TOML file")
    return serve(parser.parse_args(argv).config)


if __name__ == "__main__":
    raise SystemExit(main())
