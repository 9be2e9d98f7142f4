"""PrefillEndpoint: offers a worker's pages to decode, writes them when they are computed, and commits."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from kvxfer.control.codec import check_request_id
from kvxfer.endpoint import DEFAULT_CLOSE_TIMEOUT_S
from kvxfer.errors import (
    AdmissionClosed,
    DuplicateWrite,
    GeometryError,
    KvxferError,
    PagesQuarantined,
)
from kvxfer.grant import _MAKE, Batch, Grant, Layers, Plan, PlanEntry
from kvxfer.pages import Pages
from kvxfer.prefill_executor import PrefillExecutor
from kvxfer.protocol.actions import Notify
from kvxfer.record_bounds import MAX_AUX_BYTES
from kvxfer.region_table import RegionsByLayer


@final
class PrefillEndpoint(PrefillExecutor):
    """Prefill's side of kvxfer: one for each worker (rank). Dialable as soon as it is made. Thread-safe.

    Args:
        pool: the pages that are written from.
        bind: control address, "host:port"; port 0 takes a free one. IPv4, IPv6 ("[::1]:0") or a host name.
        advertise_host: what peers should dial, where ``bind`` is a wildcard.
        keys, insecure: as for ``DecodeEndpoint``.
        sidecar: not available yet; must be None.
        config: fields of ``protocol.config.PrefillConfig``, and ``local_lanes`` / ``tcp_lanes`` (how many of each
            kind a session gets; 0 switches a kind off).

    Attributes:
        address, port: where it listens.
        incarnation: names this life of the worker (hexadecimal); send it along with the request.

    Raises InsecureEndpoint for a bind beyond loopback without keys, OSError or KvxferError where it cannot bind.
    """

    def accept(self, request_id: str, *, readers: int | None = None, timeout_s: float, tag: Any = None) -> Grant:
        """Registers interest in a request; returns at once. Writing may start before decode has reserved.

        ``timeout_s`` starts at ``commit`` and ends when all readers have reserved. ``readers``: how many decode ranks
        will reserve; None: their reservations say so.

        Raises DuplicateRequest (the live grant is untouched), Rejected (``reject`` is remembered), GeometryError (a
        senseless time or count), CapacityError (too many live grants), Closed.
        """
        check_request_id(request_id)
        with self._lock:
            self._check_open()
            grant_id, actions = self._core.accept(self._now(), request_id, readers=readers, timeout_s=timeout_s)
            grant = Grant(_MAKE, self, grant_id, self._sender.grant(grant_id), request_id, tag)
            self._grants[grant_id] = grant
            self._drive(actions)
            self._rearm()
        return grant

    def reject(self, request_id: str, code: str, message: str, *, ttl_s: float = 60.0) -> None:
        """Refuses a request, whether decode has reserved for it already or comes within ``ttl_s``."""
        check_request_id(request_id)
        with self._lock:
            self._check_open()
            self._drive(self._core.reject(self._now(), request_id, code, message, ttl_s))
            self._rearm()

    def plan(self, entries: Sequence[tuple[Grant, Mapping[str, Pages]]]) -> Plan:
        """Prepares the writes of a batch: then ``plan.write(layer)`` is one call a layer.

        Raises GeometryError, Closed.
        """
        self._check_open()
        prepared: list[PlanEntry] = []
        for grant, pages in entries:
            if grant._endpoint is not self:
                raise GeometryError("a plan takes grants of its own endpoint only", request_id=grant.request_id)
            checked = [(self._check_pages(grant.request_id, name, given), given) for name, given in pages.items()]
            prepared.append((grant, [(group, by_layer, given) for (group, by_layer), given in checked]))
        return Plan(self, prepared)

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Aborts every grant, destroys every lane and waits until no source is read; idempotent.

        Raises PagesQuarantined where a source may still be read after ``timeout_s``; call it again.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                return
            first = not self._closing
            self._closing = True
            if first:
                self._drive(self._core.close(self._now(), "the prefill endpoint closes"))
                self._rearm()
        if not self._wait_until(lambda: self._core.is_closed, timeout_s):
            raise PagesQuarantined(
                "source pages may still be read; their memory is kept, call close() again",
                timeout_s=timeout_s,
                outstanding=[str(one) for one in self._core.outstanding()],
            )
        self._shut_down()

    # ---- for Grant and Plan ------------------------------------------------------------------------------------------

    def _batches(self, request_id: str, pages: Mapping[str, Pages], layers: Layers) -> list[Batch]:
        """What one write call is in the core's words. Raises GeometryError."""
        wanted = None if layers is None else (layers,) if isinstance(layers, (str, int)) else tuple(layers)
        batches: list[Batch] = []
        unknown = set(wanted or ())
        for name, given in pages.items():
            group, by_layer = self._check_pages(request_id, name, given)
            if wanted is None:
                regions = by_layer[None]
            else:
                found = [by_layer[layer] for layer in wanted if layer in by_layer]
                unknown.difference_update(by_layer)
                if not found:
                    continue
                regions = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
            if len(given.logical):
                batches.append((group, given.logical, given.pool, regions))
        if unknown:
            raise GeometryError(f"no group given here has layers {sorted(map(repr, unknown))}", request_id=request_id)
        return batches

    def _check_pages(self, request_id: str, name: str, given: Pages) -> tuple[int, RegionsByLayer]:
        """Index of the group and its regions by layer. Raises GeometryError."""
        known = self._regions.get(name)
        if known is None:
            raise GeometryError(
                f"the pool has no group {name!r}; it has {sorted(self._regions)}", request_id=request_id
            )
        if not isinstance(given, Pages):
            raise GeometryError(f"pages of group {name!r} must be given as kvxfer.Pages", request_id=request_id)
        group, by_layer, n_pages = known
        if len(given.pool) and int(given.pool.max()) >= n_pages:
            raise GeometryError(
                f"page {int(given.pool.max())} lies outside group {name!r}", request_id=request_id, pages=n_pages
            )
        return group, by_layer

    def _write_now(self, grant: Grant, batches: Sequence[Batch], progress: bool) -> None:
        with self._lock:
            self._check_open()
            self._check_write(grant)
            self._pin(grant, batches)
            self._core.note_written(grant._id)
        self._post(grant, batches, progress)

    def _post(self, grant: Grant, batches: Sequence[Batch], progress: bool) -> None:
        """Digests and queues in this thread, without the endpoint's lock: it takes as long as reading the pages."""
        last = len(batches) - 1
        for number, (group, logical, pool, regions) in enumerate(batches):
            try:
                grant._source.write(group, logical, pool, regions, progress and number == last)
            except ValueError as cause:
                raise _write_error(cause, grant.request_id) from None
            except RuntimeError as cause:
                raise AdmissionClosed(
                    f"nothing more can be written to this grant: {cause}", request_id=grant.request_id
                ) from None

    def _write_plan(self, entries: Sequence[PlanEntry], layer: str | int, after: Any, progress: bool) -> None:
        prepared: list[tuple[Grant, list[Batch]]] = []
        for grant, groups in entries:
            having = [(group, by_layer[layer], given) for group, by_layer, given in groups if layer in by_layer]
            if having:
                batches = [(group, g.logical, g.pool, regions) for group, regions, g in having if len(g.logical)]
                prepared.append((grant, batches))
        if entries and not prepared:
            raise GeometryError(f"no group of this plan has layer {layer!r}")
        if after is not None:
            self._write_entries_after(prepared, after, progress)
            return
        for grant, batches in prepared:
            try:
                self._write_now(grant, batches, progress)
            except AdmissionClosed:
                continue

    def _commit(self, grant: Grant, n_tokens: int, aux: bytes) -> None:
        try:
            n_tokens = operator.index(n_tokens)
        except TypeError:
            raise GeometryError("n_tokens must be an integer", request_id=grant.request_id) from None
        if n_tokens < 0:
            raise GeometryError("n_tokens must not be negative", request_id=grant.request_id, n_tokens=n_tokens)
        if len(aux) > MAX_AUX_BYTES:
            raise GeometryError(
                "aux is too long", request_id=grant.request_id, aux_bytes=len(aux), max_aux_bytes=MAX_AUX_BYTES
            )
        with self._lock:
            self._check_open()
            self._check_write(grant)
            self._check_within(grant, n_tokens)
            if grant._pending:
                self._commit_after_pending(grant, n_tokens, aux)
                return
        self._commit_now(grant, n_tokens, aux)

    def _check_within(self, grant: Grant, n_tokens: int) -> None:
        for index, group in enumerate(self._pool.geometry.groups):
            highest = grant._source.highest_logical(index)
            if group.tokens_per_page and highest >= 0 and highest * group.tokens_per_page >= n_tokens:
                raise GeometryError(
                    f"page {highest} of group {group.name!r} was written but lies beyond the committed tokens",
                    request_id=grant.request_id,
                    n_tokens=n_tokens,
                    tokens_per_page=group.tokens_per_page,
                )

    def _abort(self, grant: Grant, reason: str, drain_timeout_s: float | None) -> bool:
        self._check_process()
        with self._lock:
            if grant._released or self._closed:
                return grant._released
            self._drive(self._core.abort(self._now(), grant._id, reason))
            self._rearm()
        if drain_timeout_s is not None:
            self._wait_until(lambda: grant._released, drain_timeout_s)
        return grant._released

    def _first_token(self, grant: int) -> int | None:
        self._check_process()
        with self._lock:
            return self._core.first_token(grant)

    def _state(self, grant: int) -> str:
        self._check_process()
        with self._lock:
            return self._core.state(grant)

    def _skipped(self, grant: Grant) -> int:
        with self._lock:
            return sum(grant._source.skipped(reservation) for _, reservation in self._attached.get(grant._id, ()))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _settle(self, action: Notify) -> tuple[Any, bool]:
        grant = self._grants.get(action.key)
        if grant is None:
            return None, True
        grant._events.add(action.kind)
        if action.kind == "failed":
            grant._error = action.error
        elif action.kind == "released":
            # Lanes have let go; a write that still digests in another thread must, too. The digests stay: decode may
            # yet ask for them to name a chunk.
            grant._source.end_writes()
            self._unpin(grant)
            grant._released = True
        if "released" in grant._events and ("ready" in grant._events or "failed" in grant._events):
            self._drop_grant(action.key)
        return grant.tag, grant._waited_for


def _write_error(cause: ValueError, request_id: str) -> KvxferError:
    text = str(cause)
    if text.startswith("duplicate"):
        return DuplicateWrite(f"{text}; a page is written once in each layer, when it is final", request_id=request_id)
    return GeometryError(text, request_id=request_id)
