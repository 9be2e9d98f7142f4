"""S4 Capacity first: what does not fit is refused before a page is reserved, a key sent or a byte moved."""

from __future__ import annotations

from .model import Breakage, breakage

OFFERS = "kvxfer/protocol/decode_offers.py"
CHECKS = "kvxfer/protocol/prefill_checks.py"
RESERVE = "tests/protocol/decode/test_s4_s5_reserve.py"
REQUESTS = "tests/endpoints/test_api_requests.py"
PREFILL = "tests/protocol/prefill"

BREAKAGES: tuple[Breakage, ...] = (
    breakage(
        "S4-own-pool-tokens",
        "a request longer than decode's pool is refused at the call",
        OFFERS,
        "        if 0 < capacity < end:\n",
        "        if False:\n",
        f"{RESERVE}::test_a_request_longer_than_our_pool_is_refused_with_both_numbers",
        f"{REQUESTS}::test_tokens_beyond_decodes_pool_are_refused_however_few_pages_are_wanted",
    ),
    breakage(
        "S4-own-pool-pages",
        "a request for more pages than the group has is refused with both numbers",
        OFFERS,
        "            if len(logical) > group.n_pages:\n",
        "            if False:\n",
        f"{RESERVE}::test_more_pages_than_the_group_has_are_refused_with_both_numbers",
        f"{REQUESTS}::test_a_request_larger_than_decodes_pool_is_refused_at_once_with_both_numbers",
    ),
    breakage(
        "S4-prefills-pool",
        "a request longer than prefill's pool is refused before it is offered",
        OFFERS,
        "        if 0 < welcome.pool.capacity_tokens < end:\n",
        "        if False:\n",
        f"{RESERVE}::test_a_request_longer_than_prefills_pool_fails_before_it_is_offered",
        f"{REQUESTS}::test_a_request_larger_than_prefills_pool_is_refused_before_anything_is_offered",
    ),
    breakage(
        "S4-one-full-context-at-decode",
        "decode opens no session with a pool that cannot hold one full context",
        "kvxfer/protocol/decode_session.py",
        "            if 0 < pool.capacity_tokens < context and not self.config.accept_smaller_capacity:\n",
        "            if False:\n",
        f"{RESERVE}::test_a_peer_that_cannot_hold_one_full_context_is_refused_with_both_numbers",
    ),
    breakage(
        "S4-own-full-context",
        "decode does not start with a pool that cannot hold one full context",
        OFFERS,
        "        if not config.accept_smaller_capacity and 0 < geometry.capacity_tokens < config.max_context_tokens:\n",
        "        if False:\n",
        f"{RESERVE}::test_our_own_pool_must_hold_one_full_context",
    ),
    breakage(
        "S4-one-full-context-at-prefill",
        "prefill opens no session where either pool cannot hold one full context",
        CHECKS,
        "    if capacity and context and capacity < context:\n",
        "    if False:\n",
        f"{PREFILL}/test_hello.py::test_prefill_pool_below_one_full_context_is_refused_with_both_numbers",
        f"{PREFILL}/test_hello.py::test_decode_pool_below_one_full_context_is_refused_with_both_numbers",
    ),
    breakage(
        "S4-tokens-at-prefill",
        "prefill refuses a RESERVE of more tokens than it holds, whatever decode has checked",
        CHECKS,
        "        if decode_group.tokens_per_page and ours.capacity_tokens and end > ours.capacity_tokens:\n",
        "        if False:\n",
        f"{PREFILL}/test_reserve.py::test_more_tokens_than_prefill_holds_are_refused_with_both_numbers",
    ),
    breakage(
        "S4-pages-at-prefill",
        "prefill refuses a RESERVE of more pages than it has",
        CHECKS,
        "                if pages > group.n_pages:\n",
        "                if False:\n",
        f"{PREFILL}/test_reserve.py::test_more_pages_than_prefill_has_are_refused_with_both_numbers",
    ),
)
