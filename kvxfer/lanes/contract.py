"""The lane contract: what every kind of lane does, and what each promises.

Every lane gives the sender ``post`` (queue writes of a leg), ``progress`` (a record between writes), ``commit`` (close
admission, then a record behind the writes) and ``close_admission`` (nothing more is posted; *drained* follows), and the
receiver ``fence`` (when it returns, no further byte from this peer lands on this lane). Completions of both sides come
through one queue with an eventfd. The native ``Sender`` and ``Receiver`` implement it; one conformance suite runs on
every kind. What a lane cannot promise it does not claim.
"""

from __future__ import annotations

from dataclasses import dataclass

LOCAL = "local"
TCP = "tcp"


@dataclass(frozen=True, slots=True)
class LanePromise:
    """What one kind of lane promises.

    Attributes:
        kind: its name in offers, events and metrics.
        writer: the side whose threads store into decode's pages.
        revocable: the receiver can take away the means to write from one leg, and leave the others theirs.
        drained: what must have happened before sources count as no longer read.
        fence: what makes it true that no further byte lands.
        needs_same_host: both processes must share a kernel and a network namespace.
    """

    kind: str
    writer: str
    revocable: bool
    drained: str
    fence: str
    needs_same_host: bool


PROMISES: dict[str, LanePromise] = {
    LOCAL: LanePromise(
        kind=LOCAL,
        writer="decode",
        revocable=True,
        drained="decode confirmed the leg's record on this lane, or the leg's source generation was raised, so that "
        "decode discards what it copies from then on",
        fence="decode's own copiers are joined: nobody else can write its pages",
        needs_same_host=True,
    ),
    TCP: LanePromise(
        kind=TCP,
        writer="decode",
        revocable=True,
        drained="the socket accepted every byte of the leg, or took zeros in their place after an abort",
        fence="the sockets are closed and their readers joined: nobody else can write its pages",
        needs_same_host=False,
    ),
}
