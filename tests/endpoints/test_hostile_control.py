"""Control frames that nobody honest sends to prefill: each is refused and counted, no grant changes by it, the handoff
under way succeeds, and what prefill remembers stays bounded."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq

from kvxfer import Pages
from kvxfer.control.keys import Keys
from kvxfer.errors import Aborted
from kvxfer.protocol import messages as m

from .fake_decode import FakeDecode
from .waiting import until

N_TOKENS = 50
SOURCE, TARGET = [5, 3, 9, 7], [2, 11, 4, 30]


class Live:
    """A handoff half way: reserved, and two of its four pages written."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair
        self.handoff = pair.reserve("live", TARGET, N_TOKENS)
        self.grant = pair.prefill.accept("live", timeout_s=10)
        pair.wait_offered(self.grant)
        self.grant.write({"kv": Pages([0, 1], SOURCE[:2])})
        self.epoch = bytes.fromhex(
            next(line["epoch"] for line in pair.prefill.audit_lines() if line["event"] == "session_opened")
        )

    def counter(self, name: str) -> int:
        return int(self.pair.prefill.counters().get(name, 0))

    def assert_untouched_and_finish(self) -> None:
        assert (self.handoff.state, self.grant.state) == ("reserved", "writing")
        assert sorted(page for page in range(32) if self.pair.target.pool.ledger.states(0)[page]) == sorted(TARGET)
        self.grant.write({"kv": Pages([2, 3], SOURCE[2:])})
        self.grant.commit(N_TOKENS)
        self.handoff.wait(10)
        assert self.grant.wait_released(10) and self.grant.error is None
        self.pair.assert_delivered(SOURCE, TARGET, N_TOKENS)


@pytest.fixture
def live(pair: Any) -> Live:
    return Live(pair)


@pytest.fixture
def intruder(pair: Any) -> Iterator[FakeDecode]:
    """Another peer of the same prefill."""
    peer = FakeDecode(pair.prefill.address, pair.target.pool)
    yield peer
    peer.close()


@pytest.fixture
def other(intruder: FakeDecode) -> FakeDecode:
    """The same, with a session of its own."""
    intruder.open()
    return intruder


# ---- frames that are none --------------------------------------------------------------------------------------------

HEADER = struct.pack("<4sBBH16sQ", b"KVXC", 1, 0, 0, bytes(16), 1)


def packed(body: Any) -> bytes:
    return HEADER + bytes(msgpack.packb(body))


GARBAGE: dict[str, tuple[bytes, ...]] = {
    "empty": (b"",),
    "header only": (HEADER,),
    "wrong magic": (b"HTTP" + HEADER[4:] + b"\x91\x10",),
    "wrong version": (HEADER[:4] + b"\x09" + HEADER[5:] + b"\x91\x10",),
    "two parts": (packed([16, 1]), packed([16, 1])),
    "no list": (packed({"kind": 16}),),
    "unknown kind": (packed([99]),),
    "too few fields": (packed([16]),),
    "too many fields": (packed([16, 1, 2]),),
    "wrong type": (packed([16, "one"]),),
    "number too large": (packed([10, 2**64 - 1, 2**40]),),
    "true for a number": (packed([16, True]),),
    "bytes behind": (packed([16, 1]) + b"\x00",),
    "an extension": (HEADER + b"\x92\x10\xc7\x01\x05a",),
    "nested deeply": (HEADER + b"\x91" * 4000 + b"\x10",),
    "an array of four billion": (HEADER + b"\xdd\xff\xff\xff\xff",),
    "a text of four billion": (HEADER + b"\x92\x12\xdb\xff\xff\xff\xff",),
    "bytes of four billion": (HEADER + b"\x92\x01\xc6\xff\xff\xff\xff",),
    "text that is none": (HEADER + b"\x92\x12\xa2\xff\xfe",),
    "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_counted_and_changes_nothing(live: Live, intruder: FakeDecode, name: str) -> None:
    intruder.send_raw(*GARBAGE[name])
    until(lambda: live.counter("refused_frame") == 1)
    live.assert_untouched_and_finish()


def test_every_cut_of_a_right_frame_is_refused(live: Live, other: FakeDecode) -> None:
    whole = other.frame(other.reserve("live", [1]))
    cuts = range(0, len(whole), 7)
    for cut in cuts:
        other.send_raw(whole[:cut])
    other.settle()
    assert live.counter("refused_frame") == len(cuts)
    live.assert_untouched_and_finish()


def test_an_oversize_frame_is_refused_and_never_stored(live: Live, other: FakeDecode) -> None:
    limit = other._limits.max_frame_bytes
    other.send_raw(HEADER + bytes(limit))  # the codec's bound
    until(lambda: live.counter("refused_frame") == 1)
    before = resident_bytes()
    for _ in range(3):
        other.send_raw(HEADER + bytes(64 << 20))  # the socket's bound: libzmq drops the connection at its header
    time.sleep(0.1)
    assert resident_bytes() - before < 3 * (64 << 20) + (16 << 20)  # our own sending queue, at most
    live.assert_untouched_and_finish()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_random_frames_change_nothing(live: Live, other: FakeDecode) -> None:
    chance = random.Random(41)
    for number in range(1000):
        body = chance.randbytes(chance.randrange(0, 200))
        other.send_raw(body if number % 2 else other.frame(m.Ping(0))[:32] + body)
    other.settle()
    assert live.counter("refused_frame") >= 950  # a random body may by chance be a message that says nothing
    live.assert_untouched_and_finish()


def test_randomly_changed_messages_of_a_stranger_change_nothing(live: Live, other: FakeDecode) -> None:
    chance = random.Random(42)
    for _ in range(500):
        message = chance.choice(
            [m.Abort(1, 0, 0, "live", "x"), m.Done(1, 0), m.Relane(1), m.FetchDigests(1, 0, 0, 1), m.Ping(3)]
        )
        frame = bytearray(other.frame(message, sequence=chance.randrange(1 << 20)))
        for _ in range(chance.randrange(1, 4)):
            frame[chance.randrange(4, len(frame))] ^= 1 << chance.randrange(8)
        other.send_raw(bytes(frame))
    live.assert_untouched_and_finish()


# ---- frames of another epoch, out of order, or of somebody else ------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        m.Abort(1, 0, 0, "live", "stolen"),
        m.Done(1, 0),
        m.Bye("stolen"),
        m.Relane(2),
        m.Decline("live", "stolen"),
        m.FetchDigests(1, 0, 0, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_stolen_epoch_on_another_connection_is_dropped(live: Live, other: FakeDecode, message: m.Message) -> None:
    if hasattr(message, "reservation"):
        message = replace(message, reservation=live.handoff.reservation)
    other.say(message, epoch=live.epoch, sequence=1 << 40)
    other.settle()
    assert live.counter("dropped") == 1
    live.assert_untouched_and_finish()


def test_messages_about_the_reservation_of_another_session_are_refused(live: Live, other: FakeDecode) -> None:
    theirs = live.handoff.reservation
    other.say(m.Done(theirs, 0))
    other.say(m.FetchDigests(theirs, 0, 0, 1))
    other.say(m.Abort(theirs, 7, 0, "live", "not mine"))
    answer = other.hear(m.Quiesced)  # of a leg that this session never had, which is true
    assert answer.posted == ()
    other.settle()
    assert live.counter("illegal") == 2
    live.assert_untouched_and_finish()


def test_a_decline_of_a_rank_that_has_reserved_is_refused_and_counted(live: Live, other: FakeDecode) -> None:
    other.say(m.Decline("live", "not mine"))
    other.settle()
    assert live.counter("illegal") == 1
    live.assert_untouched_and_finish()


def test_a_second_reservation_of_a_live_request_and_rank_is_refused_and_the_first_is_served(
    live: Live, other: FakeDecode
) -> None:
    other.say(other.reserve("live", [1]))
    assert other.hear(m.Rejected).code == "duplicate"
    live.assert_untouched_and_finish()


@pytest.mark.parametrize("epoch", [bytes(16), b"\xff" * 16, os.urandom(16)], ids=["zero", "ones", "random"])
def test_another_epoch_is_refused_and_changes_nothing(live: Live, other: FakeDecode, epoch: bytes) -> None:
    other.say(other.reserve("other", [1]), epoch=epoch)
    assert other.hear(m.Refuse).code == "unknown_epoch"
    until(lambda: live.counter("refused") == 1)
    live.assert_untouched_and_finish()


def test_messages_that_only_prefill_sends_are_refused(live: Live, other: FakeDecode) -> None:
    theirs = live.handoff.reservation
    for message in (m.Granted(theirs, 0), m.Quiesced(theirs, 0, (0,)), m.Failed(theirs, 0, -1, 1, "lane", "")):
        other.say(message)
    other.settle()
    assert live.counter("illegal") == 3
    live.assert_untouched_and_finish()


def test_a_frame_whose_number_does_not_rise_is_dropped(live: Live, other: FakeDecode) -> None:
    first = other.frame(other.reserve("other", [1]))
    grant = live.pair.prefill.accept("other", timeout_s=10)
    other.send_raw(first)
    live.pair.wait_offered(grant)
    abort = other.frame(m.Abort(0, 0, 0, "other", "replayed"), sequence=1)
    for replayed in (first, first, abort):
        other.send_raw(replayed)
    other.settle()
    assert live.counter("dropped") == 3
    assert grant.state == "offered" and [e.kind for e in live.pair.prefill.poll() if e.request_id == "other"] == [
        "offered"
    ]
    live.assert_untouched_and_finish()


# ---- HELLO -----------------------------------------------------------------------------------------------------------


def test_a_thousand_hellos_of_one_peer_are_one_session(live: Live, other: FakeDecode) -> None:
    other.settle()
    sessions = live.counter("session_opened")
    hello = other.hello(nonce=other.epoch[:8])
    for number in range(1000):
        other.say(hello if number % 2 else other.hello(), epoch=other.epoch[:8] + bytes(8))
    other.settle()
    assert live.counter("session_opened") == sessions
    assert live.counter("dropped") >= 500  # all those with another nonce
    live.assert_untouched_and_finish()


def test_more_peers_than_sessions_are_refused_and_make_room_when_they_fall_silent(make_pair: Any, ends: Any) -> None:
    pair = make_pair(prefill={"max_sessions": 8, "heartbeat_s": 0.1, "heartbeat_timeout_s": 0.5})
    live = Live(pair)
    peers = [FakeDecode(pair.prefill.address, pair.target.pool) for _ in range(40)]
    for peer in peers:
        hello = peer.hello()
        peer.say(hello, epoch=hello.nonce + bytes(8))
    until(lambda: live.counter("refused") == 33)
    assert live.counter("session_opened") == 8
    live.assert_untouched_and_finish()
    until(lambda: live.counter("session_closed") >= 7)  # they never answered a heartbeat
    late = ends.decode(pair.target.pool)
    handoff = late.reserve("late", {"kv": Pages([0], [1], n_tokens=16)}, prefill=pair.prefill.address, timeout_s=10)
    pair.send("late", SOURCE[:1], 16)
    handoff.wait(10)
    for peer in peers:
        peer.close()


# ---- RESERVE and ABORT -----------------------------------------------------------------------------------------------


def test_a_reserve_that_comes_after_its_abort_revives_nothing(live: Live, other: FakeDecode) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    late = other.reserve("other", [1])
    other.say(m.Abort(late.reservation, late.number, 0, "other", "given up"))
    assert other.hear(m.Quiesced).reservation == late.reservation
    other.say(late)
    assert other.hear(m.Rejected).code == "stale_number"
    assert grant.first_token is None and grant.state == "offered"
    live.assert_untouched_and_finish()


def test_a_reserve_that_comes_twice_is_granted_twice_and_done_once(live: Live, other: FakeDecode) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    reserve = other.reserve("other", [1])
    for _ in range(2):
        other.say(reserve)
        assert other.hear(m.Granted).reservation == reserve.reservation
    assert [event.kind for event in live.pair.prefill.poll() if event.request_id == "other"] == ["offered"]
    assert grant.first_token == 0
    live.assert_untouched_and_finish()


@pytest.mark.parametrize(
    "changes",
    [{"number": 5}, {"groups": ()}, {"lanes": (1,)}, {"request_id": "live"}, {"deadline_s": 1.0}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_second_reserve_that_says_otherwise_is_refused(
    live: Live, other: FakeDecode, changes: dict[str, Any]
) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    reserve = other.reserve("other", [1])
    other.say(reserve)
    live.pair.wait_offered(grant)
    other.say(replace(reserve, **changes))
    other.settle()
    assert live.counter("illegal") == 1
    live.assert_untouched_and_finish()


def test_a_reserve_repeated_after_its_abort_is_answered_as_ended(live: Live, other: FakeDecode) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    reserve = other.reserve("other", [1])
    other.say(reserve)
    other.hear(m.Granted)
    other.say(m.Abort(reserve.reservation, reserve.number, 0, "other", "given up"))
    other.hear(m.Quiesced)
    assert grant.wait_released(10) and isinstance(grant.error, Aborted)
    other.say(reserve)
    assert other.hear(m.Rejected).code == "stale_number"
    assert grant.released
    live.assert_untouched_and_finish()


def test_a_reserve_of_an_older_number_is_refused(live: Live, other: FakeDecode) -> None:
    other.say(other.reserve("newer", [1], number=7))
    other.hear(m.Granted)
    grant = live.pair.prefill.accept("older", timeout_s=10)
    for number in (7, 6, 0):
        other.say(other.reserve("older", [2], number=number))
        answer = other.hear(m.Rejected)
        assert (answer.code, answer.details["highest"]) == ("stale_number", 7)
    assert grant.first_token is None
    live.assert_untouched_and_finish()


def test_a_reserve_of_an_ended_epoch_is_refused_in_the_next_one(live: Live, other: FakeDecode) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    old = other.reserve("other", [1])
    frame = other.frame(old)
    other.say(m.Bye("the client restarts"))
    again = FakeDecode(live.pair.prefill.address, live.pair.target.pool)
    again.open()
    again.send_raw(frame)
    assert again.hear(m.Refuse).code == "unknown_epoch"
    again.say(replace(old, generation=9))
    assert again.hear(m.Rejected).code == "generation"
    assert grant.first_token is None
    again.close()
    live.assert_untouched_and_finish()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generation": 0}, "generation"),
        ({"lanes": ()}, "geometry"),
        ({"lanes": (0, 0)}, "geometry"),
        ({"lanes": (63,)}, "geometry"),
        ({"verify": "coverage"}, "verify"),
        ({"rank": 1}, "readers"),
        ({"readers": 60000}, "readers"),
        ({"slices": bytes(64)}, "geometry"),
        ({"slices": b"\xff" * 64}, "geometry"),
        ({"groups": (m.ReserveGroup(3, 0, 16, bytes(8), bytes(8)),)}, "geometry"),
        ({"groups": (m.ReserveGroup(0, 0, 16, bytes(8), struct.pack("<Q", 32)),)}, "geometry"),
        ({"groups": (m.ReserveGroup(0, 0, 32, struct.pack("<QQ", 0, 1), bytes(16)),)}, "geometry"),
        ({"groups": (m.ReserveGroup(0, 0, 16 * 33, bytes(8), bytes(8)),)}, "capacity"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_a_reserve_that_cannot_be_is_rejected_with_its_reason_before_anything_is_kept(
    live: Live, other: FakeDecode, changes: dict[str, Any], code: str
) -> None:
    grant = live.pair.prefill.accept("other", timeout_s=10)
    other.say(other.reserve("other", [1], **changes))
    assert other.hear(m.Rejected).code == code
    assert grant.first_token is None
    live.assert_untouched_and_finish()


def test_reservations_that_nobody_serves_are_bounded(make_pair: Any) -> None:
    pair = make_pair(prefill={"max_offers": 16})
    live, other = Live(pair), FakeDecode(pair.prefill.address, pair.target.pool)
    other.open()
    for number in range(40):
        other.say(other.reserve(f"nobody's {number}", [1]))
    other.settle()
    codes = [message.code for message in other.received if isinstance(message, m.Rejected)]
    assert codes == ["busy"] * 24
    other.close()
    live.assert_untouched_and_finish()


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", ["no keys", "unknown key", "the server's public key only"])
def test_an_unauthenticated_peer_is_never_heard(make_pair: Any, stranger: str) -> None:
    server, client = Keys.generate(), Keys.generate()
    pair = make_pair(prefill={"keys": server.trusting(client.public)}, decode={"keys": client.trusting(server.public)})
    live = Live(pair)
    sessions = live.counter("session_opened")
    if stranger == "no keys":
        peer = FakeDecode(pair.prefill.address, pair.target.pool)
    else:
        keys = zmq.curve_keypair() if stranger == "unknown key" else (client.public, zmq.curve_keypair()[1])
        peer = FakeDecode(pair.prefill.address, pair.target.pool, keys=keys, server_key=server.public)
    hello = peer.hello()
    peer.say(hello, epoch=hello.nonce + bytes(8))
    peer.say(m.Bye("stolen"), epoch=live.epoch, sequence=1 << 40)
    with pytest.raises(TimeoutError):
        peer.hear(object, timeout_s=0.2)
    until(lambda: live.counter("refused_frame") >= 1)
    assert live.counter("session_opened") == sessions
    peer.close()
    live.assert_untouched_and_finish()


def test_a_handoff_of_another_pool_is_refused_at_hello(live: Live, intruder: FakeDecode) -> None:
    hello = intruder.hello()
    group = hello.pool.groups[0]
    lying = replace(hello, pool=replace(hello.pool, groups=(replace(group, layout="another"),)))
    intruder.say(lying, epoch=hello.nonce + bytes(8))
    answer = intruder.hear(m.Refuse)
    assert answer.code == "incompatible_pool" and "layout" in str(answer.details)
    live.assert_untouched_and_finish()
