"""Spans of requests and of steps, for OpenTelemetry. Nothing of it is imported before it is asked for.

    request                                    its parent: the caller's span, where a traceparent came with the call
      queue          submitted .. started
      prefill        started .. first token
        chunk        a plan sent .. its result
      decode         first token .. end
        preemption   off the rows .. all there again
          swap out, swap in, chunk
        recovery     its worker lost .. on rows again

A request's spans are made of its record (story.py) when it is over: one record, one truth, and no cost on the way. A
trace is sampled as its caller decided, else by `percent`. Of steps, one in `every` becomes a span of its own.

What this file does not know: how a record came about.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from kilburn.controller.core.events import Turn
from kilburn.controller.story import Happened, Record
from kilburn.shared.keys import SettingError
from kilburn.shared.messages import StepPlan, StepResult

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

Value = str | int | float | bool
MOST_STEPS = 64  # watched at once: those of leases that ended never land
EXPORT_TIMEOUT_S = 5


@dataclass(slots=True)
class Stretch:
    """A span to be: times of the loop's clock."""

    name: str
    start: float
    end: float
    about: dict[str, Value] = field(default_factory=dict)
    parts: list["Stretch"] = field(default_factory=list)


# --- a record's tree


def stretches(record: Record) -> Stretch:
    """The spans of a record that is over."""
    ended_at = record.end.at if record.end is not None else record.submitted_at
    started_at = ended_at if record.started_at is None else record.started_at
    first_at = ended_at if record.first_token_at is None else record.first_token_at
    root = Stretch("request", record.submitted_at, ended_at, _about(record))
    root.parts.append(Stretch("queue", record.submitted_at, started_at))
    if record.started_at is not None:
        root.parts.append(Stretch("prefill", started_at, first_at, {"kilburn.cached_tokens": record.num_cached}))
    if record.first_token_at is not None:
        root.parts.append(Stretch("decode", first_at, ended_at))
    absences = list(_absences(record.turns, ended_at))
    for absence in absences:
        _innermost(root.parts, absence.start).parts.append(absence)
    for happened in record.turns:
        name = _NAMES.get(happened.turn)
        if name is not None and happened.since is not None:
            part = Stretch(name, happened.since, happened.at, {"kilburn.what": happened.text})
            around = _absence_of(part, absences) or _innermost(root.parts, part.start)
            around.parts.append(part)
            around.end = max(around.end, part.end)  # one that left again before what brought it back had landed
    return root


_NAMES = {Turn.CHUNK: "chunk", Turn.SWAPPED_OUT: "swap out", Turn.SWAPPED_IN: "swap in"}


def _innermost(phases: list[Stretch], at: float) -> Stretch:
    """The phase that something belongs to which began then: of two that meet there, the later."""
    return next(phase for phase in reversed(phases) if phase.start <= at or phase is phases[0])


def _absence_of(part: Stretch, absences: list[Stretch]) -> Stretch | None:
    """The absence in which something began. Moves are always of one, the newest by then."""
    for absence in reversed(absences):
        if absence.start <= part.start and (part.start < absence.end or part.name != _NAMES[Turn.CHUNK]):
            return absence
    return None


def _absences(turns: list[Happened], ended_at: float) -> Iterator[Stretch]:
    """Preemptions and recoveries: from a leave to the return, else to the next leave or the end."""
    leaves = [i for i, happened in enumerate(turns) if happened.turn in (Turn.PREEMPTED, Turn.DISPLACED)]
    for i, following in pairwise([*leaves, len(turns)]):
        left, after = turns[i], turns[i + 1 : following]
        back = {happened.turn: happened.at for happened in after}
        end = turns[following].at if following < len(turns) else ended_at
        end = back.get(Turn.RETURNED, back.get(Turn.RESUMED, end))
        name = "preemption" if left.turn is Turn.PREEMPTED else "recovery"
        yield Stretch(name, left.at, end, {"kilburn.reason": left.text})


def _about(record: Record) -> dict[str, Value]:
    about: dict[str, Value] = {
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.choice.count": record.num_choices,
        "gen_ai.usage.input_tokens": record.num_prompt,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "gen_ai.response.id": record.origin.answer_id,
        "kilburn.tenant": record.origin.tenant,
        "kilburn.preemptions": record.count(Turn.PREEMPTED),
    }
    if record.origin.client_id:
        about["kilburn.client_id"] = record.origin.client_id
    if record.end is not None:
        about["kilburn.end"] = record.end.how
    return about


# --- to OpenTelemetry


class Tracing:
    """Makes spans and hands them to `exporter`. Raises SettingError where the package is missing."""

    def __init__(
        self, exporter: "SpanExporter", wall: Callable[[float], float], percent: int = 100, every: int = 0
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._wall = wall
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(percent / 100)),
            resource=Resource.create({"service.name": "kilburn"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kilburn")
        self._every = every
        self._num_sent = 0
        self._steps: dict[tuple[int, int], Stretch] = {}  # by lease and step

    def _nanos(self, at: float) -> int:
        return int(self._wall(at) * 1e9)

    def ended(self, record: Record) -> None:
        """A request is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        origin = record.origin
        carrier = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
        caller = TraceContextTextMapPropagator().extract({name: text for name, text in carrier.items() if text})
        root = stretches(record)
        span = self._tracer.start_span(
            root.name, caller, SpanKind.SERVER, attributes=root.about, start_time=self._nanos(root.start)
        )
        if span.is_recording():
            if record.end is not None and record.end.is_fault:
                span.set_status(Status(StatusCode.ERROR, record.end.message))
            self._emit(root.parts, set_span_in_context(span))
        span.end(self._nanos(root.end))

    def _emit(self, parts: list[Stretch], around: "Context") -> None:
        from opentelemetry.trace import set_span_in_context

        for part in parts:
            span = self._tracer.start_span(part.name, around, attributes=part.about, start_time=self._nanos(part.start))
            self._emit(part.parts, set_span_in_context(span))
            span.end(self._nanos(part.end))

    # --- steps

    def sent(self, plan: StepPlan, now: float) -> None:
        """A plan goes out. One in `every` is watched."""
        self._num_sent += 1
        if not self._every or self._num_sent % self._every:
            return
        if len(self._steps) >= MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        about: dict[str, Value] = {
            "kilburn.lease": plan.lease,
            "kilburn.step": plan.step,
            "kilburn.rows": len(plan.rows),
            "kilburn.positions": sum(plan.counts),
            "kilburn.blocks_moved": len(plan.swaps_out) + len(plan.copies) + len(plan.swaps_in),
        }
        self._steps[plan.lease, plan.step] = Stretch("step", now, now, about)

    def landed(self, result: StepResult, now: float) -> None:
        step = self._steps.pop((result.lease, result.step), None)
        if step is None:
            return
        timings = result.timings
        for name in ("idle_s", "moves_s", "apply_s", "forward_s", "sample_s"):
            step.about[f"kilburn.worker.{name}"] = getattr(timings, name)
        step.about["kilburn.tokens"] = len(result.tokens)
        span = self._tracer.start_span(step.name, attributes=step.about, start_time=self._nanos(step.start))
        span.end(self._nanos(now))

    # ---

    def flush(self) -> None:
        """What is held goes out now."""
        self._provider.force_flush()

    def close(self) -> None:
        """Hands over what is held, for at most as long as an export may take."""
        self._provider.shutdown()


def exporter_to(url: str) -> "SpanExporter":
    """To a collector that speaks OTLP over HTTP. Raises SettingError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise SettingError("--trace-to: OpenTelemetry is not installed; run: pip install 'kilburn[tracing]'") from error
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"--trace-to {url}: give the address of an OTLP/HTTP collector, as http://127.0.0.1:4318")
    path = url.split("://", 1)[1].partition("/")[2]
    endpoint = url if path else f"{url.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
