"""Messages as bytes: a fixed header, then one msgpack list with the message's number and its fields in order.

Header (32 bytes, little-endian): magic ``KVXC``, frame version u8, zero u8, zero u16, epoch 16 bytes, sequence u64.
Nothing of a frame is believed before it was checked against ``Limits``; whatever is wrong raises ProtocolViolation.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import msgpack

from kvxfer.control import fields as f
from kvxfer.control.geometry_codec import geometry
from kvxfer.control.limits import MAX_REQUEST_ID_BYTES, MAX_TEXT_BYTES, Limits
from kvxfer.control.records import RecordTable
from kvxfer.errors import ConfigurationError, ProtocolViolation
from kvxfer.protocol import messages as m

FRAME_VERSION = 1
_MAGIC = b"KVXC"
_HEADER = struct.Struct("<4sBBH16sQ")
_DEFAULT_LIMITS = Limits()
_VERIFY = f.one_of("digest", "coverage")


def _lanes(limits: Limits) -> int:
    return limits.max_lanes


_OFFER = RecordTable(m.LaneOffer, kind=f.label, addresses=f.several(f.label, lambda _: f.MAX_ADDRESSES), lanes=f.u32)
_RESERVE_GROUP = RecordTable(
    m.ReserveGroup,
    group=f.u32,
    first_token=f.size,
    n_tokens=f.size,
    logical=f.packed_pages,
    pool_pages=f.packed_pages,
)
_RESERVE = RecordTable(
    m.Reserve,
    reservation=f.u64,
    number=f.u64,
    request_id=f.request_id,
    rank=f.u32,
    readers=f.rank_count,
    leg=f.u32,
    n_legs=f.rank_count,
    carries_aux=f.boolean,
    verify=_VERIFY,
    generation=f.u32,
    lanes=f.several(f.u32, _lanes),
    groups=f.several(_RESERVE_GROUP.as_field, lambda limits: limits.max_groups),
    slices=f.packed_slices,
    deadline_s=f.seconds,
)
_TABLES: dict[int, RecordTable] = {
    1: RecordTable(
        m.Hello,
        nonce=f.raw(8),
        pool=geometry,
        max_context_tokens=f.size,
        verify=_VERIFY,
        lane_kinds=f.several(f.label, lambda _: f.MAX_OFFERS),
        host=f.label,
        incarnation=f.optional(f.raw(8)),
        version=f.u32,
    ),
    2: RecordTable(
        m.Welcome,
        nonce=f.raw(8),
        incarnation=f.raw(8),
        pool=geometry,
        max_context_tokens=f.size,
        offers=f.several(_OFFER.as_field, lambda _: f.MAX_OFFERS),
        secret=f.raw(32),
        generation=f.u32,
        host=f.label,
        heartbeat_s=f.seconds,
    ),
    3: RecordTable(m.Refuse, code=f.label, message=f.explanation, details=f.details),
    4: _RESERVE,
    5: RecordTable(m.Granted, reservation=f.u64, leg=f.u32),
    6: RecordTable(
        m.Rejected,
        reservation=f.u64,
        leg=f.u32,
        code=f.label,
        message=f.explanation,
        details=f.details,
        posted=f.several(f.u64, _lanes),
    ),
    7: RecordTable(m.Abort, reservation=f.u64, number=f.u64, leg=f.u32, request_id=f.request_id, reason=f.explanation),
    8: RecordTable(m.Quiesced, reservation=f.u64, leg=f.u32, posted=f.several(f.u64, _lanes)),
    9: RecordTable(
        m.Failed,
        reservation=f.u64,
        leg=f.u32,
        lane=f.lane_or_none,
        generation=f.u32,
        cause=f.label,
        message=f.explanation,
    ),
    10: RecordTable(m.Done, reservation=f.u64, leg=f.u32),
    11: RecordTable(m.Decline, request_id=f.request_id, reason=f.explanation, rank=f.u32),
    12: RecordTable(m.Relane, generation=f.u32),
    13: RecordTable(m.Lanes, generation=f.u32, secret=f.raw(32)),
    14: RecordTable(m.FetchDigests, reservation=f.u64, leg=f.u32, first=f.u64, count=f.digest_count),
    15: RecordTable(m.Digests, reservation=f.u64, leg=f.u32, first=f.u64, content=f.packed_digests),
    16: RecordTable(m.Ping, token=f.u64),
    17: RecordTable(m.Pong, token=f.u64),
    18: RecordTable(m.Bye, reason=f.explanation),
}
_NUMBERS: dict[type, tuple[int, RecordTable]] = {table.record: (number, table) for number, table in _TABLES.items()}


class _Packers(threading.local):
    """A packer keeps its buffer between messages, and serves one thread at a time."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_plain_number)


def _plain_number(value: Any) -> Any:
    item = getattr(value, "item", None)  # a NumPy scalar
    if item is None:
        raise TypeError(f"a message cannot carry a {type(value).__name__}")
    return item()


_packers = _Packers()


def check_request_id(request_id: str) -> None:
    """Raises ConfigurationError for a request id that no message could carry, before anything is reserved for it."""
    try:
        length = len(request_id.encode())
    except UnicodeEncodeError as cause:
        raise ConfigurationError(f"the request id is not valid text: {cause}") from cause
    if length > MAX_REQUEST_ID_BYTES:
        raise ConfigurationError(
            f"the request id has {length} bytes; use at most {MAX_REQUEST_ID_BYTES}", n_bytes=length
        )


def encode(epoch: bytes, sequence: int, message: m.Message) -> bytes:
    """One frame. Texts meant for people are cut to their bound. TypeError or OverflowError: a value cannot travel."""
    number, table = _NUMBERS[type(message)]
    plain = table.dump(message)
    plain.insert(0, number)
    body: bytes = _packers.packer.pack(plain)
    return _HEADER.pack(_MAGIC, FRAME_VERSION, 0, 0, epoch, sequence) + body


def decode(frame: bytes, limits: Limits = _DEFAULT_LIMITS) -> tuple[bytes, int, m.Message]:
    """``(epoch, sequence, message)`` of one frame.

    Raises:
        ProtocolViolation: nothing of the frame may be used; ``details['kind']`` is ``oversize``, ``header``,
            ``version``, ``unknown`` or ``malformed``.
    """
    if len(frame) > limits.max_frame_bytes:
        raise ProtocolViolation(
            "the frame is too long", kind="oversize", n_bytes=len(frame), limit=limits.max_frame_bytes
        )
    if len(frame) < _HEADER.size:
        raise ProtocolViolation("the frame is shorter than its header", kind="header", n_bytes=len(frame))
    magic, version, zero, zero_too, epoch, sequence = _HEADER.unpack_from(frame)
    if magic != _MAGIC or zero or zero_too:
        raise ProtocolViolation("the frame does not begin as a control frame", kind="header")
    if version != FRAME_VERSION:
        raise ProtocolViolation("the frame has another version", kind="version", ours=FRAME_VERSION, theirs=version)
    try:
        plain = msgpack.unpackb(
            memoryview(frame)[_HEADER.size :],
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=limits.max_bin_bytes,
            max_array_len=limits.max_array,
            max_map_len=f.MAX_DETAILS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as cause:
        raise ProtocolViolation(f"the frame's body is malformed: {cause}", kind="malformed") from cause
    if type(plain) is not tuple or not plain or type(plain[0]) is not int:
        raise ProtocolViolation("the frame's body is not a numbered list", kind="malformed")
    table = _TABLES.get(plain[0])
    if table is None:
        raise ProtocolViolation("the frame has a message of an unknown kind", kind="unknown", number=plain[0])
    message = table.load(plain[1:], limits)
    if table is _RESERVE:
        _check_reserve(message, limits)
    return epoch, sequence, message


def _check_reserve(message: m.Reserve, limits: Limits) -> None:
    """What no single field can say."""
    if message.leg >= message.n_legs:
        raise f.malformed("Reserve.leg", f"is not below the number of legs, {message.n_legs}")
    for group in message.groups:
        if len(group.logical) != len(group.pool_pages):
            raise f.malformed("ReserveGroup.pool_pages", "does not pair with the logical pages")
    if sum(len(group.logical) for group in message.groups) > 8 * limits.max_pages:
        raise f.malformed("Reserve.groups", f"have more than {limits.max_pages} pages together")
