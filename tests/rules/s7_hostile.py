"""S7 Hostile input changes nothing: what is malformed, replayed, oversize or unauthenticated never changes a page."""

from __future__ import annotations

from .model import Breakage, breakage

DECODE = "tests/protocol/decode/test_s7_hostile.py"
PREFILL = "tests/protocol/prefill"
CONTROL = "tests/endpoints/test_hostile_control.py"
LISTENER = "tests/lanes/test_listener.py"
SOCKETS = "tests/control/test_sockets.py"
CODEC = "tests/control/test_codec.py"
TCP = "native/tests/test_receiver_tcp.cpp"
LOCAL = "native/tests/test_receiver_local.cpp"
FRAMING = f"{TCP}::broken framing takes the lane down and lands nothing"
LANE = "native/lanes/receiver_lane.cpp"

BREAKAGES: tuple[Breakage, ...] = (
    # ---- control frames: whose, and in which order ----
    breakage(
        "S7-epoch-at-decode",
        "decode hears no frame of another epoch",
        "kvxfer/protocol/decode_session.py",
        "        if epoch != expected or len(epoch) != 16:\n",
        "        if False:\n",
        f"{DECODE}::test_a_frame_of_another_epoch_changes_nothing",
    ),
    breakage(
        "S7-sequence-at-decode",
        "decode hears no frame whose number does not rise",
        "kvxfer/protocol/decode_session.py",
        "        if sequence <= self.seen:\n",
        "        if False:\n",
        f"{DECODE}::test_a_frame_out_of_sequence_changes_nothing",
        f"{DECODE}::test_a_replayed_failed_changes_nothing",
    ),
    breakage(
        "S7-sequence-at-prefill",
        "prefill hears no frame whose number does not rise",
        "kvxfer/protocol/prefill.py",
        "        if session.route != route or sequence <= session.received:\n",
        "        if session.route != route:\n",
        f"{PREFILL}/test_hello.py::test_replayed_or_rerouted_frame_changes_nothing",
        f"{CONTROL}::test_a_frame_whose_number_does_not_rise_is_dropped",
    ),
    breakage(
        "S7-route",
        "an epoch is heard on its own connection only",
        "kvxfer/protocol/prefill.py",
        "        if session.route != route or sequence <= session.received:\n",
        "        if sequence <= session.received:\n",
        f"{PREFILL}/test_hello.py::test_replayed_or_rerouted_frame_changes_nothing",
        f"{CONTROL}::test_a_stolen_epoch_on_another_connection_is_dropped",
    ),
    breakage(
        "S7-altered-repeat",
        "a second RESERVE of a reservation that says otherwise is refused",
        "kvxfer/protocol/prefill_handlers.py",
        "            if reserve != known:\n",
        "            if False:\n",
        f"{PREFILL}/test_reserve.py::test_repeat_with_other_contents_changes_nothing",
        f"{CONTROL}::test_a_second_reserve_that_says_otherwise_is_refused",
    ),
    breakage(
        "S7-early-done",
        "DONE before the commit changes nothing",
        "kvxfer/protocol/prefill_legs.py",
        "        if not grant.committed:\n            out.append(Audit(",
        "        if False:\n            out.append(Audit(",
        f"{PREFILL}/test_grant.py::test_done_before_commit_changes_nothing",
    ),
    breakage(
        "S7-bounds-of-slices",
        "a slice lies inside the pages of both sides",
        "kvxfer/protocol/leg.py",
        "    if runs < 1 or run_bytes < 1 or offset + (runs - 1) * stride + run_bytes > page_bytes:\n",
        "    if runs < 1 or run_bytes < 1:\n",
        f"{PREFILL}/test_reserve.py::test_slice_outside_prefills_page_is_refused",
        "tests/protocol/decode/test_leg_layout.py::test_slices_outside_the_pages_are_refused",
    ),
    breakage(
        "S7-bounds-of-pages",
        "a page list names pages of the pool",
        "kvxfer/protocol/leg.py",
        "    elif int(pool_pages[0]) >= group.n_pages:\n",
        "    elif False:\n",
        f"{PREFILL}/test_reserve.py::test_page_outside_decodes_pool_is_refused",
    ),
    breakage(
        "S7-bounded-offers",
        "RESERVEs that nobody serves are bounded in number and bytes",
        "kvxfer/protocol/prefill_memory.py",
        "        return self._count < self._max_offers and self._bytes + offer.nbytes <= self._max_bytes\n",
        "        return True\n",
        f"{PREFILL}/test_reserve.py::test_offers_are_bounded_in_number",
        f"{PREFILL}/test_reserve.py::test_offers_are_bounded_in_bytes",
    ),
    # ---- control frames: their bytes ----
    breakage(
        "S7-frame-bound",
        "a control frame beyond its bound is not read",
        "kvxfer/control/codec.py",
        "    if len(frame) > limits.max_frame_bytes:\n",
        "    if False:\n",
        f"{CODEC}::test_a_frame_beyond_its_bound_is_refused_before_it_is_read",
    ),
    breakage(
        "S7-socket-bound",
        "the socket takes no message beyond the bound",
        "kvxfer/control/inbox.py",
        "    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes + 1024)\n",
        "",
        f"{SOCKETS}::test_an_oversize_frame_ends_its_own_connection_only",
    ),
    breakage(
        "S7-announced-sizes",
        "announced sizes are refused before memory is spent on them",
        "kvxfer/control/codec.py",
        "            max_array_len=limits.max_array,\n",
        "",
        f"{CODEC}::test_announced_sizes_are_refused_before_memory_is_spent_on_them",
    ),
    # ---- who may speak ----
    breakage(
        "S7-authorised-keys",
        "only authorised keys are let in",
        "kvxfer/control/zap.py",
        "            allowed = encoded in self._authorised\n",
        "            allowed = True\n",
        f"{SOCKETS}::test_an_unauthorised_key_delivers_nothing_and_is_counted",
        f"{CONTROL}::test_an_unauthenticated_peer_is_never_heard",
    ),
    breakage(
        "S7-guard-gone",
        "where the key guard is gone nobody is let in",
        "kvxfer/control/server.py",
        "            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)\n",
        "",
        f"{SOCKETS}::test_where_the_key_guard_is_gone_nobody_new_is_let_in",
    ),
    breakage(
        "S7-loopback",
        "nothing is bound or dialled beyond loopback without keys",
        "kvxfer/control/loopback.py",
        "    if not is_loopback(address.host):\n",
        "    if False:\n",
        "tests/control/test_loopback.py::test_beyond_loopback_keys_are_needed_or_the_word_insecure",
        "tests/endpoints/test_api_addresses.py::test_a_bind_beyond_loopback_without_keys_is_refused",
    ),
    breakage(
        "S7-lane-secret",
        "a lane's connection proves the session's secret",
        "kvxfer/lanes/handshake.py",
        '    return hmac.compare_digest(mac, _mac(secret, b"decode", claim.pack(), server_nonce))\n',
        "    return True\n",
        f"{LISTENER}::test_a_wrong_secret_epoch_or_generation_is_refused",
        "tests/lanes/test_handshake.py::test_a_proof_does_not_hold_for_another_connection_or_secret",
    ),
    breakage(
        "S7-lane-proof-replayed",
        "a proof holds for one connection",
        "kvxfer/lanes/handshake.py",
        '+ role + b"\\0" + body + server_nonce, "sha256")\n',
        '+ role + b"\\0" + body, "sha256")\n',
        f"{LISTENER}::test_a_replayed_proof_proves_nothing",
    ),
    breakage(
        "S7-lane-taken-once",
        "a lane is connected once",
        "kvxfer/lanes/registry.py",
        "            if claim.lane in served.taken:\n",
        "            if False:\n",
        f"{LISTENER}::test_a_lane_is_taken_once_whatever_its_kind",
    ),
    breakage(
        "S7-same-user",
        "a process of another user gets no local lane",
        "kvxfer/lanes/listener.py",
        "            if uid != os.geteuid():\n",
        "            if False:\n",
        "tests/lanes/test_dial.py::test_a_process_of_another_user_is_not_asked_and_not_answered",
        lanes="local",
    ),
    # ---- data frames ----
    breakage(
        "S7-frame-sequence",
        "a frame sent twice, or out of order, takes its lane down",
        LANE,
        "  if (header.sequence != next_sequence_) {\n",
        "  if (false) {\n",
        f"{TCP}::a frame sent twice is out of sequence and takes the lane down",
        FRAMING,
    ),
    breakage(
        "S7-frame-generation",
        "a frame of another generation takes its lane down",
        LANE,
        '  if (header.generation != shared_.generation) return "frame: of generation " + '
        "std::to_string(header.generation);\n",
        "",
        FRAMING,
    ),
    breakage(
        "S7-frame-lane",
        "a frame of another lane takes its lane down",
        LANE,
        '  if (header.lane != lane_) return "frame: of lane " + std::to_string(header.lane);\n',
        "",
        FRAMING,
    ),
    breakage(
        "S7-frame-size",
        "a frame's length is bounded by the pool's geometry",
        LANE,
        "  if (header.body_bytes < least || header.body_bytes > most) {\n",
        "  if (false) {\n",
        FRAMING,
    ),
    breakage(
        "S7-record-framing",
        "a record whose parts do not add up is never handed on",
        "native/lanes/record_reader.cpp",
        "      !take(aux_words, 8) || left != 0) {\n",
        "      !take(aux_words, 8)) {\n",
        f"{TCP}::a record whose parts do not add up is refused and never handed on",
    ),
    breakage(
        "S7-events-bounded",
        "a peer that errs without end does not fill the queue",
        LANE,
        "  if (leg != nullptr ? leg->add_violation() : may_report_unknown()) {\n",
        "  if (leg == nullptr || leg->add_violation() || true) {\n",
        f"{TCP}::violations without end do not fill the queue",
    ),
    breakage(
        "S7-unsealed-memory",
        "memory that could be truncated under a reader is not mapped",
        "native/lanes/peer_memory.cpp",
        "  if ((seals & F_SEAL_SHRINK) == 0) throw Error(",
        "  if (false) throw Error(",
        f"{LOCAL}::memory of the peer is accepted only as it was claimed",
        "tests/endpoints/test_local_source.py::"
        "test_memory_that_may_still_be_truncated_is_not_mapped_and_tcp_is_used_with_the_reason",
        lanes="local",
    ),
    breakage(
        "S7-claimed-memory",
        "a region lies inside the memory that came for it",
        "native/lanes/peer_memory.cpp",
        "      if (end > mapping.bytes) {\n",
        "      if (false) {\n",
        f"{LOCAL}::memory of the peer is accepted only as it was claimed",
        "tests/endpoints/test_local_source.py::test_a_description_that_reaches_beyond_its_memory_is_not_believed",
        lanes="local",
    ),
    breakage(
        "S7-source-pages",
        "a page outside prefill's pool is not read",
        "native/lanes/local_reader.cpp",
        "  if (beyond != source_pages.end()) {\n",
        "  if (beyond != source_pages.end() && false) {\n",
        f"{LOCAL}::a frame that names memory prefill does not have is a violation and copies nothing",
        lanes="local",
    ),
)
