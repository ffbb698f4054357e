"""Placeholders in commands of a window plan: ``{mode}``, ``{output_dir}`` and the like.

Rules: only the placeholders named here, ``{model_NAME}`` and the settings an arm declares exist; an unknown one is
refused when the plan is parsed; filling never touches anything else, so JSON in an argument stays as written; there is
no shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from windows.errors import PlanError

_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")

KNOWN_PLACEHOLDERS: Final[dict[str, str]] = {
    "python": "interpreter of the host",
    "work_dir": "where the package and the models are staged on the host",
    "output_dir": "the only folder the program writes to",
    "state_dir": "the guard's state folder on the host",
    "host": "name of the host",
    "rank": "position of the host among the hosts of its role, from 0",
    "world": "number of hosts of its role",
    "target_address": "address of the first target host",
    "drafter_address": "address of the first drafter host",
    "plan_sha256": "digest of the compiled plan",
    "hold": "hold number",
    "hold_id": "id of the open hold",
    "epoch": "fence epoch of the open hold",
    "arm": "arm label, e.g. A1",
    "pair": "number of the arm's pair",
    "mode": "draft mode of the arm",
    "manifest": "path of the load manifest on the host",
    "manifest_sha256": "digest of the load manifest",
    "concurrency": "requests in flight",
    "requests": "measured requests",
    "warm_up_requests": "requests before the baseline",
    "max_tokens": "tokens per request",
    "temperature": "sampling temperature of the requests",
    "seeds": "request seeds, comma separated",
}


def placeholders_of(texts: Iterable[str]) -> frozenset[str]:
    """Names of the placeholders in some texts."""
    return frozenset(match for text in texts for match in _PLACEHOLDER.findall(text))


def require_known(texts: Iterable[str], settings: Iterable[str] = ()) -> None:
    """Refuses a placeholder that nothing fills.

    Raises:
        ValueError: Names the unknown placeholder and the known ones.
    """
    known = set(KNOWN_PLACEHOLDERS) | set(settings)
    unknown = sorted(placeholders_of(texts) - known)
    if unknown:
        raise ValueError(f"expected placeholders among {', '.join(sorted(known))}; found {{{unknown[0]}}}")


def fill(text: str, values: Mapping[str, str | int]) -> str:
    """One text with its placeholders filled, each exactly once (a filled value is not looked at again).

    Raises:
        PlanError: A placeholder has no value.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in values:
            raise PlanError(f"placeholder {{{name}}} has no value here; available: {', '.join(sorted(values))}")
        return str(values[name])

    return _PLACEHOLDER.sub(value, text)


def fill_argv(argv: Iterable[str], values: Mapping[str, str | int]) -> tuple[str, ...]:
    """A command with its placeholders filled; the number of words never changes."""
    return tuple(fill(word, values) for word in argv)
