"""What both sides of the rig speak of: sizes, offered legs, and the completions that came."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer import _native
from kvxfer.protocol.leg import LegLayout

CANARY = 0xEE
TOKENS_PER_PAGE = 16
SESSION, GENERATION = 5, 2
DEADLINE_S = 10.0

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class Event(NamedTuple):
    """One completion."""

    kind: int
    session: int
    generation: int
    lane: int
    reservation: int
    leg: int
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True)
class Leg:
    """One leg as it was offered: page k of the sequence lies in source page ``source[k]``, to go to ``pool[k]``."""

    reservation: int
    number: int
    verify: bool
    lanes: tuple[int, ...]
    source: U64
    pool: U64
    slices: bytes
    layout: LegLayout
    first_page: int = 0

    @property
    def logical(self) -> U64:
        return np.arange(self.first_page, self.first_page + len(self.pool), dtype=np.uint64)

    @property
    def end_token(self) -> int:
        return (self.first_page + len(self.pool)) * TOKENS_PER_PAGE


@dataclass
class Completions:
    """A completion queue, and all it has ever said."""

    queue: Any = field(default_factory=_native.CompletionQueue)
    seen: list[Event] = field(default_factory=list)

    def pump(self) -> None:
        self.seen += [Event(*event) for event in self.queue.poll()]

    def of(self, kind: int, reservation: int | None = None) -> list[Event]:
        self.pump()
        return [e for e in self.seen if e.kind == kind and reservation in (None, e.reservation)]

    def wait(self, kind: int, n: int = 1, reservation: int | None = None) -> list[Event]:
        """``n`` events of a kind; waits on the queue's descriptor alone, so a missing wake-up fails the test."""
        until = time.monotonic() + DEADLINE_S
        while len(found := self.of(kind, reservation)) < n:
            left = until - time.monotonic()
            assert left > 0, f"{len(found)} of {n} events of kind {kind} came; all that came: {self.seen}"
            select.select([self.queue.fileno()], [], [], left)
        return found
