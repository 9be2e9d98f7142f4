"""Key files: written for their owner alone, refused when others can read them, peers authorised by file or folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvxfer.control.keys import Keys
from kvxfer.errors import ConfigurationError, InsecureEndpoint
from kvxfer.hosts import parse_address


def test_a_saved_pair_loads_as_it_was(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "worker")
    assert Keys.load(tmp_path / "worker") == keys


def test_the_secret_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    secret, _ = Keys.generate().save(tmp_path)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    secret, _ = Keys.generate().save(tmp_path)
    secret.chmod(mode)
    with pytest.raises(InsecureEndpoint, match="chmod 600"):
        Keys.load(tmp_path)


def test_an_existing_key_is_not_overwritten_unasked(tmp_path: Path) -> None:
    first = Keys.generate()
    first.save(tmp_path)
    with pytest.raises(ConfigurationError, match="already"):
        Keys.generate().save(tmp_path)
    assert Keys.load(tmp_path).public == first.public
    second = Keys.generate()
    second.save(tmp_path, overwrite=True)
    assert Keys.load(tmp_path).public == second.public


def test_a_secret_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    os.symlink(target, tmp_path / "kvxfer.key")
    with pytest.raises(ConfigurationError):
        Keys.generate().save(tmp_path)
    assert not target.exists()


def test_the_secret_is_not_shown() -> None:
    keys = Keys.generate()
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"x" * 40 + b"\n" + b"y" * 40, b"\xff" * 40, b'"' * 40, b"#" * 40, b"$" * 40]
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    secret, _ = Keys.generate().save(tmp_path)
    secret.write_bytes(content)
    with pytest.raises(ConfigurationError):
        Keys.load(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        Keys.load(tmp_path / "nowhere")


def test_peers_are_authorised_by_a_file_with_hosts_and_comments(tmp_path: Path) -> None:
    first, second = Keys.generate().public.decode(), Keys.generate().public.decode()
    Keys.generate().save(tmp_path)
    (tmp_path / "authorised").write_text(f"# peers\n{first} p0.example p0.example:7000  # rack 1\n\n{second}\n")
    keys = Keys.load(tmp_path)
    assert keys.authorised == {first.encode(), second.encode()}
    assert keys.servers == {"p0.example": first.encode(), "p0.example:7000": first.encode()}


def test_peers_are_authorised_by_a_folder_of_public_keys(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path)
    folder = tmp_path / "authorised"
    folder.mkdir()
    publics = {Keys.generate().public for _ in range(3)}
    for number, public in enumerate(publics):
        (folder / f"{number}.pub").write_bytes(public + b"\n")
    (folder / "README").write_text("not a key")
    assert Keys.load(tmp_path).authorised == publics


def test_the_only_authorised_key_is_the_servers() -> None:
    server = Keys.generate()
    assert Keys.generate([server.public]).server_key(parse_address("anywhere:1")) == server.public


def test_of_several_keys_the_one_named_for_the_host_is_the_servers() -> None:
    one, two, three = (Keys.generate().public for _ in range(3))
    keys = Keys.generate().trusting(one, at=["p0"]).trusting(two, at=["p1:7000", "/run/p2.sock"]).trusting(three)
    assert keys.server_key(parse_address("p0:1")) == one
    assert keys.server_key(parse_address("p1:7000")) == two
    assert keys.server_key(parse_address("ipc:///run/p2.sock")) == two
    with pytest.raises(ConfigurationError, match="behind its key"):
        keys.server_key(parse_address("p1:7001"))


def test_without_authorised_keys_no_server_can_be_dialled() -> None:
    with pytest.raises(ConfigurationError):
        Keys.generate().server_key(parse_address("p0:1"))
