"""S1, as one pure function: what must hold before a reserved page may be read.

``accept`` looks at what every leg's sender claims (its commit records) and at what decode's own core saw land (its
reports). Each clause of the rule is one function below, in the order in which a refusal is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.errors import IncompatiblePool, VerificationFailed
from kvxfer.geometry import Group
from kvxfer.protocol.actions import LegReport
from kvxfer.protocol.leg import U64, LegGroup, LegLayout, SliceTable
from kvxfer.protocol.record import COMMIT, Record

NAMED_PAGES = 16
"""How many pages an error names; it always carries the count of all."""


@dataclass(slots=True)
class LegEvidence:
    """One leg: what was offered (fixed at RESERVE), what the sender claims, and what landed."""

    leg: int
    epoch: bytes
    generation: int
    lanes: tuple[int, ...]
    carries_aux: bool
    layout: LegLayout
    records: Mapping[int, Record]  # by the lane each came on
    report: LegReport


@dataclass(frozen=True, slots=True)
class Offer:
    """What decode reserved. ``end_token`` is the number of tokens from token 0 that every group agreed on."""

    reservation: int
    request_id: str
    verify: str
    end_token: int
    group_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    n_tokens: int
    aux: bytes
    bytes_landed: int


@dataclass(slots=True)
class Finding:
    """One reason for refusing. ``pages`` are (group, indices into its page list)."""

    kind: str
    text: str
    leg: int
    pages: list[tuple[LegGroup, U64]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def accept(offer: Offer, legs: Sequence[LegEvidence]) -> Accepted:
    """Returns what may be handed to the engine, or raises VerificationFailed.

    The error's ``details``: ``kind`` (tokens, coverage, digest, record, source), ``findings`` (the texts of all),
    ``legs``, ``groups``, ``pages_refused`` (their number), and ``logical_pages`` and ``pool_pages`` (the first few, as
    ``{group name: [...]}``).
    """
    findings = [finding for clause in CLAUSES for leg in legs for finding in clause(offer, leg)]
    if not legs:
        findings.append(Finding("record", "a reservation without legs proves nothing", -1))
    if not findings:
        # Folds over pages that are not there differ anyway, and would only blur which pages those are.
        findings = [finding for leg in legs for finding in digests_match(offer, leg)]
    if findings:
        raise refusal(offer, findings)
    aux = next((record.aux for leg in legs for record in leg.records.values() if record.aux is not None), b"")
    return Accepted(offer.end_token, aux, sum(leg.report.bytes_landed for leg in legs))


# ---- the clauses of S1 -----------------------------------------------------------------------------------------------


def every_lane_has_its_record(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """A commit record on every lane of the leg's fixed lane set, also where its count is 0, and on no other."""
    missing = [lane for lane in leg.lanes if lane not in leg.records]
    if missing or len(leg.records) != len(leg.lanes) or not leg.lanes:
        yield Finding(
            "record", "a lane of the leg has not delivered its commit record", leg.leg, numbers={"lanes": missing}
        )


def records_are_of_this_leg(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """Reservation, epoch, lane generation, leg and lane are those of the offer."""
    for lane, record in leg.records.items():
        claimed = (
            record.kind,
            record.reservation,
            record.epoch,
            record.generation,
            record.leg,
            record.lane,
            record.n_lanes,
        )
        if claimed != (COMMIT, offer.reservation, leg.epoch, leg.generation, leg.leg, lane, len(leg.lanes)):
            yield Finding("record", "a record names another reservation, epoch, generation, leg or lane", leg.leg)
        if record.n_chunks != leg.layout.n_chunks:
            yield Finding("record", "a record counts other chunks than were offered", leg.leg)
        if (record.aux is not None) != (leg.carries_aux and lane == leg.lanes[0]):
            yield Finding("record", "aux bytes came on a lane that does not carry them, or are missing", leg.leg)


def token_ranges_are_equal(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """Prefill committed exactly the tokens that decode reserved for, in every group of the leg."""
    whole = tuple([(group.group, group.first_token, group.n_tokens) for group in leg.layout.groups])
    if all(record.ranges == whole and record.n_tokens == offer.end_token for record in leg.records.values()):
        return
    offered = {group.group: (group.first_token, group.n_tokens) for group in leg.layout.groups}
    for record in leg.records.values():
        stated = {rng.group: (rng.first_token, rng.n_tokens) for rng in record.ranges}
        wrong = [g for g, rng in stated.items() if offered.get(g) != rng]
        silent = [g.group for g in leg.layout.groups if g.n_slices and g.group not in stated]
        if record.n_tokens != offer.end_token or wrong or silent:
            yield Finding(
                "tokens",
                f"prefill committed {record.n_tokens} tokens, {offer.end_token} were reserved",
                leg.leg,
                _pages_beyond(leg.layout, record.n_tokens),
                {
                    "tokens_reserved": offer.end_token,
                    "tokens_committed": record.n_tokens,
                    "groups_unequal": wrong + silent,
                },
            )
            return


def records_cover_every_chunk_once(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """The chunks posted, over all lanes, are every chunk of every page of every group, each on one lane only."""
    union = twice = 0
    for record in leg.records.values():
        twice |= union & record.bitmap
        union |= record.bitmap
    if twice:
        yield Finding("coverage", "chunks were posted on two lanes", leg.leg, leg.layout.pages_of(twice))
    missing = leg.layout.expected & ~union
    if missing:
        text = f"{missing.bit_count()} of {leg.layout.n_chunks} chunks were not written"
        yield Finding("coverage", text, leg.leg, leg.layout.pages_of(missing), {"chunks_missing": missing.bit_count()})


def what_was_posted_has_landed(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """Behind each posted chunk stands a completion at the receiver, on the same lane, and no frame was refused."""
    lost = stray = 0
    for lane in leg.lanes:
        landed = int.from_bytes(leg.report.lane_bitmaps.get(lane, b""), "little")
        posted = leg.records[lane].bitmap if lane in leg.records else 0
        lost |= posted & ~landed
        stray |= landed & ~posted
    stray &= leg.layout.expected
    if lost:
        yield Finding("coverage", "chunks were posted but have not landed", leg.leg, leg.layout.pages_of(lost))
    if stray:
        yield Finding(
            "coverage", "chunks landed that no record posted on that lane", leg.leg, leg.layout.pages_of(stray)
        )
    if set(leg.report.lane_bitmaps) - set(leg.lanes):
        yield Finding("coverage", "chunks landed on a lane that is not the leg's", leg.leg)
    if leg.report.violations:
        yield Finding(
            "coverage", "frames of this leg were refused", leg.leg, numbers={"violations": leg.report.violations}
        )


def digests_match(offer: Offer, leg: LegEvidence) -> Iterator[Finding]:
    """The folds over the bound digests of what landed are those that prefill took of its sources."""
    if offer.verify != "digest":
        return
    first = leg.records.get(leg.lanes[0]) if leg.lanes else None
    if first is None:
        return
    if len(first.folds) != leg.layout.n_folds or len(leg.report.folds) != leg.layout.n_folds:
        yield Finding("record", "digests were not delivered", leg.leg, numbers={"folds": len(first.folds)})
        return
    folds = mismatching_folds(leg)
    if folds:
        yield Finding(
            "digest",
            "what landed is not what prefill wrote",
            leg.leg,
            _pages_of_folds(leg.layout, folds),
            {"folds": len(folds)},
        )


CLAUSES: tuple[Callable[[Offer, LegEvidence], Iterator[Finding]], ...] = (
    every_lane_has_its_record,
    records_are_of_this_leg,
    token_ranges_are_equal,
    records_cover_every_chunk_once,
    what_was_posted_has_landed,
)


def check_plan_covers(groups: Sequence[Group], legs: Sequence[SliceTable]) -> None:
    """S1 across legs: together their slices write every byte of every region's page. Raises IncompatiblePool.

    Which bytes each leg writes is fixed by the plan, so this is asked once a plan and not once a handoff.
    """
    written: dict[tuple[int, int], int] = {}
    for table in legs:
        for row in table.slices:
            key = (int(row["group"]), int(row["region"]))
            written[key] = written.get(key, 0) + int(row["runs"]) * int(row["run_bytes"])
    for index, group in enumerate(groups):
        for number, region in enumerate(group.regions):
            if written.get((index, number), 0) != region.page_bytes:
                raise IncompatiblePool(
                    "the prefills together do not write every byte of a page",
                    field=f"{group.name}.{region.layer}",
                    ours=region.page_bytes,
                    theirs=written.get((index, number), 0),
                )


# ---- naming what was refused -----------------------------------------------------------------------------------------


def mismatching_folds(leg: LegEvidence) -> list[int]:
    """Numbers of the folds that differ between sender and receiver; both must have the layout's length."""
    sent, landed = leg.records[leg.lanes[0]].folds, leg.report.folds
    if sent.tobytes() == landed.tobytes():
        return []
    return [int(f) for f in np.flatnonzero(sent != landed)]


def refusal(offer: Offer, findings: Sequence[Finding]) -> VerificationFailed:
    """The error for some findings: the first gives the kind, all give their pages."""
    named: dict[str, list[int]] = {}
    pool_pages: dict[str, list[int]] = {}
    refused: dict[int, set[int]] = {}
    groups: dict[int, LegGroup] = {}
    numbers: dict[str, Any] = {}
    for finding in findings:
        for key, value in finding.numbers.items():
            numbers.setdefault(key, value)
        for group, indices in finding.pages:
            groups[group.group] = group
            refused.setdefault(group.group, set()).update(indices.tolist())
    for number, page_indices in sorted(refused.items()):
        group = groups[number]
        few = sorted(page_indices)[:NAMED_PAGES]
        name = offer.group_names[number]
        named[name] = [int(group.logical[index]) for index in few]
        pool_pages[name] = [int(group.pool_pages[index]) for index in few]
    first = findings[0]
    return VerificationFailed(
        f"the handoff was refused: {first.text}; no page of it may be read, retry under a new reservation",
        reservation=offer.reservation,
        request_id=offer.request_id,
        retryable=first.kind in ("digest", "source"),
        kind=first.kind,
        findings=list(dict.fromkeys(finding.text for finding in findings)),
        legs=sorted({finding.leg for finding in findings}),
        groups=list(named),
        pages_refused=sum(len(indices) for indices in refused.values()),
        logical_pages=named,
        pool_pages=pool_pages,
        **numbers,
    )


def _pages_beyond(layout: LegLayout, n_tokens: int) -> list[tuple[LegGroup, U64]]:
    """Pages with at least one token at or after ``n_tokens`` of those that were reserved."""
    found = []
    for group in layout.groups:
        end = group.first_token + group.n_tokens
        if group.tokens_per_page and group.n_pages and n_tokens < end:
            last_tokens = np.minimum((group.logical + np.uint64(1)) * np.uint64(group.tokens_per_page), np.uint64(end))
            indices = np.flatnonzero(last_tokens > n_tokens).astype(np.uint64)
            if len(indices):
                found.append((group, indices))
    return found


def _pages_of_folds(layout: LegLayout, folds: Sequence[int]) -> list[tuple[LegGroup, U64]]:
    return [
        (layout.fold_group(fold), np.array(layout.fold_page_indices(fold), dtype=np.uint64)) for fold in folds[:4096]
    ]
