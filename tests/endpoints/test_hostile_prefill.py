"""Control frames that nobody honest sends to decode: each is refused and counted, no page changes its state by it, and
the handoff under way succeeds."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from kvxfer import GroupSpec, PageGroup, PagePool, Pages
from kvxfer.control import codec
from kvxfer.errors import Aborted, CapacityError, IncompatiblePool, KvxferError, PeerLost
from kvxfer.protocol import messages as m

from .fake_prefill import FakePrefill, Leg

N_TOKENS = 64
TARGET = [2, 11, 4, 30]
SHAPE = (16, 2, 8)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.002)


def source_pool(lane: str) -> PagePool:
    if lane != "local-read":
        return PagePool.allocate([GroupSpec("kv", 2, SHAPE, "float32", 16, token_axis=1)], pages=32)
    layers = [np.zeros((32, *SHAPE), np.float32) for _ in range(2)]
    return PagePool([PageGroup("kv", layers, tokens_per_page=16, token_axis=1)])


@pytest.fixture
def fake(lane: str, ends: Any) -> Iterator[FakePrefill]:
    prefill = FakePrefill(ends.fill(source_pool(lane), seed=1), "tcp" if lane == "tcp" else "local")
    yield prefill
    prefill.close()


class Live:
    """A handoff half way: two of its four pages have landed."""

    def __init__(self, fake: FakePrefill, decode: Any, target: Any) -> None:
        self.fake, self.decode, self.target = fake, decode, target
        wanted = {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=N_TOKENS)}
        self.handoff = decode.reserve("live", wanted, prefill=fake.address, timeout_s=10)
        self.leg: Leg = fake.reserved("live")
        fake.put(*self.leg.writes(0, 2))

    def counter(self, name: str) -> int:
        return int(self.decode.counters().get(name, 0))

    def settle(self) -> None:
        """Returns when decode has dealt with all that was said before."""
        before = len(self.fake.heard)
        self.fake.say(m.Ping(7))
        until(lambda: m.Pong(7) in self.fake.heard[before:])

    def assert_untouched_and_finish(self) -> None:
        self.settle()
        assert self.handoff.state == "reserved"
        states = self.target.pool.ledger.states(0)
        assert sorted(page for page in range(32) if states[page]) == sorted(TARGET)
        self.fake.put(*self.leg.writes(2, 2), self.leg.record())
        self.handoff.wait(10)
        for layer in range(2):
            landed = self.target.layers[layer][TARGET].reshape(4, -1)
            np.testing.assert_array_equal(landed, self.fake.rows(layer)[:4].view(np.float32))


@pytest.fixture
def live(fake: FakePrefill, decode: Any, target: Any) -> Live:
    return Live(fake, decode, target)


# ---- frames that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        (b"",),
        (b"KVXC",),
        (os.urandom(500),),
        (b"one", b"two"),
        (codec.encode(bytes(16), 1, m.Ping(1)) + b"\0",),
        (codec.encode(bytes(16), 1, m.Ping(1))[:-1],),
        (codec.encode(bytes(16), 1, m.Ping(1))[:32] + bytes(msgpack.packb([99])),),
        (codec.encode(bytes(16), 1, m.Ping(1))[:32] + b"\xdd\xff\xff\xff\xff",),
        (codec.encode(bytes(16), 1, m.Ping(1))[:32] + bytes(8 << 20),),
    ],
    ids=["empty", "short", "random", "two parts", "trailing", "truncated", "unknown", "huge array", "oversize"],
)
def test_garbage_is_refused_and_counted(live: Live, parts: tuple[bytes, ...]) -> None:
    live.fake.say_raw(*parts)
    # A frame beyond the socket's own bound ends the connection before it is one; decode then dials again.
    if len(parts[0]) < 1 << 20:
        until(lambda: live.counter("refused_frame") == 1)
        live.assert_untouched_and_finish()
    else:
        live.fake.put(*live.leg.writes(2, 2), live.leg.record())
        live.handoff.wait(10)


def test_random_changes_to_what_prefill_says_never_make_a_page_readable(live: Live) -> None:
    chance = random.Random(43)
    theirs = live.handoff.reservation
    for _ in range(400):
        message = chance.choice([m.Granted(theirs, 0), m.Quiesced(theirs, 0, (9,)), m.Digests(theirs, 0, 0, bytes(8))])
        frame = bytearray(codec.encode(live.fake.epoch, chance.randrange(1 << 10), message))
        for _ in range(chance.randrange(1, 5)):
            frame[chance.randrange(4, len(frame))] ^= 1 << chance.randrange(8)
        live.fake.say_raw(bytes(frame))
    until(lambda: live.counter("refused_frame") + live.counter("refused") >= 300)
    assert live.handoff.state != "ready"


# ---- frames of another epoch, or out of order ------------------------------------------------------------------------


def harmful(live: Live) -> list[m.Message]:
    """What would end the handoff if it were believed."""
    theirs = live.handoff.reservation
    return [
        m.Rejected(theirs, 0, "rejected", "no", {}, ()),
        m.Failed(theirs, 0, -1, 1, "aborted", "no"),
        m.Bye("no"),
        m.Refuse("unknown_epoch", "no"),
    ]


@pytest.mark.parametrize("epoch", ["zero", "random", "half"])
def test_a_frame_of_another_epoch_is_refused(live: Live, epoch: str) -> None:
    others = {"zero": bytes(16), "random": os.urandom(16), "half": live.fake.epoch[:8] + bytes(8)}
    for message in harmful(live):
        live.fake.say(message, epoch=others[epoch])
    live.settle()
    assert live.counter("refused") == 4
    live.assert_untouched_and_finish()


def test_a_frame_whose_number_does_not_rise_is_refused(live: Live) -> None:
    live.settle()
    for message in harmful(live)[:3]:
        for number in (0, 1, live.fake._sent):
            live.fake.say(message, sequence=number)
    live.settle()
    assert live.counter("refused") == 9
    live.assert_untouched_and_finish()


def test_frames_of_the_former_epoch_are_refused_in_the_next_one(live: Live, decode: Any, target: Any) -> None:
    old = live.fake.epoch
    live.fake.say(m.Bye("restarts"))
    with pytest.raises(PeerLost):
        live.handoff.wait(10)
    assert live.handoff.wait_released(10)
    again = Live.__new__(Live)
    again.__dict__.update(live.__dict__)
    wanted = {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=N_TOKENS)}
    again.handoff = decode.reserve("again", wanted, prefill=live.fake.address, timeout_s=10)
    again.leg = live.fake.reserved("again")
    live.fake.put(*again.leg.writes(0, 2))
    for message in harmful(again):
        live.fake.say(message, epoch=old, sequence=1 << 40)
    again.settle()
    assert again.counter("refused") == 4
    again.assert_untouched_and_finish()


# ---- frames that may not come now, or are about something else -------------------------------------------------------


def test_words_about_reservations_and_legs_that_are_not_there_change_nothing(live: Live) -> None:
    theirs = live.handoff.reservation
    for reservation, leg in ((theirs, 1), (theirs, 2**32 - 1), (theirs ^ 1, 0), (0, 0)):
        live.fake.say(m.Rejected(reservation, leg, "rejected", "no", {}, ()))
        live.fake.say(m.Failed(reservation, leg, -1, 1, "aborted", "no"))
        live.fake.say(m.Quiesced(reservation, leg, (0,)))
    live.settle()
    assert live.counter("refused") == 6  # those of the live reservation that name no leg of it
    live.assert_untouched_and_finish()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.Quiesced(0, 0, (0,)), "quiesced_without_abort"),
        (m.Failed(0, 0, -1, 0, "aborted", "old"), "failed_of_another_generation"),
        (m.Failed(0, 0, -1, 9, "aborted", "new"), "failed_of_another_generation"),
        (m.Lanes(1, bytes(32)), "lanes_without_relane"),
        (m.Lanes(2, bytes(32)), "lanes_without_relane"),
        (m.Refuse("capacity", "too late"), "refuse_of_an_open_session"),
        (m.Done(0, 0), "not_for_decode"),
        (m.Decline("live", "no"), "not_for_decode"),
        (m.Relane(2), "not_for_decode"),
        (m.Abort(0, 0, 0, "live", "no"), "not_for_decode"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_may_not_come_now_is_refused_with_its_reason(live: Live, message: Any, why: str) -> None:
    if hasattr(message, "reservation"):
        message = replace(message, reservation=live.handoff.reservation)
    live.fake.say(message)
    live.settle()
    lines = [line for line in live.decode.audit_lines() if line["event"] == "refused"]
    assert [line["why"] for line in lines] == [why]
    live.assert_untouched_and_finish()


def test_words_that_came_twice_and_digests_that_nobody_asked_for_change_nothing(live: Live) -> None:
    theirs = live.handoff.reservation
    for _ in range(3):
        live.fake.say(m.Granted(theirs, 0))
        live.fake.say(m.Digests(theirs, 0, 0, bytes(64)))
        live.fake.say(m.Pong(99))
    live.assert_untouched_and_finish()


def test_a_second_welcome_does_not_change_an_open_session(live: Live) -> None:
    live.fake.say(m.Welcome(os.urandom(8), bytes(8), live.fake.pool.geometry, 0, (), bytes(32), 5, "", 1.0))
    live.settle()
    live.assert_untouched_and_finish()


def test_late_words_about_an_aborted_handoff_do_not_touch_the_next_owner_of_its_pages(live: Live, decode: Any) -> None:
    former = live.handoff
    former.abort("the client went away")
    with pytest.raises(Aborted):
        former.wait(10)
    assert former.wait_released(10)
    wanted = {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=N_TOKENS)}
    live.handoff = decode.reserve("next", wanted, prefill=live.fake.address, timeout_s=10)
    live.leg = live.fake.reserved("next")
    for message in (
        m.Granted(former.reservation, 0),
        m.Quiesced(former.reservation, 0, (8,)),
        m.Failed(former.reservation, 0, -1, 1, "lane", "late"),
        m.Rejected(former.reservation, 0, "rejected", "late", {}, ()),
    ):
        live.fake.say(message)
    live.fake.put(*live.leg.writes(0, 2))
    live.assert_untouched_and_finish()


# ---- WELCOME ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"heartbeat_s": 0.0}, PeerLost),
        ({"offers": ()}, KvxferError),
        ({"offers": (m.LaneOffer("verbs", ("x",), 1),)}, KvxferError),
        ({"offers": (m.LaneOffer("tcp", ("127.0.0.1:1",), 0),)}, KvxferError),
        ({"max_context_tokens": 1 << 30}, CapacityError),
        ({"pool": "another layer"}, IncompatiblePool),
        ({"pool": "smaller pages"}, IncompatiblePool),
    ],
    ids=lambda value: ",".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_a_welcome_that_cannot_be_fails_the_handoff_and_gives_the_pages_back(
    fake: FakePrefill, decode: Any, target: Any, changes: dict[str, Any], kind: type[KvxferError]
) -> None:
    geometry = fake.pool.geometry
    group = geometry.groups[0]
    region = group.regions[1]
    lies = {
        "another layer": replace(region, layer="nobody's"),
        "smaller pages": replace(region, page_bytes=region.page_bytes // 2),
    }
    if "pool" in changes:
        lie = replace(group, regions=(group.regions[0], lies[changes["pool"]]))
        changes = {"pool": replace(geometry, groups=(lie,))}
    say = fake.say

    def lying(message: m.Message, **more: Any) -> None:
        say(replace(message, **changes) if isinstance(message, m.Welcome) else message, **more)

    fake.say = lying  # type: ignore[method-assign]
    wanted = {"kv": Pages(range(4), TARGET, first_token=0, n_tokens=N_TOKENS)}
    handoff = decode.reserve("r", wanted, prefill=fake.address, timeout_s=3)
    with pytest.raises(kind):
        handoff.wait(10)
    assert handoff.wait_released(10)
    assert not target.pool.ledger.states(0).any()
