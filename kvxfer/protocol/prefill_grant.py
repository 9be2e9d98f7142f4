"""A grant: one request's sources, the decode ranks that read them, and when it counts as ready, failed and released."""

from __future__ import annotations

import math

from kvxfer.errors import Declined, KvxferError
from kvxfer.protocol.prefill_leg import Leg, Sources

OFFERED = "offered"
WRITING = "writing"
COMMITTED = "committed"
DONE = "done"
DRAINING = "draining"
ENDED = "ended"
FENCED = "fenced"


class Grant:
    """States: offered → writing → committed → done, and draining → ended | fenced.

    ``readers`` is None until it is known. ``legs`` holds one leg for each rank that reserved, also after it ended;
    ``attached`` counts those that have not.
    """

    __slots__ = (
        "attached", "committed", "concluded", "deadline", "declined", "error", "id", "legs", "offered", "readers",
        "released", "request_id", "state", "timeout_s",
    )  # fmt: skip

    def __init__(self, grant: int, request_id: str, readers: int | None, timeout_s: float) -> None:
        self.id = grant
        self.request_id = request_id
        self.readers = readers
        self.timeout_s = timeout_s
        self.state = OFFERED
        self.legs: dict[int, Leg] = {}
        self.declined: dict[int, str] = {}
        self.attached = 0
        self.committed = False  # whatever happened since, the records are under way behind every leg's writes
        self.offered = False  # the engine has been told that every reader reserved
        self.concluded = False  # the engine has been told ready or failed
        self.released = False  # the engine has been told that the sources are free
        self.error: KvxferError | None = None
        self.deadline = math.inf  # for every reader to have reserved

    @property
    def admits(self) -> bool:
        """Writes and the commit are welcome."""
        return self.state in (OFFERED, WRITING)

    @property
    def complete(self) -> bool:
        """Every known reader has reserved or declined, so that no further leg can come."""
        return self.readers is not None and len(self.legs) + len(self.declined) >= self.readers

    @property
    def settled(self) -> bool:
        """S3: no lane reads the sources, and none will."""
        if not (self.concluded or (self.committed and self.complete)):
            return False
        return all(leg.settled for leg in self.legs.values())

    @property
    def outcome_known(self) -> bool:
        return self.complete and all(leg.outcome_known for leg in self.legs.values())

    def outcome(self) -> KvxferError | None:
        """None for a grant that every reader has; otherwise the first reader's error. ``outcome_known`` must hold."""
        failed = {rank: leg.error for rank, leg in sorted(self.legs.items()) if leg.error is not None}
        for rank, error in failed.items():
            error.details.setdefault("rank", rank)
            if len(self.legs) > 1:
                error.details.setdefault("readers_failed", sorted(failed))
                error.details.setdefault("readers_done", sorted(rank for rank, leg in self.legs.items() if leg.done))
            return error
        if not self.legs:
            reasons = "; ".join(sorted(set(self.declined.values())))
            return Declined(
                f"no reader wants this request's pages: {reasons}", request_id=self.request_id, readers=self.readers
            )
        return None

    def end_state(self) -> str:
        """The state of a failed grant whose sources are free."""
        destroyed = any(leg.sources is Sources.DESTROYED for leg in self.legs.values())
        return FENCED if destroyed else ENDED
