"""How a reservation is made at decode: checked and claimed (S4, S5), joined to its sessions, offered to every leg."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import (
    CapacityError,
    GeometryError,
    IncompatiblePool,
    KvxferError,
    LaneFailed,
    PeerLost,
    PeerRestarted,
    ProtocolViolation,
)
from kvxfer.geometry import PoolGeometry
from kvxfer.ledger import PageLedger
from kvxfer.protocol import decode_reservation as states
from kvxfer.protocol.acceptance import Offer, check_plan_covers
from kvxfer.protocol.actions import Action, Audit, LegSpec, OpenLeg
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.decode_endings import DecodeEndings
from kvxfer.protocol.decode_reservation import Leg, Reservation
from kvxfer.protocol.decode_session import NO_NONCE, Session
from kvxfer.protocol.leg import U64, SliceTable, page_fault
from kvxfer.protocol.messages import Bye, Hello, Refuse, Reserve, ReserveGroup, Welcome

PageRequest = tuple[U64, U64, int | None, int | None]
"""logical pages (rising), pool pages, first_token, n_tokens; None: what the other groups say."""

Plan = Callable[[PoolGeometry, Sequence[PoolGeometry]], list[npt.NDArray[np.void]]]

MAX_PLANS = 1024
_U64 = np.dtype("<u8")
REFUSALS: dict[str, type[KvxferError]] = {
    "incarnation": PeerRestarted,
    "unknown_epoch": PeerRestarted,
    "capacity": CapacityError,
    "closed": PeerLost,
}
_IN_CALL = frozenset({"reservation", "request_id", "peer", "retryable", "message"})


class DecodeOffers(DecodeEndings):
    """Adds sessions, plans and offers to the tables. Not thread-safe."""

    def __init__(
        self,
        config: DecodeConfig,
        geometry: PoolGeometry,
        ledger: PageLedger,
        random: Callable[[int], bytes],
        plan: Plan,
        host: str,
    ) -> None:
        super().__init__(config, geometry, ledger)
        if not config.accept_smaller_capacity and 0 < geometry.capacity_tokens < config.max_context_tokens:
            raise CapacityError(
                "this pool cannot hold one full context; enlarge it, lower max_context_tokens, or set "
                "accept_smaller_capacity=True",
                needed_tokens=config.max_context_tokens,
                available_tokens=geometry.capacity_tokens,
            )
        self._random = random
        self._plan = plan
        self._host = host
        self._next_session = 1
        self._dial_failures: dict[str, int] = {}
        self._plans: dict[tuple[int, ...], list[SliceTable]] = {}
        self._partial_plans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[SliceTable]] = {}

    # ---- checks before anything is claimed ---------------------------------------------------------------------------

    def _check_pages(
        self, request_id: str, pages: Mapping[int, PageRequest]
    ) -> tuple[tuple[ReserveGroup, ...], int, dict[int, U64], int]:
        """Groups as they travel, the token all of them end at, pages by id space, and how many. Raises GeometryError,
        CapacityError."""
        ends = {_first(pages, want) + want[3] for want in pages.values() if want[3] is not None}
        if len(ends) != 1:
            raise GeometryError(
                "all groups of a reservation must end at one token; give n_tokens for at least one group, and agree",
                request_id=request_id,
                ends=sorted(ends),
            )
        (end,) = ends
        groups: list[ReserveGroup] = []
        spaces: dict[int, list[U64]] = {}
        for index in sorted(pages):
            if not 0 <= index < len(self.geometry.groups):
                raise GeometryError(f"the pool has no group {index}", request_id=request_id)
            group = self.geometry.groups[index]
            want = pages[index]
            logical, pool_pages = np.asarray(want[0], _U64), np.asarray(want[1], _U64)
            first = _first(pages, want)
            if len(logical) > group.n_pages:
                raise CapacityError(
                    f"the request needs more pages of group {group.name!r} than this pool has",
                    request_id=request_id,
                    needed_pages=len(logical),
                    available_pages=group.n_pages,
                )
            fault = page_fault(group, first, end - first, logical, pool_pages)
            if fault is not None:
                raise GeometryError(fault, request_id=request_id, group=group.name)
            groups.append(ReserveGroup(index, first, end - first, logical.tobytes(), pool_pages.tobytes()))
            spaces.setdefault(group.id_space, []).append(pool_pages)
        capacity = self.geometry.capacity_tokens
        if 0 < capacity < end:
            raise CapacityError(
                "the request is longer than this pool can hold",
                request_id=request_id,
                needed_tokens=end,
                available_tokens=capacity,
            )
        claim = {space: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for space, arrays in spaces.items()}
        return tuple(groups), end, claim, sum(len(array) for array in claim.values())

    def _peer_fault(self, session: Session, expected: bytes | None, request_id: str, end: int) -> KvxferError | None:
        """What an open session already tells about this request (S4), or None."""
        welcome = session.welcome
        if welcome is None:
            return None
        if expected is not None and expected != welcome.incarnation:
            return PeerRestarted(
                "prefill is another incarnation than the request was computed by; route the request anew",
                request_id=request_id,
                peer=session.peer,
                expected=expected.hex(),
                found=welcome.incarnation.hex(),
            )
        if 0 < welcome.pool.capacity_tokens < end:
            return CapacityError(
                "the request is longer than prefill's pool can hold",
                request_id=request_id,
                peer=session.peer,
                needed_tokens=end,
                available_tokens=welcome.pool.capacity_tokens,
            )
        return None

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def _session_for(self, now: float, peer: str, incarnation: bytes | None, out: list[Action]) -> Session:
        """The session with a peer, dialled now if there is none."""
        session = self._by_peer.get(peer)
        if session is None:
            failures = self._dial_failures.get(peer, 0)
            wait_s = self.config.relane_backoff_s * 2.0 ** min(failures - 2, 30) if failures > 1 else 0.0
            nonce = self._random(8)
            hello = Hello(
                nonce,
                self.geometry,
                self.config.max_context_tokens,
                self.config.verify,
                self.config.lane_kinds,
                self._host,
                incarnation,
            )
            dial_at = now + min(wait_s, self.config.relane_backoff_max_s)
            session = Session(self._next_session, peer, nonce, hello, self.config, now, dial_at)
            self._next_session += 1
            self._sessions[session.id] = self._by_peer[peer] = session
            if dial_at <= now:
                session.dial(now, out)
            self._arm_session(session)
        return session

    def _welcome(self, now: float, session: Session, welcome: Welcome, out: list[Action]) -> None:
        if session.state != "dialing":
            return  # a repeated answer to a repeated HELLO
        error = session.judge(welcome, self.geometry) or session.welcomed(now, welcome, out)
        if error is not None:
            session.epoch = session.nonce + welcome.nonce if len(welcome.nonce) == 8 else session.nonce + NO_NONCE
            session.send(Bye(error.message), out)
            self._session_dead(now, session, error, out)
            return
        self._dial_failures.pop(session.peer, None)
        for reservation in list(session.waiting.values()):
            self._check_sessions(now, reservation, out)

    def _refuse(self, now: float, session: Session, refuse: Refuse, out: list[Action]) -> None:
        if session.state == "open" and refuse.code not in ("unknown_epoch", "closed"):
            out.append(Audit("refused", session.id, fields={"why": "refuse_of_an_open_session", "code": refuse.code}))
            return
        details: dict[str, Any] = {key: value for key, value in refuse.details.items() if key not in _IN_CALL}
        kind = REFUSALS.get(refuse.code, IncompatiblePool)
        text = f"prefill refused the session: {refuse.message}"
        error = kind(text, peer=session.peer, **{**details, "code": refuse.code})
        others = []
        if refuse.code == "incarnation":
            # Requests that expect another incarnation than this HELLO named have not been answered by this refusal.
            others = [r for r in session.waiting.values() if r.expected[session.peer] != session.hello.incarnation]
            for reservation in others:
                del session.waiting[reservation.id]
        self._session_dead(now, session, error, out)
        for reservation in others:
            fresh = self._session_for(now, session.peer, reservation.expected[session.peer], out)
            fresh.waiting[reservation.id] = reservation
            for leg in reservation.legs:
                if leg.session is session:
                    leg.session = fresh

    def _session_dead(self, now: float, session: Session, error: KvxferError, out: list[Action]) -> None:
        """The epoch is over: its lanes are fenced, what had arrived in full goes on, everything else may be retried."""
        if session.state == "dead":
            return
        if session.state == "dialing":
            if len(self._dial_failures) >= MAX_PLANS:
                self._dial_failures.pop(next(iter(self._dial_failures)))
            self._dial_failures[session.peer] = self._dial_failures.get(session.peer, 0) + 1
        session.die(now, error.message, out)
        self._by_peer.pop(session.peer, None)
        self._plans = {key: tables for key, tables in self._plans.items() if session.id not in key}
        self._partial_plans = {key: tables for key, tables in self._partial_plans.items() if session.id not in key[0]}
        for reservation in list(session.waiting.values()):
            self._fail(now, reservation, error, out)
        for leg in list(session.legs.values()):
            if not leg.all_records:
                self._fail(now, leg.reservation, error, out)
        self._arm_session(session)
        if session.lanes_state == "none":
            session.fenced_below = session.generation + 1
            self._generation_is_silent(now, session, out)

    # ---- offers ------------------------------------------------------------------------------------------------------

    def _join_sessions(
        self,
        now: float,
        reservation: Reservation,
        prefill: Sequence[str],
        incarnation: Sequence[bytes | None],
        out: list[Action],
    ) -> None:
        for index, (peer, expected) in enumerate(zip(prefill, incarnation, strict=True)):
            session = self._session_for(now, peer, expected, out)
            reservation.legs.append(Leg(reservation, index, session))
            session.waiting[reservation.id] = reservation
        self._check_sessions(now, reservation, out)

    def _check_sessions(self, now: float, reservation: Reservation, out: list[Action]) -> None:
        """As soon as a session is open its numbers are checked; as soon as all are, the plan; and when all lanes are up
        the reservation is offered."""
        for leg in reservation.legs:
            expected = reservation.expected[leg.session.peer]
            fault = self._peer_fault(leg.session, expected, reservation.request_id, reservation.end_token)
            if fault is not None:
                self._fail(now, reservation, fault, out)
                return
        if any(leg.session.state != "open" for leg in reservation.legs):
            return
        try:
            tables = self._tables(reservation)
        except KvxferError as error:
            self._fail(now, reservation, error, out)
            return
        if all(leg.session.lanes_state == "up" for leg in reservation.legs):
            self._offer(now, reservation, tables, out)

    def _tables(self, reservation: Reservation) -> list[SliceTable]:
        """Each leg's slices of the reservation's groups. Raises IncompatiblePool."""
        sessions = tuple(leg.session.id for leg in reservation.legs)
        whole = self._plans.get(sessions)
        if whole is None:
            slices = self._plan(self.geometry, [leg.session.peer_pool for leg in reservation.legs])
            pools = [leg.session.peer_pool.groups for leg in reservation.legs]
            try:
                whole = [
                    SliceTable(self.geometry.groups, part.tobytes(), pool)
                    for part, pool in zip(slices, pools, strict=True)
                ]
            except (ProtocolViolation, ValueError) as error:
                raise IncompatiblePool(f"the shard plan does not fit the pools: {error}", field="shards") from error
            check_plan_covers(self.geometry.groups, whole)
            if len(self._plans) >= MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[sessions] = whole
        if len(reservation.groups) == len(self.geometry.groups):
            return whole
        wanted = tuple(group.group for group in reservation.groups)
        part_key = (sessions, wanted)
        tables = self._partial_plans.get(part_key)
        if tables is None:
            tables = [
                SliceTable(self.geometry.groups, table.slices[np.isin(table.slices["group"], wanted)].tobytes())
                for table in whole
            ]
            if len(self._partial_plans) >= MAX_PLANS:
                self._partial_plans.pop(next(iter(self._partial_plans)))
            self._partial_plans[part_key] = tables
        return tables

    def _offer(self, now: float, reservation: Reservation, tables: Sequence[SliceTable], out: list[Action]) -> None:
        """From here on every leg counts as granted, whatever comes back (S2): the pages' addresses are out."""
        if reservation.state != states.WAITING:
            return
        reservation.state = states.OFFERED
        reservation.offered_at = now
        reservation.next_reserve = now + self.config.reserve_repeat_s
        n_legs = len(reservation.legs)
        for leg, table in zip(reservation.legs, tables, strict=True):
            session = leg.session
            session.waiting.pop(reservation.id, None)
            session.legs[reservation.id] = leg
            groups = _groups_of_leg(reservation.groups, table)
            leg.table, leg.groups = table, groups
            leg.generation = session.generation
            leg.lanes = session.lanes
            leg.kind = session.kind
            spec = LegSpec(
                session.id, leg.generation, reservation.id, leg.index, self.config.verify, leg.lanes, groups, table.raw
            )
            leg.reserve = Reserve(
                reservation.id,
                session.next_number,
                reservation.request_id,
                reservation.rank,
                reservation.readers,
                leg.index,
                n_legs,
                leg.index == 0,
                self.config.verify,
                leg.generation,
                leg.lanes,
                groups,
                table.raw,
                max(0.0, reservation.deadline - now),
            )
            leg.number = session.next_number
            session.next_number += 1
            out.append(OpenLeg(spec))
            session.send(leg.reserve, out)
        self._arm(reservation)

    def _lanes_are_up(self, now: float, session: Session, out: list[Action]) -> None:
        out.append(
            Audit(
                "lane_up",
                session.id,
                fields={"lane": session.kind, "lanes": len(session.lanes_up), "peer": session.peer},
            )
        )
        self._arm_session(session)
        for reservation in list(session.waiting.values()):
            self._check_sessions(now, reservation, out)

    def _lanes_did_not_connect(self, now: float, session: Session, cause: str, out: list[Action]) -> None:
        attempts = session.attempts + 1
        self._fence(now, session, cause, out)
        if attempts >= self.config.relane_attempts:
            for reservation in list(session.waiting.values()):
                error = LaneFailed(
                    f"no lane to prefill could be connected: {cause}; check that its lane port is reachable",
                    peer=session.peer,
                    attempts=attempts,
                )
                self._fail(now, reservation, error, out)

    def _new_reservation(
        self,
        now: float,
        request_id: str,
        rank: int,
        readers: int,
        groups: tuple[ReserveGroup, ...],
        end: int,
        n_pages: int,
        timeout_s: float,
        expected: Mapping[str, bytes | None],
    ) -> Reservation:
        while True:
            number = int.from_bytes(self._random(8), "little")
            if number and number not in self._reservations and number not in self._ended:
                break
        offer = Offer(number, request_id, self.config.verify, end, self._group_names)
        return Reservation(
            number, request_id, rank, readers, groups, end, n_pages, offer, now, now + timeout_s, expected
        )


def _first(pages: Mapping[int, PageRequest], want: PageRequest) -> int:
    if want[2] is not None:
        return want[2]
    return min((other[2] for other in pages.values() if other[2] is not None), default=0)


def _groups_of_leg(groups: tuple[ReserveGroup, ...], table: SliceTable) -> tuple[ReserveGroup, ...]:
    """Every leg is told every token range, and the pages of those groups only that it is to write."""
    if all(group.group in table.spans for group in groups):
        return groups
    return tuple(
        group if group.group in table.spans else ReserveGroup(group.group, group.first_token, group.n_tokens, b"", b"")
        for group in groups
    )
