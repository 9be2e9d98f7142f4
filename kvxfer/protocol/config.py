"""What decode's side of the protocol can be told. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxfer.errors import GeometryError

VERIFY_MODES = ("digest", "coverage")
LANE_KINDS = ("local", "tcp")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Decode's settings.

    Attributes:
        verify: ``digest`` (default), or ``coverage``, which both sides must ask for by name.
        max_context_tokens: longest sequence the engine will ever ask for; 0 where it does not say.
        accept_smaller_capacity: take peers, and an own pool, that cannot hold one full context.
        lane_kinds: kinds of lane to accept, best first.
        lanes: how many lanes of a session are wanted; the peer may offer fewer.
        heartbeat_s: a peer that was silent for this long is dead.
        dial_timeout_s: a peer that does not answer HELLO for this long is lost.
        eof_grace_s: after a lane broke the peer has this long to answer a ping.
        hello_repeat_s, reserve_repeat_s, abort_repeat_s, relane_repeat_s: until answered, a message is sent again.
        quiesce_timeout_s: after this an abort fences if the peer is dead or pages run low.
        fence_hard_limit_s: after this an abort fences in any case.
        quarantine_low_fraction: pages run low when this part of the pool is quarantined.
        relane_backoff_s, relane_backoff_max_s: wait before lanes are connected again, doubled each time.
        relane_attempts: after so many failures in a row the waiting reservations are failed.
        diagnosis_timeout_s: how long a refused handoff may wait for the digests that name the chunk, and one whose
            source was withdrawn for prefill's reason.
    """

    verify: str = "digest"
    max_context_tokens: int = 0
    accept_smaller_capacity: bool = False
    lane_kinds: tuple[str, ...] = LANE_KINDS
    lanes: int = 2
    heartbeat_s: float = 5.0
    dial_timeout_s: float = 10.0
    eof_grace_s: float = 1.0
    hello_repeat_s: float = 0.5
    reserve_repeat_s: float = 1.0
    abort_repeat_s: float = 0.5
    relane_repeat_s: float = 0.5
    quiesce_timeout_s: float = 5.0
    fence_hard_limit_s: float = 30.0
    quarantine_low_fraction: float = 0.25
    relane_backoff_s: float = 0.05
    relane_backoff_max_s: float = 5.0
    relane_attempts: int = 3
    diagnosis_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_MODES:
            raise GeometryError(f"verify must be one of {VERIFY_MODES}", verify=self.verify)
        if not self.lane_kinds or set(self.lane_kinds) - set(LANE_KINDS):
            raise GeometryError(f"lane_kinds must name some of {LANE_KINDS}", lane_kinds=str(self.lane_kinds))
        object.__setattr__(self, "lane_kinds", tuple(self.lane_kinds))
        if not 1 <= self.lanes <= 64:
            raise GeometryError("lanes must be between 1 and 64", lanes=self.lanes)
        if self.max_context_tokens < 0 or self.relane_attempts < 1:
            raise GeometryError("max_context_tokens must not be negative, relane_attempts must be positive")
        for item in fields(self):
            if item.name.endswith("_s") and not 0 < getattr(self, item.name) < float("inf"):
                raise GeometryError(f"{item.name} must be a positive, finite number of seconds")
        if self.fence_hard_limit_s < self.quiesce_timeout_s:
            raise GeometryError("fence_hard_limit_s must not be below quiesce_timeout_s")
