"""``accept`` alone: it must refuse whatever its caller failed to keep away from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import VerificationFailed
from kvxfer.geometry import SLICE_DTYPE, Group, Region
from kvxfer.protocol.acceptance import NAMED_PAGES, LegEvidence, Offer, accept
from kvxfer.protocol.actions import LegReport
from kvxfer.protocol.leg import LegLayout
from kvxfer.protocol.messages import ReserveGroup
from kvxfer.protocol.record import PROGRESS, build, parse

RESERVATION, EPOCH, GENERATION, N_PAGES = 77, b"epoch of 16 byte", 4, 40
END = N_PAGES * 16 - 3


def layout() -> LegLayout:
    groups = [Group("kv", 16, 64, (Region("l0", "f2", 64, 64),))]
    slices = np.array([(0, 0, 0, 0, 0, 1, 64, 0, 0, 0, 0)], SLICE_DTYPE).tobytes()
    pages = np.arange(N_PAGES, dtype="<u8").tobytes()
    return LegLayout.of(groups, slices, [ReserveGroup(0, 0, END, pages, pages)])


def offer(**changed: Any) -> Offer:
    fields: dict[str, Any] = {
        "reservation": RESERVATION, "request_id": "r", "verify": "digest", "end_token": END, "group_names": ("kv",),
    }  # fmt: skip
    return Offer(**(fields | changed))


def evidence(
    change_record: Callable[[int], dict[str, Any]] = lambda lane: {}, folds: Any = None, **changed: Any
) -> LegEvidence:
    """One leg on two lanes: even chunks on lane 0, odd ones on lane 1, everything landed and true."""
    made = layout()
    true_folds = np.arange(1, made.n_folds + 1, dtype=np.uint64)
    bitmaps = {0: sum(1 << k for k in range(0, N_PAGES, 2)), 1: sum(1 << k for k in range(1, N_PAGES, 2))}
    records = {}
    for lane, bitmap in bitmaps.items():
        fields: dict[str, Any] = {
            "reservation": RESERVATION, "epoch": EPOCH, "generation": GENERATION, "leg": 2, "lane": lane, "n_lanes": 2,
            "ranges": [(0, 0, END)], "n_chunks": N_PAGES, "bitmap": bitmap, "n_tokens": END,
            "folds": true_folds if lane == 0 else None, "aux": b"aux" if lane == 0 else None,
        }  # fmt: skip
        records[lane] = parse(build(**(fields | change_record(lane))))
    landed = {lane: bitmap.to_bytes(5, "little") for lane, bitmap in bitmaps.items()}
    report = LegReport(landed, true_folds if folds is None else folds, 0, 64 * N_PAGES)
    leg: dict[str, Any] = {
        "leg": 2, "epoch": EPOCH, "generation": GENERATION, "lanes": (0, 1), "carries_aux": True, "layout": made,
        "records": records, "report": report,
    }  # fmt: skip
    return LegEvidence(**(leg | changed))


def test_true_evidence_is_accepted() -> None:
    accepted = accept(offer(), [evidence()])
    assert (accepted.n_tokens, accepted.aux, accepted.bytes_landed) == (END, b"aux", 64 * N_PAGES)


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": PROGRESS},
        {"reservation": 78},
        {"epoch": bytes(16)},
        {"generation": 3},
        {"leg": 1},
        {"lane": 5},
        {"n_lanes": 3},
    ],
)
@pytest.mark.parametrize("on", [0, 1])
def test_one_record_that_is_not_this_legs_is_refused(changed: dict[str, Any], on: int) -> None:
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(), [evidence(lambda lane: changed if lane == on else {})])
    assert refused.value.details["kind"] == "record"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_lane_without_its_record_is_refused_even_if_nothing_was_posted_on_it(missing: int) -> None:
    leg = evidence(lambda lane: {"bitmap": 0 if lane == missing else (1 << N_PAGES) - 1})
    leg.records = {lane: record for lane, record in leg.records.items() if lane != missing}
    leg.report = LegReport(
        {1 - missing: ((1 << N_PAGES) - 1).to_bytes(5, "little"), missing: bytes(5)}, leg.report.folds, 0, 1
    )
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(verify="coverage"), [leg])
    assert (refused.value.details["kind"], refused.value.details["lanes"]) == ("record", [missing])


def test_a_record_on_a_lane_that_is_not_the_legs_is_refused() -> None:
    with pytest.raises(VerificationFailed):
        accept(offer(), [evidence(lanes=(0,))])


def test_a_record_that_counts_other_chunks_is_refused() -> None:
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(), [evidence(lambda lane: {"n_chunks": N_PAGES + 1})])
    assert refused.value.details["kind"] == "record"


@pytest.mark.parametrize("stray_on", [0, 1])
def test_a_chunk_that_landed_on_a_lane_whose_record_did_not_post_it_is_refused(stray_on: int) -> None:
    """Its other lane posted it and it landed there too, so that nothing is missing: two lanes wrote one place."""
    leg = evidence()
    landed = dict(leg.report.lane_bitmaps)
    other_page = 7 - stray_on  # one of the chunks that the other lane carries
    landed[stray_on] = (int.from_bytes(landed[stray_on], "little") | 1 << other_page).to_bytes(5, "little")
    leg.report = LegReport(landed, leg.report.folds, 0, 64 * (N_PAGES + 1))
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(), [leg])
    details = refused.value.details
    assert (details["kind"], details["logical_pages"]) == ("coverage", {"kv": [other_page]})
    assert details["findings"] == ["chunks landed that no record posted on that lane"]


def test_a_reservation_without_legs_is_refused() -> None:
    with pytest.raises(VerificationFailed):
        accept(offer(), [])


def test_one_bad_leg_of_two_refuses_both() -> None:
    bad = evidence(folds=np.zeros(10, np.uint64), leg=2)
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(), [evidence(), bad])
    assert refused.value.details["kind"] == "digest"


def test_an_error_names_a_bounded_number_of_pages_and_counts_them_all() -> None:
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(), [evidence(lambda lane: {"bitmap": 0}, folds=np.zeros(10, np.uint64))])
    details = refused.value.details
    assert details["pages_refused"] == N_PAGES
    assert details["logical_pages"] == {"kv": list(range(NAMED_PAGES))}
    assert details["legs"] == [2] and details["groups"] == ["kv"]


def test_digests_are_compared_only_where_they_were_asked_for() -> None:
    untaken = evidence(lambda lane: {"folds": None}, folds=np.zeros(0, np.uint64))
    assert accept(offer(verify="coverage"), [untaken]).n_tokens == END
    with pytest.raises(VerificationFailed):
        accept(offer(), [untaken])


def test_the_token_count_is_compared_even_where_no_group_has_pages() -> None:
    made = LegLayout.of([Group("kv", 16, 64, (Region("l0", "f2", 64, 64),))], b"", [ReserveGroup(0, 0, 8, b"", b"")])
    empty: dict[str, Any] = {"layout": made, "report": LegReport({0: b"", 1: b""}, np.zeros(0, np.uint64), 0, 0)}

    def committed(tokens: int) -> LegEvidence:
        none = np.zeros(0, np.uint64)
        return evidence(
            lambda lane: {
                "n_chunks": 0, "bitmap": 0, "n_tokens": tokens, "ranges": [], "folds": none if lane == 0 else None,
            },
            **empty,
        )  # fmt: skip

    assert accept(offer(end_token=8), [committed(8)]).n_tokens == 8
    with pytest.raises(VerificationFailed) as refused:
        accept(offer(end_token=8), [committed(1)])
    assert refused.value.details["kind"] == "tokens"
