"""Messages survive the way to bytes and back; anything else raises ProtocolViolation and allocates little."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.control.codec import check_request_id, decode, encode
from kvxfer.control.limits import MAX_REQUEST_ID_BYTES, MAX_TEXT_BYTES, Limits
from kvxfer.errors import ConfigurationError, ProtocolViolation
from kvxfer.geometry import Group, PoolGeometry, Region
from kvxfer.protocol import messages as m

EPOCH = b"e" * 16
LIMITS = Limits()
HEADER_BYTES = 32

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
size = st.integers(0, 2**47 - 1)
label = st.text(max_size=40)
text = st.text(max_size=200)
seconds = st.floats(0, 1e6)
details = st.dictionaries(st.text(max_size=20), st.one_of(text, st.integers(-(2**63), 2**64 - 1)), max_size=5)
verify = st.sampled_from(["digest", "coverage"])
regions = st.builds(
    Region,
    layer=label,
    dtype=label,
    page_bytes=size,
    page_stride=size,
    runs=u32,
    units=u32,
    unit_bytes=size,
    token_rows=u32,
    token_bytes=size,
)
groups = st.builds(
    Group,
    name=label,
    tokens_per_page=u32,
    n_pages=size,
    regions=st.lists(regions, max_size=3).map(tuple),
    id_space=u32,
    layout=label,
    replicated=st.booleans(),
    window=st.none() | size,
    shard_start=u32,
    shard_stop=u32,
    shard_total=u32,
)
pools = st.builds(PoolGeometry, groups=st.lists(groups, max_size=3).map(tuple), capacity_tokens=size, fingerprint=label)


@st.composite
def reserve_groups(draw: st.DrawFn) -> m.ReserveGroup:
    n_pages = draw(st.integers(0, 5))
    pages = st.binary(min_size=8 * n_pages, max_size=8 * n_pages)
    return m.ReserveGroup(draw(u32), draw(size), draw(size), draw(pages), draw(pages))


@st.composite
def reserves(draw: st.DrawFn) -> m.Reserve:
    n_legs = draw(st.integers(1, 8))
    return m.Reserve(
        reservation=draw(u64),
        number=draw(u64),
        request_id=draw(label),
        rank=draw(u32),
        readers=draw(st.integers(1, 8)),
        leg=draw(st.integers(0, n_legs - 1)),
        n_legs=n_legs,
        carries_aux=draw(st.booleans()),
        verify=draw(verify),
        generation=draw(u32),
        lanes=tuple(draw(st.lists(u32, max_size=8))),
        groups=tuple(draw(st.lists(reserve_groups(), max_size=3))),
        slices=bytes(64 * draw(st.integers(0, 4))),
        deadline_s=draw(seconds),
    )


posted = st.lists(u64, max_size=8).map(tuple)
offers = st.builds(m.LaneOffer, kind=label, addresses=st.lists(label, max_size=3).map(tuple), lanes=u32)
nonce = st.binary(min_size=8, max_size=8)
secret = st.binary(min_size=32, max_size=32)
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    m.Hello: st.builds(
        m.Hello,
        nonce=nonce,
        pool=pools,
        max_context_tokens=size,
        verify=verify,
        lane_kinds=st.lists(label, max_size=3).map(tuple),
        host=label,
        incarnation=st.none() | nonce,
        version=u32,
    ),
    m.Welcome: st.builds(
        m.Welcome,
        nonce=nonce,
        incarnation=nonce,
        pool=pools,
        max_context_tokens=size,
        offers=st.lists(offers, max_size=3).map(tuple),
        secret=secret,
        generation=u32,
        host=label,
        heartbeat_s=seconds,
    ),
    m.Refuse: st.builds(m.Refuse, code=label, message=text, details=details),
    m.Reserve: reserves(),
    m.Granted: st.builds(m.Granted, reservation=u64, leg=u32),
    m.Rejected: st.builds(
        m.Rejected, reservation=u64, leg=u32, code=label, message=text, details=details, posted=posted
    ),
    m.Abort: st.builds(m.Abort, reservation=u64, number=u64, leg=u32, request_id=label, reason=text),
    m.Quiesced: st.builds(m.Quiesced, reservation=u64, leg=u32, posted=posted),
    m.Failed: st.builds(
        m.Failed, reservation=u64, leg=u32, lane=st.integers(-1, 63), generation=u32, cause=label, message=text
    ),
    m.Done: st.builds(m.Done, reservation=u64, leg=u32),
    m.Decline: st.builds(m.Decline, request_id=label, reason=text, rank=u32),
    m.Relane: st.builds(m.Relane, generation=u32),
    m.Lanes: st.builds(m.Lanes, generation=u32, secret=secret),
    m.FetchDigests: st.builds(m.FetchDigests, reservation=u64, leg=u32, first=u64, count=st.integers(1, 65536)),
    m.Digests: st.builds(
        m.Digests, reservation=u64, leg=u32, first=u64, content=st.integers(0, 5).map(lambda n: bytes(8 * n))
    ),
    m.Ping: st.builds(m.Ping, token=u64),
    m.Pong: st.builds(m.Pong, token=u64),
    m.Bye: st.builds(m.Bye, reason=text),
}
any_message = st.one_of(*MESSAGES.values())


def frame_of(*fields: Any) -> bytes:
    return encode(EPOCH, 0, m.Ping(0))[:HEADER_BYTES] + msgpack.packb(list(fields))


def reserve_of(**changes: Any) -> m.Reserve:
    group = m.ReserveGroup(0, 0, 32, bytes(16), bytes(16))
    whole = m.Reserve(1, 1, "r", 0, 1, 0, 1, True, "digest", 0, (0,), (group,), bytes(64), 1.0)
    return dataclasses.replace(whole, **changes)


def test_every_message_has_a_strategy_here() -> None:
    assert set(MESSAGES) == set(m.Message.__args__)  # type: ignore[attr-defined]


@given(message=any_message, epoch=st.binary(min_size=16, max_size=16), sequence=u64)
def test_a_message_comes_back_equal(message: m.Message, epoch: bytes, sequence: int) -> None:
    assert decode(encode(epoch, sequence, message), LIMITS) == (epoch, sequence, message)


@given(pool=pools)
def test_the_fingerprint_travels_although_it_is_not_compared(pool: PoolGeometry) -> None:
    hello = m.Hello(b"n" * 8, pool, 0, "digest", (), "h")
    _, _, back = decode(encode(EPOCH, 0, hello), LIMITS)
    assert isinstance(back, m.Hello) and back.pool.fingerprint == pool.fingerprint


@given(frame=st.binary(max_size=300))
def test_random_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(frame, LIMITS)


@given(body=st.binary(max_size=300))
def test_random_bodies_behind_a_good_header_are_refused_or_are_messages(body: bytes) -> None:
    frame = encode(EPOCH, 0, m.Ping(0))[:HEADER_BYTES] + body
    try:
        _, _, message = decode(frame, LIMITS)
    except ProtocolViolation:
        return
    assert decode(encode(EPOCH, 0, message), LIMITS)[2] == message


@given(message=any_message, data=st.data())
def test_a_truncated_frame_is_refused_at_every_length(message: m.Message, data: st.DataObject) -> None:
    frame = encode(EPOCH, 3, message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolViolation):
        decode(frame[:cut], LIMITS)


@given(message=any_message, extra=st.binary(min_size=1, max_size=8))
def test_bytes_behind_a_message_are_refused(message: m.Message, extra: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(encode(EPOCH, 3, message) + extra, LIMITS)


@settings(max_examples=300)
@given(message=any_message, data=st.data())
def test_a_mutated_frame_is_refused_or_is_another_valid_message(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(EPOCH, 3, message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        epoch, sequence, changed = decode(bytes(frame), LIMITS)
    except ProtocolViolation:
        return
    assert decode(encode(epoch, sequence, changed), LIMITS) == (epoch, sequence, changed)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ((), "no number"),
        ((99,), "an unknown number"),
        ((True, 1), "a boolean for a number"),
        ((16,), "a missing field"),
        ((16, 1, 2), "an extra field"),
        ((16, True), "a boolean for an integer"),
        ((16, 1.0), "a float for an integer"),
        ((16, -1), "a negative number"),
        ((10, 1, 2**32), "a number beyond 32 bits"),
        ((5, "1", 0), "a text for an integer"),
        ((9, 1, 0, -2, 0, "lane", ""), "a lane below -1"),
        ((18, b"bytes"), "bytes for a text"),
        ((13, 0, b"short"), "a secret of another length"),
        ((14, 1, 0, 0, 0), "a count of zero digests"),
        ((14, 1, 0, 0, 2**20), "a count beyond the bound"),
        ((15, 1, 0, 0, b"1234567"), "digests that are not whole"),
        ((3, "code", "text", {1: "x"}), "a key that is no text"),
        ((3, "code", "text", {"k": 1.5}), "a detail that is neither number nor text"),
        ((3, "code", "text", {"k": [1]}), "a nested detail"),
        ((3, "code", "text", {str(k): k for k in range(33)}), "too many details"),
        ((8, 1, 0, list(range(65))), "more lanes than a leg may have"),
        ((8, 1, 0, {"a": 1}), "a mapping for a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_of_another_type_or_range_is_refused(fields: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ProtocolViolation):
        decode(frame_of(*fields), LIMITS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_deadline_that_is_no_finite_time_is_refused(value: float) -> None:
    with pytest.raises(ProtocolViolation, match="deadline_s"):
        decode(encode(EPOCH, 0, reserve_of(deadline_s=value)), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"leg": 1},
        {"n_legs": 0},
        {"readers": 0},
        {"slices": bytes(63)},
        {"slices": bytes(64 * 5)},
        {"lanes": tuple(range(65))},
        {"verify": "none"},
        {"request_id": "x" * (MAX_REQUEST_ID_BYTES + 1)},
        {"groups": (m.ReserveGroup(0, 0, 0, bytes(8), bytes(16)),)},
        {"groups": (m.ReserveGroup(0, 0, 0, bytes(7), bytes(7)),)},
        {"groups": (m.ReserveGroup(0, 0, 0, bytes(8 * 11), bytes(8 * 11)),)},
        {"groups": (m.ReserveGroup(0, 0, 0, bytes(8 * 6), bytes(8 * 6)),) * 2},
        {"groups": (m.ReserveGroup(0, 0, 0, b"", b""),) * 17},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_reserve_beyond_the_pools_bounds_is_refused(changes: dict[str, Any]) -> None:
    small = Limits(max_pages=10, max_slices=4, max_groups=16)
    assert decode(encode(EPOCH, 0, reserve_of()), small)
    with pytest.raises(ProtocolViolation):
        decode(encode(EPOCH, 0, reserve_of(**changes)), small)


def test_a_frame_beyond_its_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolViolation) as refusal:
        decode(bytes(LIMITS.max_frame_bytes + 1), LIMITS)
    assert refusal.value.details["kind"] == "oversize"


def test_another_frame_version_is_named_in_the_refusal() -> None:
    frame = bytearray(encode(EPOCH, 0, m.Ping(1)))
    frame[4] += 1
    with pytest.raises(ProtocolViolation) as refusal:
        decode(bytes(frame), LIMITS)
    assert refusal.value.details["kind"] == "version"


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd" + struct.pack(">I", 2**32 - 1),  # a list of 4 G items
        b"\xdc\x00\x40" * 2000,  # lists in lists, each within its bound
        b"\xdc\x10\x00" * 2000,  # the same, each beyond it but shorter than the frame
        b"\xc6" + struct.pack(">I", 2**31),  # 2 GiB of bytes
        b"\xdb" + struct.pack(">I", 2**31),  # 2 GiB of text
        b"\xdf" + struct.pack(">I", 2**31),  # a mapping of 2 G entries
        b"\xc9" + struct.pack(">I", 2**31) + b"\x01",  # an extension
    ],
    ids=["list", "nested", "nested wide", "bytes", "text", "mapping", "extension"],
)
@pytest.mark.parametrize("place", ["body", "geometry"])
def test_announced_sizes_are_refused_before_memory_is_spent_on_them(bomb: bytes, place: str) -> None:
    frame = encode(EPOCH, 0, m.Ping(0))[:HEADER_BYTES] + bomb
    if place == "geometry":
        frame = frame_of(1, b"n" * 8, bomb, 0, "digest", [], "h", None, 1)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            decode(frame, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_a_geometry_may_not_have_more_regions_than_the_bound_over_all_groups() -> None:
    region = Region("l", "u8", 1, 1, unit_bytes=1)
    group = Group("g", 1, 1, (region,) * 3)
    hello = m.Hello(b"n" * 8, PoolGeometry((group, group)), 0, "digest", (), "h")
    assert decode(encode(EPOCH, 0, hello), Limits(max_regions=6))
    with pytest.raises(ProtocolViolation, match="regions"):
        decode(encode(EPOCH, 0, hello), Limits(max_regions=5))


def test_bytes_behind_a_geometry_are_refused() -> None:
    hello = m.Hello(b"n" * 8, PoolGeometry(()), 0, "digest", (), "h")
    geometry = msgpack.unpackb(encode(EPOCH, 0, hello)[HEADER_BYTES:])[2]
    assert decode(frame_of(1, b"n" * 8, geometry, 0, "digest", [], "h", None, 1), LIMITS)[2] == hello
    with pytest.raises(ProtocolViolation, match="further bytes"):
        decode(frame_of(1, b"n" * 8, geometry + b"\x00", 0, "digest", [], "h", None, 1), LIMITS)


def test_texts_for_people_are_cut_and_never_lost() -> None:
    long = "ü" * MAX_TEXT_BYTES
    _, _, message = decode(encode(EPOCH, 0, m.Refuse("code", long, {"k": long, "n": 2**70})), LIMITS)
    assert isinstance(message, m.Refuse)
    assert message.message == "ü" * (MAX_TEXT_BYTES // 2)
    assert message.details == {"k": message.message, "n": str(2**70)}


def test_numpy_numbers_travel_as_numbers() -> None:
    message = m.Quiesced(np.uint64(7), 0, (np.int64(3),))  # type: ignore[arg-type]
    assert decode(encode(EPOCH, 0, message), LIMITS)[2] == m.Quiesced(7, 0, (3,))


def test_a_request_id_that_no_message_can_carry_is_refused_up_front() -> None:
    check_request_id("x" * MAX_REQUEST_ID_BYTES)
    for bad in ("x" * (MAX_REQUEST_ID_BYTES + 1), "\ud800"):
        with pytest.raises(ConfigurationError):
            check_request_id(bad)


def test_limits_leave_room_for_any_reservation_of_the_pool() -> None:
    region = Region("l", "u8", 64, 64, unit_bytes=64)
    pool = PoolGeometry((Group("a", 16, 100_000, (region,) * 80), Group("b", 1, 50_000, (region,))))
    limits = Limits.for_pool(pool)
    whole = tuple(m.ReserveGroup(i, 0, 1, bytes(8 * n), bytes(8 * n)) for i, n in enumerate((100_000, 50_000)))
    reserve = reserve_of(groups=whole, slices=bytes(64 * 81))
    assert decode(encode(EPOCH, 0, reserve), limits)[2] == reserve
