"""S6 No endless wait: everything a caller waits for has a deadline and ends in a typed error."""

from __future__ import annotations

from .model import Breakage, breakage

DEADLINES = "tests/protocol/decode/test_s6_deadlines.py"
PREFILL = "tests/protocol/prefill"
SESSION = "kvxfer/protocol/decode_session.py"
LEGS = "kvxfer/protocol/prefill_legs.py"

BREAKAGES: tuple[Breakage, ...] = (
    breakage(
        "S6-reservation",
        "a reservation ends at its deadline",
        "kvxfer/protocol/decode_endings.py",
        "        if reservation.live and now >= reservation.deadline:\n",
        "        if False:\n",
        f"{DEADLINES}::test_a_handoff_that_never_commits_ends_at_its_deadline_and_says_what_is_missing",
        "tests/endpoints/test_api_endings.py::"
        "test_a_reservation_that_nobody_serves_ends_at_its_deadline_and_its_pages_come_back",
    ),
    breakage(
        "S6-hello",
        "a peer that does not answer HELLO is given up",
        SESSION,
        "            if self.dial_at is None and now >= self.dialed_at + self.config.dial_timeout_s:\n",
        "            if False:\n",
        f"{DEADLINES}::test_a_peer_that_never_answers_hello_is_given_up",
    ),
    breakage(
        "S6-silent-prefill",
        "a prefill that falls silent is lost",
        SESSION,
        "        if now >= self.last_heard + self.config.heartbeat_s:\n",
        "        if False:\n",
        "tests/protocol/decode/test_s2_release.py::"
        "test_a_peer_that_falls_silent_is_fenced_and_its_pages_return_by_the_fence",
    ),
    breakage(
        "S6-reserve-repeated",
        "RESERVE is repeated until it is answered",
        "kvxfer/protocol/decode_endings.py",
        "                    leg.session.send(leg.reserve, out)\n",
        "                    pass\n",
        f"{DEADLINES}::test_reserve_is_repeated_word_for_word_until_it_is_answered",
    ),
    breakage(
        "S6-readers-in-time",
        "a committed grant does not wait for its readers for ever",
        LEGS,
        "        for grant in [grant for grant in self.live.values() if grant.deadline <= now]:\n",
        "        for grant in list[Grant]():\n",
        f"{PREFILL}/test_deadlines.py::test_committed_grant_that_nobody_reserves_fails_and_is_released",
        "tests/endpoints/test_api_endings.py::test_accepts_time_starts_at_commit_and_not_before",
    ),
    breakage(
        "S6-offer",
        "a RESERVE that nobody accepts is refused after its deadline",
        "kvxfer/protocol/prefill_grants.py",
        "        for offer in [offer for offer in self.offers if offer.deadline <= now]:\n",
        "        for offer in list[Offer]():\n",
        f"{PREFILL}/test_reserve.py::test_offer_that_nobody_accepts_is_rejected_after_its_deadline",
    ),
    breakage(
        "S6-transfer",
        "committed pages that do not leave in time are aborted",
        LEGS,
        "            leg.deadline = max(now + self._config.transfer_timeout_s, leg.given_up_at)\n",
        "            leg.deadline = math.inf\n",
        f"{PREFILL}/test_deadlines.py::test_committed_pages_that_do_not_leave_in_time_are_aborted_and_drained",
    ),
    breakage(
        "S6-lost-done",
        "a DONE that never comes ends as unknown delivery",
        LEGS,
        "                leg.deadline = max(now, leg.given_up_at) + self._config.done_timeout_s\n",
        "                leg.deadline = math.inf\n",
        f"{PREFILL}/test_grant.py::test_lost_done_is_a_failure_of_unknown_delivery_not_ready",
    ),
    breakage(
        "S6-silent-decode",
        "a decode that falls silent is closed",
        "kvxfer/protocol/prefill.py",
        "            if now >= session.heard_at + self._config.heartbeat_timeout_s:\n",
        "            if False:\n",
        f"{PREFILL}/test_lanes.py::test_silent_decode_is_closed_after_the_heartbeat_timeout_and_its_sources_are_freed",
    ),
    breakage(
        "S6-handshake",
        "a connection that does not prove itself in time is closed",
        "kvxfer/lanes/listener.py",
        "if pending.deadline <= now]:\n",
        "if False]:\n",
        "tests/lanes/test_listener.py::test_a_peer_that_stops_in_mid_handshake_is_closed_at_the_deadline",
    ),
    breakage(
        "S6-fence-wakes-readers",
        "a fence does not wait for a peer that stopped inside a frame",
        "native/lanes/receiver_lane.cpp",
        "  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));\n"
        "  if (owned_socket_.get() >= 0) shutdown(socket_, SHUT_RDWR);\n",
        "  static_cast<void>(one);\n",
        "native/tests/test_receiver_tcp.cpp::"
        "fence returns at once although the peer stopped inside a frame, and nothing lands after it",
        # Every receiver would wait for its peers when it is closed.
        still="native/tests/test_sender_tcp.cpp::"
        "a reader that comes after the commit gets pages and record all the same",
    ),
)
