"""One table of a configuration file: typed reads, named refusals, and no key left unread.

The two servers read their TOML through this. Rules: a wrong type or value refuses with file, field, expectation and
finding; paths are relative to the file; `require_all_read` refuses what nobody asked for. What only one server needs is
in a subclass beside that server's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from remote_dspark.wire.tls import TlsConfig


class ConfigTable:
    """Remembers what was read, so that unknown keys can be refused. Empty is false.

    Attributes:
        error: What a refusal raises; each server has its own error tree.
    """

    error: ClassVar[type[Exception]] = ValueError

    def __init__(self, path: Path, name: str, document: Mapping[str, Any]) -> None:
        self._path = path
        self._name = name
        self._document = document
        self._read: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._document)

    def __contains__(self, key: str) -> bool:
        return key in self._document

    def take(self, key: str, default: object) -> Any:
        """The raw value, marked as read; ``default`` when the key is absent."""
        self._read.add(key)
        return self._document.get(key, default)

    def refuse(self, key: str, expected: str, found: object) -> NoReturn:
        """Raises `error`, naming file, field, expectation and finding."""
        field = f"{self._name}.{key}" if self._name else key
        raise self.error(f"{self._path}: field {field}: expected {expected}, found {found!r}")

    def table(self, key: str, *, required: bool = True) -> Self:
        """A table inside this one."""
        found = self.take(key, None if required else {})
        if not isinstance(found, dict):
            self.refuse(key, "a table", found)
        return type(self)(self._path, key, found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty."""
        found = self.take(key, default)
        if not isinstance(found, str) or not found:
            self.refuse(key, "a non-empty string", found)
        return found

    def texts(self, key: str) -> list[str]:
        """A list of strings that is not empty."""
        found = self.take(key, None)
        if not isinstance(found, list) or not found or not all(isinstance(item, str) for item in found):
            self.refuse(key, "a list of strings", found)
        return list(found)

    def path(self, key: str, default: Path | None = None) -> Path:
        """A path, relative to the file."""
        return (self._path.parent / self.text(key, None if default is None else str(default))).resolve()

    def choice(self, key: str, allowed: list[str], default: str) -> str:
        """One of some words."""
        found = self.take(key, default)
        if found not in allowed:
            self.refuse(key, f"one of {allowed}", found)
        return str(found)

    def integer(self, key: str, default: int | None, *, low: int, high: int) -> int:
        """An integer within bounds, both included."""
        found = self.take(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            self.refuse(key, f"an integer of {low}..{high}", found)
        return found

    def seconds(self, key: str, default: float) -> float:
        """A duration."""
        found = self.take(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 86_400:
            self.refuse(key, "seconds, above 0 and below a day", found)
        return float(found)

    def tls(self) -> TlsConfig:
        """This table as pinned mutual TLS: the same words on both ends."""
        return TlsConfig(
            cert_path=str(self.path("cert")),
            key_path=str(self.path("key")),
            peers_path=str(self.path("peers")),
            peer_fingerprints=frozenset(self.texts("peer_fingerprints")),
        )

    def require_all_read(self) -> None:
        """Refuses a key that nobody read."""
        for key in self._document:
            if key not in self._read:
                self.refuse(key, f"one of {sorted(self._read)}", key)
