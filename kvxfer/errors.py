"""Every error kvxfer raises or reports, in one small tree.

An error says which reservation and which peer it concerns, whether the same request may be tried again under a new
reservation (``retryable``), the numbers involved (``details``), and, in its message, what to do next.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Aborted",
    "AdmissionClosed",
    "CapacityError",
    "Closed",
    "ConfigurationError",
    "DeadlineExceeded",
    "Declined",
    "DuplicateRequest",
    "DuplicateWrite",
    "GeometryError",
    "IncompatiblePool",
    "InsecureEndpoint",
    "KvxferError",
    "LaneFailed",
    "NotReady",
    "OwnershipError",
    "PagesQuarantined",
    "PeerLost",
    "PeerRestarted",
    "ProtocolViolation",
    "Rejected",
    "SourceChanged",
    "VerificationFailed",
]


class KvxferError(Exception):
    """Base of all kvxfer errors.

    Attributes:
        reservation: 64-bit reservation id, or None where no reservation was made.
        request_id: the engine's request id, or None.
        peer: address of the peer concerned, or None.
        retryable: True if the request may be tried again under a new reservation.
        details: the numbers and names involved, JSON-serialisable.
    """

    default_retryable = False

    def __init__(
        self,
        message: str,
        *,
        reservation: int | None = None,
        request_id: str | None = None,
        peer: str | None = None,
        retryable: bool | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reservation = reservation
        self.request_id = request_id
        self.peer = peer
        self.retryable = self.default_retryable if retryable is None else retryable
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        context = []
        if self.request_id is not None:
            context.append(f"request={self.request_id}")
        if self.reservation is not None:
            context.append(f"reservation={self.reservation:016x}")
        if self.peer is not None:
            context.append(f"peer={self.peer}")
        context.extend(f"{name}={value}" for name, value in self.details.items())
        return f"{self.message} [{', '.join(context)}]" if context else self.message


class GeometryError(KvxferError, ValueError):
    """A tensor, page list or argument does not fit the pool it names. Raised locally, nothing was sent."""


class ConfigurationError(KvxferError, ValueError):
    """An address, key file or option that cannot be used as it is; the message says what to write instead."""


class OwnershipError(KvxferError):
    """S5: a page is already owned by a live or quarantined reservation, or claimed twice by this one."""


class CapacityError(KvxferError):
    """S4: the request, or one full context, does not fit. ``details`` carries the needed and available numbers."""


class IncompatiblePool(KvxferError):
    """The two pools cannot exchange pages; ``details`` has ``field``, ``ours`` and ``theirs``."""


class InsecureEndpoint(KvxferError):
    """Binding or dialling beyond loopback without CURVE keys; pass ``keys=`` or say ``insecure=True``."""


class DuplicateRequest(KvxferError):
    """The request id is already in use by a live reservation or grant; the live one is untouched."""


class DuplicateWrite(KvxferError):
    """A page was written twice in one grant (S5: a chunk is posted at most once per leg)."""


class AdmissionClosed(KvxferError):
    """A write or commit after the grant was committed, aborted, rejected or failed."""


class NotReady(KvxferError):
    """S1: a page was asked for that is not in state READY."""


class Closed(KvxferError):
    """The endpoint is closed, or belongs to another process."""


class Rejected(KvxferError):
    """Prefill refused the reservation; ``details['code']`` is its reason."""


class Declined(KvxferError):
    """Decode does not want this request's pages; the grant ends without a handoff."""


class Aborted(KvxferError):
    """One side aborted the handoff."""


class DeadlineExceeded(KvxferError, TimeoutError):
    """S6: a deadline passed. Pages it concerned are released by quiesce or fence only."""

    default_retryable = True


class PeerRestarted(KvxferError):
    """The peer is another incarnation than the one asked for or spoken to."""

    default_retryable = True


class PeerLost(KvxferError):
    """The peer cannot be reached, fell silent or died."""

    default_retryable = True


class LaneFailed(KvxferError):
    """A lane of the leg broke; its generation was fenced."""

    default_retryable = True


class SourceChanged(KvxferError):
    """S3: the source bytes are no longer those that were digested at ``write()``."""

    default_retryable = True


class VerificationFailed(KvxferError):
    """S1: the handoff was refused. ``details['kind']`` is ``tokens``, ``coverage``, ``digest``, ``record`` or
    ``source``."""


class ProtocolViolation(KvxferError):
    """S7: the peer sent something it must not; no state changed by it."""


class PagesQuarantined(KvxferError):
    """S2: pages cannot be released because a writer could not be proven silent; ``details`` says which."""
