"""A user's mistake ends in one clear line and a status that says whose fault it was, never in a traceback."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from kvxfer.cli import exit_codes


def test_version_is_printed_as_text_and_as_json(kvxfer):
    from kvxfer import __version__

    assert kvxfer("--version").out.strip() == f"kvxfer {__version__}"
    assert kvxfer("--version", "--json").document["version"] == __version__


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "--page-bytes", "0"), "page_bytes must lie between 1 and"),
        (("bench", "--page-bytes", "65M"), "page_bytes must lie between 1 and"),
        (("bench", "--page-bytes", "much"), "is not a size"),
        (("bench", "--lane", "pigeon"), "unknown lane 'pigeon'; there are: local, tcp"),
        (("bench", "--verify", "never"), "unknown verify 'never'; there are: digest, coverage"),
        (("bench", "--pages", "0"), "pages must lie between 1 and"),
        (("bench", "--pages", "1000", "--regions", "1001"), "chunks"),
        (("bench", "--role", "router"), "unknown role 'router'"),
        (("bench", "--role", "prefill"), "needs --listen"),
        (("bench", "--role", "decode"), "needs --connect"),
        (("bench", "--connect", "127.0.0.1:1"), "--connect goes with --role decode"),
        (("bench", "--no-such-option",), "No such option"),
        (("demo", "--lane", "pigeon"), "unknown lane 'pigeon'; there are: local, tcp, both"),
        (("demo", "--prompt-tokens", "5"), "several pages"),
        (("no-such-command",), "No such command"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_and_ends_with_the_usage_status(kvxfer, arguments, says):
    as_text = kvxfer(*arguments)
    assert as_text.status == exit_codes.USAGE
    assert says in as_text.err.replace("\n", " ")
    assert as_text.out == ""

    as_json = kvxfer(*arguments, "--json")
    assert as_json.status == exit_codes.USAGE
    assert says in as_json.document["error"]["message"]
    assert as_json.err == ""


def test_a_busy_port_is_named(kvxfer):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = kvxfer("bench", "--role", "prefill", "--listen", address, "--pages", "1", "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert address in outcome.document["error"]["message"]
    assert "port" in outcome.document["error"]["hint"]


def test_listening_beyond_loopback_without_keys_is_refused(kvxfer):
    outcome = kvxfer("bench", "--role", "prefill", "--listen", "0.0.0.0:0", "--pages", "1", "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert outcome.document["error"]["kind"] == "InsecureEndpoint"


def test_a_run_that_does_not_fit_in_memory_is_refused_before_anything_starts(kvxfer, monkeypatch):
    monkeypatch.setattr("kvxfer.bench.options.available_bytes", lambda: 1 << 20)
    outcome = kvxfer("bench", "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert outcome.document["error"]["details"]["available_bytes"] == 1 << 20


def test_a_missing_model_folder_is_named(kvxfer, tmp_path):
    outcome = kvxfer("demo", "--model", str(tmp_path / "nowhere"), "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert str(tmp_path / "nowhere") in outcome.document["error"]["message"]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(kvxfer, monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    outcome = kvxfer("demo", "--json")
    assert outcome.status == exit_codes.ENVIRONMENT
    assert outcome.document["error"]["details"]["package"] == package
    assert "pip install" in outcome.document["error"]["hint"]


def test_an_error_may_carry_details_of_any_name() -> None:
    from kvxfer.cli.output import kvxfer_error
    from kvxfer.errors import PeerLost

    shown = kvxfer_error(PeerLost("gone", status=-9, kind="x", hint="y"), 3)
    assert (shown.status, shown.kind, shown.details) == (3, "PeerLost", {"status": -9, "kind": "x", "hint": "y"})
