from __future__ import annotations

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
