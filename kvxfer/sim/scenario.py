"""What one seed does: machines, requests and faults as plain data, so that a failing run can be made smaller.

Times are seconds of the simulated world's clock. What happens by chance in a run (delays, losses) is drawn from streams
of their own for each link, lane and request: taking a request out leaves the others' luck as it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

TOKENS_PER_PAGE = 16

LANE_KINDS = ("tcp", "local", "verbs")
"""``tcp`` and ``local`` can be revoked leg by leg; ``verbs`` only by the fence of a generation."""

HONEST = "honest"
MISTAKES = (
    "placeholder",  # one token's worth is computed and committed in place of the prompt (the incident)
    "placeholder-in-page",  # the same number of pages, fewer tokens
    "partial",  # one page of one layer is not written, all tokens are committed
    "careless",  # the engine reuses a source page that it has not been told is free
    "silent",  # prefill's engine accepts and never commits
    "oversize",  # decode reserves more than its pool, or prefill's, can hold
    "reject",  # prefill's engine refuses the request
    "decline",  # decode does not want the pages
    "greedy",  # decode's engine offers a page that a handoff still holds
    "double",  # the sender's core puts a chunk on its lanes twice (lanes that decode places only)
)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request. ``decodes`` has one decode for each reader; ``prefill`` is an instance with all its ranks.
    ``prompt``
    says what its pages contain: a request id that comes again is of the same prompt."""

    serial: int
    prompt: int
    request_id: str
    at_s: float
    prefill: int
    decodes: tuple[int, ...]
    n_tokens: int
    first_token: int
    kind: str
    reserve_after_s: float
    accept_after_s: float
    batches: int
    batch_gap_s: float
    reserve_timeout_s: float
    accept_timeout_s: float
    hold_s: float
    abort_decode_after_s: float | None = None
    abort_prefill_after_s: float | None = None
    extend_s: float = 0.0
    retries: int = 0
    expect_incarnation: bool = False


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """``kind``: pause, crash, partition, lane, forge, flip, slow-fence, dead-fence. ``target`` names a node, or two
    with
    a blank."""

    at_s: float
    kind: str
    target: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Weather:
    """The control network. ``slow_s`` is the tail of the delays that ``slow`` of the frames see."""

    delay_s: float = 0.002
    jitter_s: float = 0.01
    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    slow_s: float = 1.0
    ordered: bool = False  # frames of one direction between two nodes do not overtake each other


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of one run. ``fair``: nothing is broken, and every request that nobody disturbs must succeed: at once where
    frames come in order and none is lost, else after a few retries (a RESERVE that a later one overtook is refused)."""

    seed: int
    fair: bool
    decodes: int
    prefills: int
    ranks: int
    sharding: str  # layers | heads | replicated
    lanes: int
    lane_kind: str
    verify: str
    decode_pages: int
    prefill_pages: int
    clock_skew: float
    hasty: bool  # short time-outs, small memories
    eager_completion: bool  # verbs: success may be reported before the bytes are visible
    lane_step_s: float  # how long a few frames take on a lane
    weather: Weather
    requests: tuple[RequestPlan, ...]
    faults: tuple[FaultPlan, ...]
    events: int
    horizon_s: float = field(default=float("inf"))  # nothing planned begins after it

    @property
    def disturbed(self) -> frozenset[str]:
        """Names of the nodes that a fault is planned for."""
        return frozenset(name for fault in self.faults for name in fault.target.split())


DEFAULT_EVENTS = 2500


def scenario(seed: int, events: int = DEFAULT_EVENTS) -> Scenario:
    """The scenario of a seed. Every fifth is fair."""
    dice = random.Random(f"scenario:{seed}")
    fair = seed % 5 == 0
    decodes, prefills = dice.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
    ranks = dice.choice([1, 1, 2, 2, 3])
    lane_kind = dice.choice(LANE_KINDS)
    decode_pages = 40 if fair else dice.choice([10, 14, 24])
    prefill_pages = 60 if fair else dice.choice([16, 24, 48])
    base = Scenario(
        seed=seed,
        fair=fair,
        decodes=decodes,
        prefills=prefills,
        ranks=ranks,
        sharding=dice.choice(["layers", "heads", "replicated"]),
        lanes=dice.choice([1, 2, 2, 3]),
        lane_kind=lane_kind,
        verify=dice.choice(["digest", "digest", "coverage"]),
        decode_pages=decode_pages,
        prefill_pages=prefill_pages,
        clock_skew=dice.choice([0.0, 0.02, 0.2]),
        hasty=not fair and dice.random() < 0.5,
        eager_completion=dice.random() < 0.5,
        lane_step_s=0.004 if fair else dice.choice([0.004, 0.1, 0.5]),
        weather=_weather(dice, fair),
        requests=(),
        faults=(),
        events=events,
    )
    requests = _requests(dice, base)
    faults = () if fair else _faults(dice, base, requests)
    return replace(base, requests=requests, faults=faults)


def _weather(dice: random.Random, fair: bool) -> Weather:
    if fair:
        if dice.random() < 0.5:
            return Weather(jitter_s=0.05, ordered=True)
        return Weather(loss=dice.choice([0.05, 0.15]), duplicate=dice.choice([0.0, 0.1]), jitter_s=0.05)
    if dice.random() < 0.4:  # what ZeroMQ promises while nothing is cut
        return Weather(jitter_s=dice.choice([0.001, 0.05, 0.3]), ordered=True)
    return Weather(
        jitter_s=dice.choice([0.001, 0.05, 0.3]),
        loss=dice.choice([0.0, 0.05, 0.2, 0.4]),
        duplicate=dice.choice([0.0, 0.1, 0.3]),
        slow=dice.choice([0.0, 0.05, 0.2]),
        slow_s=dice.choice([1.0, 10.0, 100.0]),
    )


def _requests(dice: random.Random, base: Scenario) -> tuple[RequestPlan, ...]:
    plans: list[RequestPlan] = []
    at_s = 0.0
    for serial in range(1, dice.randint(8, 30)):
        at_s += dice.expovariate(1.0) if dice.random() < 0.8 else dice.uniform(2.0, 15.0)
        kind = HONEST if base.fair or dice.random() < 0.7 else dice.choice(MISTAKES)
        if (kind == "careless" and base.verify != "digest") or (kind == "double" and base.lane_kind == "verbs"):
            kind = HONEST  # only digests find a changed source, and only decode's own core sees a chunk twice
        readers = min(base.decodes, dice.choice([1, 1, 1, 2]))
        most = min(base.decode_pages // 3, base.prefill_pages // 4, 5) * TOKENS_PER_PAGE
        n_tokens = dice.randint(2, most)
        if kind == "oversize":
            n_tokens = (max(base.decode_pages, base.prefill_pages) + 1) * TOKENS_PER_PAGE
        first = dice.randrange(n_tokens) if dice.random() < 0.25 and kind == HONEST else 0
        prompt = serial
        if base.fair and not base.weather.ordered:
            readers = 1  # several would have to try again together
        if plans and not base.fair and dice.random() < 0.1:
            prompt = plans[-1].prompt
        plans.append(
            RequestPlan(
                serial=serial,
                prompt=prompt,
                request_id=f"r{prompt}",
                at_s=at_s,
                prefill=dice.randrange(base.prefills),
                decodes=tuple(dice.sample(range(base.decodes), readers)),
                n_tokens=n_tokens,
                first_token=first,
                kind=kind,
                reserve_after_s=dice.choice([0.0, 0.0, 0.1, 1.0]),
                accept_after_s=dice.choice([0.0, 0.0, 0.1, 1.0]),
                batches=dice.choice([1, 1, 2, 3]),
                batch_gap_s=dice.choice([0.0, 0.05, 0.5]),
                reserve_timeout_s=60.0 if base.fair else dice.choice([2.0, 10.0, 60.0]),
                accept_timeout_s=60.0 if base.fair else dice.choice([2.0, 10.0, 60.0]),
                hold_s=dice.choice([0.0, 0.2, 3.0]),
                abort_decode_after_s=_sometimes(dice, 0.12 if not base.fair else 0.05),
                abort_prefill_after_s=_sometimes(dice, 0.08 if not base.fair else 0.05),
                extend_s=dice.choice([0.0, 0.0, 0.0, 5.0]),
                retries=(0 if base.weather.ordered else 5) if base.fair else dice.choice([0, 0, 1, 2]),
                expect_incarnation=not base.fair and dice.random() < 0.3,
            )
        )
    return tuple(plans)


def _sometimes(dice: random.Random, chance: float) -> float | None:
    return dice.choice([0.0, 0.01, 0.1, 0.5, 2.0]) if dice.random() < chance else None


def _faults(dice: random.Random, base: Scenario, requests: tuple[RequestPlan, ...]) -> tuple[FaultPlan, ...]:
    """Most of them strike while a request is under way, and those that it uses."""
    decodes = [f"decode{n}" for n in range(base.decodes)]
    prefills = [f"prefill{n}.{rank}" for n in range(base.prefills) for rank in range(base.ranks)]
    faults = []
    for _ in range(dice.choice([0, 1, 2, 4, 8, 12])):
        kind = dice.choice(
            ["pause", "pause", "crash", "partition", "lane", "lane", "lane", "forge", "forge", "flip"]
            + ["lane"] * (3 if base.lane_kind == "verbs" else 0)
            + ["slow-fence", "dead-fence"] * (base.lane_kind == "verbs" or dice.random() < 0.2)
        )
        if kind == "flip" and base.verify != "digest":
            kind = "pause"  # coverage does not look at bytes
        victim = dice.choice(requests)
        if dice.random() < 0.7:
            at_s = victim.at_s + dice.choice([0.0, 0.1, 1.0]) + dice.expovariate(5.0 if base.lane_step_s < 0.1 else 1.0)
            pair = f"decode{dice.choice(victim.decodes)} prefill{victim.prefill}.{dice.randrange(base.ranks)}"
        else:
            at_s = dice.uniform(0.0, requests[-1].at_s + 1.0)
            pair = f"{dice.choice(decodes)} {dice.choice(prefills)}"
        one = dice.choice(pair.split())
        target = pair if kind in ("partition", "lane", "forge", "flip") else one
        if kind in ("slow-fence", "dead-fence"):
            target = dice.choice(decodes)
        duration = dice.choice([0.05, 0.5, 3.0, 20.0, 150.0])
        faults.append(FaultPlan(at_s, kind, target, duration))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
