"""What became of a step: progress, tokens, names, forks; and what failed or was lost.

Losses come first, since they say what the worker found and not what the core made of it since. Then each advance whose
life is not over moves num_computed on, names the blocks that it filled, and appends what it drew.
"""

from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.departure import Departure, Way
from kilburn.controller.core.events import Beam, Effect, Emit, Note, NoteKind, Pinned, PromptScored, Turn, Turned
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.policy import Costs
from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, Sequence
from kilburn.controller.core.step import Counters, Flight
from kilburn.shared.messages import KvLost, PromptLogprobs, RowLogprobs, StepResult
from kilburn.shared.types import FinishReason, Tier


class Disagreement(Exception):
    """The worker's outcomes do not fit the plan. Ends the lease."""


class _Said:
    """What a result says of single rows, by their index, beside their tokens."""

    __slots__ = ("failed", "logprobs", "of_any", "scores", "unwell")

    def __init__(self, result: StepResult) -> None:
        self.failed = result.failed
        self.unwell = {*result.failed, *(lost.index for lost in result.lost)}
        self.logprobs = {entry.index: entry for entry in result.logprobs}
        self.scores = {entry.index: entry for entry in result.prompt_logprobs}
        self.of_any = bool(self.unwell or self.logprobs)  # of rows that draw

    @classmethod
    def of(cls, result: StepResult) -> "_Said":
        """Of nearly every result, that nothing is said."""
        is_silent = not (result.failed or result.lost or result.logprobs or result.prompt_logprobs)
        return _NOTHING if is_silent else cls(result)


_NOTHING = _Said(StepResult(0, 0, [], []))


class Commit:
    """Takes the results of one worker group. `name` is the group's."""

    def __init__(self, line: Lineup, counters: Counters, costs: Costs, name: str, vocab_size: int) -> None:
        self._line, self._memory, self._counters, self._costs = line, line.memory, counters, costs
        self._name, self._vocab_size, self._block_size = name, vocab_size, line.memory.block_size

    def land(self, flight: Flight, result: StepResult, effects: list[Effect]) -> None:
        """A flight's result. Raises Disagreement."""
        if len(result.num_tokens) != len(flight.sequences):
            raise Disagreement(f"{len(result.num_tokens)} outcomes for {len(flight.sequences)} advances")
        if result.tokens and not 0 <= min(result.tokens) <= max(result.tokens) < self._vocab_size:
            raise Disagreement("a token beyond the vocabulary")
        self._learn(flight, result, effects)
        self._lose(result.lost, effects)
        said, tokens, num_tokens, at = _Said.of(result), result.tokens, result.num_tokens, 0
        start = flight.num_chunks
        if said.of_any or num_tokens[start:].count(1) != len(num_tokens) - start:
            start = len(num_tokens)
        for i in range(start):
            first, at = at, at + num_tokens[i]
            self._take(flight, i, tokens[first:at], said, effects)
        if len(tokens) - at != len(num_tokens) - start:
            raise Disagreement("more tokens than the outcomes count, or fewer")
        self._go_on(flight, start, tokens[at:], said, effects)
        if self._line.returning:
            self._welcome(flight.step, effects)

    def _take(self, flight: Flight, i: int, drawn: list[int], said: _Said, effects: list[Effect]) -> None:
        """What became of one row, whatever it is."""
        sequence, count = flight.sequences[i], flight.counts[i]
        if i in said.failed:
            self._memory.distrust(sequence.chain)
        if sequence.epoch != flight.epochs[i]:
            return  # of a life that is over
        if i in said.unwell:
            self._unwell(sequence, said.failed.get(i), effects)
            return
        if count > 1 or sequence.num_computed < sequence.num_prompt:
            self._tell_chunk(sequence, count, flight.sent_at, effects)
        if sequence.group.num_scored < sequence.num_prompt:
            self._score(sequence, count, said.scores.get(i), effects)
        self._advance(sequence, count, drawn, said.logprobs.get(i), effects)

    # --- what went well

    def _go_on(self, flight: Flight, start: int, tokens: list[int], said: _Said, effects: list[Effect]) -> None:
        """The rows from `start` on drew a token each, and nothing else is said of them: most rows of most steps."""
        told: list[Sequence] = []
        drawn: list[int] = []
        rows, sequences, epochs = range(start, len(flight.sequences)), flight.sequences[start:], flight.epochs[start:]
        size = self._block_size
        try:
            for i, sequence, epoch, token in zip(rows, sequences, epochs, tokens, strict=True):
                if sequence.epoch != epoch:
                    continue  # of a life that is over
                if not sequence.is_steady:
                    self._tell(told, drawn, effects)
                    told, drawn = [], []
                    self._take(flight, i, [token], said, effects)
                    continue
                computed = sequence.num_computed = sequence.num_computed + 1
                sequence.tokens.append(token)
                told.append(sequence)
                drawn.append(token)
                if not computed % size:
                    self._publish(sequence, computed - 1)
                if computed >= sequence.limit or token in sequence.stop_ids:
                    self._tell(told, drawn, effects)
                    told, drawn = [], []
                    self._end_if_due(sequence, token, effects)
        finally:  # what was appended is told, whatever law the next row broke
            self._tell(told, drawn, effects)

    def _tell(self, told: list[Sequence], drawn: list[int], effects: list[Effect]) -> None:
        """Steady sequences went on, and nothing else happened meanwhile."""
        if told:
            self._counters.generated_tokens += len(told)
            effects.append(Emit([s.request_id for s in told], [s.index for s in told], drawn))

    def _advance(
        self, sequence: Sequence, count: int, drawn: list[int], logprobs: RowLogprobs | None, effects: list[Effect]
    ) -> None:
        before, group = sequence.num_computed, sequence.group
        computed = sequence.num_computed = before + count
        if computed // self._block_size > before // self._block_size:
            self._publish(sequence, before)
        expected = 0 if computed < len(sequence.tokens) else group.num_draws
        if expected != 1 or type(group) is not Group:
            self._advance_rarely(sequence, expected, drawn, logprobs, effects)
            return
        if len(drawn) != 1:
            raise Disagreement(f"{len(drawn)} tokens for {sequence}, expected 1")
        if sequence.followers:
            self._line.lead(sequence)
        # From now on all that can come of it is one token more, for as long as this life lasts.
        sequence.is_steady = not sequence.followers
        self._counters.generated_tokens += 1
        self._append(sequence, drawn[0], _entries(logprobs, 0), effects)

    def _publish(self, sequence: Sequence, before: int) -> None:
        """Name the blocks that a sequence filled, of which `before` positions were computed until now."""
        computed, size = sequence.num_computed, self._block_size
        full = sequence.own_table.blocks[: computed // size]
        self._memory.index.publish(sequence.chain, sequence.tokens, full, before // size, sequence.group.salt)

    @staticmethod
    def _tell_chunk(sequence: Sequence, count: int, sent_at: float, effects: list[Effect]) -> None:
        start = sequence.num_computed
        what = f"positions {start} to {start + count} of sequence {sequence.index}"
        effects.append(Turned(sequence.group.request_id, Turn.CHUNK, what, sent_at))

    @staticmethod
    def _score(sequence: Sequence, count: int, scores: PromptLogprobs | None, effects: list[Effect]) -> None:
        """Of an advance over a prompt that is to be scored: a position's scores come with the one before it."""
        group = sequence.group
        start, end = group.num_scored, min(sequence.num_computed + count + 1, sequence.num_prompt)
        if start >= end:
            return  # computed again, on the way to what is still wanted
        if scores is None or (scores.start, len(scores.ranks)) != (start, end - start):
            raise Disagreement(f"no log probabilities of the positions {start} to {end} of {sequence}")
        group.num_scored = end
        effects.append(PromptScored(group.request_id, start, scores.width, scores.ids, scores.logprobs, scores.ranks))

    def _advance_rarely(
        self, sequence: Sequence, expected: int, drawn: list[int], logprobs: RowLogprobs | None, effects: list[Effect]
    ) -> None:
        """Of an advance that does not append one token: a chunk, a fork, a named prefix, beams."""
        group, computed = sequence.group, sequence.num_computed
        if len(drawn) != expected:
            raise Disagreement(f"{len(drawn)} tokens for {sequence}, expected {expected}")
        if sequence.followers:
            self._line.lead(sequence)
        if isinstance(group, PinGroup) and computed >= sequence.limit:
            self._line.pin(group)  # its draw is of no use to anybody
            effects.append(Pinned(group.request_id, self._name, len(sequence.own_table.blocks)))
        elif expected and isinstance(group, BeamGroup):
            self._step_beams(group, sequence, _candidates(logprobs), effects)
        elif expected:
            self._counters.generated_tokens += expected
            self._line.regrouped()
            for i, child in enumerate(group.fork()):
                self._append(child, drawn[i], _entries(logprobs, i), effects)
        elif computed >= sequence.limit:
            self._line.end(sequence, FinishReason.LENGTH, effects)

    def _append(
        self, sequence: Sequence, token: int, logprobs: tuple[tuple[int, float], ...], effects: list[Effect]
    ) -> None:
        sequence.tokens.append(token)
        entries = {0: logprobs} if logprobs else {}
        effects.append(Emit([sequence.request_id], [sequence.index], [token], entries))
        self._end_if_due(sequence, token, effects)

    def _end_if_due(self, sequence: Sequence, token: int, effects: list[Effect]) -> None:
        if token in sequence.stop_ids:
            self._line.end(sequence, FinishReason.STOP, effects)
        elif sequence.num_computed >= sequence.limit:
            self._line.end(sequence, FinishReason.LENGTH, effects)

    def _step_beams(
        self, group: BeamGroup, beam: Sequence, candidates: list[tuple[int, float]], effects: list[Effect]
    ) -> None:
        """One beam's candidates are in; with the last of them the search goes on, or ends with its results."""
        if not group.heard(beam, candidates):
            return
        continuations = group.step()
        if continuations:
            group.go_on(continuations)
            self._line.regrouped()
            self._counters.generated_tokens += 1
            return
        self._line.cancel(group)
        for i, kept in enumerate(group.search.kept[: group.n]):
            outcome = Beam(group.request_id, i, kept.tokens, kept.cumulative, kept.score, kept.reason)
            effects.append(outcome)

    # --- what did not

    def _unwell(self, sequence: Sequence, reason: str | None, effects: list[Effect]) -> None:
        """A row failed, or found KV that it could not read."""
        group = sequence.group
        if reason is None:
            self._line.recompute(group, effects)
            return
        for member in group.live:
            self._memory.distrust(member.chain)
        self._line.fail(group, f"the worker could not compute this request: {reason}", effects)

    def _lose(self, lost: tuple[KvLost, ...], effects: list[Effect]) -> None:
        """Blocks whose content proved unreadable lose their names, and every table that holds them is recomputed."""
        for entry in lost:
            pool = self._memory.pool(entry.tier)
            if entry.block >= pool.num_blocks:
                raise Disagreement(f"a loss in block {entry.block} of the {entry.tier.name.lower()} tier")
            if pool.held_since(entry.block) > entry.step:
                continue  # taken again since it was read
            if entry.tier is Tier.HOST:
                self._lose_on_host(entry.block, effects)
            else:
                self._lose_on_device(entry.block, effects)

    def _lose_on_device(self, block: int, effects: list[Effect]) -> None:
        match self._memory.origin(block):  # it would be filled from there again
            case (Tier.HOST, source):
                self._lose_on_host(source, effects)
            case (Tier.DEVICE, source):
                self._withdraw(source, effects)
        self._withdraw(block, effects)

    def _withdraw(self, block: int, effects: list[Effect]) -> None:
        self._memory.device.withdraw(block)
        for group in self._line.holding(block):
            self._line.recompute(group, effects)
        for pin in self._line.pins_holding(block):
            self._line.unsettle(pin)

    def _lose_on_host(self, block: int, effects: list[Effect]) -> None:
        """A host copy proved unreadable: no name, no group comes back by it, and what it filled is no better."""
        for filled in self._memory.filled_from(block):
            self._withdraw(filled, effects)
        self._memory.host.withdraw(block)
        for group in self._line.waiting:
            if any(block in sequence.host for sequence in group.live):
                self._line.forget_swap(group)

    # --- what it cost

    def _learn(self, flight: Flight, result: StepResult, effects: list[Effect]) -> None:
        """What the step cost, for the operators and for the next choice between swap and recompute."""
        counters, timings = self._counters, result.timings
        if flight.shares or self._line.returning:
            self._share(flight, result, effects)
        self._costs.moved(flight.num_moved, timings.moves_s)
        self._costs.computed(flight.num_chunk_tokens, flight.num_decodes, timings.forward_s)
        if flight.num_moved:
            out_s = timings.moves_s * flight.num_out / flight.num_moved
            counters.swap_out_s += out_s
            counters.swap_in_s += timings.moves_s - out_s
        else:
            counters.copy_s += timings.moves_s
        counters.worker_idle_s += timings.idle_s
        counters.worker_apply_s += timings.apply_s
        counters.worker_forward_s += timings.forward_s
        counters.worker_sample_s += timings.sample_s

    def _share(self, flight: Flight, result: StepResult, effects: list[Effect]) -> None:
        """What of the step's seconds preempted groups have caused: their moves, and what they compute again."""
        timings = result.timings
        for departure, num_blocks in flight.shares:
            departure.actual_s += timings.moves_s * num_blocks / max(flight.num_moved, 1)
            if num_blocks:
                turn = Turn.SWAPPED_IN if departure.back_step == flight.step else Turn.SWAPPED_OUT
                effects.append(Turned(departure.request_id, turn, f"{num_blocks} blocks", flight.sent_at))
        chunk_s = self._costs.chunk_s(flight.num_decodes, timings.forward_s)
        for sequence, epoch, count in zip(flight.sequences, flight.epochs, flight.counts, strict=True):
            away = sequence.group.departure
            if away is not None and epoch == sequence.epoch and flight.num_chunk_tokens:
                num_again = min(count, away.targets.get(sequence.index, 0) - sequence.num_computed)
                away.actual_s += chunk_s * max(num_again, 0) / flight.num_chunk_tokens

    def _welcome(self, step: int, effects: list[Effect]) -> None:
        """Those who are all there again: what was predicted, and the truth."""
        remaining: list[tuple[Group, Departure]] = []
        for group, departure in self._line.returning:
            if group.departure is not departure or not group.live:
                continue  # it has ended, or left again
            if not departure.is_back(step, {s.index: s.num_computed for s in group.live}) or group.has_followers:
                remaining.append((group, departure))
                continue
            group.departure = None
            self._count_return(departure)
            effects.append(Note(NoteKind.RETURNED, f"request {group.request_id}, {departure.outcome}"))
            effects.append(Turned(group.request_id, Turn.RETURNED, departure.outcome))
        self._line.returning = remaining

    def _count_return(self, departure: Departure) -> None:
        counters = self._counters
        match departure.way:
            case Way.SWAP:
                counters.returned_by_swap += 1
                counters.predicted_swap_s += departure.predicted_s
                counters.actual_swap_s += departure.actual_s
                self._costs.came_back(departure.num_own, departure.num_found, None)
            case Way.RECOMPUTE:
                counters.returned_by_recompute += 1
                counters.predicted_recompute_s += departure.predicted_s
                counters.actual_recompute_s += departure.actual_s
                self._costs.came_back(departure.num_own, departure.num_found, departure.num_brought)


def _entries(logprobs: RowLogprobs | None, draw: int) -> tuple[tuple[int, float], ...]:
    """The entries of one draw: the token itself, then the likeliest."""
    if logprobs is None:
        return ()
    start, end = draw * logprobs.width, (draw + 1) * logprobs.width
    return tuple(zip(logprobs.ids[start:end], logprobs.logprobs[start:end], strict=True))


def _candidates(logprobs: RowLogprobs | None) -> list[tuple[int, float]]:
    """What a beam's row returned, best first."""
    if logprobs is None or logprobs.width != 1:
        raise Disagreement("candidates without their log probabilities")
    return list(zip(logprobs.ids, logprobs.logprobs, strict=True))
