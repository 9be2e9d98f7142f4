"""One reservation at decode and its legs: plain state, and the questions that the core asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError, VerificationFailed
from kvxfer.protocol.acceptance import Offer
from kvxfer.protocol.actions import LegReport
from kvxfer.protocol.decode_session import Session
from kvxfer.protocol.leg import LegLayout, SliceTable
from kvxfer.protocol.messages import Reserve, ReserveGroup
from kvxfer.protocol.record import Record

WAITING = "waiting"  # its sessions are not all up; nothing was sent
OFFERED = "offered"  # RESERVE was handed to every leg's socket
VERIFYING = "verifying"  # every record is there; the reports are awaited
NAMING = "naming"  # the digests do not match; the chunk is being named
READY = "ready"
QUARANTINED = "quarantined"  # failed; a writer is not yet proven silent
RELEASED = "released"

LIVE = frozenset({WAITING, OFFERED, VERIFYING, NAMING})


class Outcome(NamedTuple):
    """What READY tells the engine. ``stats``: times in seconds, counts, lane kind and verify mode."""

    n_tokens: int
    aux: bytes
    stats: dict[str, Any]


class Leg:
    """One leg as decode sees it. ``closed`` is None while its writer may write: else quiesced, revoked or fenced."""

    __slots__ = (
        "abort_answered", "answered", "closed", "digests", "generation", "groups", "index", "kind", "lanes", "layout",
        "next_word", "number", "posted", "records", "reservation", "reserve", "revoke_asked", "session", "table",
        "violated",
    )  # fmt: skip

    def __init__(self, reservation: Reservation, index: int, session: Session) -> None:
        self.reservation = reservation
        self.index = index
        self.session = session
        self.generation = -1
        self.lanes: tuple[int, ...] = ()
        self.kind = ""
        self.table: SliceTable | None = None
        self.groups: tuple[ReserveGroup, ...] = ()
        self.layout: LegLayout | None = None  # of the table and the groups, once somebody has asked
        self.number = -1  # of its RESERVE, kept when the RESERVE itself is dropped; -1: never offered
        self.reserve: Reserve | None = None
        self.answered = False
        self.records: dict[int, Record] = {}
        self.digests: dict[int, bytes] = {}  # each record's own digest, by lane: tells a replay from a contradiction
        self.posted: tuple[int, ...] | None = None
        self.violated = False
        self.closed: str | None = None
        self.revoke_asked = False
        self.abort_answered = False
        self.next_word = 0.0  # not before this is a prefill told once more that the reservation has ended

    @property
    def offered(self) -> bool:
        """Somebody was given the pages: RESERVE was handed to the socket, whatever came back."""
        return self.number >= 0

    @property
    def all_records(self) -> bool:
        return self.offered and len(self.records) == len(self.lanes)

    @property
    def quiesced(self) -> bool:
        """S2: admission is closed, every posted write has completed, and decode saw a record on every lane that was
        written to. Records on all lanes say all of this. Where a frame was refused only a fence will do."""
        if self.violated:
            return False
        if self.all_records:
            return True
        if self.posted == () and not self.answered:
            return True  # the RESERVE never arrived, and its number says that it never will be admitted
        if self.posted is None or len(self.posted) != len(self.lanes):
            return False
        return all(count == 0 or lane in self.records for lane, count in zip(self.lanes, self.posted, strict=True))


class Naming(NamedTuple):
    """A refused handoff whose chunk is being named: chunks ``[first, first + n_chunks)`` of ``leg`` are compared."""

    error: VerificationFailed
    leg: int
    first: int
    n_chunks: int
    until: float


class Reservation:
    """One reservation. ``groups`` are the engine's pages, ``legs`` the writers they are offered to."""

    __slots__ = (
        "accepted", "deadline", "end_token", "error", "expected", "failed_at", "first_record_at", "groups", "id",
        "last_record_at",
        "legs", "landed_digests", "n_pages", "naming", "next_abort", "next_reserve", "offer", "offered_at", "outcome",
        "rank", "readers", "request_id", "reserved_at", "sent_digests", "state", "withdrawn",
    )  # fmt: skip

    def __init__(
        self,
        reservation: int,
        request_id: str,
        rank: int,
        readers: int,
        groups: tuple[ReserveGroup, ...],
        end_token: int,
        n_pages: int,
        offer: Offer,
        now: float,
        deadline: float,
        expected: Mapping[str, bytes | None],
    ) -> None:
        self.id = reservation
        self.request_id = request_id
        self.rank = rank
        self.readers = readers
        self.groups = groups
        self.end_token = end_token
        self.n_pages = n_pages
        self.offer = offer
        self.deadline = deadline
        self.expected = expected
        self.state = WAITING
        self.legs: list[Leg] = []
        self.error: KvxferError | None = None
        self.outcome: Outcome | None = None
        self.naming: Naming | None = None
        self.withdrawn: VerificationFailed | None = None  # a source was let go in mid-copy: prefill should say why
        self.accepted: tuple[bytes, int] | None = None  # aux and bytes landed, while the tail is being zeroed
        self.landed_digests: npt.NDArray[np.uint64] | None = None
        self.sent_digests: npt.NDArray[np.uint64] | None = None
        self.reserved_at = now
        self.offered_at = 0.0
        self.first_record_at = 0.0
        self.last_record_at = 0.0
        self.failed_at = 0.0
        self.next_reserve = 0.0
        self.next_abort = 0.0

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def released(self) -> bool:
        return self.state == RELEASED

    def leg(self, index: int, session: Session) -> Leg | None:
        """The leg with this number, if it was offered on this session."""
        if 0 <= index < len(self.legs):
            leg = self.legs[index]
            if leg.session is session and leg.offered:
                return leg
        return None

    def aborts_wanted(self) -> list[Leg]:
        """Legs whose prefill has not yet answered the ABORT and still can."""
        return [leg for leg in self.legs if leg.offered and not leg.abort_answered and leg.session.state == "open"]

    def due(self, abort_limit_s: float) -> float | None:
        """When the core must look at it again."""
        if self.state == OFFERED and any(not leg.answered for leg in self.legs):
            return min(self.deadline, self.next_reserve)
        if self.state == NAMING and self.naming is not None:
            return min(self.deadline, self.naming.until)
        if self.live:
            return self.deadline
        if self.state == QUARANTINED:
            return self.next_abort
        if self.state == RELEASED and self.aborts_wanted() and self.next_abort < self.failed_at + abort_limit_s:
            return self.next_abort
        return None

    def forget_details(self) -> None:
        """Drops what only a live reservation needs, so that a long history stays small."""
        self.groups = ()
        self.naming = self.landed_digests = self.sent_digests = None
        for leg in self.legs:
            leg.layout = leg.table = leg.reserve = None
            leg.groups = ()
            leg.records.clear()
            leg.digests.clear()


def name_chunks(
    naming: Naming,
    layout: LegLayout,
    landed: npt.NDArray[np.uint64] | None,
    sent: npt.NDArray[np.uint64] | None,
    group_names: tuple[str, ...],
) -> VerificationFailed:
    """Adds the mismatching chunks to the error, as far as both sides' content digests are known."""
    error = naming.error
    if landed is None or sent is None or len(landed) < naming.first + naming.n_chunks or len(sent) != naming.n_chunks:
        error.details["chunk"] = "not named: the chunk digests did not arrive in time"
        return error
    differing = np.flatnonzero(landed[naming.first : naming.first + naming.n_chunks] != sent)
    if not len(differing):
        error.details["chunk"] = "every chunk's content is equal: the record, or what it binds to, was altered"
        return error
    chunk = layout.locate(naming.first + int(differing[0]))
    error.details["chunk"] = {
        "leg": naming.leg,
        "group": group_names[chunk.group],
        "region": chunk.region,
        "slice": chunk.slice,
        "logical_page": chunk.logical,
        "pool_page": chunk.pool_page,
    }
    error.details["chunks_differing"] = len(differing)
    return error


def reports_complete(reservation: Reservation, reports: Mapping[tuple[int, int], LegReport]) -> bool:
    return all((leg.session.id, leg.index) in reports for leg in reservation.legs)
