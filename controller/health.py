"""Whether the service works: three questions, each with a reason where the answer is no.

    /live     the process is of use: its loop turns and its engine goes on          no -> restart it
    /health   tokens can be produced now                                           no -> send nobody here, look why
    /ready    a request that comes now would be admitted                           no -> send others elsewhere

    live  <-  healthy  <-  ready        whoever answers yes on the right answers yes on the left

Tokens can be produced where a worker group's lease is READY and its work, if it has any, makes progress: a step came
back within `progress_s`. A pulse proves nothing; a worker whose step hangs beats on. A lease that is SUSPECT, silent
for half of what is allowed, does not count, so that a worker that was stopped is noticed before its lease ends.

Reasons are for everybody who may ask, without a key: no names, no numbers of others.
What this file does not know: HTTP, clocks.
"""

from dataclasses import dataclass

from kilburn.controller.core.lease import LeaseState
from kilburn.controller.core.snapshot import GroupSnapshot, Snapshot


@dataclass(frozen=True, slots=True)
class Health:
    """Each None for yes, or why not."""

    dead: str | None
    unhealthy: str | None
    unready: str | None


def judged(
    snapshot: Snapshot, now: float, progress_s: float, max_waiting: int, max_waiting_tokens: int, has_failed: bool
) -> Health:
    """`max_waiting_tokens`: 0 for any. `has_failed`: the engine cannot go on and the process is about to end."""
    dead = "the engine has failed" if has_failed else None
    unhealthy = dead or _unhealthy(snapshot, now, progress_s)
    return Health(dead, unhealthy, unhealthy or _unready(snapshot, max_waiting, max_waiting_tokens))


def _unhealthy(snapshot: Snapshot, now: float, progress_s: float) -> str | None:
    if snapshot.is_closing:
        return "shutting down"
    if not snapshot.groups:
        return "ranks of a worker are missing" if snapshot.waiting_ranks else "no worker is ready"
    if all(group.is_leaving for group in snapshot.groups) and not snapshot.requests:
        return "the workers were told to leave"
    heard = [group for group in snapshot.groups if group.state is LeaseState.READY]
    if not heard:
        return "the workers are silent"
    if all(_is_stuck(group, now, progress_s) for group in heard):
        return f"work has made no progress for {progress_s:g} s"
    return None


def _is_stuck(group: GroupSnapshot, now: float, progress_s: float) -> bool:
    return group.unanswered_since is not None and now - group.unanswered_since >= progress_s


def _unready(snapshot: Snapshot, max_waiting: int, max_waiting_tokens: int) -> str | None:
    if all(group.is_leaving for group in snapshot.groups):
        return "the workers were told to leave"
    if snapshot.waiting_requests >= max_waiting or 0 < max_waiting_tokens <= snapshot.waiting_tokens:
        return "the queue is full"
    return None
