from __future__ import annotations

import shutil
import stat

from kvxfer.cli import exit_codes
from kvxfer.control.keys import Keys


def test_the_secret_key_is_readable_by_its_owner_only(kvxfer, tmp_path):
    outcome = kvxfer("keygen", str(tmp_path / "worker"), "--json")
    assert outcome.status == exit_codes.OK
    mode = stat.S_IMODE((tmp_path / "worker" / "kvxfer.key").stat().st_mode)
    assert mode == 0o600


def test_the_keys_load_and_the_secret_is_never_printed(kvxfer, tmp_path):
    outcome = kvxfer("keygen", str(tmp_path), "--json")
    keys = Keys.load(tmp_path)
    assert keys.public.decode() == outcome.document["public_key"]
    assert keys.secret.decode() not in outcome.out


def test_the_public_keys_of_several_peers_fit_into_one_folder_as_the_command_says(kvxfer, tmp_path):
    (tmp_path / "own" / "authorised").mkdir(parents=True)
    kvxfer("keygen", str(tmp_path / "own"))
    publics = set()
    for peer in ("decode-1", "decode-2"):
        told = kvxfer("keygen", str(tmp_path / peer)).out.replace("\n", " ")
        assert "copy kvxfer.pub to the peer's authorised/ folder under a name of its own" in told
        shutil.copy(tmp_path / peer / "kvxfer.pub", tmp_path / "own" / "authorised" / f"{peer}.pub")
        publics.add(Keys.load(tmp_path / peer).public)
    assert Keys.load(tmp_path / "own").authorised == publics


def test_keys_are_not_replaced_unless_asked_to(kvxfer, tmp_path):
    kvxfer("keygen", str(tmp_path))
    before = Keys.load(tmp_path)
    assert kvxfer("keygen", str(tmp_path)).status == exit_codes.ENVIRONMENT
    assert Keys.load(tmp_path) == before
    assert kvxfer("keygen", str(tmp_path), "--overwrite").status == exit_codes.OK
    assert Keys.load(tmp_path) != before


def test_a_directory_that_cannot_be_written_is_named(kvxfer, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    outcome = kvxfer("keygen", str(file / "inside"), "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert str(file) in outcome.document["error"]["message"]
