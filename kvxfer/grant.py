"""Prefill's view of one request: ``Grant`` for one, ``Plan`` for a batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from kvxfer.errors import DuplicateWrite, KvxferError
from kvxfer.pages import Pages

if TYPE_CHECKING:
    from kvxfer import _native
    from kvxfer.prefill import PrefillEndpoint

_MAKE = object()
Layers = str | int | Sequence[str | int] | None


@final
class Grant:
    """One request's source pages and all readers they go to. Made by ``PrefillEndpoint.accept``. Thread-safe.

    The source of a page is pinned from the call of ``write`` until ``released`` (S3): the engine must neither change
    nor reuse it before.
    """

    __slots__ = (
        "_committing",
        "_endpoint",
        "_error",
        "_events",
        "_id",
        "_pending",
        "_pins",
        "_released",
        "_source",
        "_waited_for",
        "request_id",
        "tag",
    )

    def __init__(
        self,
        token: object,
        endpoint: PrefillEndpoint,
        grant: int,
        source: _native.SourceGrant,
        request_id: str,
        tag: Any,
    ) -> None:
        if token is not _MAKE:
            raise TypeError("a Grant is made by PrefillEndpoint.accept only")
        self._endpoint = endpoint
        self._id = grant
        self._source = source
        self.request_id = request_id
        self.tag = tag
        self._error: KvxferError | None = None
        self._released = False
        self._events: set[str] = set()  # kinds told so far
        self._waited_for = False  # a wait call has told its caller of the end: later events are not repeated by poll
        self._committing = False  # commit was called and waits behind those writes
        self._pins: list[dict[int, npt.NDArray[np.uint64]]] = []  # pages pinned in the pool, by id space
        self._pending = 0  # writes whose events have not happened yet

    def write(
        self, pages: Mapping[str, Pages], *, layers: Layers = None, after: Any = None, progress: bool = False
    ) -> None:
        """Sends pages to every reader that reserved, or will reserve, them. Their bytes are digested at this call.

        Args:
            pages: by group; ``Pages.pool`` are pages of this pool. A page is written once in each layer, when it is
                final.
            layers: what is written now, as ``PagePool.regions_of`` takes it: a layer's name or number (all regions of
                that layer), or one region's own name; None: all regions of each group.
            after: None (the bytes are there), or an object with ``synchronize()`` such as a CUDA event: the call
                returns at once, and the write happens after it. Errors that show only then fail the grant.
            progress: tells decode's core that a batch has ended.

        Raises OwnershipError for pages that a reservation of this pool still waits for, GeometryError,
        DuplicateWrite, AdmissionClosed, Closed; nothing of the group concerned has been sent
        then.
        """
        endpoint = self._endpoint
        batches = endpoint._batches(self.request_id, pages, layers)
        if after is None:
            endpoint._write_now(self, batches, progress)
        else:
            endpoint._write_after(self, batches, after, progress)

    def commit(self, n_tokens: int, aux: bytes = b"") -> None:
        """Says that everything was written; returns at once. Queues behind writes that wait for their events.

        ``n_tokens`` counts from token 0. ``aux`` goes to every reader with the record. Raises GeometryError where a
        written page lies beyond ``n_tokens`` or aux is too long, CapacityError, AdmissionClosed, Closed; the grant is
        then as it was.
        """
        self._endpoint._commit(self, n_tokens, bytes(aux))

    def abort(self, reason: str = "aborted by the engine", *, drain_timeout_s: float | None = None) -> bool:
        """Gives the grant up. True: no lane reads the source any more, the pages may be reused.

        Without ``drain_timeout_s`` it returns at once with what holds now, and ``released`` follows; with it, it
        waits that long at most. Idempotent; after ``released`` it is True and changes nothing. A reader whose
        reservation comes only afterwards is not told: ``PrefillEndpoint.reject`` does that.
        """
        return self._endpoint._abort(self, reason, drain_timeout_s)

    @property
    def first_token(self) -> int | None:
        """The lowest first token that a reader asked for (what lies before it is a prefix hit).

        None before the first reader has reserved, and once the grant is over.
        """
        return self._endpoint._first_token(self._id)

    @property
    def state(self) -> str:
        """``offered``, ``writing``, ``committed``, ``done``, ``draining``, ``ended`` or ``fenced``."""
        return self._endpoint._state(self._id)

    @property
    def error(self) -> KvxferError | None:
        return self._error

    @property
    def skipped_chunks(self) -> int:
        """Chunks written that a reader had not reserved (its prefix hits), over all readers attached now."""
        return self._endpoint._skipped(self)

    @property
    def released(self) -> bool:
        """True once no lane reads the source pages."""
        return self._released

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until the source pages may be reused; False if they may not yet.

        Afterwards ``poll`` has no more events of this grant: a program that waits need not poll.
        """
        endpoint = self._endpoint
        endpoint._check_process()
        reached = endpoint._wait_until(lambda: self._released, timeout_s)
        if reached:
            self._waited_for = True
            endpoint._events.consume(self._id, "offered", "ready", "failed", "released")
        return reached

    def __reduce__(self) -> Any:
        raise TypeError("a Grant belongs to one process and cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"Grant(request_id={self.request_id!r}, released={self._released})"


Batch = tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint32]]
"""What one native write takes: group, logical pages, pool pages, regions."""


PlanEntry = tuple[Grant, list[tuple[int, Mapping[str | int | None, npt.NDArray[np.uint32]], Pages]]]
"""One request of a plan: by group its index, its regions by layer, and the pages."""


@final
class Plan:
    """The writes of a whole batch of requests, prepared once and carried out layer by layer. Made by
    ``PrefillEndpoint.plan``."""

    __slots__ = ("_endpoint", "_entries", "_lock", "_written")

    def __init__(self, endpoint: PrefillEndpoint, entries: Sequence[PlanEntry]) -> None:
        self._endpoint = endpoint
        self._entries = entries
        self._lock = threading.Lock()
        self._written: set[str | int] = set()

    def write(self, layer: str | int, *, after: Any = None, progress: bool = False) -> None:
        """Writes one layer of every request of the plan, named as for ``Grant.write``.

        A grant that has ended meanwhile is passed over: its own event says so, and the others go on. Raises
        DuplicateWrite where the layer was written before, GeometryError where no group has it, Closed.
        """
        with self._lock:
            if layer in self._written:
                raise DuplicateWrite(f"layer {layer!r} of this plan was written before; each layer is written once")
            self._endpoint._write_plan(self._entries, layer, after, progress)
            self._written.add(layer)
