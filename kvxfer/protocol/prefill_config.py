"""What may be set at prefill. Times in seconds; every bound on what a peer can make prefill remember is here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxfer.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Configuration of ``PrefillCore``. Raises ConfigurationError for values that cannot work.

    Attributes:
        verify: ``digest``, or ``coverage``, which must be asked for by name on both sides.
        max_context_tokens: the longest context the engine serves; 0: not stated, only single requests are then checked.
        accept_smaller_capacity: open sessions although one pool cannot hold one full context (S4).
        heartbeat_s: how often decode is asked to show that it lives.
        heartbeat_timeout_s: silence after which a session is closed and its lanes are destroyed.
        drain_timeout_s: wait for a leg whose admission was closed, or whose lane broke, before its session is closed.
        transfer_timeout_s: wait, from commit, for a leg's bytes to leave; at least the reservation's own deadline.
        done_timeout_s: wait for decode's word on a leg once its sources are free.
        failed_repeat_s: how often FAILED is repeated until decode answers.
        offer_grace_s: how long beyond its deadline a RESERVE without a grant is kept: decode may extend the deadline.
        decline_ttl_s: how long a DECLINE without a grant is remembered.
        refusal_interval_s: a stranger gets at most one REFUSE in this time.
        close_grace_s: ``close`` lets committed grants finish for so long.
        max_sessions, max_legs, max_grants: sessions, live legs of one session, live grants.
        max_readers: decode ranks of one request.
        max_offers, max_offer_bytes: RESERVEs kept without a grant, over all sessions.
        max_rejects, max_declines: requests remembered as rejected or declined.
        max_answers: last words on ended legs kept for each session, for repeated questions.
        max_aux_bytes: bytes of aux in one commit.
        max_fetched_digests: chunk digests in one answer.
    """

    verify: str = "digest"
    max_context_tokens: int = 0
    accept_smaller_capacity: bool = False
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 6.0
    drain_timeout_s: float = 5.0
    transfer_timeout_s: float = 60.0
    done_timeout_s: float = 30.0
    failed_repeat_s: float = 0.5
    offer_grace_s: float = 30.0
    decline_ttl_s: float = 60.0
    refusal_interval_s: float = 0.2
    close_grace_s: float = 1.0
    max_sessions: int = 1024
    max_legs: int = 4096
    max_grants: int = 65536
    max_readers: int = 1024
    max_offers: int = 4096
    max_offer_bytes: int = 256 << 20
    max_rejects: int = 65536
    max_declines: int = 65536
    max_answers: int = 1024
    max_aux_bytes: int = 16 << 20
    max_fetched_digests: int = 1 << 16

    def __post_init__(self) -> None:
        if self.verify not in ("digest", "coverage"):
            raise ConfigurationError(f"verify is 'digest' or 'coverage', not {self.verify!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 <= value < float("inf"):
                raise ConfigurationError(f"{field.name} must be a finite number of seconds, not {value!r}")
            if field.name.startswith("max_") and value < (0 if field.name == "max_context_tokens" else 1):
                raise ConfigurationError(f"{field.name} must be positive, not {value!r}")
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            raise ConfigurationError("heartbeat_timeout_s must exceed heartbeat_s")
