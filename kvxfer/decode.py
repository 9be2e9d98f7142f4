"""DecodeEndpoint: reserves pages, receives into them, and hands them to the engine once they are READY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvxfer.control.codec import check_request_id
from kvxfer.decode_executor import DecodeExecutor
from kvxfer.endpoint import DEFAULT_CLOSE_TIMEOUT_S
from kvxfer.errors import (
    Closed,
    DeadlineExceeded,
    GeometryError,
    KvxferError,
    NotReady,
    PagesQuarantined,
    PeerLost,
)
from kvxfer.handoff import _MAKE, Handoff, Ready
from kvxfer.ledger import PageState
from kvxfer.pages import Pages
from kvxfer.protocol.actions import Notify


@final
class DecodeEndpoint(DecodeExecutor):
    """Decode's side of kvxfer: one for each pool that receives pages. Thread-safe.

    Args:
        pool: the pages that handoffs land in.
        keys: CURVE keys (``kvxfer keygen``); needed to dial beyond loopback unless ``insecure``.
        insecure: allow peers beyond loopback without keys.
        sidecar: not available yet; must be None.
        config: fields of ``protocol.config.DecodeConfig`` (``verify``, ``max_context_tokens``, ``lane_kinds``,
            time-outs, ...).

    Raises:
        NotImplementedError: ``sidecar`` was given.
        TypeError: an unknown configuration field.
    """

    def reserve(
        self,
        request_id: str,
        pages: Mapping[str, Pages],
        *,
        prefill: str | Sequence[str],
        incarnation: str | Sequence[str | None] | None = None,
        readers: int = 1,
        rank: int = 0,
        timeout_s: float,
        tag: Any = None,
    ) -> Handoff:
        """Offers pages to a request; returns at once. The outcome is an event, ``Handoff.wait`` or ``await``.

        Args:
            request_id: the engine's id, unique among live reservations of this endpoint.
            pages: by group name, which logical pages are wanted and the pool pages they go to.
            prefill: control address of the prefill, or of every rank of it, in order ("host:port").
            incarnation: ``PrefillEndpoint.incarnation`` as it came with the request, one or one a rank; a prefill
                that has restarted since then fails the reservation with PeerRestarted.
            readers, rank: how many decode ranks reserve for this request, and which one this is.
            timeout_s: from this call, dialling included, to READY; the reservation then fails with DeadlineExceeded.
                ``Handoff.extend`` adds.
            tag: comes back in events.

        Raises, for local reasons only:
            GeometryError, OwnershipError, CapacityError, DuplicateRequest, PeerRestarted (already known),
            InsecureEndpoint, ConfigurationError (addresses), Closed.
        """
        peers = (prefill,) if isinstance(prefill, str) else tuple(prefill)
        check_request_id(request_id)
        packed = self._pack(request_id, pages)
        for peer in peers:
            self._check_peer(peer)
        with self._lock:
            self._check_open()
            reservation, actions = self._core.reserve(
                self._now(),
                request_id=request_id,
                pages=packed,
                prefill=peers,
                incarnation=_incarnations(incarnation, len(peers)),
                readers=readers,
                rank=rank,
                timeout_s=timeout_s,
            )
            handoff = Handoff(_MAKE, self, reservation, request_id, tag, dict(pages))
            self._handoffs[reservation] = handoff
            self._drive(actions)
            self._rearm()
            self._core.prepare(reservation)
        return handoff

    def decline(
        self, request_id: str, *, prefill: str | Sequence[str], reason: str = "declined", rank: int = 0
    ) -> None:
        """Tells prefill that this request's pages are not wanted (full prefix hit, aborted before allocation).

        Returns at once. Raises GeometryError, InsecureEndpoint, ConfigurationError (addresses), Closed.
        """
        peers = (prefill,) if isinstance(prefill, str) else tuple(prefill)
        check_request_id(request_id)
        for peer in peers:
            self._check_peer(peer)
        with self._lock:
            self._check_open()
            self._drive(self._core.decline(self._now(), request_id, peers, reason, rank))
            self._rearm()

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Ends every handoff, fences every lane, and waits for the fences; idempotent.

        Raises PagesQuarantined if a writer could not be proven silent within ``timeout_s``: the pool's memory is then
        kept alive by the endpoint, and ``close`` may be called again.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                return
            first = not self._closing
            self._closing = True
            if first:
                self._drive(self._core.close(self._now(), "the decode endpoint closes"))
                self._rearm()
        quiet = self._wait_until(lambda: self._core.is_closed and not self._reactor.led, timeout_s)
        if not quiet:
            outstanding = self._core.outstanding()
            raise PagesQuarantined(
                "pages are still quarantined: a writer could not be proven silent; their memory is kept, call close() "
                "again",
                timeout_s=timeout_s,
                outstanding={f"{reservation:016x}": pages for reservation, pages in outstanding.items()},
            )
        self._shut_down()

    # ---- for Handoff and Ready ---------------------------------------------------------------------------------------

    def _extend(self, reservation: int, seconds: float) -> None:
        with self._lock:
            self._check_open()
            self._drive(self._core.extend(self._now(), reservation, seconds))
            self._rearm()

    def _abort(self, reservation: int, reason: str) -> None:
        self._check_process()
        with self._lock:
            if self._closing or reservation not in self._handoffs:
                return
            self._drive(self._core.abort(self._now(), reservation, reason))
            self._rearm()

    def _read_page(
        self, reservation: int, request_id: str, group: str, layer: str | int, page: int
    ) -> npt.NDArray[np.uint8]:
        self._check_process()
        with self._lock:
            if self._closing:
                raise Closed("the decode endpoint is closed", reservation=reservation, request_id=request_id)
            space = self._pool.geometry.groups[self._pool.geometry.group_index(group)].id_space
            ledger = self._pool._ledger
            if ledger.owner_of(space, page) != reservation or ledger.state_of(space, page) != PageState.READY:
                raise NotReady(
                    f"page {page} of group {group!r} has been given up or reserved anew since this handoff",
                    reservation=reservation,
                    request_id=request_id,
                )
            return self._pool.page(group, layer, page)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _settle(self, action: Notify) -> tuple[Any, bool]:
        handoff = self._handoffs.get(action.key)
        if handoff is None:
            return None, True
        if action.kind == "ready":
            n_tokens, aux, stats = self._core.ready(action.key)
            handoff._ready = Ready(_MAKE, self, action.key, action.request_id, handoff._pages, n_tokens, aux, stats)
        elif action.kind == "failed":
            handoff._error = self._explained(action.error)
        elif action.kind == "released":
            handoff._released = True
        if action.kind in ("ready", "released"):
            del self._handoffs[action.key]
        told = False
        if action.kind in ("ready", "failed"):
            told = bool(handoff._waiters)  # it is in a wait call, which reports this and nothing else
            self._wakes += handoff._take_wakes()
        return handoff.tag, told

    def _explained(self, error: KvxferError | None) -> KvxferError | None:
        """Adds what the socket knows of a peer that did not answer."""
        if isinstance(error, (PeerLost, DeadlineExceeded)):
            for link in self._links.values():
                trouble = link.client.trouble() if link.peer == error.peer else None
                if trouble is not None:
                    error.details["connection"] = trouble
        return error

    def _pack(
        self, request_id: str, pages: Mapping[str, Pages]
    ) -> dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int | None, int | None]]:
        packed = {}
        for name, wanted in pages.items():
            try:
                index = self._pool.geometry.group_index(name)
            except KeyError:
                raise GeometryError(
                    f"the pool has no group {name!r}; it has {[group.name for group in self._pool.geometry.groups]}",
                    request_id=request_id,
                ) from None
            if not isinstance(wanted, Pages):
                raise GeometryError(f"pages of group {name!r} must be given as kvxfer.Pages", request_id=request_id)
            packed[index] = (wanted.logical, wanted.pool, wanted.first_token, wanted.n_tokens)
        return packed


def _incarnations(incarnation: str | Sequence[str | None] | None, n_peers: int) -> list[bytes | None]:
    given = [incarnation] * n_peers if incarnation is None or isinstance(incarnation, str) else list(incarnation)
    if len(given) != n_peers:
        raise GeometryError("give one incarnation, or one a prefill rank", prefills=n_peers, incarnations=len(given))
    try:
        return [None if one is None else bytes.fromhex(one) for one in given]
    except ValueError:
        raise GeometryError("an incarnation is the hexadecimal string that PrefillEndpoint.incarnation gives") from None
