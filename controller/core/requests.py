"""All requests, from their Submit to their end, and where each of them is.

    Submit --> at the door --> homeless --> placed: in the line of a home --> ended, and forgotten
                  |               ^                     |
               Refused            '---- displaced ------'    its worker group is lost, or leaves

Every request is with the homeless or placed, never both. What becomes of one with a worker group is its line's affair;
of one without, all that can come is a home, a Stop, a Cancel, or that its time is up.
"""

from collections.abc import Mapping

from kilburn.controller.core import door
from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.events import Effect, Finished, Refused, Started, Submit
from kilburn.controller.core.fairness import Fairness
from kilburn.controller.core.home import Home
from kilburn.controller.core.homeless import Homeless
from kilburn.controller.core.limits import Clocks, Limit, Outflow, gave_up_waiting, shorter
from kilburn.controller.core.pinning import Pinning
from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, Place, State
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.turns import turn_of
from kilburn.shared.types import FinishReason, LawBroken


class Requests:
    """See the file's head. `homes` are the engine's, by the peer of rank 0."""

    def __init__(self, settings: EngineSettings, homes: Mapping[bytes, Home], pinning: Pinning) -> None:
        self._settings, self._homes, self._pinning = settings, homes, pinning
        self.groups: dict[int, Group] = {}
        self.placed: dict[int, Home] = {}
        self.homeless = Homeless(settings.recovery_s)
        self.fairness = Fairness() if settings.is_fair else None
        self.outflow, self.clocks = Outflow(), Clocks()
        self.timeouts = dict.fromkeys(Limit, 0)
        self._num_arrivals = 0

    # --- questions

    @property
    def deadlines(self) -> list[float]:
        """When one is given up, or its time may be up."""
        next_at = self.clocks.next_at
        return self.homeless.deadlines + ([] if next_at is None else [next_at])

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests that wait, here or for a worker group, and the tokens of their prompts."""
        lines = [home.scheduler.line.waiting for home in self._homes.values()]
        num_requests = len(self.homeless.strays) + sum(waiting.num_requests for waiting in lines)
        num_tokens = sum(group.num_prompt for group in self.homeless.groups)
        return num_requests, num_tokens + sum(waiting.num_tokens for waiting in lines)

    def _refusal(self, submit: Submit, now: float) -> Refused | None:
        num_its = None
        if self.fairness is not None:
            num_its = sum(group.tenant == submit.tenant for group in self.homeless.groups)
            num_its += self.fairness.num_waiting(submit.tenant)
        full = door.queue_full(submit, self._settings, self.waiting, num_its, self.outflow, now)
        return full or door.objection(submit, [home.scheduler for home in self._homes.values()])

    # --- they come

    def submit(self, submit: Submit, now: float, effects: list[Effect]) -> None:
        refused = self._refusal(submit, now)
        if refused is not None:
            effects.append(refused)
            return
        settings = self._settings
        self._num_arrivals += 1
        place = Place(submit.priority, self._num_arrivals)
        group = door.group_of(submit, place, self._pinning.salt_of(submit.salt, submit.prompt))
        group.turn = turn_of(place, now, settings.aging_s)
        group.tenant, group.weight = submit.tenant, submit.weight
        if group.live[0].limit <= 0:  # one prompt token and nothing to draw: there is nothing to compute
            effects.append(Started(submit.request_id, 0))
            effects.extend(Finished(submit.request_id, i, FinishReason.LENGTH) for i in range(submit.n))
            return
        self.groups[submit.request_id] = group
        self.homeless.arrived(group, now)
        for limit, seconds in (
            (Limit.QUEUE, shorter(settings.queue_s, submit.queue_s)),
            (Limit.REQUEST, shorter(settings.request_s, submit.request_s)),
        ):
            if seconds is not None:
                self.clocks.set(now + seconds, submit.request_id, limit)

    # --- they move

    def settle(self, now: float, effects: list[Effect]) -> None:
        """A home for those without, where there is one; those who waited too long for one are given up."""
        for group in self.homeless.settle(self._homes.values(), self.placed, self._pinning, now, effects):
            del self.groups[group.request_id]

    def displaced(self, group: Group, now: float) -> None:
        """Its worker group is lost to it."""
        del self.placed[group.request_id]
        self.homeless.displaced(group, now)

    def note_begun(self, home: Home, now: float) -> None:
        """Of a line, those who began since it was last looked at."""
        line = home.scheduler.line
        if line.num_begun:
            self.outflow.began(line.num_begun, line.tokens_begun, now)
            line.num_begun = line.tokens_begun = 0

    # --- they end

    def stop(self, request_id: int, index: int, effects: list[Effect]) -> None:
        """The text of one choice is complete."""
        group, home = self.groups.get(request_id), self.placed.get(request_id)
        if group is None:
            return
        if home is not None:
            home.scheduler.line.stop(group, index, effects)
            self.forget_ended(home)
            return
        for sequence in list(group.live):
            if sequence.index == index and group.has_forked and not isinstance(group, BeamGroup):
                sequence.move(State.FINISHED)
                group.part_with(sequence)
                effects.append(Finished(request_id, index, FinishReason.STOP))
        if not group.live:
            self._drop_homeless(group)

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more."""
        group, home = self.groups.get(request_id), self.placed.get(request_id)
        if group is None:
            return
        if home is not None:
            home.scheduler.line.cancel(group)
            self.forget_ended(home)
        else:
            for sequence in group.live:
                sequence.move(State.FINISHED)
            self._drop_homeless(group)

    def pass_time(self, now: float, effects: list[Effect]) -> None:
        """End those that have waited, or taken, as long as they may."""
        for request_id, limit in self.clocks.due(now):
            self._time_is_up(request_id, limit, now, effects)
        self.clocks.clear_away(self.groups.__contains__, len(self.groups))

    def _time_is_up(self, request_id: int, limit: Limit, now: float, effects: list[Effect]) -> None:
        group = self.groups.get(request_id)
        if group is None or (limit is Limit.QUEUE and group.has_started):
            return
        self.timeouts[limit] += 1
        if group.has_started:
            message = "the request's time ran out"
            effects.extend(Finished(request_id, i, FinishReason.TIMEOUT, message) for i in group.indices())
        else:
            effects.append(gave_up_waiting(request_id, limit, self.outflow.wait_s(*self.waiting, now)))
        self.cancel(request_id)

    def _drop_homeless(self, group: Group) -> None:
        self.homeless.drop(group)
        del self.groups[group.request_id]

    def forget_ended(self, home: Home) -> None:
        """Of a line, those with nothing left to do."""
        for group in home.scheduler.line.ended:
            if not isinstance(group, PinGroup):
                del self.groups[group.request_id]
                del self.placed[group.request_id]
                home.scheduler.line.grammars.leave(group)
        home.scheduler.line.ended.clear()

    # --- laws

    def validate(self) -> None:
        """Every request is in one place. Raises LawBroken."""
        placed = {g.request_id for home in self._homes.values() for g in home.scheduler.line.requests}
        homeless = {group.request_id for group in self.homeless.groups}
        if placed != self.placed.keys() or placed & homeless or placed | homeless != self.groups.keys():
            raise LawBroken("a request is in two places, or in none")
        if len(self.homeless.strays) != len(homeless):
            raise LawBroken("a request waits for a home twice")
