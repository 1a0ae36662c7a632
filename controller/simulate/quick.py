"""A worker without contents: it counts what each step holds, and draws tokens that mean nothing.

It checks nothing: for that there is `fake_worker`. Its Load is exact, so that a machine's model can say how long the
step takes; its tokens are one and the same, but for beams, whose candidates have log probabilities drawn by seed: steps
of an exponential, so that some beams die and some branch. At a share of positions one candidate is all but certain, as
language models have it; there, every beam goes on. Nothing depends on anything but the plans and the seed.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, cast

from kilburn.controller.core.block_pool import BlockPool, Name
from kilburn.controller.core.prefix_index import PrefixIndex, Salt
from kilburn.controller.simulate.roofline import Load
from kilburn.shared.digest import ROOT
from kilburn.shared.messages import RowLogprobs, StepPlan, StepResult
from kilburn.shared.sampling import Candidates
from kilburn.shared.types import LawBroken

TOKEN = 7
FIRST_ID = 8  # of tokens in prompts
BEAM_STEP = 1.0  # nats between one candidate and the next, in the mean; what happens does not depend on the scale
SURE_STEPS = (0.01, 6.0)  # of the first two, where one is all but certain


class QuickWorker:
    """Rows of one lease."""

    def __init__(self, seed: int = 0, sure_share: float = 0.0) -> None:
        self._computed: dict[int, int] = {}
        self._left: dict[int, int] = {}  # known tokens that are not computed: with the last of them a row draws
        self._several: dict[int, int] = {}  # rows that return more than one token
        self._candidates: dict[int, int] = {}  # rows of beams
        self._rng, self._sure_share = Random(seed), sure_share

    def run(self, plan: StepPlan) -> tuple[StepResult, Load]:
        load = Load(num_moved=len(plan.swaps_out) + len(plan.swaps_in), num_copied=len(plan.copies))
        for admit in plan.admits:
            self._admit(admit.row, admit.start, len(admit.tokens), admit.sampling.choose)
        counts = plan.counts
        result = StepResult(plan.lease, plan.step, [], [])
        num_chunks = 0 if counts.count(1) == len(counts) else len(counts)
        while num_chunks and counts[num_chunks - 1] == 1:  # chunks stand first; a chunk may be of one token
            num_chunks -= 1
        for index in range(num_chunks):
            self._chunk(plan.rows[index], counts[index], load)
            self._draw(index, plan.rows[index], result)
        rows = plan.rows[num_chunks:]
        computed, left = self._computed, self._left
        after = [computed[row] + 1 for row in rows]
        computed.update(zip(rows, after, strict=True))
        load.num_rows, load.num_cells = len(rows), sum(after)
        is_common = not self._several and not self._candidates
        if is_common and [left[row] for row in rows].count(1) == len(rows):  # nobody draws less, or more
            result.num_tokens += [1] * len(rows)
            result.tokens += [TOKEN] * len(rows)
        else:
            for index, row in enumerate(rows, num_chunks):
                left[row] -= 1
                self._draw(index, row, result)
        load.num_sampled = len(result.num_tokens) - result.num_tokens.count(0)
        return result, load

    def skip(self, rows: Iterable[int], num_steps: int) -> None:
        """Rows that went on by so many tokens each, all of them their own."""
        for row in rows:
            self._computed[row] += num_steps

    def _admit(self, row: int, start: int, num_tokens: int, choose: object) -> None:
        self._computed[row], self._left[row] = start, num_tokens
        self._several.pop(row, None)
        self._candidates.pop(row, None)
        if isinstance(choose, Candidates):
            self._candidates[row] = choose.count
        elif getattr(choose, "count", 1) > 1:
            self._several[row] = choose.count  # type: ignore[attr-defined]

    def _chunk(self, row: int, count: int, load: Load) -> None:
        start = self._computed[row]
        self._computed[row] = start + count
        self._left[row] -= count
        load.num_chunks += 1
        load.num_chunk_tokens += count
        load.num_chunk_cells += start
        load.num_pairs += count * start + count * (count + 1) // 2

    def _draw(self, index: int, row: int, result: StepResult) -> None:
        """What a row that reached the end of its known tokens returns."""
        if self._left[row] > 0:
            result.num_tokens.append(0)
            return
        num_candidates = self._candidates.get(row, 0)
        count = num_candidates or self._several.get(row, 1)
        result.num_tokens.append(count)
        if not num_candidates:
            result.tokens.extend([TOKEN] * count)
            self._left[row] += count == 1
            return
        ids = [FIRST_ID + i for i in range(count)]
        logprob, logprobs = 0.0, []
        is_sure = self._sure_share and self._rng.random() < self._sure_share
        for at in range(count):
            is_given = is_sure and at < len(SURE_STEPS)
            logprob -= SURE_STEPS[at] if is_given else self._rng.expovariate(1.0 / BEAM_STEP)
            logprobs.append(logprob)
        result.tokens.extend(ids)
        result.logprobs = (*result.logprobs, RowLogprobs(index, 1, tuple(ids), tuple(logprobs)))


class QuickIndex(PrefixIndex):
    """Names that are counted on, where blocks of one and the same token follow each other, as most here do.

        tokens   [ a a a a ][ a a a a ][ a a a a ][ a b b b ][ b b b b ][ b b b b ]
        names      h(root,     + 1        + 2       h(.., ab)  h(.., bb)   + 1

    Like real ones, a function of a block's tokens and of all before it; unlike these, told apart in one process only.
    They are numbers, which nobody else notices.
    """

    def extend(self, chain: list[bytes], tokens: Sequence[int], num_blocks: int, salt: Salt) -> None:
        size, names = self._block_size, cast(list[Any], chain)
        salted = salt.after // size if salt.value else -1
        while len(names) < num_blocks:
            i = len(names)
            block = tokens[i * size : (i + 1) * size]
            if i != salted and i and block == tokens[(i - 1) * size : i * size] and block.count(block[0]) == size:
                end = num_blocks if salted < i else min(num_blocks, salted)
                names.extend(range(names[-1] + 1, names[-1] + 1 + self._num_alike(block[0], tokens, i, end)))
            else:
                names.append(hash((names[-1] if i else ROOT, tuple(block), salt.value if i == salted else b"")))

    def _num_alike(self, token: int, tokens: Sequence[int], start: int, end: int) -> int:
        """How many blocks from number `start` on are of this token alone, of which the first one is."""
        size, at, width, grows = self._block_size, start + 1, 32, True
        while width and at < end:
            ahead = tokens[at * size : min(at + width, end) * size]
            is_alike = bool(ahead) and ahead.count(token) == len(ahead)
            at += len(ahead) // size if is_alike else 0
            grows = grows and is_alike
            width = 2 * width if grows else width // 2
        return at - start

    def find(self, chain: list[bytes], i: int, tokens: Sequence[int]) -> int | None:
        return self._pool.find(chain[i])

    def publish(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, salt: Salt) -> None:
        self.extend(chain, tokens, len(blocks), salt)
        cast(QuickPool, self._pool).publish_all(blocks[first:], chain[first : len(blocks)])


class QuickPool(BlockPool):
    """The pool, with loops of its own where it has a call for each block.

    It gives no hints on names, which nobody reads, and does not keep what they stand for: QuickIndex does not ask.
    """

    def name_of(self, block: int) -> Name | None:
        digest = self._names.get(block)
        return None if digest is None else Name(digest, ROOT, ())

    def take(self, num_blocks: int, step: int) -> list[int]:
        if num_blocks > self.num_available:
            raise LawBroken(f"{num_blocks} blocks taken of {self.num_available}: num_available was not asked")
        free, refs, taken_at, born_s, now = self._free, self._refs, self._taken_at, self._born_s, self.now
        num_free = min(num_blocks, len(free))
        taken = [free.popleft() for _ in range(num_free)]
        if num_free < num_blocks:
            taken += self._evict_all(num_blocks - num_free)
        for block in taken:
            refs[block], taken_at[block], born_s[block] = 1, step, now
        if self._was_shared:
            self._was_shared.difference_update(taken)
        self._num_owned += num_blocks
        self._num_refs += num_blocks
        return taken

    def _evict_all(self, num_blocks: int) -> list[int]:
        popitem, forget, named, born_s, now = self._cached.popitem, self._names.pop, self._named, self._born_s, self.now
        gone = [popitem(last=False) for _ in range(num_blocks)]
        evicted = [block for block, _ in gone]
        for block in evicted:
            del named[forget(block)]
        self.num_evictions += num_blocks
        self.lifetimes_s.observe_each([now - born_s[block] for block in evicted])
        self.idle_s.observe_each([now - since_s for _, since_s in gone])
        return evicted

    def drop(self, blocks: Sequence[int]) -> None:
        refs, names, cached, now = self._refs, self._names, self._cached, self.now
        num_left = num_single = 0
        for block in reversed(blocks):
            count = refs[block]
            refs[block] = count - 1
            if count > 1:
                num_left += 1
                num_single += count == 2
            elif not count:
                raise LawBroken(f"block {block} dropped by a table that does not hold it")
            elif block in names:
                cached[block] = now
            else:
                self._free.append(block)
        self._num_refs -= len(blocks)
        self._num_owned -= len(blocks) - num_left
        self._num_shared -= num_single

    def publish(self, block: int, name: Name) -> bool:
        num_names = len(self._named)
        self.publish_all([block], [name.digest])
        return len(self._named) > num_names

    def publish_all(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """As `publish`, of several."""
        names, named, refs = self._names, self._named, self._refs
        for block, digest in zip(blocks, digests, strict=True):
            if not refs[block]:
                raise LawBroken(f"block {block} named, though nobody owns it")
            if digest not in named and block not in names:
                names[block] = digest
                named[digest] = block

    def _forget(self, block: int) -> None:
        del self._named[self._names.pop(block)]
