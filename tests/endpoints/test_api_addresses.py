"""Where endpoints listen and dial, and what protects them there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from kvxfer import DecodeEndpoint, GroupSpec, Keys, PagePool, Pages, PrefillEndpoint
from kvxfer.errors import ConfigurationError, InsecureEndpoint, KvxferError, PeerLost

N_TOKENS = 64
ELSEWHERE = "198.51.100.7:5000"  # a documentation address: nothing is ever sent there


def pool() -> PagePool:
    return PagePool.allocate([GroupSpec("kv", 2, (16, 8), "float32", 16)], pages=8)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")


@pytest.mark.parametrize(
    "bind",
    ["127.0.0.1:0", pytest.param("[::1]:0", marks=needs_ipv6), "localhost:0", "tcp://127.0.0.1:0"],
)
def test_a_handoff_works_over_every_kind_of_loopback_address(ends: Any, bind: str) -> None:
    prefill = ends.prefill(ends.fill(pool(), seed=1), bind=bind)
    assert prefill.address.endswith(f":{prefill.port}") and prefill.port > 0
    _hand_over(prefill, ends.decode(pool()), prefill.address)


def test_an_advertised_host_is_what_peers_are_told_to_dial(ends: Any) -> None:
    prefill = ends.prefill(ends.fill(pool(), seed=1), bind="127.0.0.1:0", advertise_host="localhost")
    assert "localhost" in prefill.address
    _hand_over(prefill, ends.decode(pool()), prefill.address)


def test_two_endpoints_cannot_have_one_port(ends: Any) -> None:
    port = ends.prefill(pool()).port
    with pytest.raises(KvxferError):
        ends.prefill(pool(), bind=f"127.0.0.1:{port}")


# ---- the loopback rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "*:0", pytest.param("[::]:0", marks=needs_ipv6)])
def test_a_bind_beyond_loopback_without_keys_is_refused(bind: str) -> None:
    with pytest.raises(InsecureEndpoint, match="insecure=True"):
        PrefillEndpoint(pool(), bind=bind)


def test_a_dial_beyond_loopback_without_keys_is_refused_and_no_page_is_claimed(ends: Any) -> None:
    decode = ends.decode(pool())
    with pytest.raises(InsecureEndpoint):
        decode.reserve("r", _pages(), prefill=ELSEWHERE, timeout_s=10)
    with pytest.raises(InsecureEndpoint):
        decode.decline("r", prefill=ELSEWHERE)
    assert not decode.pool.ledger.states(0).any()


def test_a_bind_beyond_loopback_works_where_the_caller_says_insecure(ends: Any) -> None:
    prefill = ends.prefill(ends.fill(pool(), seed=1), bind="0.0.0.0:0", advertise_host="127.0.0.1", insecure=True)
    _hand_over(prefill, ends.decode(pool()), prefill.address)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1", "127.0.0.1:70000", "::1:5000", "127.0.0.1:0"])
def test_an_address_that_cannot_be_dialled_is_refused_or_lost_and_its_pages_come_back(ends: Any, address: str) -> None:
    decode = ends.decode(pool(), dial_timeout_s=0.2)
    try:
        handoff = decode.reserve("r", _pages(), prefill=address, timeout_s=10)
    except ConfigurationError:
        assert not decode.pool.ledger.states(0).any()
        return
    with pytest.raises(KvxferError):
        handoff.wait(10)
    assert handoff.wait_released(10)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_handoff_works_between_endpoints_that_trust_each_others_keys(ends: Any) -> None:
    prefill_keys, decode_keys = _acquainted()
    prefill = ends.prefill(ends.fill(pool(), seed=1), keys=prefill_keys)
    _hand_over(prefill, ends.decode(pool(), keys=decode_keys), prefill.address)


def test_keys_open_a_bind_beyond_loopback(ends: Any) -> None:
    prefill_keys, decode_keys = _acquainted()
    prefill = ends.prefill(ends.fill(pool(), seed=1), bind="0.0.0.0:0", advertise_host="127.0.0.1", keys=prefill_keys)
    _hand_over(prefill, ends.decode(pool(), keys=decode_keys), prefill.address)


def test_keys_that_were_saved_and_loaded_do_the_same(ends: Any, tmp_path: Path) -> None:
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        Keys.generate().save(tmp_path / name)
        (tmp_path / other).mkdir(exist_ok=True)
        (tmp_path / other / "authorised").write_bytes((tmp_path / name / "kvxfer.pub").read_bytes())
    prefill = ends.prefill(ends.fill(pool(), seed=1), keys=Keys.load(tmp_path / "prefill"))
    _hand_over(prefill, ends.decode(pool(), keys=Keys.load(tmp_path / "decode")), prefill.address)


@pytest.mark.parametrize("stranger", ["no keys", "unknown keys", "wrong server key"])
def test_a_decode_without_the_right_keys_gets_nowhere_and_changes_nothing(ends: Any, stranger: str) -> None:
    prefill_keys, decode_keys = _acquainted()
    prefill = ends.prefill(ends.fill(pool(), seed=1), keys=prefill_keys)
    keys = {
        "no keys": None,
        "unknown keys": Keys.generate([prefill_keys.public]),
        "wrong server key": Keys(decode_keys.public, decode_keys.secret, frozenset([Keys.generate().public])),
    }[stranger]
    target = pool()
    decode = ends.decode(target, keys=keys, dial_timeout_s=0.3)
    grant = prefill.accept("r", timeout_s=10)
    handoff = decode.reserve("r", _pages(), prefill=prefill.address, timeout_s=10)
    with pytest.raises(PeerLost):
        handoff.wait(10)
    assert handoff.wait_released(10)
    assert grant.first_token is None
    assert not target.tensor("kv", 0).any()


def test_a_prefill_whose_key_is_one_of_several_must_be_named(ends: Any) -> None:
    keys = Keys.generate([Keys.generate().public, Keys.generate().public])
    with pytest.raises(ConfigurationError, match="which key"):
        ends.decode(pool(), keys=keys).reserve("r", _pages(), prefill="127.0.0.1:5000", timeout_s=10)


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(TypeError):
        DecodeEndpoint(pool(), verfy="digest")
    with pytest.raises(TypeError):
        PrefillEndpoint(pool(), bind="127.0.0.1:0", verfy="digest")


def test_the_sidecar_is_not_available_yet() -> None:
    with pytest.raises(NotImplementedError, match="sidecar"):
        DecodeEndpoint(pool(), sidecar="unix:///run/kvxfer.sock")
    with pytest.raises(NotImplementedError, match="sidecar"):
        PrefillEndpoint(pool(), bind="127.0.0.1:0", sidecar="unix:///run/kvxfer.sock")


def _acquainted() -> tuple[Keys, Keys]:
    """Keys of a prefill and of a decode that trust each other."""
    prefill, decode = Keys.generate(), Keys.generate()
    return prefill.trusting(decode.public), decode.trusting(prefill.public)


def _pages() -> dict[str, Pages]:
    return {"kv": Pages(range(4), range(4), first_token=0, n_tokens=N_TOKENS)}


def _hand_over(prefill: PrefillEndpoint, decode: DecodeEndpoint, address: str) -> None:
    handoff = decode.reserve("r", _pages(), prefill=address, timeout_s=10)
    grant = prefill.accept("r", timeout_s=10)
    grant.write(_pages())
    grant.commit(N_TOKENS)
    ready = handoff.wait(10)
    for page in range(4):
        assert (ready.page("kv", 1, page) == prefill.pool.page("kv", 1, page)).all()
