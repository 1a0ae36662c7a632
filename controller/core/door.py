"""What can be refused is refused here, before anything is allocated for it.

A request that fits some worker group, alone if need be, can always finish there. One that fits none is turned away with
the number that would fit.
"""

from collections.abc import Sequence

from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.events import Refusal, Refused, Submit
from kilburn.controller.core.limits import Outflow
from kilburn.controller.core.prefix_index import Salt
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group, Place
from kilburn.controller.core.settings import EngineSettings


def room_for(num_prompt: int, n: int, schedulers: Sequence[Scheduler], num_shared: int = 0) -> int | None:
    """The most max_tokens that a prompt of this length can have on a worker group wide enough; None without one.

    Zero or less: the prompt itself does not fit. `num_shared`: blocks of named prefixes that the prompt begins with.
    """
    rooms = [
        min(s.max_len, s.longest_limit(num_prompt, n, num_shared) + 1) - num_prompt
        for s in schedulers
        if s.fits_width(n)
    ]
    return max(rooms, default=None)


def objection(submit: Submit, schedulers: Sequence[Scheduler]) -> Refused | None:
    """Why the request can run on none of the worker groups; None where it can, or where there are none yet."""
    num_prompt, n = len(submit.prompt), submit.width
    if not num_prompt:
        return Refused(submit.request_id, Refusal.EMPTY, "the prompt has no tokens")
    limit = num_prompt + submit.max_tokens - 1
    most = 0 if submit.sampling.prompt_logprobs >= 0 else num_prompt - 1
    shared = [scheduler.shared_with_pins(submit.prompt, submit.salt, most) for scheduler in schedulers]
    if not schedulers or any(s.fits(num_prompt, limit, n, k) for s, k in zip(schedulers, shared, strict=True)):
        return None
    if not any(scheduler.fits_width(n) for scheduler in schedulers):
        widest = max(min(scheduler.max_rows, scheduler.max_step_tokens) for scheduler in schedulers)
        message = (
            f"n (or beam_width) is {n}, and at most {widest} sequences can run together; lower it, or raise --max-rows"
        )
        return Refused(submit.request_id, Refusal.TOO_WIDE, message)
    room = room_for(num_prompt, n, schedulers, max(shared)) or 0
    if room <= 0:
        message = f"the prompt has {num_prompt} tokens and leaves no room for an answer"
    else:
        message = f"the prompt has {num_prompt} tokens and max_tokens is {submit.max_tokens}: at most {room} fit"
    return Refused(submit.request_id, Refusal.TOO_LONG, message)


def group_of(submit: Submit, place: Place, salt: Salt) -> Group:
    """What a request becomes once it is accepted."""
    parts = (submit.request_id, place, submit.prompt, submit.max_tokens, submit.sampling, submit.n, salt)
    return Group(*parts, submit.grammar) if submit.beams is None else BeamGroup(*parts, submit.beams)


def queue_full(
    submit: Submit,
    settings: EngineSettings,
    waiting: tuple[int, int],
    num_its: int | None,
    outflow: Outflow,
    now: float,
) -> Refused | None:
    """Why no more may wait; None where they may.

    `waiting`: requests, and the tokens of their prompts. `num_its`: requests of this tenant; None: it may have all.
    """
    num_waiting, num_tokens = waiting
    num_over = num_waiting + 1 - settings.max_waiting
    if num_its is not None:
        num_over = max(num_over, num_its + 1 - (settings.max_waiting + 1) // 2)
    most_tokens = settings.max_waiting_tokens
    tokens_over = num_tokens + len(submit.prompt) - most_tokens if most_tokens else 0
    if num_over <= 0 and (tokens_over <= 0 or not num_tokens):
        return None
    retry_after_s = outflow.wait_s(max(num_over, 1), max(tokens_over, 0), now)
    message = f"{num_waiting} requests with {num_tokens} tokens are waiting; try again in {retry_after_s} s"
    return Refused(submit.request_id, Refusal.QUEUE_FULL, message, retry_after_s)
