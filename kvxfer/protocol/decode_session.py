"""Decode's end of one session: the handshake, heartbeats, and the life of its lanes from generation to generation.

A session knows nothing of pages. It tells its core, through the few flags below, when reservations may be offered, when
a generation's means to write are gone, and when the peer is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvxfer.errors import CapacityError, KvxferError, LaneFailed, PeerLost
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol.actions import Action, Audit, CloseSession, ConnectLanes, Fence, OpenSocket, Send
from kvxfer.protocol.config import DecodeConfig
from kvxfer.protocol.messages import (
    Decline,
    Hello,
    LaneOffer,
    Lanes,
    Message,
    Ping,
    Refuse,
    Relane,
    Welcome,
)

if TYPE_CHECKING:
    from kvxfer.protocol.decode_reservation import Leg, Reservation

NO_NONCE = bytes(8)
MAX_WAITING_DECLINES = 4096


class Session:
    """One prefill address, one epoch. Not thread-safe: its core's caller holds the lock.

    Attributes:
        state: ``dialing``, ``open`` or ``dead``.
        lanes_state: ``none``, ``connecting``, ``up``, ``fencing``, ``waiting`` (for the back-off) or ``relaning``.
        generation: of the lanes that are up, connecting or being fenced, else of those that will come next.
        fenced_below: lanes of generations below this can no longer write.
        waiting: reservations that are offered as soon as all their sessions are up.
        legs: legs offered on this session that have not ended.
    """

    __slots__ = (
        "attempts", "config", "declines", "dial_at", "dialed_at", "epoch", "expected", "fence_sent", "fenced_below",
        "generation", "hello", "id", "incarnation", "interval", "kind", "lanes_state", "lanes_up", "last_heard", "legs",
        "next_number", "next_ping", "nonce", "offers", "peer", "pool", "relane_at", "revocable", "secret", "seen",
        "sent", "state", "suspect_until", "timer", "token", "up_at", "waiting", "welcome",
    )  # fmt: skip

    def __init__(
        self, session: int, peer: str, nonce: bytes, hello: Hello, config: DecodeConfig, now: float, dial_at: float
    ) -> None:
        self.id = session
        self.peer = peer
        self.nonce = nonce
        self.hello = hello
        self.config = config
        self.state = "dialing"
        self.epoch = nonce + NO_NONCE
        self.sent = 0
        self.seen = -1
        self.welcome: Welcome | None = None
        self.dial_at: float | None = dial_at
        self.dialed_at = max(now, dial_at)
        self.last_heard = now
        self.interval = config.heartbeat_s / 3
        self.next_ping = now
        self.token = 0
        self.suspect_until: float | None = None
        self.timer: float | None = None
        self.lanes_state = "none"
        self.generation = 0
        self.fenced_below = 0
        self.lanes_up: set[int] = set()
        self.kind = ""
        self.revocable = True
        self.offers: tuple[LaneOffer, ...] = ()
        self.secret = b""
        self.attempts = 0
        self.relane_at = 0.0
        self.up_at = 0.0
        self.next_number = 0
        self.waiting: dict[int, Reservation] = {}
        self.legs: dict[int, Leg] = {}
        self.declines: list[Decline] = []

    # ---- frames ------------------------------------------------------------------------------------------------------

    def send(self, message: Message, out: list[Action]) -> None:
        out.append(Send(self.id, message, self.epoch, self.sent))
        self.sent += 1

    def refuses(self, epoch: bytes, sequence: int, message: Message) -> str | None:
        """Why a frame must not be looked at (S7), or None; an accepted frame proves that the peer lives."""
        if self.state == "dead":
            return "dead_session"
        if isinstance(message, Refuse):
            # A peer that does not know the epoch cannot know how far its sequence had come.
            known = epoch == self.epoch if self.welcome is not None else epoch[:8] == self.nonce
            return None if known else "epoch"
        expected = self.nonce + message.nonce if isinstance(message, Welcome) and self.welcome is None else self.epoch
        if epoch != expected or len(epoch) != 16:
            return "epoch"
        if self.welcome is None and not isinstance(message, Welcome):
            return "before_welcome"
        if sequence <= self.seen:
            return "sequence"
        return None

    def heard(self, now: float, sequence: int) -> None:
        self.seen = max(self.seen, sequence)
        self.last_heard = now
        self.suspect_until = None

    def suspect(self, now: float, out: list[Action]) -> None:
        """A lane broke: the peer has a short time to say that it lives."""
        if self.state == "open" and self.suspect_until is None:
            self.suspect_until = now + self.config.eof_grace_s
            self.ping(now, out)

    def ping(self, now: float, out: list[Action]) -> None:
        self.token += 1
        self.next_ping = now + self.interval
        self.send(Ping(self.token), out)

    # ---- handshake ---------------------------------------------------------------------------------------------------

    def dial(self, now: float, out: list[Action]) -> None:
        if self.dial_at is not None:
            self.dial_at = None
            out.append(OpenSocket(self.id, self.peer))
        self.next_ping = now + self.config.hello_repeat_s
        self.send(self.hello, out)

    def judge(self, welcome: Welcome, ours: PoolGeometry) -> KvxferError | None:
        """S4: neither pool may be too small for one full context of the other side, unless the caller said so."""
        for holder, pool, context in (
            ("prefill's", welcome.pool, self.config.max_context_tokens),
            ("decode's", ours, welcome.max_context_tokens),
        ):
            if 0 < pool.capacity_tokens < context and not self.config.accept_smaller_capacity:
                return CapacityError(
                    f"{holder} pool cannot hold one full context; enlarge it, lower max_context_tokens on the other "
                    "side, or set accept_smaller_capacity=True",
                    peer=self.peer,
                    needed_tokens=context,
                    available_tokens=pool.capacity_tokens,
                )
        if len(welcome.nonce) != 8 or len(welcome.incarnation) != 8 or len(welcome.secret) != 32:
            return PeerLost("the peer's WELCOME is malformed", peer=self.peer, retryable=False)
        if not 0 < welcome.heartbeat_s < float("inf") or welcome.generation < 0:
            return PeerLost("the peer's WELCOME is malformed", peer=self.peer, retryable=False)
        return None

    def welcomed(self, now: float, welcome: Welcome, out: list[Action]) -> KvxferError | None:
        """Opens the session and asks for its lanes; returns an error where no kind of lane is shared."""
        offered = {offer.kind: offer for offer in welcome.offers}
        same_host = bool(welcome.host) and welcome.host == self.hello.host
        wanted = [
            LaneOffer(kind, offered[kind].addresses, min(offered[kind].lanes, self.config.lanes))
            for kind in self.config.lane_kinds
            if kind in offered and offered[kind].lanes > 0 and (kind != "local" or same_host)
        ]
        if not wanted:
            return LaneFailed(
                "the two sides share no kind of lane; check lane_kinds, and that local lanes are used on one host only",
                peer=self.peer,
                retryable=False,
                accepted=list(self.config.lane_kinds),
                offered=sorted(offered),
                same_host=same_host,
            )
        self.welcome = welcome
        self.state = "open"
        self.epoch = self.nonce + welcome.nonce
        self.interval = min(self.config.heartbeat_s, welcome.heartbeat_s) / 3
        self.next_ping = now + self.interval
        self.generation = self.fenced_below = welcome.generation
        self.offers = tuple(wanted)
        self.secret = welcome.secret
        out.append(Audit("session_opened", self.id, fields={"peer": self.peer}))
        for decline in self.declines:
            self.send(decline, out)
        self.declines.clear()
        self._connect(out)
        return None

    @property
    def peer_pool(self) -> PoolGeometry:
        return cast(Welcome, self.welcome).pool

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def _connect(self, out: list[Action]) -> None:
        self.lanes_state = "connecting"
        self.lanes_up.clear()
        self.kind = ""
        self.revocable = True
        out.append(ConnectLanes(self.id, self.epoch, self.generation, self.secret, self.offers))

    def lane_up(self, now: float, lane: int, kind: str, revocable: bool) -> bool:
        """Counts one lane; True when all of its kind are up."""
        if self.lanes_state != "connecting" or (self.kind and self.kind != kind):
            return False
        wanted = next((offer.lanes for offer in self.offers if offer.kind == kind), 0)
        if not 0 <= lane < wanted:
            return False
        self.kind = kind
        self.revocable = self.revocable and revocable
        self.lanes_up.add(lane)
        if len(self.lanes_up) < wanted:
            return False
        self.lanes_state = "up"
        self.up_at = now
        return True

    @property
    def lanes(self) -> tuple[int, ...]:
        return tuple(sorted(self.lanes_up))

    @property
    def can_be_written(self) -> bool:
        """Lanes of the current generation exist, or may."""
        return self.lanes_state in ("connecting", "up", "fencing")

    def fence(self, now: float, cause: str, out: list[Action]) -> bool:
        """Asks for the fence of the current generation; False where it is already under way or there is nothing."""
        if self.lanes_state not in ("connecting", "up"):
            return False
        if self.lanes_state == "up" and now - self.up_at > self.config.relane_backoff_max_s:
            self.attempts = 0
        self.lanes_state = "fencing"
        out.append(Audit("fence", self.id, fields={"generation": self.generation, "cause": cause, "peer": self.peer}))
        out.append(Fence(self.id, self.generation))
        return True

    def fenced(self, now: float, out: list[Action]) -> None:
        """The fence has returned: nothing of this generation can land any more."""
        self.fenced_below = self.generation + 1
        self.generation += 1
        self.lanes_up.clear()
        if self.state == "dead":
            self.lanes_state = "none"
            return
        config = self.config
        backoff_s = config.relane_backoff_s * 2.0 ** min(self.attempts - 1, 30) if self.attempts else 0.0
        self.attempts += 1
        self.lanes_state = "waiting"
        self.relane_at = now + min(backoff_s, config.relane_backoff_max_s)
        if self.relane_at <= now:
            self._relane(now, out)

    def _relane(self, now: float, out: list[Action]) -> None:
        self.lanes_state = "relaning"
        self.relane_at = now + self.config.relane_repeat_s
        self.send(Relane(self.generation), out)

    def relaned(self, message: Lanes, out: list[Action]) -> bool:
        """Prefill serves the generation we asked for; False where we did not."""
        if self.lanes_state != "relaning" or message.generation != self.generation or len(message.secret) != 32:
            return False
        self.secret = message.secret
        self._connect(out)
        return True

    # ---- time --------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When ``on_time`` wants to be called."""
        if self.state == "dead":
            return None
        if self.state == "dialing":
            if self.dial_at is not None:
                return self.dial_at
            return min(self.next_ping, self.dialed_at + self.config.dial_timeout_s)
        due = min(self.next_ping, self.last_heard + self.config.heartbeat_s)
        if self.suspect_until is not None:
            due = min(due, self.suspect_until)
        if self.lanes_state in ("waiting", "relaning"):
            due = min(due, self.relane_at)
        return due

    def on_time(self, now: float, out: list[Action]) -> KvxferError | None:
        """Does what is due; returns an error when the peer is lost."""
        if self.state == "dialing":
            if self.dial_at is None and now >= self.dialed_at + self.config.dial_timeout_s:
                return PeerLost(
                    "prefill did not answer HELLO; check its address and that it runs",
                    peer=self.peer,
                    dial_timeout_s=self.config.dial_timeout_s,
                )
            if now >= (self.next_ping if self.dial_at is None else self.dial_at):
                self.dial(now, out)
            return None
        if self.state == "dead":
            return None
        if self.timer is not None and now - self.timer > self.interval:
            # We were stopped ourselves: the peer gets the time to answer that we did not give it.
            self.last_heard = max(self.last_heard, now - 2 * self.interval)
            if self.suspect_until is not None:
                self.suspect_until = max(self.suspect_until, now + self.config.eof_grace_s)
            self.next_ping = now
        if now >= self.last_heard + self.config.heartbeat_s:
            return PeerLost("prefill fell silent", peer=self.peer, heartbeat_s=self.config.heartbeat_s)
        if self.suspect_until is not None and now >= self.suspect_until:
            return PeerLost("a lane broke and prefill does not answer", peer=self.peer)
        if now >= self.next_ping:
            self.ping(now, out)
        if self.lanes_state in ("waiting", "relaning") and now >= self.relane_at:
            self._relane(now, out)
        return None

    def die(self, now: float, cause: str, out: list[Action]) -> None:
        """The epoch is over. ``closed`` follows once its lanes are fenced."""
        if self.state == "dead":
            return
        out.append(Audit("session_lost", self.id, fields={"peer": self.peer, "cause": cause}))
        self.fence(now, cause, out)
        self.state = "dead"
        if self.lanes_state in ("waiting", "relaning"):
            self.lanes_state = "none"

    def close(self, reason: str, out: list[Action]) -> None:
        out.append(CloseSession(self.id, reason))
