"""``python -m remote_dspark.target --config target.toml``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from remote_dspark.target.server import serve


def main(argv: list[str]) -> int:
    """Parse, serve, return the exit code."""
    parser = argparse.ArgumentParser(prog="remote_dspark.target", description="OpenAI-compatible target server")
    parser.add_argument("--config", type=Path, required=True, help="TOML file; see docs/target-server.md")
    return serve(parser.parse_args(argv).config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
