"""One session at prefill: epoch and numbering, the lanes' generation, its legs, and its last words on ended ones."""

from __future__ import annotations

from collections import OrderedDict

from kvxfer.protocol.actions import Send
from kvxfer.protocol.leg import SliceTable
from kvxfer.protocol.messages import Failed, Hello, Message, Quiesced, Rejected, Welcome
from kvxfer.protocol.prefill_leg import Leg
from kvxfer.protocol.prefill_memory import Offer

FIRST_GENERATION = 1


class Session:
    """Plain state with the arithmetic that belongs to it; the rules are the core's.

    ``generation`` is the one RESERVE must name. ``opened`` is the highest one whose lanes were asked for; it is ahead
    of ``generation`` while the older lanes are being destroyed. ``wanted`` is the highest one decode asked for.
    """

    __slots__ = (
        "answers", "closing", "down", "epoch", "forgotten_failure", "generation", "heard_at", "hello", "highest_number",
        "id", "lanes_up", "legs", "n_lanes", "offers", "opened", "received", "route", "secret", "sent", "slice_tables",
        "wanted", "welcome",
    )  # fmt: skip

    def __init__(self, session: int, route: bytes, hello: Hello, welcome: Welcome, now: float) -> None:
        self.id = session
        self.route = route
        self.hello = hello
        self.welcome = welcome
        self.epoch = hello.nonce + welcome.nonce
        self.secret = welcome.secret
        self.generation = self.opened = self.wanted = welcome.generation
        self.n_lanes = max(offer.lanes for offer in welcome.offers)
        self.lanes_up: set[int] = set()
        self.down: set[int] = set()
        self.sent = -1
        self.received = -1
        self.heard_at = now
        self.closing = False
        self.highest_number = -1  # the only tombstone: nothing at or below it is ever admitted again
        self.legs: dict[int, Leg] = {}
        self.offers: dict[int, Offer] = {}
        self.answers: OrderedDict[int, tuple[int, Quiesced | Failed | Rejected]] = OrderedDict()
        self.forgotten_failure = -1  # highest number among failed legs whose last word was dropped for room
        self.slice_tables: OrderedDict[bytes, SliceTable] = OrderedDict()

    def send(self, message: Message) -> Send:
        """The message with this session's next number on it."""
        self.sent += 1
        return Send(self.id, message, self.epoch, self.sent, self.route)

    def remember(self, number: int, word: Quiesced | Failed | Rejected, keep: int) -> None:
        """Keeps the last word on a reservation, to be said again; ``keep`` bounds how many."""
        self.answers[word.reservation] = (number, word)
        while len(self.answers) > keep:
            _, (dropped, forgotten) = self.answers.popitem(last=False)
            if isinstance(forgotten, Failed):
                # S2: which of the old reservations did not drain is no longer known, so none of them counts as drained.
                self.forgotten_failure = max(self.forgotten_failure, dropped)

    def slice_table(self, raw: bytes) -> SliceTable:
        """Checked slices; reservations between the same peers share one. Raises ProtocolViolation."""
        table = self.slice_tables.get(raw)
        if table is None:
            table = SliceTable(self.hello.pool.groups, raw, self.welcome.pool.groups)
            self.slice_tables[raw] = table
            if len(self.slice_tables) > 4:
                self.slice_tables.popitem(last=False)
        return table
