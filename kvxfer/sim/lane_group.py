"""The lanes of one generation of one session, both ends of them.

Three kinds. ``tcp``: the source is read when the bytes go to the socket, decode's core places them. ``local``: decode's
core reads the source when it copies, and prefill's generation slot says whether it may. ``verbs``: the adapter reads
and
writes by itself, also when a process is stopped; what was posted may land after an error completion, minutes later,
until
decode's fence has returned.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvxfer.sim.sender_leg import CONFIRMED, DUE, SENT, SenderLeg
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.decode_node import DecodeNode
    from kvxfer.sim.prefill_node import PrefillNode

WINDOW = {"tcp": 6, "local": 12, "verbs": 8}
"""Frames that a lane has on its way at most."""

PIECE = 5
"""Frames that one step moves at most."""


class Frame:
    """A chunk (``ordinal`` of ``leg``) or, with ordinal -1, a commit record and the bitmap that it claims."""

    __slots__ = ("bitmap", "content", "leg", "ordinal", "record")

    def __init__(self, leg: SenderLeg, ordinal: int, content: int | None, record: bytes = b"", bitmap: int = 0) -> None:
        self.leg = leg
        self.ordinal = ordinal
        self.content = content  # None: not read yet
        self.record = record
        self.bitmap = bitmap


class Lane:
    """``connected``: prefill's end is there. ``installed``: decode's end is, so that bytes can land. ``broken``: the
    sender saw an error; nothing new is posted."""

    __slots__ = ("broken", "connected", "index", "installed", "landing", "sending", "wire")

    def __init__(self, index: int) -> None:
        self.index = index
        self.connected = False
        self.installed = False
        self.broken = False
        self.wire: deque[Frame] = deque()
        self.sending = False
        self.landing = False


class LaneGroup:
    """``fenced``: decode's fence has returned, nothing lands any more. ``destroyed``: prefill's ends are gone."""

    def __init__(
        self, world: World, prefill: PrefillNode, session: int, epoch: bytes, generation: int, secret: bytes, n: int
    ) -> None:
        self.world = world
        self.kind = world.plan.lane_kind
        self.prefill = prefill
        self.session = session  # prefill's number of it
        self.epoch = epoch
        self.generation = generation
        self.secret = secret
        self.lanes = [Lane(index) for index in range(n)]
        self.legs: dict[int, SenderLeg] = {}
        self.decode: DecodeNode | None = None
        self.decode_session = -1
        self.fenced = False
        self.destroyed = False
        self._turn = 0
        self._dice = world.chance(f"lane:{prefill.name}:{len(world.groups)}")

    @property
    def _step_s(self) -> float:
        return 0.004 if self.world.healed else self.world.plan.lane_step_s

    # ---- life --------------------------------------------------------------------------------------------------------

    def connect(self, decode: DecodeNode, session: int) -> None:
        """Prefill's ends of all lanes stand; decode's follow by ``install``."""
        self.decode, self.decode_session = decode, session
        for lane in self.lanes:
            lane.connected = True
            self.prefill.lane_event("lane_up", self, lane.index)
        self.kick()

    def install(self) -> None:
        for lane in self.lanes:
            lane.installed = True
        self.kick()

    def break_lane(self, index: int, seen_by_decode: bool) -> None:
        """One lane fails in mid-flight."""
        lane = self.lanes[index]
        if lane.broken or not lane.connected or self.destroyed:
            return
        lane.broken = True
        self.world.note(self.prefill.name, "lane breaks", f"s{self.session} g{self.generation} lane {index}")
        self._lose(lane)
        self._sender_sees(lane, "broken")
        if seen_by_decode or self.kind != "verbs":
            self._decode_sees(lane, "broken")

    def fence(self) -> None:
        """Decode's ends are gone: the call that takes them away has returned."""
        if self.fenced:
            return
        self.fenced = True
        for lane in self.lanes:
            self._drop(lane)
            if lane.connected and not lane.broken and not self.destroyed:
                lane.broken = True
                self._sender_sees(lane, "eof", self._dice.random() * (0.5 if self.kind == "verbs" else 0.02))

    def destroy(self) -> None:
        """Prefill's ends are gone: nothing reads its sources any more, which does not keep what is on its way."""
        if self.destroyed:
            return
        for leg in list(self.legs.values()):
            leg.close("fail", "lane: the session's lanes were closed")
        for lane in self.lanes:
            if self.kind == "verbs":
                self._lose(lane)
            if lane.connected and not lane.broken:
                lane.broken = True
                if self.kind != "verbs" or self._dice.random() < 0.3:
                    self._decode_sees(lane, "eof")
        for lane in self.lanes:
            self._fix(lane)
        self.destroyed = True
        self.legs.clear()

    def _lose(self, lane: Lane) -> None:
        """What is under way on a lane that failed. On verbs part of it is already with the other adapter, or comes
        there yet: it lands later, however dead the lane is to its sender."""
        kept = deque(frame for frame in lane.wire if self.kind == "verbs" and self._dice.random() < 0.6)
        if self.kind == "tcp":
            kept = deque(list(lane.wire)[: self._dice.randrange(len(lane.wire) + 1)])  # what the socket holds
        for frame in lane.wire:
            if frame not in kept:
                self._gone(frame)
        lane.wire = kept

    def _fix(self, lane: Lane) -> None:
        """Frames that outlive prefill's end carry what was read before it went."""
        if self.kind == "local":
            return
        for frame in lane.wire:
            if frame.content is None and frame.ordinal >= 0:
                frame.content = frame.leg.read(frame.ordinal)
                frame.leg.unread -= 1

    def _drop(self, lane: Lane) -> None:
        for frame in lane.wire:
            self._gone(frame)
        lane.wire.clear()

    def _gone(self, frame: Frame) -> None:
        """The frame will never land."""
        if frame.content is None and frame.ordinal >= 0:
            frame.leg.unread -= 1

    def _sender_sees(self, lane: Lane, cause: str, delay_s: float | None = None) -> None:
        def see() -> None:
            if self.destroyed:
                return
            self.prefill.lane_event("lane_down", self, lane.index, cause)
            for leg in list(self.legs.values()):
                if lane.index in leg.reserve.lanes:
                    leg.close("fail", f"lane: lane {lane.index}: {cause}")

        self.world.later(self._dice.random() * 0.05 if delay_s is None else delay_s, see)

    def _decode_sees(self, lane: Lane, cause: str) -> None:
        def see() -> None:
            if self.decode is not None and not self.fenced and lane.installed:
                self.decode.lane_down(self, lane.index, cause)

        self.world.later(self._dice.random() * 0.05, see)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Something may be sent or may land that could not before."""
        for lane in self.lanes:
            self._kick_sending(lane)
            self._kick_landing(lane)

    def _kick_sending(self, lane: Lane) -> None:
        if not lane.sending and lane.connected and not lane.broken and not self.destroyed:
            lane.sending = True
            self.world.later(0.0005 + self._dice.random() * self._step_s, lambda: self._send(lane))

    def _send(self, lane: Lane) -> None:
        lane.sending = False
        prefill = self.prefill
        if lane.broken or self.destroyed or not prefill.alive or prefill.paused or self._cut():
            return
        room = WINDOW[self.kind] - len(lane.wire)
        sent = 0
        for _ in range(min(room, self._dice.randint(1, PIECE))):
            frame = self._next(lane)
            if frame is None:
                break
            sent += 1
            lane.wire.append(frame)
        if sent:
            self.world.note(prefill.name, "lane sends", f"g{self.generation} lane {lane.index}: {sent}", sent)
            self._kick_landing(lane)
            self._kick_sending(lane)

    def _next(self, lane: Lane) -> Frame | None:
        """The next frame for a lane: chunks of any leg, in turn; a record behind the last chunk of its leg."""
        legs = [leg for leg in self.legs.values() if not leg.end and lane.index in leg.reserve.lanes]
        for step in range(len(legs)):
            leg = legs[(self._turn + step) % len(legs)]
            if leg.queue:
                self._turn += step + 1
                return self._post(lane, leg, leg.queue.popleft())
            if leg.grant.commit is not None and leg.records[lane.index] == DUE:
                return self._post_record(lane, leg)
        return None

    def _post(self, lane: Lane, leg: SenderLeg, ordinal: int) -> Frame:
        leg.posted[lane.index] |= 1 << ordinal
        eager = self.kind == "verbs" and self.world.plan.eager_completion
        frame = Frame(leg, ordinal, leg.read(ordinal) if self.kind == "tcp" or eager else None)
        if frame.content is None:
            leg.unread += 1
        if self.kind == "verbs":
            leg.unfinished += 1
            if eager:
                self._complete(leg)
        if leg.grant.doubles and self.kind != "verbs":
            leg.grant.doubles = False
            leg.queue.append(ordinal)
        return frame

    def _post_record(self, lane: Lane, leg: SenderLeg) -> Frame:
        frame = Frame(leg, -1, 0, leg.record(lane.index), leg.posted[lane.index])
        leg.records[lane.index] = SENT
        if self.kind == "verbs":
            leg.unfinished += 1
            if self.world.plan.eager_completion:
                self._complete(leg)
        leg.settle()
        return frame

    def _complete(self, leg: SenderLeg) -> None:
        """The adapter reports success for one write."""

        def done() -> None:
            leg.unfinished -= 1
            leg.settle()

        self.world.later(0.001 + self._dice.random() * 0.01, done)

    # ---- landing -----------------------------------------------------------------------------------------------------

    def _kick_landing(self, lane: Lane) -> None:
        if lane.landing or not lane.wire or not lane.installed or self.fenced:
            return
        lane.landing = True
        delay_s = 0.0005 + self._dice.random() * self._step_s
        if not self.world.plan.fair and not self.world.healed:
            if lane.broken and self.kind == "verbs":
                delay_s += self._dice.choice([0.1, 5.0, 120.0]) * self._dice.random()
            elif self._dice.random() < 0.03:
                delay_s += self._dice.choice([0.2, 2.0, 20.0])
        self.world.later(delay_s, lambda: self._land(lane))

    def _land(self, lane: Lane) -> None:
        lane.landing = False
        decode = self.decode
        if decode is None or not decode.alive or self.fenced or not lane.wire:
            return
        if self.kind != "verbs" and (decode.paused or self._cut()):
            return
        landed = 0
        for _ in range(self._dice.randint(1, PIECE)):
            if not lane.wire:
                break
            landed += 1
            self._arrive(lane, lane.wire.popleft(), decode)
        self.world.note(decode.name, "lane lands", f"g{self.generation} lane {lane.index}: {landed}", landed)
        self._kick_landing(lane)
        self._kick_sending(lane)

    def _arrive(self, lane: Lane, frame: Frame, decode: DecodeNode) -> None:
        leg = frame.leg
        if frame.ordinal < 0:
            decode.receiver.record(self, lane.index, frame)
            if self.kind == "local":
                self._confirm(lane, leg)
        else:
            readable = self.kind != "local" or (leg.slot_valid and self.prefill.alive and not self.destroyed)
            if frame.content is None:
                leg.unread -= 1
                frame.content = leg.read(frame.ordinal) if readable else None
            decode.receiver.chunk(self, lane.index, frame)
        if self.kind == "verbs" and not self.world.plan.eager_completion and not lane.broken:
            self._complete(leg)

    def _confirm(self, lane: Lane, leg: SenderLeg) -> None:
        def confirmed() -> None:
            if not lane.broken and not self.destroyed and self.prefill.alive:
                leg.records[lane.index] = CONFIRMED
                leg.settle()

        self.world.later(0.001, confirmed)

    def _cut(self) -> bool:
        return self.decode is not None and self.world.network.is_cut(self.decode.name, self.prefill.name)

    def can_still_be_written(self, reservation: int) -> bool:
        """Bytes for this reservation may yet land in decode's memory, unless decode's core sinks them."""
        if self.fenced:
            return False
        leg = self.legs.get(reservation)
        if leg is not None and leg.may_write and any(lane.connected and not lane.broken for lane in self.lanes):
            return True
        return any(
            f.leg.reserve.reservation == reservation and f.ordinal >= 0 for lane in self.lanes for f in lane.wire
        )
