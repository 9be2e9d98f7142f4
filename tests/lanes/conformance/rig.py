"""Both ends of one session's lanes, with real handshakes: a real Sender (or one by hand) and a real Receiver."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.geometry import SLICE_DTYPE, Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes.dial import connect_lanes
from kvxfer.lanes.export import export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener
from kvxfer.protocol import record as rec
from kvxfer.protocol.acceptance import Accepted, LegEvidence, Offer, accept
from kvxfer.protocol.actions import LegReport
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import LaneOffer, ReserveGroup

from .by_hand import ByHand
from .offers import CANARY, DEADLINE_S, GENERATION, SESSION, TOKENS_PER_PAGE, U8, U64, Completions, Leg
from .remote import Remote


class Rig(ByHand):
    """Prefill's pool and decode's, ``regions`` regions each, joined by ``n_lanes`` lanes of ``kind``.

    ``hostile``: instead of a Sender the test holds prefill's ends (``wires``) and writes frames by hand.
    ``deaf``: instead of a Receiver the test holds decode's ends (``ears``), and nobody reads them.
    ``remote``: prefill is this process, made by ``remote_prefill`` with the same sizes.
    ``relay``: makes another offer of the real one, to put something in between.
    """

    def __init__(
        self,
        kind: str,
        *,
        n_lanes: int = 2,
        n_pages: int = 32,
        page_bytes: int = 4096,
        regions: int = 2,
        hostile: bool = False,
        deaf: bool = False,
        remote: Remote | None = None,
        relay: Callable[[LaneOffer], LaneOffer] | None = None,
    ) -> None:
        self.kind = kind.partition("-")[0]
        self.n_lanes, self.n_pages, self.page_bytes, self.regions = n_lanes, n_pages, page_bytes, regions
        region = Region("layer", "uint8", page_bytes, page_bytes, unit_bytes=page_bytes)
        self.geometry = PoolGeometry((Group("kv", TOKENS_PER_PAGE, n_pages, (region,) * regions),))
        self.source, source_memory = self._source_memory(mapped=kind != "local-process_vm_readv")
        self.source[:] = np.random.default_rng(7).integers(0, 256, self.source.shape, dtype=np.uint8)
        self.pool: U8 = np.full((regions, n_pages, page_bytes), CANARY, np.uint8)
        self.prefill, self.decode = Completions(), Completions()
        self.epoch = remote.epoch if remote else os.urandom(16)
        self.secret = remote.secret if remote else os.urandom(32)
        self.taken: list[LaneConnection] = []
        self.wires: dict[int, socket.socket] = {}
        self.ears: list[socket.socket] = []
        self._sequences: dict[int, int] = {}
        self._source_map = _native.PoolMap(self._regions_of(self.source))
        self._pool_map = _native.PoolMap(self._regions_of(self.pool))
        self._table = _native.SharedMemory(4096, "kvxfer-test-table")
        self.sender = None if hostile or remote else _native.Sender(self.prefill.queue, self._source_map)
        table_fd = self._table.fd if self.sender is None else self.sender.generation_table_fd
        if self.sender is not None:
            self.sender.open_session(SESSION, self.epoch, GENERATION, n_lanes)
        self.listener = LaneListener(
            tcp_hosts=["127.0.0.1"],
            local=True,
            memory=export_memory(source_memory, self.geometry, table_fd),
            on_lane=self._take_lane,
            on_refused=lambda *refusal: None,
        )
        self.receiver = _native.Receiver(
            self.decode.queue, self._pool_map, SESSION, self.epoch, GENERATION, max_record_bytes=1 << 20
        )
        offer = remote.offer if remote else self._serve()
        self._connect(relay(offer) if relay else offer, deaf)

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _source_memory(self, *, mapped: bool) -> tuple[U8, list[list[RegionMemory]]]:
        shape = (self.regions, self.n_pages, self.page_bytes)
        region_bytes = self.n_pages * self.page_bytes
        if not mapped:
            raw = np.zeros(shape, np.uint8)
            return raw, [[RegionMemory(raw[i].ctypes.data, region_bytes) for i in range(self.regions)]]
        self._shared = _native.SharedMemory(self.regions * region_bytes, "kvxfer-test-pool")
        whole = (ctypes.c_uint8 * (self.regions * region_bytes)).from_address(self._shared.ptr)
        places = [(self._shared.ptr + i * region_bytes, i * region_bytes) for i in range(self.regions)]
        memory = [RegionMemory(ptr, region_bytes, self._shared.fd, offset) for ptr, offset in places]
        return np.frombuffer(whole, np.uint8).reshape(shape), [memory]

    def _regions_of(self, array: U8) -> list[list[tuple[int, int, int, int]]]:
        return [[(region.ctypes.data, self.page_bytes, self.page_bytes, self.n_pages) for region in array]]

    def _take_lane(self, lane: LaneConnection) -> None:
        if self.sender is not None:
            self.sender.add_lane(lane.session, lane.generation, lane.lane, lane.kind, lane.fd)
        else:
            wire = socket.socket(fileno=lane.fd)
            wire.settimeout(DEADLINE_S)
            self.wires[lane.lane] = wire
        self.taken.append(lane)  # last: whoever waits for it finds the lane in place

    def _serve(self) -> LaneOffer:
        self.listener.serve(SESSION, self.epoch, GENERATION, self.secret, {self.kind: self.n_lanes})
        (offer,) = self.listener.offers({self.kind: self.n_lanes})
        return offer

    def _connect(self, offer: LaneOffer, deaf: bool) -> None:
        _, lanes, reasons = connect_lanes(
            [offer],
            (self.kind,),
            epoch=self.epoch,
            generation=GENERATION,
            secret=self.secret,
            timeout_s=DEADLINE_S,
        )
        assert reasons == {}
        if deaf:
            self.ears = [socket.socket(fileno=lane.detach()) for lane in lanes]
            self.prefill.wait(_native.LANE_UP, self.n_lanes)
            return
        for number, lane in enumerate(lanes):
            self.receiver.add_lane(number, self.kind, lane.detach(), lane.peer_memory)
        self.decode.wait(_native.LANE_UP, self.n_lanes)
        if self.sender is not None:
            self.prefill.wait(_native.LANE_UP, self.n_lanes)
        until = time.monotonic() + DEADLINE_S
        while offer.addresses == self.listener.addresses(self.kind) and len(self.taken) < self.n_lanes:
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        self.receiver.fence()
        self.listener.close()
        if self.sender is not None:
            self.sender.close()
        for sock in (*self.wires.values(), *self.ears):
            sock.close()

    # ---- offers and writes -------------------------------------------------------------------------------------------

    def slices(self) -> bytes:
        """Every region, whole pages."""
        rows = [(0, i, 0, 0, i, 1, self.page_bytes, 0, 0, 0, 0) for i in range(self.regions)]
        return np.array(rows, SLICE_DTYPE).tobytes()

    def offer(
        self,
        reservation: int,
        n_pages: int = 8,
        *,
        pool: Sequence[int] | None = None,
        source: Sequence[int] | None = None,
        verify: bool = True,
        first_page: int = 0,
        slices: bytes | None = None,
    ) -> Leg:
        """Opens a leg at the receiver. Pages are permuted on both sides, unless given."""
        shuffle = np.random.default_rng(reservation)
        to = shuffle.permutation(self.n_pages)[:n_pages] if pool is None else np.array(pool)
        come_from = shuffle.permutation(self.n_pages)[:n_pages] if source is None else np.array(source)
        to, come_from = to.astype(np.uint64), come_from.astype(np.uint64)
        slices = self.slices() if slices is None else slices
        logical = np.arange(first_page, first_page + len(to), dtype=np.uint64)
        first_token, n_tokens = first_page * TOKENS_PER_PAGE, len(to) * TOKENS_PER_PAGE
        group = ReserveGroup(0, first_token, n_tokens, logical.tobytes(), to.tobytes())
        layout = LegLayout.of(self.geometry.groups, slices, [group])
        self.receiver.open_leg(reservation, 0, verify, slices, [(0, TOKENS_PER_PAGE, logical, to)])
        return Leg(reservation, 0, verify, tuple(range(self.n_lanes)), come_from, to, slices, layout, first_page)

    def attach(self, grant: Any, leg: Leg) -> None:
        grant.attach(
            SESSION,
            GENERATION,
            leg.reservation,
            leg.number,
            leg.verify,
            True,
            leg.lanes,
            leg.slices,
            [(0, TOKENS_PER_PAGE, leg.first_page * TOKENS_PER_PAGE, leg.logical)],
        )

    def grant(self, leg: Leg | None = None) -> Any:
        """A source grant, attached to ``leg``."""
        assert self.sender is not None
        grant = self.sender.grant(leg.reservation if leg else 1)
        if leg is not None:
            self.attach(grant, leg)
        return grant

    def write(
        self, grant: Any, leg: Leg, pages: slice = slice(None), regions: Sequence[int] | None = None, **options: Any
    ) -> None:
        """Writes the leg's pages ``pages`` (indices into its list), all regions unless given."""
        chosen = range(self.regions) if regions is None else regions
        grant.write(0, leg.logical[pages], leg.source[pages], np.array(chosen, np.uint32), **options)

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def landed(self, leg: Leg) -> bool:
        """True if the leg's pages hold the source's bytes, all of them."""
        return bool(np.array_equal(self.pool[:, leg.pool], self.source[:, leg.source]))

    def untouched(self, pages: Sequence[int] | U64) -> bool:
        return bool((self.pool[:, np.asarray(pages)] == CANARY).all())

    def others(self, *legs: Leg) -> list[int]:
        """Pages of no leg."""
        taken = {int(page) for leg in legs for page in leg.pool}
        return [page for page in range(self.n_pages) if page not in taken]

    def report(self, leg: Leg) -> LegReport:
        return LegReport(*self.receiver.report(leg.reservation, leg.number))

    def records(self, leg: Leg) -> dict[int, rec.Record]:
        """The records that came for the leg so far, by lane."""
        found = self.decode.of(_native.RECORD, leg.reservation)
        return {event.lane: rec.parse(event.data) for event in found}

    def judge(self, leg: Leg, records: dict[int, rec.Record] | None = None) -> Accepted:
        """S1 over what came, or over ``records``. Raises VerificationFailed."""
        verify = "digest" if leg.verify else "coverage"
        offer = Offer(leg.reservation, "request", verify, leg.end_token, ("kv",))
        found = self.records(leg) if records is None else records
        evidence = LegEvidence(leg.number, self.epoch, GENERATION, leg.lanes, True, leg.layout, found, self.report(leg))
        return accept(offer, [evidence])

    def delivered(self, leg: Leg) -> Accepted:
        """Waits for the leg's records on all lanes, then judges."""
        self.decode.wait(_native.RECORD, len(leg.lanes), leg.reservation)
        return self.judge(leg)
