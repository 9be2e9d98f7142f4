"""Which lanes of which sessions may be connected now, and by whom they have been."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxfer.lanes import handshake as hs
from kvxfer.lanes.pending import Proven, Refusal


@dataclass(slots=True)
class _Served:
    session: int
    epoch: bytes
    generation: int
    secret: bytes
    lanes: dict[str, int]
    taken: set[int] = field(default_factory=set)


class LaneRegistry:
    """Thread-safe; ``serve`` and ``withdraw`` come from the endpoint, ``judge`` and ``claim`` from the listener."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_session: dict[int, _Served] = {}
        self._by_epoch: dict[bytes, _Served] = {}
        self._nobodys_secret = os.urandom(hs.SECRET_BYTES)

    def serve(self, session: int, epoch: bytes, generation: int, secret: bytes, lanes: Mapping[str, int]) -> None:
        """Raises ValueError for a secret or epoch of another length."""
        if len(secret) != hs.SECRET_BYTES or len(epoch) != 16:
            raise ValueError("a lane's secret has 32 bytes and its epoch 16")
        with self._lock:
            self._remove(session)
            served = _Served(session, epoch, generation, secret, dict(lanes))
            self._by_session[session] = served
            self._by_epoch[epoch] = served

    def withdraw(self, session: int, up_to_generation: int) -> None:
        with self._lock:
            served = self._by_session.get(session)
            if served is not None and served.generation <= up_to_generation:
                self._remove(session)

    def judge(self, claim: hs.Claim, nonce: bytes, mac: bytes) -> tuple[Proven, bytes]:
        """What the claim proves, and the Accept frame. Raises Refusal."""
        with self._lock:
            served = self._by_epoch.get(claim.epoch)
            secret = served.secret if served is not None else self._nobodys_secret
        # The MAC is computed in any case: how long a refusal takes shall not tell which epochs exist.
        proven = hs.proves(secret, claim, nonce, mac)
        if served is None:
            raise Refusal("unknown_epoch", "no session has this epoch")
        if not proven:
            # Another generation has another secret, so a stale one ends here too; the claim tells them apart for us.
            stale = claim.generation != served.generation
            raise Refusal("stale_generation" if stale else "bad_proof", "the session's secret was not proven")
        if claim.generation != served.generation:
            raise Refusal("stale_generation", f"generation {claim.generation} is not served")
        if claim.lane >= served.lanes.get(claim.kind, 0):
            raise Refusal("unknown_lane", f"there is no {claim.kind} lane {claim.lane}")
        return Proven(served.session, claim), hs.pack_accept(secret, claim, nonce)

    def claim(self, proven: Proven) -> None:
        """Takes the lane, once, whatever its kind. Raises Refusal where it was taken before or has been withdrawn."""
        claim = proven.claim
        with self._lock:
            served = self._by_epoch.get(claim.epoch)
            if served is None or served.generation != claim.generation:
                raise Refusal("stale_generation", "the generation was withdrawn during the handshake")
            if claim.lane in served.taken:
                raise Refusal("lane_taken", f"lane {claim.lane} is connected already")
            served.taken.add(claim.lane)

    def _remove(self, session: int) -> None:
        served = self._by_session.pop(session, None)
        if served is not None:
            del self._by_epoch[served.epoch]
