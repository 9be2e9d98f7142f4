"""S8 Nothing silent: every refusal, mismatch, fence and quarantine is an error, a count and a line."""

from __future__ import annotations

from .model import Breakage, breakage

AUDIT = "tests/protocol/decode/test_s8_audit.py"
PREFILL = "tests/protocol/prefill/test_audit.py"
CONTROL = "tests/endpoints/test_hostile_control.py"

BREAKAGES: tuple[Breakage, ...] = (
    breakage(
        "S8-failed",
        "a failed handoff leaves a line with its error",
        "kvxfer/protocol/decode_endings.py",
        '        out.append(Audit("failed", reservation=reservation.id, fields=_json(error)))\n',
        "",
        f"{AUDIT}::test_a_failed_handoff_leaves_its_error_its_quarantine_and_its_release",
    ),
    breakage(
        "S8-mismatch",
        "a handoff that is refused leaves a line with the pages concerned",
        "kvxfer/protocol/decode_endings.py",
        '            out.append(Audit("mismatch", reservation=reservation.id, fields=_json(error)))\n',
        "",
        "tests/protocol/decode/test_s1_accept.py::test_every_mismatch_is_audited_with_the_pages_concerned",
    ),
    breakage(
        "S8-quarantine",
        "a quarantine leaves a line with its pages",
        "kvxfer/protocol/decode_endings.py",
        '            out.append(Audit("quarantine", reservation=reservation.id, fields=pages))\n',
        "",
        f"{AUDIT}::test_a_failed_handoff_leaves_its_error_its_quarantine_and_its_release",
    ),
    breakage(
        "S8-fence",
        "a fence leaves a line with its generation and cause",
        "kvxfer/protocol/decode_session.py",
        '        out.append(Audit("fence", self.id, fields={"generation": self.generation, "cause": cause, '
        '"peer": self.peer}))\n',
        "",
        f"{AUDIT}::test_a_fence_says_which_generation_and_why",
    ),
    breakage(
        "S8-refused-reservation",
        "a refused reservation leaves a line with its numbers",
        "kvxfer/protocol/prefill_legs.py",
        '        out.append(Audit("refused", session.id, reserve.reservation, reserve.leg, fields))\n',
        "",
        f"{PREFILL}::test_refused_reservation_is_audited_with_its_numbers",
    ),
    breakage(
        "S8-failed-leg",
        "a failed leg leaves a line with lane, generation and cause",
        "kvxfer/protocol/prefill_legs.py",
        '        out.append(Audit("leg_failed", leg.session, reserve.reservation, reserve.leg, fields))\n',
        "",
        f"{PREFILL}::test_failed_leg_is_audited_with_lane_generation_and_cause",
    ),
    breakage(
        "S8-counted",
        "every line is counted",
        "kvxfer/audit.py",
        "            self._counts[event] += 1\n",
        "",
        f"{CONTROL}::test_garbage_is_refused_counted_and_changes_nothing",
    ),
    breakage(
        "S8-refused-frame",
        "a control frame that is refused is counted",
        "kvxfer/prefill_executor.py",
        '        self._trail.note(Audit("refused_frame", fields={"kind": refused.kind, "detail": refused.detail}))\n',
        "        pass\n",
        f"{CONTROL}::test_garbage_is_refused_counted_and_changes_nothing",
    ),
    breakage(
        "S8-lane-fallback",
        "a kind of lane that was passed over is named with the reason",
        "kvxfer/decode_executor.py",
        '                Audit("lane_fallback", action.session, fields={"lane": fallen, "used": kind, '
        '"reason": reason})\n',
        '                Audit("ready")\n',
        "tests/endpoints/test_local_source.py::"
        "test_memory_that_may_still_be_truncated_is_not_mapped_and_tcp_is_used_with_the_reason",
        lanes="local",
    ),
    breakage(
        "S8-the-caller-hears",
        "a failure is an error to the caller",
        "kvxfer/decode.py",
        "            handoff._error = self._explained(action.error)\n",
        "            pass\n",
        "tests/endpoints/test_api_events.py::test_awaiting_a_handoff_that_fails_raises_its_error",
    ),
)
