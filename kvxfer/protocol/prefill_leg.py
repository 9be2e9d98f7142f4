"""A leg seen from prefill: whether a lane may still read its sources (S3), and what became of the handoff.

The two questions are kept apart. A leg whose bytes have left may still be refused by decode, and a leg that decode has
given up may still be read by a lane that is stuck.
"""

from __future__ import annotations

import math
from enum import Enum

from kvxfer.errors import KvxferError
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import Failed, Quiesced, Reserve


class Sources(Enum):
    """May a lane still read this leg's sources?

    OPEN: yes. CLOSING: yes, until its drain is reported. BROKEN: an error completion was seen; yes, until its lanes are
    destroyed. DRAINED: no, every posted write left successfully. DESTROYED: no, our ends of its lanes are gone.
    """

    OPEN = "open"
    CLOSING = "closing"
    BROKEN = "broken"
    DRAINED = "drained"
    DESTROYED = "destroyed"


class Leg:
    """One reader's share of a grant. ``deadline`` belongs to whatever the leg waits for now."""

    __slots__ = (
        "aborted", "cause", "deadline", "done", "error", "failed", "given_up_at", "grant", "heard", "layout", "posted",
        "repeat_at", "reserve", "session", "sources",
    )  # fmt: skip

    def __init__(self, grant: int, session: int, reserve: Reserve, layout: LegLayout, given_up_at: float) -> None:
        self.grant = grant
        self.session = session
        self.reserve = reserve
        self.layout = layout
        self.given_up_at = given_up_at  # decode's own deadline, as far as we know it
        self.sources = Sources.OPEN
        self.posted: tuple[int, ...] = (0,) * len(reserve.lanes)
        self.done = False  # decode has said DONE
        self.error: KvxferError | None = None  # the reader's outcome, where it failed
        self.cause: KvxferError | None = None  # a lane failure behind the commit: decode's word decides
        self.failed: Failed | None = None  # what decode was told, and is told again until it answers
        self.aborted = False  # decode has sent ABORT and is owed an answer once the leg is settled
        self.heard = False  # decode's last word on this leg (DONE or ABORT) is here, or its session is gone
        self.deadline = math.inf
        self.repeat_at = math.inf

    @property
    def settled(self) -> bool:
        """No lane reads the sources any more."""
        return self.sources is Sources.DRAINED or self.sources is Sources.DESTROYED

    @property
    def outcome_known(self) -> bool:
        return self.done or self.error is not None

    @property
    def ended(self) -> bool:
        return self.heard and self.settled

    @property
    def last_word(self) -> Quiesced | Failed:
        """The answer to ABORT once the leg is settled. S2: what was not drained is never called quiesced."""
        reserve = self.reserve
        if self.sources is Sources.DRAINED:
            return Quiesced(reserve.reservation, reserve.leg, self.posted)
        if self.failed is not None and self.failed.cause in ("lane", "source_changed"):
            return self.failed
        return Failed(
            reserve.reservation, reserve.leg, -1, reserve.generation, "lane", "the lanes went before it drained"
        )
