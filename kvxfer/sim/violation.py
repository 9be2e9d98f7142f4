"""What a run ends with when a rule does not hold."""

from __future__ import annotations


class Violation(Exception):
    """A rule is broken. ``kind`` is a stable name, by which a smaller run is recognised as the same failure.

    Kinds: S1-unconfirmed, S1-foreign, S1-tokens, S2-late-write, S2-still-writable, S3-read, S3-still-readable,
    S5-owner, S5-lost, S6-deadline, S6-endless, S6-memory, S7-exception, S7-order, S8-twice, fair.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
