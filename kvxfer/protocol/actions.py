"""What the cores ask the outside to do. Cores return lists of these; whoever drives them carries them out in order.

``now`` is seconds of a monotonic clock, always passed in. An action marked *answers X* must be followed by a call of
the core's method X once it has been carried out (at once or later); nothing else of the reservation waits meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError
from kvxfer.protocol.messages import LaneOffer, Message, ReserveGroup


@dataclass(frozen=True, slots=True)
class LegSpec:
    """What the receiver's core must know of a leg before its RESERVE is sent."""

    session: int
    generation: int
    reservation: int
    leg: int
    verify: str
    lanes: tuple[int, ...]
    groups: tuple[ReserveGroup, ...]
    slices: bytes


@dataclass(frozen=True, slots=True, eq=False)
class LegReport:
    """What the receiver's core saw land for one leg (answer to Verify). Arrays are numbered as in ``leg.LegLayout``."""

    lane_bitmaps: dict[int, bytes]  # lane -> bitmap of chunks placed, little-endian bit order
    folds: npt.NDArray[np.uint64]  # over digests of what landed; empty under verify="coverage"
    violations: int  # frames refused for this leg (a chunk sent twice, ...)
    bytes_landed: int
    digests: npt.NDArray[np.uint64] | None = None  # content digests by chunk ordinal, where Verify asked for them


# ---- both sides ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``message`` to the session's socket. Losing it is the network's right; the cores repeat what must arrive."""

    session: int  # -1: an answer to somebody who has no session
    message: Message
    epoch: bytes  # 16 bytes; HELLO: decode's nonce and eight zero bytes
    sequence: int  # per session and direction, from 0, rising
    route: bytes = b""  # prefill: the ROUTER's name of the peer


@dataclass(frozen=True, slots=True)
class Notify:
    """One engine event: kind is offered, ready, failed or released; each at most once per handoff or grant."""

    kind: str
    key: int  # reservation id at decode, grant id at prefill
    request_id: str
    error: KvxferError | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """S8: one line for the audit log and one metric. ``fields`` are JSON-serialisable."""

    event: str  # refused, mismatch, fence, quarantine, failed, ready, released, ...
    session: int | None = None
    reservation: int | None = None
    leg: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close the session's socket with no linger; its epoch is dead. At prefill: destroy its lanes of every generation;
    *answers* ``lanes_closed`` with the last one served."""

    session: int
    reason: str


# ---- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A fresh DEALER socket to ``peer`` for ``session``."""

    session: int
    peer: str


@dataclass(frozen=True, slots=True)
class ConnectLanes:
    """Connect the lanes of ``generation``; report each by ``lane_up`` / ``lane_down``. Try ``offers`` in order."""

    session: int
    epoch: bytes
    generation: int
    secret: bytes
    offers: tuple[LaneOffer, ...]


@dataclass(frozen=True, slots=True)
class OpenLeg:
    """Prepare to receive; carried out before the RESERVE that follows it in the list."""

    spec: LegSpec


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take away the leg's means to write. *Answers* ``revoked`` once the call has returned."""

    session: int
    reservation: int
    leg: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Fence all lanes of the session's generation. *Answers* ``fenced`` once the call has returned."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the receiver's core for a report of every leg. *Answers* ``verified``."""

    reservation: int
    legs: tuple[tuple[int, int], ...]  # (session, leg)
    with_digests: bool = False  # after a mismatch: the report must carry the content digests


@dataclass(frozen=True, slots=True)
class ZeroTail:
    """Zero the token slots past ``n_tokens`` in the last page of each group whose token axis is known. *Answers*
    ``tail_zeroed``: the reservation becomes READY after it."""

    reservation: int
    n_tokens: int
    groups: tuple[ReserveGroup, ...]


@dataclass(frozen=True, slots=True)
class ForgetLeg:
    """The leg has ended (READY, or released): drop its tables."""

    session: int
    reservation: int
    leg: int


@dataclass(frozen=True, slots=True)
class MarkPages:
    """Pages of a reservation change state: reserved, ready, quarantined or free."""

    reservation: int
    state: str


# ---- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLanes:
    """Serve lanes of ``generation`` for a session, and destroy those of older generations. *Answers* ``lanes_closed``
    with the newest of those, where there were any."""

    session: int
    epoch: bytes
    generation: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class Attach:
    """Let the sender's core write what the grant has, and will get, to this reservation. Where that is impossible,
    answer ``leg_failed`` with "attach: ..." at once."""

    grant: int
    session: int
    reserve: Any  # messages.Reserve


@dataclass(frozen=True, slots=True)
class CloseAdmission:
    """Close admission of one leg and drain it. *Answers* ``leg_drained`` or ``leg_failed``."""

    grant: int
    session: int
    reservation: int


@dataclass(frozen=True, slots=True)
class DetachLeg:
    """The leg has ended on both sides: drop its tables."""

    grant: int
    session: int
    reservation: int


@dataclass(frozen=True, slots=True)
class AnswerDigests:
    """Read content digests from the grant. *Answers* ``digests``."""

    grant: int
    session: int
    reservation: int
    leg: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ReleaseGrant:
    """No lane reads the grant's sources any more and every leg was detached: drop its tables. It may come later than
    Notify "released", as decode can ask for digests until it has said DONE or ABORT."""

    grant: int


Action = (
    Send
    | Notify
    | Audit
    | CloseSession
    | OpenSocket
    | ConnectLanes
    | OpenLeg
    | Revoke
    | Fence
    | Verify
    | ZeroTail
    | ForgetLeg
    | MarkPages
    | OpenLanes
    | Attach
    | CloseAdmission
    | DetachLeg
    | AnswerDigests
    | ReleaseGrant
)
