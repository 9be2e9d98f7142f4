"""The demonstration, step by step, over one lane at a time. Every promise is a named check; all of them must hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.demo import layout
from kvxfer.demo.process import Worker

LOAD_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 120.0
OTHER_WEIGHTS_OFFSET = 1000


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Lanes to show, the model (None: small, random weights from ``seed``), and the sizes of prompt and answer."""

    lanes: tuple[str, ...] = ("local", "tcp")
    model: Path | None = None
    prompt_tokens: int = 300
    new_tokens: int = 32
    seed: int = 7


@dataclass(slots=True)
class LaneResult:
    """What happened on one lane. ``checks``: promise -> kept."""

    lane: str
    handoff: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    retry: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(self.checks.values())


@dataclass(slots=True)
class DemoResult:
    options: DemoOptions
    tokens_alone: list[int]
    page_bytes: int
    lanes: list[LaneResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.lanes) and all(lane.ok for lane in self.lanes)

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "ok": self.ok,
            "model": "random" if self.options.model is None else str(self.options.model),
            "prompt_tokens": self.options.prompt_tokens,
            "tokens_alone": self.tokens_alone,
            "lanes": [self._lane(lane) for lane in self.lanes],
        }

    def _lane(self, lane: LaneResult) -> dict[str, Any]:
        return {
            "lane": lane.lane,
            "ok": lane.ok,
            "identical": lane.handoff.get("tokens") == self.tokens_alone,
            "tokens_handed_over": lane.handoff.get("tokens"),
            "pages": lane.handoff.get("pages"),
            "page_bytes": self.page_bytes,
            "bytes": lane.handoff.get("bytes"),
            "stages_ms": stages_ms(lane),
            "tokens_with_other_weights": lane.control.get("tokens"),
            "incidents": [
                {key: value for key, value in incident.items() if key != "map"} for incident in lane.incidents
            ],
            "checks": lane.checks,
        }


def stages_ms(lane: LaneResult) -> dict[str, float]:
    """Times of the good handoff, in order; ``handoff`` is decode's reserve to READY, and contains prefill's stages."""
    times = {name: lane.prefill.get(name) for name in ("prefill", "lay_out", "post")}
    times |= {name: lane.handoff.get(name) for name in ("handoff", "read", "decode")}
    return {name: round(seconds * 1e3, 3) for name, seconds in times.items() if seconds is not None}


def run_demo(options: DemoOptions, advance: Callable[[], None] = lambda: None) -> DemoResult:
    """Starts the two workers, runs everything on each lane, and ends them. Raises KvxferError where something broke."""
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(Worker(role)) for role in ("prefill", "decode"))
        model = None if options.model is None else str(options.model.absolute())
        for worker in (prefill, decode):
            worker.send("load", model=model, seed=options.seed)
        # This process is the "one process alone". It imports torch while the workers do.
        from kvxfer.demo.model import Model, random_prompt

        reference = Model(options.model, options.seed)
        prompt = random_prompt(options.prompt_tokens, reference.vocabulary, options.seed)
        alone = reference.alone(prompt, options.new_tokens)
        for worker in (prefill, decode):
            worker.answer(LOAD_TIMEOUT_S)
        advance()
        result = DemoResult(options, alone, 0)
        for lane in options.lanes:
            run = _LaneRun(options, lane, prompt, alone, prefill, decode)
            result.page_bytes = run.open()
            try:
                result.lanes.append(run.all(advance))
            finally:
                run.close()
        return result


class _LaneRun:
    def __init__(
        self, options: DemoOptions, lane: str, prompt: list[int], alone: list[int], prefill: Worker, decode: Worker
    ) -> None:
        self._options = options
        self._prompt = prompt
        self._alone = alone
        self._prefill = prefill
        self._decode = decode
        self._result = LaneResult(lane)
        self._address = self._incarnation = ""

    def open(self) -> int:
        """Returns the bytes of a page over all layers."""
        pages = 2 * layout.pages_for(len(self._prompt)) + 10
        opened = self._prefill.call("open", STEP_TIMEOUT_S, lane=self._result.lane, pages=pages)
        self._address, self._incarnation = opened["address"], opened["incarnation"]
        return int(self._decode.call("open", STEP_TIMEOUT_S, lane=self._result.lane, pages=pages)["page_bytes"])

    def close(self) -> None:
        for worker in (self._decode, self._prefill):
            worker.call("close", STEP_TIMEOUT_S)

    def all(self, advance: Callable[[], None]) -> LaneResult:
        for step in (self._good, self._control, self._incident_of_count, self._incident_of_coverage, self._again):
            step()
            advance()
        return self._result

    def _good(self) -> None:
        result = self._result
        result.prefill, result.handoff = self._handoff("the-prompt", "prefill", prompt=self._prompt)
        same = result.handoff.get("tokens") == self._alone
        result.checks["the same tokens as one process alone"] = same
        result.checks["no stale page in what was accepted"] = result.handoff.get("stale_pages") == []
        result.checks["slots past the last token are zero"] = bool(result.handoff.get("tail_is_zero"))
        result.checks["the source pages were released"] = bool(result.prefill.get("released"))

    def _control(self) -> None:
        """With KV from other weights the tokens must change, or it was not the handed-over KV that decode used."""
        _, decoded = self._handoff(
            "the-control",
            "prefill",
            prompt=self._prompt,
            other_weights=self._options.seed + OTHER_WEIGHTS_OFFSET,
            first_token=self._alone[0],
        )
        self._result.control = decoded
        changed = bool(decoded.get("accepted")) and decoded["tokens"] != self._alone
        self._result.checks["other KV gives other tokens"] = changed

    def _incident_of_count(self) -> None:
        self._incident("commits the one token that it has", 1, "tokens")

    def _incident_of_coverage(self) -> None:
        self._incident("commits the whole prompt", len(self._prompt), "coverage")

    def _incident(self, what: str, commit_tokens: int, kind: str) -> None:
        n_tokens = len(self._prompt)
        n_pages = layout.pages_for(n_tokens)
        _, refused = self._handoff(
            f"the-incident-{kind}", "placeholder", n_tokens=n_tokens, commit_tokens=commit_tokens
        )
        refused = {"placeholder": what, **refused}
        self._result.incidents.append(refused)
        checks = self._result.checks
        checks[f"placeholder that {what}: refused ({kind})"] = not refused["accepted"] and refused["kind"] == kind
        # By count, pages that are not full of committed tokens are named; by coverage, pages that were not written.
        missing = n_pages - (0 if kind == "tokens" else 1)
        named = refused.get("logical_pages", [])
        checks[f"placeholder that {what}: its pages are named"] = (
            refused.get("pages_refused") == missing and bool(named) and named[0] == n_pages - missing
        )
        # Without the refusal these pages would have been read: they still hold what lay there before.
        stale = len(refused.get("stale_pages", []))
        checks[f"placeholder that {what}: the unwritten pages are stale"] = stale == n_pages - 1

    def _again(self) -> None:
        """The pages of the refused handoffs come back, and serve the same prompt."""
        _, self._result.retry = self._handoff("the-retry", "prefill", prompt=self._prompt)
        self._result.checks["the refused request succeeds when prefill really computes it"] = (
            self._result.retry.get("tokens") == self._alone and self._result.retry.get("stale_pages") == []
        )

    def _handoff(self, request_id: str, command: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Decode reserves while prefill works, as in a serving system; returns both answers."""
        self._decode.send(
            "decode",
            request_id=request_id,
            address=self._address,
            incarnation=self._incarnation,
            n_tokens=len(self._prompt),
            n_new=self._options.new_tokens,
        )
        self._prefill.send(command, request_id=request_id, **arguments)
        decoded = self._decode.answer(STEP_TIMEOUT_S)
        return self._prefill.answer(STEP_TIMEOUT_S), decoded


STEPS_PER_LANE = 5
