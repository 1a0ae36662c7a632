"""A request's record as it is told: one line for the log, one object for JSON. No text, unless it is asked for."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kilburn.controller.core.events import Turn
from kilburn.controller.story import Happened, Record

log = logging.getLogger("kilburn.requests")


@dataclass(frozen=True, slots=True)
class Teller:
    """Logs records that are over: faults always, all others where `tells_all`.

    `decode`: from token ids to text, where prompts and answers shall stand in the line; None: they never do.
    """

    wall: Callable[[float], float]
    tells_all: bool = False
    decode: Callable[[list[int]], str] | None = None

    def __call__(self, record: Record) -> None:
        is_fault = record.end is not None and record.end.is_fault
        if not is_fault and not self.tells_all:
            return
        line, fields = as_line(record), as_data(record, self.wall)
        if self.decode is not None:
            prompt = self.decode(list(record.prompt))
            answers = {str(index): self.decode(tokens) for index, tokens in sorted(record.tokens.items())}
            line = f"{line} prompt {prompt!r}, answers {list(answers.values())!r}"
            fields |= {"prompt": prompt, "answers": answers}
        log.log(logging.WARNING if is_fault else logging.INFO, "%s", line, extra={"fields": fields})


def as_data(record: Record, wall: Callable[[float], float]) -> dict[str, object]:
    """A record for JSON: when it came in seconds since 1970, all else in seconds since then."""
    end = record.end
    return {
        "id": record.origin.answer_id,
        "client_id": record.origin.client_id or None,
        "tenant": record.origin.tenant,
        "trace_id": record.origin.trace_id or None,
        "request": record.request_id,
        "state": "open" if end is None else end.how,
        "reason": end.message if end is not None else "",
        "prompt_tokens": record.num_prompt,
        "cached_tokens": record.num_cached,
        "max_tokens": record.max_tokens,
        "choices": record.num_choices,
        "output_tokens": record.num_tokens,
        "finish_reasons": {str(index): reason.value for index, reason in sorted(record.reasons.items())},
        "submitted_at": round(wall(record.submitted_at), 6),
        "started_s": _after(record, record.started_at),
        "first_token_s": _after(record, record.first_token_at),
        "ended_s": _after(record, end.at if end is not None else None),
        "preemptions": record.num_preempted,
        "turns": [_turn_data(record, happened) for happened in record.turns],
        "turns_dropped": record.num_turns_dropped,
    }


def _after(record: Record, at: float | None) -> float | None:
    return None if at is None else round(at - record.submitted_at, 6)


def _turn_data(record: Record, happened: Happened) -> dict[str, object]:
    return {
        "turn": happened.turn.value,
        "at_s": _after(record, happened.at),
        "since_s": _after(record, happened.since),
        "text": happened.text,
    }


def as_line(record: Record) -> str:
    """A record in one line."""
    times: list[tuple[float, str]] = []
    if record.started_at is not None:
        times.append((record.started_at, f"started with {record.num_cached} tokens cached"))
    if record.first_token_at is not None:
        times.append((record.first_token_at, "first token"))
    for happened in record.turns:
        if happened.turn is not Turn.CHUNK:  # of these there may be many; they are counted below
            about = f" ({happened.text})" if happened.text else ""
            times.append((happened.at, happened.turn.value + about))
    times.sort(key=lambda entry: entry[0])
    story = ", ".join(f"{what} at {at - record.submitted_at:.3f} s" for at, what in times) or "never placed"
    end, ending = record.end, "open"
    if end is not None:
        ending = f"{end.how} after {end.at - record.submitted_at:.3f} s" + (f": {end.message}" if end.message else "")
    counts = (
        f"{record.num_prompt} prompt tokens, {record.count(Turn.CHUNK)} chunks, {record.num_tokens} tokens drawn, "
        f"{record.num_preempted} preemptions"
    )
    return f"request {record.origin.answer_id or record.request_id}: {ending} [{counts}; {story}]"
