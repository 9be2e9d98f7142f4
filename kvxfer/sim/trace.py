"""What happened, in order: a running hash of all of it, and the last part of it to be read by people."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from typing import Any

from kvxfer.protocol import actions as act
from kvxfer.protocol.messages import Message


class Trace:
    """``note`` is called for every event and action, so it formats nothing. ``keep``: how many are kept; 0: none."""

    def __init__(self, keep: int) -> None:
        self._kept: deque[tuple[float, str, str, Any]] = deque(maxlen=keep)
        self._keeps = keep > 0
        self._codes: dict[str, int] = {}
        self.hash = 0
        self.counts: Counter[str] = Counter()

    def note(self, now: float, node: str, what: str, about: Any = None, number: int = 0) -> None:
        """``number`` tells things of one name apart in the hash: a reservation, a sequence."""
        self.counts[what] += 1
        self.hash = hash((self.hash, now, self._code(node), self._code(what), number))
        if self._keeps:
            self._kept.append((now, node, what, about))

    def _code(self, text: str) -> int:
        code = self._codes.get(text)
        if code is None:
            code = self._codes[text] = zlib.crc32(text.encode())  # hash() of text differs between processes
        return code

    def lines(self) -> list[str]:
        """The kept part, oldest first, one line each."""
        return [f"{now:11.4f}  {node:<12} {what:<18} {_about(about)}".rstrip() for now, node, what, about in self._kept]


def _about(about: Any) -> str:
    if about is None:
        return ""
    if isinstance(about, str):
        return about
    if isinstance(about, act.Send):
        return f"s{about.session} #{about.sequence} {_message(about.message)}"
    if isinstance(about, act.Audit):
        at = "".join(
            f" {name}={_hex(value)}"
            for name, value in (("s", about.session), ("r", about.reservation), ("leg", about.leg))
            if value is not None
        )
        return f"{about.event}{at} {_short(about.fields)}"
    if isinstance(about, act.Notify):
        error = "" if about.error is None else f" {type(about.error).__name__}: {about.error.message[:90]}"
        return f"{about.kind} {about.request_id} {_hex(about.key)}{error}"
    if isinstance(about, act.OpenLeg):
        return f"s{about.spec.session} g{about.spec.generation} r={_hex(about.spec.reservation)} leg={about.spec.leg}"
    if isinstance(about, act.Attach):
        return f"grant {about.grant} s{about.session} {_message(about.reserve)}"
    if hasattr(about, "__dataclass_fields__"):
        return _message(about)
    return str(about)


def _message(message: Message | Any) -> str:
    shown = []
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        if name in ("pool", "secret", "offers", "slices", "host", "nonce"):
            continue
        if name == "groups":
            value = [(g.group, g.first_token, g.n_tokens, len(g.logical) // 8) for g in value]
        elif name == "reservation":
            value = _hex(value)
        elif isinstance(value, bytes):
            value = value.hex()[:12]
        shown.append(f"{name}={value}")
    return f"{type(message).__name__} {_short(' '.join(shown))}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 150 else text[:147] + "..."


def _hex(value: Any) -> str:
    return f"{value:x}" if isinstance(value, int) and value > 1 << 20 else str(value)
