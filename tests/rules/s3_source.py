"""S3 Source: a source page is pinned and digested at the call of write(), and released when no lane can read it."""

from __future__ import annotations

from .model import Breakage, Edit, breakage

LEGS = "kvxfer/protocol/prefill_legs.py"
PREFILL = "tests/protocol/prefill"
AFTER = "tests/endpoints/test_api_after.py"
LOCAL = "native/tests/test_receiver_local.cpp"
SENDER_LOCAL = "native/tests/test_sender_local.cpp"
SLICES = "native/tests/test_sender_slices.cpp"
ABORT = "native/tests/test_sender_abort.cpp"

BREAKAGES: tuple[Breakage, ...] = (
    # ---- when it is digested ----
    breakage(
        "S3-after-the-event",
        "a source is read after the event that produces it",
        "kvxfer/prefill_executor.py",
        "            after.synchronize()\n",
        "            pass\n",
        f"{AFTER}::test_the_bytes_that_arrive_are_those_after_the_event",
    ),
    breakage(
        "S3-commit-behind-events",
        "a commit waits for the writes whose events are pending",
        "kvxfer/prefill.py",
        "            if grant._pending:\n",
        "            if False:\n",
        f"{AFTER}::test_a_commit_queues_behind_every_pending_event",
    ),
    breakage(
        "S3-digest-at-write",
        "the digest is taken at the call of write(), not when the page is posted",
        "native/lanes/source_grant.cpp",
        "        if (leg.spec.verify) leg.content[group.ordinal(k, s)] = "
        "table_.digest(from, source.region_index, *rows[k]);\n",
        "        if (leg.spec.verify)\n"
        "          leg.content[group.ordinal(k, s)] =\n"
        "              source.whole_page ? digest::xxh3_64(source.chunk(table_.page(from, *rows[k])), "
        "source.chunk_bytes())\n"
        "                                : table_.digest(from, source.region_index, *rows[k]);\n",
        f"{SLICES}::a page that changed after the write is sent under the digest it had, for the reader to refuse",
    ),
    breakage(
        "S3-parts-are-rechecked",
        "parts of an early page are cut from bytes that have the digest of write()",
        "native/lanes/sender_lane.cpp",
        "page_bytes) != content) {\n",
        "page_bytes) != content && false) {\n",
        f"{SLICES}::"
        "a page that changed between the write and the coming of a reader of its parts fails the leg, unsent",
    ),
    # ---- when it is released ----
    breakage(
        "S3-every-reader",
        "sources stay pinned until every reader's leg is settled",
        "kvxfer/protocol/prefill_grant.py",
        "        return all(leg.settled for leg in self.legs.values())\n",
        "        return any(leg.settled for leg in self.legs.values())\n",
        f"{PREFILL}/test_readers.py::test_ready_needs_done_of_every_reader",
    ),
    breakage(
        "S3-readers-to-come",
        "sources stay pinned for readers that have not reserved yet",
        "kvxfer/protocol/prefill_grant.py",
        "        if not (self.concluded or (self.committed and self.complete)):\n",
        "        if not (self.concluded or self.committed):\n",
        "tests/endpoints/test_api_readers.py::test_the_source_stays_pinned_until_the_last_reader_has_ended",
        f"{PREFILL}/test_grant.py::test_commit_before_reserve_releases_only_after_the_late_reader_drained",
    ),
    breakage(
        "S3-closing-is-read",
        "a leg that is closing, or has failed, still counts as read",
        "kvxfer/protocol/prefill_leg.py",
        "        return self.sources is Sources.DRAINED or self.sources is Sources.DESTROYED\n",
        "        return self.sources is not Sources.OPEN\n",
        f"{PREFILL}/test_grant.py::test_preempted_prefill_gets_its_blocks_only_after_the_drain",
        f"{PREFILL}/test_lanes.py::test_error_completion_is_told_and_holds_the_sources_until_the_lanes_are_destroyed",
    ),
    breakage(
        "S3-dead-session",
        "a dead session frees nothing before its lanes are destroyed",
        "kvxfer/protocol/prefill_sessions.py",
        "        self.grants.lose(out, list(session.legs.values()), error)\n",
        "        self.grants.destroyed(out, 0.0, list(session.legs.values()))\n"
        "        self.grants.lose(out, list(session.legs.values()), error)\n",
        f"{PREFILL}/test_lanes.py::test_bye_closes_the_session_and_frees_its_sources_when_the_lanes_are_destroyed",
    ),
    breakage(
        "S3-never-on-time",
        "a deadline ends the wait for a drain, and frees nothing",
        LEGS,
        "                stuck = leg\n",
        "                leg.sources = Sources.DRAINED\n                self._settle_leg(out, now, leg)\n",
        f"{PREFILL}/test_deadlines.py::test_leg_that_does_not_drain_after_an_abort_costs_its_session",
    ),
    breakage(
        "S3-drain-was-asked-for",
        "a drain is believed only of a leg that is closing or committed",
        LEGS,
        "        if not (leg.sources is Sources.CLOSING or (leg.sources is Sources.OPEN and grant.committed)):\n",
        "        if False:\n",
        f"{PREFILL}/test_grant.py::test_drain_that_nobody_asked_for_is_not_believed",
        f"{PREFILL}/test_lanes.py::test_drain_of_a_destroyed_leg_is_not_believed",
    ),
    Breakage(
        "S3-write-in-progress",
        "released comes after every write() in progress has let go of its pages",
        (
            Edit("kvxfer/prefill.py", "            grant._source.end_writes()\n", ""),
            Edit("kvxfer/prefill_executor.py", "        grant._source.close()\n", ""),
        ),
        (
            "tests/endpoints/test_source_in_use.py::"
            "test_abort_is_drained_only_when_a_write_of_another_thread_has_let_go",
        ),
    ),
    breakage(
        "S3-lane-in-mid-read",
        "a leg is drained when no lane reads its sources any more",
        "native/lanes/sender_session.cpp",
        "  if (leg->reading == 0) report(leg);\n",
        "  report(leg);\n",
        f"{SLICES}::an abort while a lane reads a page is reported when it has stopped reading, and not before",
    ),
    breakage(
        "S3-zeros-after-abort",
        "after an abort the rest of a frame comes from a zero buffer",
        "native/lanes/sender_lane.cpp",
        "      frame_.zero_rest();\n",
        "",
        f"{ABORT}::"
        "an abort in mid-frame drains at once though the reader is stopped, and the rest of the frame is zeros",
        lanes="tcp",
    ),
    breakage(
        "S3-drained-by-confirmation",
        "on local a leg is drained when decode has confirmed its records",
        "native/lanes/sender_session.cpp",
        "    const auto wanted = lane->kind() == LaneKind::kLocal ? "
        "LegOut::Record::kConfirmed : LegOut::Record::kSent;\n    if (leg.shares[i].record != wanted) return false;\n",
        "    if (leg.shares[i].record < LegOut::Record::kSent) return false;\n",
        f"{SENDER_LOCAL}::a committed leg drains when every lane's record is confirmed, and not before",
        lanes="local",
        # The slot moves on under decode's copiers, which refuse what they copy.
        still="native/tests/test_sender_tcp.cpp::"
        "a reader that comes after the commit gets pages and record all the same",
    ),
    # ---- local: decode reads prefill's memory ----
    breakage(
        "S3-slot-is-raised",
        "letting go of sources raises their generation slot first",
        "native/lanes/sender_generations.cpp",
        "  value(ref.slot).fetch_add(1, std::memory_order_seq_cst);\n",
        "",
        f"{SENDER_LOCAL}::an abort changes the slot and drains at once, whatever the reader does",
        f"{SENDER_LOCAL}::a lane that breaks before the confirmation fails the leg and changes the slot",
        lanes="local",
    ),
    breakage(
        "S3-slot-after-the-copy",
        "the slot is compared again after the copy, before it counts",
        "native/lanes/receiver_lane.cpp",
        "      if (source_intact(header, leg, source)) leg.land(plan, leg.share(lane_));\n",
        "      leg.land(plan, leg.share(lane_));\n",
        f"{LOCAL}::a slot that moves on in mid-copy takes the whole frame with it",
        f"{LOCAL}::a prefill that dies in mid-copy takes the whole frame with it",
        lanes="local",
    ),
    breakage(
        "S3-slot-compared",
        "a copy whose slot moved on does not count",
        "native/lanes/peer_memory.cpp",
        "  if (now != expected) {\n",
        "  if (now < expected) {\n",
        f"{LOCAL}::what is read after its slot moved on does not count, and the leg hears of it once",
        "tests/endpoints/test_local_source.py::test_a_source_that_was_let_go_is_never_accepted_whenever_that_was",
        lanes="local",
    ),
    breakage(
        "S3-source-before-record",
        "slot and process are checked before a record counts",
        "native/lanes/receiver_lane.cpp",
        "  if (source && !source_intact(header, *leg, *source)) return Status::kOk;\n",
        "",
        f"{LOCAL}::a record of a dead prefill is not handed on",
        lanes="local",
    ),
    breakage(
        "S3-peer-alive",
        "what is read from a process that has ended does not count",
        "native/lanes/peer_memory.cpp",
        "  if (ready != 0) {\n",
        "  if (ready < 0) {\n",
        f"{LOCAL}::a prefill that dies in mid-copy takes the whole frame with it",
        "tests/endpoints/test_local_source.py::test_what_is_read_after_prefill_has_ended_is_never_accepted",
        lanes="local",
    ),
)
