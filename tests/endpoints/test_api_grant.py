"""What a Grant, a Handoff and a Ready say about themselves, and what a commit carries."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer import Grant, Handoff, Pages
from kvxfer.errors import AdmissionClosed, DuplicateWrite, GeometryError, NotReady
from kvxfer.record_bounds import MAX_AUX_BYTES

N_TOKENS = 64
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]
FULL = {"kv": Pages(range(4), SOURCE)}


def test_a_grants_state_follows_its_life(pair: Any, ends: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    states = [grant.state]
    grant.write(FULL)
    states.append(grant.state)
    grant.commit(N_TOKENS)
    states.append(grant.state)
    pair.reserve("r", TARGET, N_TOKENS).wait(10)
    ends.until(lambda: grant.state == "done")
    assert states == ["offered", "writing", "committed"]
    aborted = pair.prefill.accept("aborted", timeout_s=10)
    aborted.abort()
    ends.until(lambda: aborted.state == "ended")


def test_a_handoffs_state_follows_its_life(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    assert handoff.state == "reserved" and handoff.error is None
    pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    assert handoff.state == "ready" and not handoff.released
    failed = pair.reserve("failed", [20], 16)
    failed.abort()
    assert failed.state in ("quarantined", "released")
    assert failed.wait_released(10) and failed.state == "released" and failed.error is not None


def test_a_grant_that_is_over_can_still_be_asked(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.send("r", SOURCE, N_TOKENS)
    handoff.wait(10)
    assert grant.wait_released(10)
    pair.hand_over("another", [0], [0], 16)
    assert grant.skipped_chunks == 0
    assert grant.first_token is None
    assert grant.state == "done" and grant.error is None


@pytest.mark.parametrize("aux", [b"", b"\0", bytes(range(256)) * 400], ids=["none", "one zero", "100 kB"])
def test_aux_arrives_with_the_commit_byte_for_byte(pair: Any, aux: bytes) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    pair.send("r", SOURCE, N_TOKENS, aux=aux)
    assert handoff.wait(10).aux == aux


def test_aux_may_be_any_buffer_and_is_taken_at_the_call(pair: Any) -> None:
    aux = bytearray(b"first")
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    grant.commit(N_TOKENS, memoryview(aux))
    aux[:] = b"later"
    assert pair.reserve("r", TARGET, N_TOKENS).wait(10).aux == b"first"


def test_a_commit_that_is_refused_leaves_the_grant_open(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    for n_tokens, aux in ((-1, b""), (N_TOKENS, bytes(MAX_AUX_BYTES + 1)), (N_TOKENS - 16, b"")):
        with pytest.raises(GeometryError):
            grant.commit(n_tokens, aux)
    grant.commit(N_TOKENS)
    handoff.wait(10)


def test_a_grant_is_committed_once(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.send("r", SOURCE, N_TOKENS, aux=b"first")
    with pytest.raises(AdmissionClosed):
        grant.commit(N_TOKENS, b"second")
    assert handoff.wait(10).aux == b"first"


def test_a_write_of_no_pages_is_a_write(pair: Any) -> None:
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write({})
    grant.write({"kv": Pages([], [])}, progress=True)
    assert grant.state == "writing"


def test_a_page_written_twice_is_refused_and_the_handoff_goes_on(pair: Any) -> None:
    handoff = pair.reserve("r", TARGET, N_TOKENS)
    grant = pair.prefill.accept("r", timeout_s=10)
    grant.write(FULL)
    with pytest.raises(DuplicateWrite):
        grant.write({"kv": Pages([2], [1])})
    grant.commit(N_TOKENS)
    handoff.wait(10)
    pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


def test_errors_of_a_write_name_the_request(pair: Any) -> None:
    grant = pair.prefill.accept("named", timeout_s=10)
    for pages in ({"nowhere": Pages([0], [0])}, {"kv": [0, 1]}, {"kv": Pages([0], [99])}):
        with pytest.raises(GeometryError, match="request=named"):
            grant.write(pages)


def test_a_ready_gives_exactly_its_own_pages(pair: Any) -> None:
    ready = pair.hand_over("r", SOURCE, TARGET, N_TOKENS)
    assert ready.pages["kv"].pool.tolist() == TARGET
    for group, logical in (("kv", 4), ("nowhere", 0)):
        with pytest.raises(NotReady, match="not part"):
            ready.page(group, 0, logical)
    assert {"lane", "verify", "bytes", "pages", "chunks", "total_s"} <= ready.stats.keys()
    assert ready.stats["bytes"] == sum(layer[SOURCE].nbytes for layer in pair.source.layers)


def test_grants_and_handoffs_are_made_by_their_endpoints_only(pair: Any) -> None:
    with pytest.raises(TypeError):
        Grant(object(), pair.prefill, 1, None, "r", None)
    with pytest.raises(TypeError):
        Handoff(object(), pair.decode, 1, "r", None, {})


def test_each_object_names_its_request_when_printed(pair: Any) -> None:
    handoff = pair.reserve("r-17", TARGET, N_TOKENS)
    grant = pair.send("r-17", SOURCE, N_TOKENS)
    ready = handoff.wait(10)
    assert all("r-17" in repr(one) for one in (handoff, grant, ready))
