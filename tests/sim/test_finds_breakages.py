"""The simulator would see it: with a rule taken out it finds a violation within a few seeds.

The protocol's rules are taken out as ``tests/rules`` does it. What stands behind them, fences, revokes and the sender's
core, is broken here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.protocol.actions import Action, Revoke
from kvxfer.sim.campaign import Found, run_seeds
from kvxfer.sim.content import chunk_content
from kvxfer.sim.decode_node import DecodeNode
from kvxfer.sim.lane_group import LaneGroup
from kvxfer.sim.prefill_node import PrefillNode
from kvxfer.sim.sender_leg import SenderLeg

SEEDS = 150

RULES = {
    "S1-tokens": "S1-tokens",
    "S1-every-chunk": "S1-unconfirmed",
    "S1-digests": "S1-foreign",
    "S2-never-on-time": "S2-",
    "S2-every-leg": "S2-",
    "S2-offered-is-granted": "S2-",
    "S2-revoke-returned": "S2-",
    "S2-receiver-barrier": "S2-",
    "S2-quiesced-after-drain": "S2-",
    "S3-readers-to-come": "S3-",
    "S3-closing-is-read": "S3-",
    "S5-owned-pages": "S5-owner",
    "S6-reservation": "S6-",
    "S6-hello": "S6-",
    "S6-lost-done": "S6-",
}
"""Breakage by its id in tests/rules -> how the kind of violation begins."""


@pytest.mark.parametrize(("breakage", "kind"), RULES.items(), ids=RULES)
def test_a_rule_taken_out_of_the_protocol_is_found(breakage: str, kind: str) -> None:
    broken = Path(__file__).with_name("broken.py")
    found = subprocess.run(
        [sys.executable, str(broken), str(SEEDS), breakage], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found, f"{SEEDS} seeds do not notice"
    assert found[1].startswith(kind)


def first_found(seeds: int = SEEDS) -> Found:
    for seed in range(seeds):
        found = run_seeds(seed, 1).found
        if found:
            return found[0]
    pytest.fail(f"{seeds} seeds do not notice")


def test_a_fence_that_returns_while_bytes_can_still_land_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneGroup, "fence", lambda self: None)
    assert first_found().kind in ("S2-late-write", "S2-still-writable")


def test_a_revoke_that_takes_nothing_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def revoke(self: DecodeNode, action: Revoke) -> Sequence[Action]:
        return self.core.revoked(self.clock(), action.session, action.reservation, action.leg)

    make = DecodeNode.__init__

    def init(self: DecodeNode, *given: Any) -> None:
        make(self, *given)
        self.handlers[Revoke] = lambda action: revoke(self, action)

    monkeypatch.setattr(DecodeNode, "__init__", init)
    assert first_found().kind in ("S2-late-write", "S2-still-writable")


def test_an_error_completion_that_counts_as_drained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = PrefillNode.leg_reported

    def drained(self: PrefillNode, leg: SenderLeg) -> None:
        leg.end = "drain"
        report(self, leg)

    monkeypatch.setattr(PrefillNode, "leg_reported", drained)
    assert first_found().kind.startswith(("S2-", "S3-"))


def test_digests_taken_at_commit_instead_of_at_write_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SenderLeg.record

    def late(self: SenderLeg, lane: int) -> bytes:
        cells = self.group.prefill.sources.cells
        for ordinal in self.content:
            place = self.places.places[ordinal]
            page = self.grant.written[place.source][0]
            self.content[ordinal] = chunk_content(cells[(*place.source[:2], page)], place.unit, place.units)
        return record(self, lane)

    monkeypatch.setattr(SenderLeg, "record", late)
    assert first_found().kind == "S1-foreign"


def test_a_record_that_claims_what_was_asked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SenderLeg.record

    def claims(self: SenderLeg, lane: int) -> bytes:
        if lane == self.reserve.lanes[0]:
            others = 0
            for other, bitmap in self.posted.items():
                others |= bitmap if other != lane else 0
            self.posted[lane] = self.places.layout.expected & ~others
            for ordinal in range(self.places.layout.n_chunks):
                self.content.setdefault(ordinal, 0)
        return record(self, lane)

    monkeypatch.setattr(SenderLeg, "record", claims)
    assert first_found(400).kind == "S1-unconfirmed"


def test_a_leg_that_is_called_drained_and_goes_on_posting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = SenderLeg.close

    def goes_on(self: SenderLeg, end: str, cause: str = "") -> None:
        if end == "fail":
            close(self, end, cause)
        elif not self.reported:
            self.reported = True
            self.group.prefill.leg_reported(self)

    monkeypatch.setattr(SenderLeg, "close", goes_on)
    assert first_found().kind.startswith(("S2-", "S3-"))
