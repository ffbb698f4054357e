"""Configuration: what is accepted, what is refused and how the refusal names it.

Turns red when: an unknown key is ignored, the default mode is not OFF, or a message does not name field and value.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from remote_dspark.contract import DraftMode
from remote_dspark.target.config import load_config
from remote_dspark.target.errors import ConfigError
from remote_dspark.wire.tls import TlsConfig

GOOD = """
[model]
path = "model"
[listen]
port = 0
[drafter]
address = "127.0.0.1:9"
checkpoint = "drafter"
"""
TLS = '[tls]\ncert = "c"\nkey = "k"\npeers = "p"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "target.toml"
    path.write_text(text)
    return path


def test_defaults_are_off_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.mode is DraftMode.OFF
    assert config.model == tmp_path / "model"
    assert config.tokenizer == tmp_path / "model" / "tokenizer.json"
    assert (config.depth, config.draft_temperature_ppm, config.max_requests, config.spin_us) == (5, 700_000, 4, 0)
    assert config.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()


def test_the_tls_table_has_the_words_of_the_worker(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, GOOD)).tls is None
    tls = load_config(write(tmp_path, GOOD + TLS + 'peer_fingerprints = ["aa", "bb"]\n')).tls
    expected = TlsConfig(str(tmp_path / "c"), str(tmp_path / "k"), str(tmp_path / "p"), frozenset({"aa", "bb"}))
    assert tls == expected


@pytest.mark.parametrize(
    ("old", "new", "field", "found"),
    [
        ("[model]", 'mode = "on"\n[model]', "mode", "'on'"),
        ("[model]", "speed = 3\n[model]", "speed", "'speed'"),
        ("port = 0", "port = 70000", "listen.port", "70000"),
        ("port = 0", "port = true", "listen.port", "True"),
        ("port = 0", "", "listen.port", "nothing"),
        ('path = "model"', 'path = ""', "model.path", "''"),
        ('path = "model"', 'path = "model"\nthreads = 0', "model.threads", "0"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\ndepth = 3', "drafter.depth", "3"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\nsupport = 16', "drafter.support", "16"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\ntemperature = 0.7', "drafter.temperature", "0.7"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\ntemperature = "0"', "drafter.temperature", "'0'"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\ntemperature = "nan"', "drafter.temperature", "'nan'"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\ntemperature = "1e-9"', "drafter.temperature", "'1e-9'"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\nretries = 2', "drafter.retries", "'retries'"),
        ("[drafter]", "[limits]\nmax_requests = 5\n[drafter]", "limits.max_requests", "5"),
        ("[drafter]", '[tls]\ncert = "c"\nkey = "k"\n[drafter]', "tls.peers", "nothing"),
        ("[drafter]", f"{TLS}peer_fingerprints = []\n[drafter]", "tls.peer_fingerprints", "[]"),
        ("[drafter]", f'{TLS}peer_fingerprints = ["a"]\nca = "x"\n[drafter]', "tls.ca", "'ca'"),
        ('checkpoint = "drafter"', 'checkpoint = "drafter"\nspin_us = 100001', "drafter.spin_us", "100001"),
        ("[drafter]", "[limits]\nwedge_after_s = 0\n[drafter]", "limits.wedge_after_s", "0"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, old: str, new: str, field: str, found: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    message = str(refusal.value)
    assert f"field {field}: expected" in message
    assert message.endswith(f"found {found}") or "nothing" in message
    assert str(path) in message


def test_an_unreadable_or_malformed_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="TOML"):
        load_config(write(tmp_path, "mode = "))
