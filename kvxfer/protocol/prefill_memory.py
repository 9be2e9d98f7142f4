"""What prefill remembers of requests that have no grant: RESERVEs kept as offers, rejections, declines. All bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import Reserve


@dataclass(slots=True, eq=False)
class Offer:
    """A RESERVE that came before its ``accept``."""

    session: int
    reserve: Reserve
    layout: LegLayout
    deadline: float
    given_up_at: float

    @property
    def nbytes(self) -> int:
        return len(self.reserve.slices) + sum(len(g.logical) + len(g.pool_pages) for g in self.reserve.groups)


class Offers:
    """Offers by request id and decode rank."""

    def __init__(self, max_offers: int, max_bytes: int) -> None:
        self._max_offers = max_offers
        self._max_bytes = max_bytes
        self._by_request: dict[str, dict[int, Offer]] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Offer]:
        for ranks in self._by_request.values():
            yield from ranks.values()

    def has_room(self, offer: Offer) -> bool:
        return self._count < self._max_offers and self._bytes + offer.nbytes <= self._max_bytes

    def of(self, request_id: str) -> dict[int, Offer]:
        """Offers of one request by rank, in order of arrival; to be read only."""
        return self._by_request.get(request_id, {})

    def add(self, offer: Offer) -> None:
        """The rank must be free and ``has_room`` true."""
        self._by_request.setdefault(offer.reserve.request_id, {})[offer.reserve.rank] = offer
        self._count += 1
        self._bytes += offer.nbytes

    def remove(self, offer: Offer) -> None:
        """Forgets an offer that is here."""
        ranks = self._by_request[offer.reserve.request_id]
        del ranks[offer.reserve.rank]
        if not ranks:
            del self._by_request[offer.reserve.request_id]
        self._count -= 1
        self._bytes -= offer.nbytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine's ``reject``: ``code`` is the engine's own."""

    code: str
    message: str
    expires: float


class Refusals:
    """Requests the engine rejected, each for its time. The oldest gives way when the room is used up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_request: OrderedDict[str, Refused] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, now: float, request_id: str, refused: Refused) -> None:
        self._by_request.pop(request_id, None)
        self._by_request[request_id] = refused
        self._trim(now)

    def get(self, now: float, request_id: str) -> Refused | None:
        refused = self._by_request.get(request_id)
        if refused is not None and refused.expires <= now:
            del self._by_request[request_id]
            return None
        return refused

    def _trim(self, now: float) -> None:
        while self._by_request:
            oldest = next(iter(self._by_request.values()))
            if len(self._by_request) <= self._most and oldest.expires > now:
                return
            self._by_request.popitem(last=False)


class Declines:
    """Ranks that declined a request before its ``accept``: request id → rank → (reason, expiry)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: OrderedDict[tuple[str, int], tuple[str, float]] = OrderedDict()
        self._ranks: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, now: float, request_id: str, rank: int, reason: str, ttl_s: float) -> None:
        key = (request_id, rank)
        self._by_key.pop(key, None)
        self._by_key[key] = (reason, now + ttl_s)
        self._ranks.setdefault(request_id, set()).add(rank)
        while self._by_key:
            oldest, (_, expires) = next(iter(self._by_key.items()))
            if len(self._by_key) <= self._most and expires > now:
                return
            self._drop(oldest)

    def has(self, now: float, request_id: str, rank: int) -> bool:
        found = self._by_key.get((request_id, rank))
        return found is not None and found[1] > now

    def take(self, now: float, request_id: str) -> dict[int, str]:
        """Reasons by rank, forgotten here from now on."""
        taken = {}
        for rank in sorted(self._ranks.get(request_id, ())):
            reason, expires = self._by_key[request_id, rank]
            if expires > now:
                taken[rank] = reason
            self._drop((request_id, rank))
        return taken

    def _drop(self, key: tuple[str, int]) -> None:
        del self._by_key[key]
        ranks = self._ranks[key[0]]
        ranks.discard(key[1])
        if not ranks:
            del self._ranks[key[0]]
