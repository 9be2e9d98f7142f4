"""The benchmark as a user runs it, with very small sizes."""

from __future__ import annotations

import pytest

from kvxfer.cli import exit_codes

KEYS = {
    "lane", "verify", "page_bytes", "pages", "regions", "total_bytes", "gbps_median", "gbps_best", "memcpy_gbps",
    "ratio_to_memcpy", "latency_us", "stages_ms", "bytes_checked_ok",
}  # fmt: skip
STAGES = {"reserve", "post", "wire", "verify"}


@pytest.mark.parametrize("lane", ["local", "tcp"])
@pytest.mark.parametrize("verify", ["digest", "coverage"])
def test_a_run_prints_the_promised_keys_and_has_checked_every_byte(kvxfer, lane, verify):
    outcome = kvxfer(
        "bench", "--lane", lane, "--verify", verify, "--page-bytes", "1027", "--pages", "37", "--regions", "3",
        "--repeat", "2", "--latency-handoffs", "20", "--connections", "2", "--json",
    )  # fmt: skip
    assert outcome.status == exit_codes.OK, outcome.err
    document = outcome.document
    assert document.keys() >= KEYS
    assert document["stages_ms"].keys() >= STAGES
    assert document["total_bytes"] == 1027 * 37 * 3
    assert document["bytes_checked_ok"] is True
    assert document["latency_us"]["p50"] > 0
    if lane == "tcp":
        assert document["c_stream_gbps"] is None or document["ratio_to_c_stream"] > 0


@pytest.mark.parametrize("lane", ["local", "tcp"])
@pytest.mark.parametrize(("page_bytes", "pages"), [("1", "1"), ("1", "5000"), ("5M", "2")])
def test_pages_of_any_size_arrive(kvxfer, lane, page_bytes, pages):
    outcome = kvxfer(
        "bench", "--lane", lane, "--page-bytes", page_bytes, "--pages", pages, "--repeat", "1",
        "--latency-handoffs", "3", "--json",
    )  # fmt: skip
    assert outcome.status == exit_codes.OK, outcome.err
    assert outcome.document["bytes_checked_ok"] is True


def test_without_a_c_compiler_the_stream_is_left_out_with_the_reason(kvxfer, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    outcome = kvxfer("bench", "--lane", "tcp", "--pages", "2", "--repeat", "1", "--latency-handoffs", "0", "--json")
    assert outcome.status == exit_codes.OK, outcome.err
    assert outcome.document["c_stream_gbps"] is None
    assert "/bin/false" in outcome.document["c_stream_missing"]


def test_a_byte_that_did_not_arrive_ends_with_a_status_of_its_own(kvxfer, monkeypatch):
    from kvxfer.bench.content import Contents

    monkeypatch.setattr(Contents, "matches", lambda *_: False)
    outcome = kvxfer("bench", "--pages", "2", "--repeat", "1", "--latency-handoffs", "0", "--json")
    assert outcome.status == exit_codes.NOT_AS_PROMISED
    assert outcome.document["bytes_checked_ok"] is False


def test_a_sweep_prints_one_result_for_each_page_size(kvxfer, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    picture = tmp_path / "sweep.png"
    outcome = kvxfer(
        "bench", "--page-bytes", "1K,4K", "--pages", "4", "--repeat", "1", "--latency-handoffs", "0",
        "--plot", str(picture), "--json",
    )  # fmt: skip
    assert [one["page_bytes"] for one in outcome.document["results"]] == [1024, 4096]
    assert picture.read_bytes().startswith(b"\x89PNG")
