"""S5 One owner: no two reservations share a page, no two writers a byte, and a chunk is posted once."""

from __future__ import annotations

from .model import Breakage, Edit, breakage

LEDGER = "kvxfer/ledger.py"
RESERVE = "tests/protocol/decode/test_s4_s5_reserve.py"
REFUSALS = "native/tests/test_sender_refusals.cpp"
TCP = "native/tests/test_receiver_tcp.cpp"
HOSTILE = "tests/endpoints/test_hostile_data.py"
FITS = f"{TCP}::a frame that does not fit its leg is a violation, goes nowhere, and the lane goes on"

BREAKAGES: tuple[Breakage, ...] = (
    # ---- pages ----
    breakage(
        "S5-owned-pages",
        "a page that is RESERVED or QUARANTINED cannot be claimed",
        LEDGER,
        '        self._check_free(space, array, "cannot be reserved", owner)\n',
        "        self._check_bounds(space, array)\n",
        "tests/pool/test_ledger.py::test_a_page_that_may_still_be_written_cannot_be_claimed_again",
        f"{RESERVE}::test_a_page_of_a_live_or_quarantined_reservation_cannot_be_reserved",
        "tests/endpoints/test_api_requests.py::test_pages_of_a_live_reservation_are_refused_to_another",
    ),
    breakage(
        "S5-page-named-twice",
        "a claim names a page once",
        LEDGER,
        "        twice = _twice(array)\n",
        "        twice = None\n",
        "tests/pool/test_ledger.py::test_a_page_named_twice_in_one_claim_is_refused",
        f"{RESERVE}::test_overlaid_groups_cannot_claim_one_page_twice",
        "tests/endpoints/test_layouts.py::"
        "test_two_overlaid_groups_that_claim_one_byte_are_refused_and_nothing_is_claimed",
    ),
    breakage(
        "S5-all-or-nothing",
        "a claim that fails in one id space takes nothing in the others",
        LEDGER,
        "                self._check_claim(owner, space, array)\n            total = 0\n",
        "                self._check_claim(owner, space, array)\n"
        "                self._put(space, array, owner, _RESERVED)\n            total = 0\n",
        "tests/pool/test_ledger.py::test_a_claim_that_fails_in_one_id_space_takes_nothing_in_the_others",
    ),
    breakage(
        "S5-ids-once",
        "a reservation claims once",
        LEDGER,
        "            if owner in self._held:\n",
        "            if False:\n",
        "tests/pool/test_ledger.py::test_an_owner_claims_once",
    ),
    breakage(
        "S5-undeclared-overlay",
        "groups that have bytes in common without saying so are refused",
        "kvxfer/overlay.py",
        "        if not shared_ids:\n",
        "        if False:\n",
        "tests/pool/test_overlay.py::test_an_overlay_that_was_not_declared_is_refused",
        "tests/pool/test_overlay.py::test_one_byte_in_common_is_an_overlap",
    ),
    breakage(
        "S5-overlay-shares-numbers",
        "groups that overlay each other share one page numbering",
        "kvxfer/overlay.py",
        "        root[find(second)] = find(first)\n",
        "",
        "tests/pool/test_overlay.py::test_a_page_of_an_overlay_belongs_to_one_reservation_whatever_group_it_is_for",
        "tests/endpoints/test_layouts.py::test_a_page_of_one_overlaid_group_cannot_be_reserved_through_the_other",
    ),
    # ---- requests and writers ----
    breakage(
        "S5-request-twice",
        "a live request id cannot be reserved again at decode",
        "kvxfer/protocol/decode.py",
        "        if (request_id, rank) in self._live_requests:\n",
        "        if False:\n",
        f"{RESERVE}::test_the_same_request_id_twice_is_refused_and_leaves_the_first_alone",
        "tests/endpoints/test_api_requests.py::test_a_live_request_id_is_refused_at_decode_and_the_first_goes_on",
    ),
    breakage(
        "S5-rank-twice",
        "a rank has one live reservation of a request at prefill",
        "kvxfer/protocol/prefill_grants.py",
        "        if reserve.rank in grant.legs:\n",
        "        if False:\n",
        "tests/protocol/prefill/test_reserve.py::test_same_request_and_rank_twice_is_refused_and_the_first_goes_on",
        "tests/endpoints/test_hostile_control.py::"
        "test_a_second_reservation_of_a_live_request_and_rank_is_refused_and_the_first_is_served",
    ),
    breakage(
        "S5-two-writers",
        "two ranks that hold the whole of a region must say that their bytes are the same",
        "kvxfer/shards.py",
        "    if group.shard_total == 1 and len(having) > 1 and not all(",
        "    if group.shard_total == 0 and len(having) > 1 and not all(",
        "tests/shards/test_plan.py::test_two_ranks_with_undeclared_parts_are_refused_instead_of_guessed",
    ),
    Breakage(
        "S5-one-writer-a-byte",
        "of several ranks that hold the same bytes one is elected",
        (
            Edit(
                "kvxfer/shards.py",
                "            for first, last, holder in _elect(group, region, having, load):\n"
                "                legs[holder.leg].append(",
                "            for first, last, chosen in _elect(group, region, having, load):\n"
                "              for holder in [one for one in having if one.holds(first)] or [chosen]:\n"
                "                legs[holder.leg].append(",
            ),
        ),
        (
            "tests/shards/test_plan.py::test_a_replicated_group_has_one_writer_a_region_and_the_ranks_share_the_work",
            "tests/endpoints/test_api_legs.py::test_replicas_elect_one_writer_a_region_and_every_rank_is_let_go",
        ),
    ),
    # ---- chunks and bytes ----
    breakage(
        "S5-written-once",
        "a page is written once in each region",
        "native/lanes/source_grant_table.cpp",
        "      if (written(group, region, *row)) {\n",
        "      if (written(group, region, *row) && false) {\n",
        f"{REFUSALS}::a page written twice is refused, and nothing of that call is queued",
        "tests/endpoints/test_incident.py::test_a_second_write_of_a_page_raises_and_the_first_one_counts",
    ),
    breakage(
        "S5-chunk-placed-once",
        "a chunk that comes twice is not placed again, and spoils its leg",
        "native/lanes/receiver_lane.cpp",
        "  if (!leg->claim(plan)) {\n",
        "  if (!leg->claim(plan) && false) {\n",
        f"{TCP}::a chunk that comes twice makes the leg violated, and its bytes go nowhere",
        f"{HOSTILE}::test_a_page_that_comes_twice_is_not_placed_again_and_refuses_the_handoff",
    ),
    breakage(
        "S5-behind-the-record",
        "a write behind the lane's commit record is not placed",
        "native/lanes/receiver_lane.cpp",
        '  if (share.committed) {\n    violation(header, leg.get(), "closed: a write',
        '  if (share.committed && false) {\n    violation(header, leg.get(), "closed: a write',
        f"{TCP}::commit is the last thing a lane says for a leg",
        f"{HOSTILE}::test_a_record_before_its_data_refuses_the_handoff_and_what_follows_lands_nowhere",
    ),
    breakage(
        "S5-pages-of-the-leg",
        "a frame's run of pages lies inside the reservation",
        "native/lanes/leg_in.cpp",
        "  if (header.n_pages == 0 || header.page_first >= n_pages || "
        "header.n_pages > n_pages - header.page_first) {\n",
        "  if (header.n_pages == 0) {\n",
        FITS,
    ),
    breakage(
        "S5-slice-of-the-leg",
        "a frame's slice is one of the leg's",
        "native/lanes/leg_in.cpp",
        "  if (header.slice >= group->n_slices) {\n",
        "  if (header.slice > group->n_slices) {\n",
        FITS,
    ),
    breakage(
        "S5-length-of-the-chunks",
        "a frame is as long as the chunks that it names",
        "native/lanes/receiver_lane.cpp",
        '  if (!local_ && header.body_bytes / plan.chunk_bytes != header.n_pages) why = "do not hold";\n',
        "",
        FITS,
        lanes="tcp",
    ),
    breakage(
        "S5-leg-inside-the-pool",
        "a leg that reaches outside decode's pool is refused when it is opened",
        "native/lanes/leg_in.cpp",
        "      if (beyond != pool_pages_[i].end()) {\n",
        "      if (beyond != pool_pages_[i].end() && false) {\n",
        f"{TCP}::a leg that reaches outside the pool is refused when it is opened",
    ),
    breakage(
        "S5-slice-inside-prefills-page",
        "a slice that reaches outside prefill's page never leaves the sender's core",
        "native/lanes/leg_out.cpp",
        "  if (!pattern_fits(slice.runs, slice.run_bytes, slice.src_offset, slice.src_stride, region.page_bytes)) {\n",
        "  if (false) {\n",
        f"{REFUSALS}::slices outside prefill's pool, and lanes the session does not have, are refused",
    ),
    breakage(
        "S5-reserved-pages-only",
        "a page outside the reservation never leaves the sender",
        "native/lanes/source_grant.cpp",
        "      index.push_back(at != reserved.end() && *at == logical ? at - reserved.begin() : kNotReserved);\n",
        "      index.push_back(at != reserved.end() ? at - reserved.begin() : kNotReserved);\n",
        "native/tests/test_sender_tcp.cpp::"
        "pages that a reader did not reserve are neither sent nor forgotten: they are counted",
    ),
)
