"""What an operator may choose about the core. Seconds, tokens and counts; shared/config.py has them as flags."""

from dataclasses import dataclass

from kilburn.controller.core.policy import Preemption


@dataclass(frozen=True, slots=True)
class EngineSettings:
    depth: int = 2  # plans under way per worker group
    max_step_tokens: int = 1 << 20  # positions per plan; the worker's own bound counts too
    beat_s: float = 0.5
    silence_s: float = 5.0
    step_deadline_s: float = (
        60.0  # from the later of a plan's sending and the previous commit, or 10 times its prediction
    )
    prepare_s: float = 20.0  # before a worker is asked for a grammar again
    recovery_s: float = 60.0  # how long a request waits for a worker group
    max_waiting: int = 1024  # requests that wait, preempted ones included
    max_waiting_tokens: int = 0  # of their prompts; 0: any. One alone may have more
    queue_s: float = 0.0  # how long a request may wait to begin; 0: for ever
    request_s: float = 0.0  # how long it may take in all; 0: for ever
    most_pinned: float = 0.5  # of a pool, by named prefixes
    preemption: Preemption = Preemption.AUTO
    step_target_s: float = 0.0  # of a step in which somebody waits for his next token; 0: any
    prefix_wait_steps: int = 64  # at most, that a request waits for a prefix that another computes; 0: none
    is_fair: bool = False  # tenants get shares of the tokens, and none may have more than half of the queue
    aging_s: float = 60.0  # of waiting make up for one level of priority; 0: nothing does
