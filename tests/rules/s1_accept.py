"""S1 Accept: a reserved page may be read only in state READY, and what READY needs."""

from __future__ import annotations

from .model import Breakage, Edit, breakage

ACCEPTANCE = "kvxfer/protocol/acceptance.py"
INBOX = "kvxfer/protocol/decode_inbox.py"
ACCEPT = "tests/protocol/decode/test_s1_accept.py"
EVIDENCE = "tests/protocol/decode/test_acceptance.py"
INCIDENT = "tests/endpoints/test_incident.py"
HOSTILE = "tests/endpoints/test_hostile_data.py"
UNCONFIRMED = "tests/endpoints/test_unconfirmed_pages.py"

BREAKAGES: tuple[Breakage, ...] = (
    # ---- what the records claim ----
    breakage(
        "S1-tokens",
        "the tokens committed are those reserved",
        ACCEPTANCE,
        "    token_ranges_are_equal,\n",
        "",
        f"{INCIDENT}::test_a_placeholder_of_one_token_in_the_reserved_page_is_refused_by_its_token_count",
        f"{ACCEPT}::test_the_incident_inside_one_page_is_refused_by_its_token_count",
    ),
    breakage(
        "S1-every-chunk",
        "the records cover every chunk of every page",
        ACCEPTANCE,
        "    missing = leg.layout.expected & ~union\n",
        "    missing = 0\n",
        f"{INCIDENT}::test_a_placeholder_of_one_page_committed_as_the_whole_prompt_is_refused_with_the_missing_pages",
        f"{INCIDENT}::test_all_pages_but_one_layer_of_one_page_are_not_enough",
        f"{ACCEPT}::test_n_minus_one_of_n_pages_are_refused_and_the_missing_page_is_named",
    ),
    Breakage(
        "S1-distinct-chunks",
        "chunks are counted as a set, never by their number",
        (
            Edit(
                ACCEPTANCE,
                "    missing = leg.layout.expected & ~union\n",
                "    posted = sum(record.bitmap.bit_count() for record in leg.records.values())\n"
                "    missing = 0 if posted >= leg.layout.n_chunks else leg.layout.expected & ~union\n",
            ),
            Edit(ACCEPTANCE, "    if twice:\n", "    if False:\n"),
        ),
        (f"{ACCEPT}::test_a_count_that_is_right_does_not_hide_a_chunk_posted_twice",),
    ),
    breakage(
        "S1-chunk-on-one-lane",
        "a chunk is posted on one lane",
        ACCEPTANCE,
        "    if twice:\n",
        "    if False:\n",
        f"{ACCEPT}::test_a_chunk_on_two_lanes_is_refused_even_if_nothing_is_missing",
    ),
    breakage(
        "S1-every-lane",
        "every lane of the leg has delivered its record before anything is judged",
        "kvxfer/protocol/decode_reservation.py",
        "        return self.offered and len(self.records) == len(self.lanes)\n",
        "        return self.offered and len(self.records) > 0\n",
        f"{ACCEPT}::test_a_missing_lane_keeps_the_pages_unreadable",
        # Judged after the first record, a handoff over two lanes is refused for the second.
        still="tests/protocol/decode/test_ready.py::test_the_leg_is_opened_before_its_reserve_is_sent",
    ),
    breakage(
        "S1-every-lane-judged",
        "a lane without a record refuses the handoff, also where nothing was posted on it",
        ACCEPTANCE,
        "    every_lane_has_its_record,\n",
        "",
        f"{EVIDENCE}::test_a_lane_without_its_record_is_refused_even_if_nothing_was_posted_on_it",
    ),
    breakage(
        "S1-every-leg",
        "every leg has delivered its records",
        INBOX,
        "            if all(each.all_records for each in reservation.legs):\n",
        "            if leg.all_records:\n",
        f"{ACCEPT}::test_a_missing_leg_keeps_the_pages_unreadable",
        "tests/endpoints/test_api_legs.py::test_ready_needs_every_leg",
    ),
    breakage(
        "S1-commit-only",
        "a progress record commits nothing",
        INBOX,
        "        if record.kind != COMMIT:\n",
        "        if False:\n",
        f"{ACCEPT}::test_a_progress_record_commits_nothing",
    ),
    # ---- whose records they are ----
    breakage(
        "S1-epoch",
        "a record is of the session's epoch",
        INBOX,
        "    if record.epoch != session.epoch:\n",
        "    if False:\n",
        f"{ACCEPT}::test_a_record_counts_only_for_its_own_leg_lane_epoch_and_generation",
        f"{HOSTILE}::test_a_commit_of_an_older_epoch_does_not_count_in_the_next_one[tcp]",
    ),
    breakage(
        "S1-generation",
        "a record is of the leg's lane generation",
        INBOX,
        "    if record.generation != leg.generation or generation != leg.generation:\n",
        "    if False:\n",
        f"{ACCEPT}::test_a_record_counts_only_for_its_own_leg_lane_epoch_and_generation",
        f"{ACCEPT}::test_a_record_that_comes_on_another_generation_of_the_lane_does_not_count",
    ),
    breakage(
        "S1-own-lane",
        "a record counts only on the lane it names, of its own leg",
        INBOX,
        "    if record.lane != lane or lane not in leg.lanes or record.n_lanes != len(leg.lanes):\n",
        "    if False:\n",
        f"{ACCEPT}::test_a_record_that_comes_on_another_lane_than_it_names_does_not_count",
    ),
    breakage(
        "S1-own-session",
        "a record of one leg does not count on the session of another",
        "kvxfer/protocol/decode_reservation.py",
        "            if leg.session is session and leg.offered:\n",
        "            if leg.offered:\n",
        f"{ACCEPT}::test_a_record_of_one_leg_does_not_count_on_the_session_of_another",
    ),
    breakage(
        "S1-record-judged",
        "reservation, epoch, generation, leg and lane are compared once more when the handoff is judged",
        ACCEPTANCE,
        "    records_are_of_this_leg,\n",
        "",
        f"{EVIDENCE}::test_one_record_that_is_not_this_legs_is_refused",
        f"{EVIDENCE}::test_a_record_that_counts_other_chunks_is_refused",
    ),
    breakage(
        "S1-aux",
        "aux comes from the leg that is to bring it, and is not missing",
        ACCEPTANCE,
        "        if (record.aux is not None) != (leg.carries_aux and lane == leg.lanes[0]):\n",
        "        if False:\n",
        f"{ACCEPT}::test_aux_on_a_leg_that_does_not_carry_it_is_refused",
        f"{ACCEPT}::test_aux_that_is_missing_is_refused",
    ),
    breakage(
        "S1-record-digest",
        "a record is believed only if its own digest matches",
        "kvxfer/protocol/record.py",
        "    if _DIGEST.unpack_from(data, digest_at)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:digest_at]):\n",
        "    if False:\n",
        "tests/protocol/decode/test_record.py::test_every_flipped_bit_is_noticed",
        f"{HOSTILE}::test_a_record_altered_on_its_way_its_aux_too_is_refused",
    ),
    # ---- what landed ----
    breakage(
        "S1-landed",
        "behind each posted chunk stands a completion at the receiver",
        ACCEPTANCE,
        "        lost |= posted & ~landed\n",
        "        lost |= 0\n",
        f"{ACCEPT}::test_a_posted_chunk_that_has_not_landed_is_refused",
        f"{ACCEPT}::test_what_has_not_landed_is_refused_without_digests_too",
    ),
    breakage(
        "S1-landed-whole",
        "a chunk has landed when its last byte is placed",
        "native/lanes/receiver_lane.cpp",
        "  if (placed) leg->land(plan, share);\n",
        "  leg->land(plan, share);\n",
        "native/tests/test_receiver_tcp.cpp::a stream cut at any byte ends the lane and leaves no half record",
        lanes="tcp",
    ),
    breakage(
        "S1-frames-refused",
        "a leg whose frames were refused is not accepted",
        ACCEPTANCE,
        "    if leg.report.violations:\n",
        "    if False:\n",
        f"{ACCEPT}::test_a_refused_frame_of_the_leg_is_enough_to_refuse_it",
    ),
    breakage(
        "S1-digests",
        "the digests of what landed match those taken at the source",
        ACCEPTANCE,
        "    folds = mismatching_folds(leg)\n",
        "    folds: list[int] = []\n",
        f"{HOSTILE}::test_one_flipped_bit_refuses_the_handoff_and_names_the_chunk",
        f"{HOSTILE}::test_right_bytes_in_the_wrong_page_refuse_the_handoff",
        "tests/endpoints/test_hostile_wire.py::test_a_bit_flipped_on_the_wire_refuses_the_handoff_and_names_the_page",
        f"{ACCEPT}::test_a_flipped_bit_in_a_page_is_refused_and_its_chunk_is_named",
    ),
    breakage(
        "S1-digests-delivered",
        "a commit without digests is refused where digests were asked for",
        ACCEPTANCE,
        "    if len(first.folds) != leg.layout.n_folds or len(leg.report.folds) != leg.layout.n_folds:\n",
        "    if len(first.folds) != len(leg.report.folds):\n        return\n    if False:\n",
        f"{ACCEPT}::test_a_commit_without_digests_is_refused_where_digests_were_asked_for",
    ),
    breakage(
        "S1-digests-bound",
        "a digest is bound to reservation, epoch, leg and place",
        "native/lanes/leg_table.cpp",
        "          bound.push_back(digest::bind(content[at], key, g.group, slices[s].region, slices[s].slice, "
        "g.logical[k]));\n",
        "          bound.push_back(content[at]);\n",
        "native/tests/test_sender_leg_table.cpp::a fold is the digest of its chunks' bound digests in ordinal order",
        "native/tests/test_receiver_tcp.cpp::"
        "a fold covers the bound digests of its pages, and is 0 while one of them is missing",
    ),
    Breakage(
        "S1-posted-not-asked",
        "a record's bitmap says what was posted, and not what was asked for",
        (
            Edit("native/lanes/sender_session.cpp", "    leg->mark_posted(job.batch, job.position);\n", ""),
            Edit(
                "native/lanes/sender_session.cpp",
                "  ++leg->posting;\n",
                "  ++leg->posting;\n  leg->mark_posted(batch, position);\n",
            ),
        ),
        (
            "native/tests/test_sender_abort.cpp::"
            "an abort in mid-frame drains at once though the reader is stopped, and the rest of the frame is zeros",
        ),
    ),
    # ---- what the engine is shown ----
    breakage(
        "S1-plan-covers",
        "the legs together are to write every byte of every page",
        "kvxfer/protocol/decode_offers.py",
        "            check_plan_covers(self.geometry.groups, whole)\n",
        "",
        "tests/protocol/decode/test_s4_s5_reserve.py::test_a_pool_that_no_plan_covers_is_refused_with_the_field",
    ),
    breakage(
        "S1-pool-page",
        "the pool shows no page that is RESERVED or QUARANTINED",
        "kvxfer/pool.py",
        "        if state not in (PageState.FREE, PageState.READY):\n",
        "        if False:\n",
        "tests/pool/test_pool.py::test_a_page_that_is_not_confirmed_is_never_shown",
        f"{UNCONFIRMED}::test_the_pool_refuses_reserved_pages_before_ready",
        f"{UNCONFIRMED}::test_another_thread_sees_no_page_earlier_than_the_first",
    ),
    breakage(
        "S1-former-handoff",
        "a page that was reserved anew is closed to its former handoff",
        "kvxfer/decode.py",
        "ledger.owner_of(space, page) != reservation or ",
        "",
        f"{UNCONFIRMED}::test_a_page_is_closed_to_its_former_handoff_also_once_the_next_one_is_ready",
    ),
    breakage(
        "S1-made-by-the-endpoint",
        "nobody but the endpoint makes a Ready",
        "kvxfer/handoff.py",
        '            raise NotReady("a Ready is made by its endpoint only; wait for the handoff", '
        "request_id=request_id)\n",
        "            pass\n",
        f"{UNCONFIRMED}::test_a_ready_cannot_be_made_by_hand",
    ),
)
