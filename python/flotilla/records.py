"""Results of a fleet as plain values: runs, evals and samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone

from google.protobuf.timestamp_pb2 import Timestamp

from flotilla.v1 import board_pb2, control_pb2, facts_pb2

HELDOUT = "held out"
"""The name of a run's own held-out prompts among its suites."""


@dataclass(frozen=True)
class RunInfo:
    """A run. `message` is the API's whole description, with cycles, checkpoints and evals."""

    run: str
    name: str
    kind: str
    state: str
    """running, paused, queued, succeeded, failed or cancelled."""
    reason: str
    """Why it has ended, is paused or waits; may be empty."""
    cycle: int
    """The current cycle, from 0."""
    cycles: int
    phase: str
    """Empty in lists until the run has ended."""
    submitted_at: datetime | None
    ended_at: datetime | None
    user: str
    message: control_pb2.Run = field(repr=False, compare=False)

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")

    @classmethod
    def from_message(cls, run: control_pb2.Run) -> RunInfo:
        return cls(
            run=run.run,
            name=run.name,
            kind=run.kind,
            state=control_pb2.Run.State.Name(run.state).lower(),
            reason=run.message,
            cycle=run.cycle,
            cycles=run.cycles,
            phase=run.phase,
            submitted_at=_to_datetime(run.submitted_at),
            ended_at=_to_datetime(run.ended_at),
            user=run.user,
            message=run,
        )


@dataclass(frozen=True)
class PassRate:
    """The share of held-out samples that passed: mean over prompts, 0 to 1."""

    mean: float
    stderr: float
    prompts: int
    samples: int
    pass_at: dict[int, float]
    """Unbiased pass@k by k, as far as the spec asks for it."""

    @classmethod
    def from_message(
        cls, rate: facts_pb2.CycleDone.Rate, pass_at: list[facts_pb2.CycleDone.PassAt]
    ) -> PassRate:
        by_k = {it.k: it.mean for it in pass_at}
        return cls(rate.mean, rate.stderr, rate.prompts, rate.samples, by_k)


@dataclass(frozen=True)
class EvalResult:
    """A measurement of a checkpoint: the perplexity of a text, or the pass rates of a cycle."""

    cursor: int
    """Pass it as `after` to continue a stream behind this result."""
    at: datetime | None
    run: str
    cycle: int
    step: int
    suite: str
    """Name of the text; empty for pass rates."""
    perplexity: float | None
    """Per token of the model; None for pass rates."""
    stderr: float | None
    """Standard error of the perplexity."""
    pass_rates: dict[str, PassRate]
    """By suite; empty for a perplexity. HELDOUT are the run's own held-out prompts."""
    message: control_pb2.EvalEvent = field(repr=False, compare=False)

    @classmethod
    def from_message(cls, event: control_pb2.EvalEvent) -> EvalResult:
        at = _to_datetime(event.at)
        if event.WhichOneof("result") == "eval":
            it = event.eval
            place = (event.cursor, at, it.run, it.cycle, it.step)
            return cls(*place, it.suite, it.perplexity, it.stderr, {}, event)
        rates = event.pass_rates
        found = {}
        if rates.HasField("heldout"):
            found[HELDOUT] = PassRate.from_message(rates.heldout, list(rates.pass_at))
        for suite in rates.suites:
            if suite.HasField("rate"):
                found[suite.suite] = PassRate.from_message(suite.rate, list(suite.pass_at))
        place = (event.cursor, at, rates.run, rates.cycle, rates.step)
        return cls(*place, "", None, None, found, event)

    def __str__(self) -> str:
        if self.perplexity is not None:
            value = f"{self.suite}: perplexity {self.perplexity:.4f}"
        else:
            rates = (
                f"{suite}: pass rate {rate.mean:.1%}" for suite, rate in self.pass_rates.items()
            )
            value = ", ".join(rates)
        return f"{self.run}, cycle {self.cycle}, step {self.step}, {value}"


@dataclass(frozen=True)
class Sample:
    """A sampled completion of a cycle, with its verdict and selection."""

    run: str
    cycle: int
    prompt_id: str
    prompt: str
    index: int
    """Of the prompt's samples, from 0."""
    text: str
    """Truncated if `cut`."""
    cut: bool
    tokens: int
    finish: str
    """stop or length."""
    logprob: float | None
    """Sum over the tokens, in nats."""
    outcome: str
    """pass, fail or error; empty: not judged yet."""
    reward: float | None
    """None without a verdict."""
    detail: str
    fate: str
    """kept, or the reason why it was dropped; empty: not selected yet, or never to be."""
    agent: str

    @classmethod
    def from_page(cls, run: str, cycle: int, page: board_pb2.SamplesPage) -> Iterator[Sample]:
        for prompt in page.prompts:
            for it in prompt.samples:
                yield cls(
                    run=run,
                    cycle=cycle,
                    prompt_id=prompt.prompt_id,
                    prompt=prompt.text,
                    index=it.index,
                    text=it.text,
                    cut=it.cut,
                    tokens=it.tokens,
                    finish=it.finish,
                    logprob=it.logprob if it.HasField("logprob") else None,
                    outcome=it.outcome,
                    reward=it.reward if it.outcome in ("pass", "fail") else None,
                    detail=it.detail,
                    fate=it.fate,
                    agent=it.agent,
                )


def _to_datetime(time: Timestamp) -> datetime | None:
    if time.seconds == 0:
        return None
    return datetime.fromtimestamp(time.seconds + time.nanos / 1e9, timezone.utc)
