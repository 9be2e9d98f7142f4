"""What the two sides say to each other over the control plane. Plain data; ``codec`` turns it into bytes and back.

``epoch`` and ``sequence`` travel in the frame, not here. ``leg`` counts the prefill ranks of a reservation from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.geometry import PoolGeometry

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """One kind of lane prefill can serve: ``kind`` is ``local`` or ``tcp``; addresses are socket names or host:port."""

    kind: str
    addresses: tuple[str, ...]
    lanes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Decode opens a session. ``nonce`` is the first half of the epoch."""

    nonce: bytes  # 8 bytes
    pool: PoolGeometry
    max_context_tokens: int
    verify: str  # "digest" | "coverage"
    lane_kinds: tuple[str, ...]  # what decode accepts, best first
    host: str  # identifies the kernel (boot id and network namespace), to see whether both are on one host
    incarnation: bytes | None = None  # the prefill incarnation decode expects, or None for any
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Welcome:
    """Prefill accepts. epoch = hello.nonce + welcome.nonce (16 bytes)."""

    nonce: bytes
    incarnation: bytes  # 8 bytes
    pool: PoolGeometry
    max_context_tokens: int
    offers: tuple[LaneOffer, ...]
    secret: bytes  # 32 bytes: proves a lane's connection
    generation: int
    host: str
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Prefill does not open, or no longer knows, the session. ``code``: version, incompatible_pool, capacity, verify,
    incarnation, lanes, busy, unknown_epoch, closed."""

    code: str
    message: str
    details: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReserveGroup:
    """Pages of one group in one reservation: ``logical[k]`` of the sequence is to be written to ``pool_pages[k]`` of
    decode. Both are packed little-endian u64, sorted by logical page, distinct."""

    group: int
    first_token: int
    n_tokens: int
    logical: bytes
    pool_pages: bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    reservation: int
    number: int  # rises within the session
    request_id: str
    rank: int  # decode rank
    readers: int  # how many decode ranks reserve for this request
    leg: int
    n_legs: int
    carries_aux: bool  # this leg delivers the aux bytes
    verify: str
    generation: int
    lanes: tuple[int, ...]  # fixed here
    groups: tuple[ReserveGroup, ...]
    slices: bytes  # geometry.SLICE_DTYPE records; empty: nothing to write on this leg
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    reservation: int
    leg: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """``code``: stale_number, capacity, geometry, verify, readers, duplicate, rejected (by the engine, whose own code
    is in ``details``), declined (by this rank), ended (the grant failed and its sources are still read), timeout (the
    engine did not accept it in time), closed, generation, busy."""

    reservation: int
    leg: int
    code: str
    message: str
    details: dict[str, str | int] = field(default_factory=dict)
    posted: tuple[int, ...] = ()  # chunks posted on each lane of the leg before the rejection


@dataclass(frozen=True, slots=True)
class Abort:
    reservation: int
    number: int
    leg: int
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Admission is closed and every posted write completed successfully. ``posted``: chunks per lane."""

    reservation: int
    leg: int
    posted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Prefill saw an error completion, lost its source, or aborted. Never counts as drained."""

    reservation: int
    leg: int
    lane: int  # -1: not one lane's fault
    generation: int
    cause: str  # lane, source_changed, aborted, rejected, timeout
    message: str


@dataclass(frozen=True, slots=True)
class Done:
    reservation: int
    leg: int


@dataclass(frozen=True, slots=True)
class Decline:
    request_id: str
    reason: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Relane:
    """Decode fenced the lanes and asks for the next generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """Prefill destroyed its ends of older generations and serves this one."""

    generation: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class FetchDigests:
    """Asks for content digests of chunk ordinals ``[first, first + count)`` of a leg, to name a mismatching chunk."""

    reservation: int
    leg: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Digests:
    reservation: int
    leg: int
    first: int
    content: bytes  # packed little-endian u64


@dataclass(frozen=True, slots=True)
class Ping:
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Bye:
    reason: str


Message = (
    Hello
    | Welcome
    | Refuse
    | Reserve
    | Granted
    | Rejected
    | Abort
    | Quiesced
    | Failed
    | Done
    | Decline
    | Relane
    | Lanes
    | FetchDigests
    | Digests
    | Ping
    | Pong
    | Bye
)
