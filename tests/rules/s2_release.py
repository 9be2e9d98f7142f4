"""S2 Release: pages of a failed reservation come back when every writer is quiesced or fenced, never on time alone."""

from __future__ import annotations

from .model import Breakage, Edit, breakage

ENDINGS = "kvxfer/protocol/decode_endings.py"
RESERVATION = "kvxfer/protocol/decode_reservation.py"
INBOX = "kvxfer/protocol/decode_inbox.py"
HANDLERS = "kvxfer/protocol/prefill_handlers.py"
RELEASE = "tests/protocol/decode/test_s2_release.py"
PREFILL = "tests/protocol/prefill"
FENCE_TEST = "native/tests/test_receiver_fence.cpp"
FAULTS = "tests/endpoints/test_control_faults.py"
TCP = "native/tests/test_receiver_tcp.cpp"
EVERY_LEG = "        if any(leg.offered and leg.closed is None for leg in reservation.legs):\n"
FENCE = '                self._fence(now, leg.session, "an aborted leg did not quiesce in time", out)\n'
LAST_WORD = "        if self.sources is Sources.DRAINED:\n"

BREAKAGES: tuple[Breakage, ...] = (
    # ---- decode: when a leg counts as silent ----
    breakage(
        "S2-never-on-time",
        "time alone releases nothing",
        ENDINGS,
        FENCE,
        '                leg.closed = "overdue"\n                self._release_if_silent(now, reservation, out)\n',
        f"{RELEASE}::test_nothing_is_released_on_time_alone",
        f"{RELEASE}::test_the_shortest_timeouts_release_no_sooner",
        f"{FAULTS}::test_time_alone_never_releases_a_leg_that_is_neither_quiesced_nor_fenced",
    ),
    breakage(
        "S2-every-leg",
        "every leg offered must be silent",
        ENDINGS,
        EVERY_LEG,
        EVERY_LEG.replace("any(", "all("),
        f"{RELEASE}::test_one_leg_revoked_and_one_not_releases_nothing",
        f"{RELEASE}::test_one_leg_quiesced_and_one_paused_releases_only_after_the_fence",
        f"{FAULTS}::test_with_one_leg_quiesced_and_one_paused_the_pages_stay_until_the_paused_one_is_fenced",
    ),
    breakage(
        "S2-offered-is-granted",
        "a leg counts as granted once RESERVE was handed to the socket, answered or not",
        ENDINGS,
        EVERY_LEG,
        EVERY_LEG.replace("leg.offered", "leg.answered"),
        f"{RELEASE}::test_granted_means_offered_so_an_unanswered_reserve_is_revoked_too",
    ),
    breakage(
        "S2-revoke-returned",
        "a revoke counts when it has returned, not when it was asked for",
        ENDINGS,
        "            leg.revoke_asked = True\n",
        '            leg.revoke_asked, leg.closed = True, "revoked"\n',
        f"{RELEASE}::test_an_abort_releases_when_the_revoke_has_returned_and_not_before",
    ),
    breakage(
        "S2-revoke-awaited",
        "a revoke under way is awaited, whatever the sender says meanwhile",
        ENDINGS,
        "            if leg.offered and leg.closed is None and not leg.revoke_asked and leg.quiesced:\n",
        "            if leg.offered and leg.closed is None and leg.quiesced:\n",
        f"{RELEASE}::test_an_abort_after_the_last_record_still_waits_for_its_revoke",
    ),
    breakage(
        "S2-receiver-barrier",
        "QUIESCED counts only with a record seen on every lane that was written to",
        RESERVATION,
        "        return all(count == 0 or lane in self.records for lane, count in "
        "zip(self.lanes, self.posted, strict=True))\n",
        "        return True\n",
        f"{RELEASE}::test_quiesced_counts_only_with_a_record_on_every_lane_that_was_written",
    ),
    breakage(
        "S2-refused-not-believed",
        "a leg whose frames were refused is not believed when it says QUIESCED",
        RESERVATION,
        "        if self.violated:\n",
        "        if False:\n",
        f"{RELEASE}::test_a_leg_whose_frames_were_refused_is_not_believed_when_it_says_quiesced",
    ),
    breakage(
        "S2-error-is-not-drained",
        "an error completion at the sender needs a fence",
        INBOX,
        '        if message.cause == "lane" and not leg.session.revocable and '
        "leg.generation == leg.session.generation:\n",
        "        if False:\n",
        f"{RELEASE}::test_an_error_completion_never_counts_as_drained",
    ),
    breakage(
        "S2-rejected-is-no-proof",
        "REJECTED does not prove that nothing was written",
        INBOX,
        '        out.append(Audit("rejected", ',
        '        leg.closed = "rejected"\n        out.append(Audit("rejected", ',
        f"{RELEASE}::test_a_rejection_is_no_proof_that_nothing_was_written",
    ),
    breakage(
        "S2-fence-of-this-generation",
        "the fence of another generation proves nothing",
        "kvxfer/protocol/decode.py",
        '        if found is None or found.lanes_state != "fencing" or found.generation != generation:\n',
        '        if found is None or found.lanes_state != "fencing":\n',
        f"{RELEASE}::test_the_fence_of_another_generation_releases_nothing",
    ),
    breakage(
        "S2-revoke-of-this-leg",
        "a revoke that nobody asked for proves nothing",
        "kvxfer/protocol/decode.py",
        "        if not found.revoke_asked or found.session.id != session:\n",
        "        if False:\n",
        f"{RELEASE}::test_a_revoke_nobody_asked_for_changes_nothing",
    ),
    # ---- prefill: what it may say, and what never comes back to life ----
    breakage(
        "S2-late-reserve",
        "a RESERVE is refused if its number is not above the highest seen",
        HANDLERS,
        "            if reserve.number <= highest:\n",
        "            if False:\n",
        f"{PREFILL}/test_reserve.py::test_reserve_below_a_later_reservation_is_never_admitted",
        "tests/endpoints/test_hostile_control.py::test_a_reserve_of_an_older_number_is_refused",
    ),
    breakage(
        "S2-abort-raises-the-number",
        "an ABORT counts as a number seen, so that its RESERVE is never admitted afterwards",
        HANDLERS,
        "        session.highest_number = max(session.highest_number, abort.number)\n",
        "",
        f"{PREFILL}/test_reserve.py::test_reserve_below_an_abort_of_a_later_number_is_never_admitted",
    ),
    Breakage(
        "S2-epoch",
        "a RESERVE of the former epoch is not admitted in the next",
        (
            Edit(
                "kvxfer/protocol/prefill.py",
                "        session = self._sessions.by_epoch.get(epoch)\n",
                "        session = next(iter(self._sessions.by_epoch.values()), None)\n",
            ),
        ),
        (
            f"{PREFILL}/test_reserve.py::test_reserve_of_the_former_epoch_is_not_admitted_in_the_next",
            "tests/endpoints/test_hostile_control.py::test_a_reserve_of_an_ended_epoch_is_refused_in_the_next_one",
        ),
    ),
    Breakage(
        "S2-quiesced-after-drain",
        "QUIESCED is said only after the drain",
        (
            Edit("kvxfer/protocol/prefill_leg.py", LAST_WORD, "        if True:\n"),
            Edit(
                "kvxfer/protocol/prefill_legs.py",
                "        if leg.settled or leg.sources is Sources.BROKEN:\n            out.append(",
                "        if True:\n            out.append(",
            ),
        ),
        (f"{PREFILL}/test_abort.py::test_abort_closes_admission_and_is_answered_only_after_the_drain",),
    ),
    breakage(
        "S2-failed-is-not-quiesced",
        "a leg that saw an error completion, or did not drain, never says QUIESCED",
        "kvxfer/protocol/prefill_leg.py",
        LAST_WORD,
        "        if True:\n",
        f"{PREFILL}/test_abort.py::test_error_completion_is_never_answered_with_quiesced",
        f"{PREFILL}/test_abort.py::test_leg_whose_drain_fails_is_answered_with_failed",
    ),
    breakage(
        "S2-forgotten-failure",
        "a failed leg whose last word was dropped for room is still not called quiesced",
        "kvxfer/protocol/prefill_session.py",
        "            if isinstance(forgotten, Failed):\n",
        "            if False:\n",
        f"{PREFILL}/test_abort.py::test_failed_leg_is_not_called_quiesced_even_when_its_last_word_was_dropped_for_room",
    ),
    # ---- ledger, pool, endpoint ----
    breakage(
        "S2-quarantine-is-final",
        "a quarantined page never becomes readable without its release",
        "kvxfer/ledger.py",
        "    _QUARANTINED: (_QUARANTINED,),\n",
        "    _QUARANTINED: (_QUARANTINED, _READY),\n",
        "tests/pool/test_ledger.py::test_a_quarantined_page_never_becomes_readable_without_release",
    ),
    breakage(
        "S2-give-back",
        "the allocator takes no page back that may still be written",
        "kvxfer/page_allocator.py",
        "            self._ledger.free_ready(self._space, array)\n",
        "",
        "tests/pool/test_pool.py::test_a_page_that_may_still_be_written_cannot_be_given_back",
    ),
    breakage(
        "S2-memory-kept",
        "memory of a dropped pool is kept while a writer is not proven silent",
        "kvxfer/pool.py",
        "        _KEPT.append(memory)\n",
        "        pass\n",
        "tests/pool/test_pool.py::test_memory_of_a_dropped_pool_is_kept_while_a_writer_is_not_proven_silent",
    ),
    breakage(
        "S2-failed-fence",
        "a fence that could not be made proves nothing",
        "kvxfer/decode_executor.py",
        "            return\n        with self._lock:\n            # What landed",
        "        with self._lock:\n            # What landed",
        f"{FAULTS}::test_close_with_a_quarantined_page_names_it_and_keeps_it_until_the_fence_has_returned",
    ),
    breakage(
        "S2-close-says-so",
        "close() does not return as if all were well while a page is quarantined",
        "kvxfer/decode.py",
        "        if not quiet:\n",
        "        if False:\n",
        f"{FAULTS}::test_close_with_a_quarantined_page_names_it_and_keeps_it_until_the_fence_has_returned",
    ),
    # ---- the core: revoke and fence ----
    Breakage(
        "S2-live-check-tcp",
        "a reader looks whether the leg lives before every piece that it places",
        (
            Edit(
                "native/lanes/tcp_reader.cpp",
                "  while (!placer.done() && leg.live()) {\n",
                "  while (!placer.done()) {\n",
            ),
            Edit(
                "native/lanes/tcp_reader.cpp",
                "    if (!leg.live()) return input.skip(left);\n",
                "",
            ),
            Edit(
                "native/lanes/tcp_reader.cpp",
                "    if (n > 0 || placer.done() || !leg.live()) continue;\n",
                "    if (n > 0 || placer.done()) continue;\n",
            ),
        ),
        (f"{TCP}::once revoke returns, the rest of a half read frame never reaches the page",),
        "tcp",
    ),
    breakage(
        "S2-live-check-local",
        "a copier looks whether the leg lives before every piece that it copies",
        "native/lanes/local_reader.cpp",
        "      if (!go_on(leg)) return false;\n",
        "",
        "native/tests/test_receiver_local.cpp::a leg revoked in mid-copy gets nothing more",
        lanes="local",
    ),
    breakage(
        "S2-revoke-waits",
        "revoke returns only when nobody is placing bytes of the leg any more",
        "native/lanes/leg_in.cpp",
        "  const std::unique_lock lock(gate_);\n",
        "",
        f"{FENCE_TEST}::a revoke returns only when whoever is placing bytes of the leg has let go",
        "native/tests/test_receiver_local.cpp::a leg revoked in mid-copy gets nothing more",
    ),
    breakage(
        "S2-fence-joins",
        "a fence returns only when the lanes' threads have ended",
        "native/lanes/receiver.cpp",
        "  for (const auto& lane : lanes_) lane->join();\n",
        "",
        f"{FENCE_TEST}::a fence returns only when whoever is placing bytes has ended",
    ),
    breakage(
        "S2-sunk-when-revoked",
        "frames of a revoked leg go nowhere",
        "native/lanes/receiver_lane.cpp",
        "  if (!leg || !leg->live()) return sink();\n",
        "  if (!leg) return sink();\n",
        f"{TCP}::frames for unknown and revoked legs are sunk and counted, and the lane goes on",
    ),
    breakage(
        "S2-admission",
        "nothing is admitted to a grant behind its commit",
        "native/lanes/source_grant.cpp",
        '    if (closed_ || commit_) refuse_closed("grant " + std::to_string(id_) + " takes no more writes");\n',
        '    if (closed_) refuse_closed("grant " + std::to_string(id_) + " takes no more writes");\n',
        "native/tests/test_sender_refusals.cpp::"
        "a write or commit after the commit is refused, and nothing follows the record",
    ),
)
