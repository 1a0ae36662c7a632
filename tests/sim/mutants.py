"""One-line sabotages of the core that a world must kill, and of gateways that a service of several controllers must.

Each names the rule that it breaks. `edits` are (file, exact old text, new text); the old text must occur exactly once,
so that a mutant cannot rot when the core moves on. Most need one edit; a few break a rule that is defended twice, and
so need two. Equivalents (another order of eviction, say) do not belong here.

    python tests/sim/mutants.py            the table of kills
    python tests/sim/mutants.py NAME       one of them
"""

import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kilburn.controller.core as core

HERE = Path(__file__).parent
CONTROLLER = Path(next(iter(core.__path__))).parent
NUM_SEEDS = 3_000
LIMIT_S = 120.0  # for one mutant


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    edits: tuple[tuple[str, str, str], ...]
    of: str = "core"  # the folder of the controller that its files are in
    world: str = "world"  # the module that runs the seeds

    @property
    def folder(self) -> Path:
        return CONTROLLER / self.of


@dataclass(frozen=True, slots=True)
class Kill:
    mutant: str
    num_worlds: int | None  # worlds needed; 0: a table of laws did it; None: it survived
    by: str


def one(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, ((file, old, new),))


def front(name: str, file: str, old: str, new: str) -> Mutant:
    """Of a gateway."""
    return Mutant(name, ((file, old, new),), "gateway", "service")


MUTANTS = [
    # --- memory
    one(
        "no copy-on-write",
        "scheduler.py",
        "if self.pool.is_writable(table.blocks[at]):",
        "if True:",
    ),
    one(
        "writable means no name only",
        "block_pool.py",
        "return self._refs[block] == 1 and block not in self._names",
        "return block not in self._names",
    ),
    one(
        "writable means one owner only",
        "block_pool.py",
        "return self._refs[block] == 1 and block not in self._names",
        "return self._refs[block] == 1",
    ),
    one("two moves into one block", "block_pool.py", "[self._free.popleft() for", "[self._free[0] for"),
    one(
        "an evicted block keeps its name",
        "block_pool.py",
        "        self._forget(block)\n        self.num_evictions += 1",
        "        self.num_evictions += 1",
    ),
    one(
        "a shared block is freed by its first owner",
        "block_pool.py",
        "            if refs > 1:\n                self._num_shared -= refs == 2",
        "            if refs > 9:\n                self._num_shared -= refs == 2",
    ),
    one(
        "a hit leaves its block in the cache",
        "block_pool.py",
        "            del self._cached[block]\n            self._num_owned",
        "            self._num_owned",
    ),
    one(
        "cached hits are not counted as taken",
        "policy.py",
        "return sum(self.taken) + len(revived)",
        "return sum(self.taken)",
    ),
    one("a copy drops its destination", "block_table.py", "self.pool.drop([source])", "self.pool.drop([destination])"),
    # --- ranks
    one(
        "a step counts before all ranks are in",
        "ranks.py",
        "if min(self._newest) < step:",
        "if self._newest[0] < step:",
    ),
    one("nobody looks at what ranks confirm", "ranks.py", "if digest != expected:", "if not digest:"),
    one(
        "pools as large as those of rank 0",
        "ranks.py",
        "min(getattr(hello, name) for hello in hellos)",
        "getattr(hellos[0], name)",
    ),
    # --- prefixes
    Mutant(
        "digest without parent",
        (
            (
                "prefix_index.py",
                "hasher.digest(parent, ",
                "hasher.digest(ROOT, ",
            ),
            ("prefix_index.py", "or name.parent != (chain[i - 1] if i else ROOT)", ""),
        ),
    ),
    one("digest without salt", "prefix_index.py", 'salt.value if i == salt.after // block_size else b""', 'b""'),
    Mutant(
        "a hit covers the newest token",
        (
            (
                "prefix_index.py",
                "end = (len(tokens) - 1) // self._block_size",
                "end = len(tokens) // self._block_size",
            ),
            ("sequence.py", "return end - 1", "return end"),
        ),
    ),
    one(
        "what is to be scored is hit",
        "sequence.py",
        "end = num_tokens if self.num_scored >= self.num_prompt else self.num_scored",
        "end = num_tokens",
    ),
    one(
        "scores are asked for anew after a preemption",
        "step.py",
        "scored_from=sequence.group.num_scored if",
        "scored_from=1 if",
    ),
    one("scores are told twice", "commit.py", "group.num_scored = end", "group.num_scored = min(end, start + 1)"),
    one(
        "published one block early",
        "commit.py",
        "full = sequence.own_table.blocks[: computed // size]",
        "full = sequence.own_table.blocks[: min(computed // size + 1, len(sequence.tokens) // size)]",
    ),
    one(
        "published before it is computed",
        "commit.py",
        "full = sequence.own_table.blocks[: computed // size]",
        "full = sequence.own_table.blocks[: len(sequence.tokens) // size]",
    ),
    Mutant(
        "a failed row's names are kept",
        (
            ("commit.py", "self._memory.distrust(sequence.chain)", "pass"),
            ("commit.py", "self._memory.distrust(member.chain)", "pass"),
        ),
    ),
    # --- lives
    one("the epoch is ignored", "commit.py", "if sequence.epoch != flight.epochs[i]:", "if False:"),
    one(
        "a steady row goes on in another life",
        "commit.py",
        "if sequence.epoch != epoch:",
        "if False:",
    ),
    one(
        "a steady row is planned past its blocks",
        "scheduler.py",
        "if sequence.is_steady and planned < sequence.capacity and planned < sequence.plan_end:",
        "if sequence.is_steady and planned < sequence.plan_end:",
    ),
    one(
        "a steady row is planned past its limit",
        "scheduler.py",
        "if sequence.is_steady and planned < sequence.capacity and planned < sequence.plan_end:",
        "if sequence.is_steady and planned < sequence.capacity:",
    ),
    one(
        "a steady row never ends",
        "commit.py",
        "if computed >= sequence.limit or token in sequence.stop_ids:",
        "if False:",
    ),
    one(
        "tokens of other rows",
        "commit.py",
        "self._go_on(flight, start, tokens[at:], said, effects)",
        "self._go_on(flight, start, tokens[at:][::-1], said, effects)",
    ),
    one(
        "a sequence that begins anew still goes on token by token",
        "sequence.py",
        "self.is_fresh, self.is_steady = True, False",
        "self.is_fresh = True",
    ),
    one(
        "work in flight survives the end",
        "sequence.py",
        "        if self.state is State.RUNNING:\n            self.epoch += 1",
        "        if self.state is State.RUNNING and to is not State.FINISHED:\n            self.epoch += 1",
    ),
    one(
        "work in flight survives preemption",
        "sequence.py",
        "        if self.state is State.RUNNING:\n            self.epoch += 1",
        "        if self.state is State.RUNNING and to is not State.WAITING:\n            self.epoch += 1",
    ),
    one(
        "preemption keeps progress",
        "sequence.py",
        "        self.num_computed = self.num_planned = self.plan_end = 0\n        self.is_fresh = False",
        "        self.is_fresh = False",
    ),
    Mutant(
        "admitted anew while in flight",
        (
            (
                "step.py",
                "        if sequence.num_planned != sequence.num_computed:\n"
                '            raise LawBroken(f"{sequence} admitted anew',
                '        if False:\n            raise LawBroken(f"{sequence} admitted anew',
            ),
            (
                "step.py",
                "        sequence.is_fresh = False",
                "        sequence.is_fresh = len(sequence.tokens) % 3 == 0",
            ),
        ),
    ),
    one(
        "a row is leaked",
        "lineup.py",
        "self.free_rows.append(sequence.leave(State.FINISHED))",
        "sequence.leave(State.FINISHED)",
    ),
    one(
        "a cancelled group keeps its rows",
        "lineup.py",
        "            self.take_off(group, State.FINISHED)",
        "            self.running.remove(group)",
    ),
    one(
        "generated tokens become the prompt",
        "step.py",
        "num_prompt=sequence.num_prompt,",
        "num_prompt=len(sequence.tokens),",
    ),
    one("history is left out", "step.py", "tuple(sequence.tokens[:start]) if sampling.needs_history else ()", "()"),
    one(
        "who came is not planned for",
        "lineup.py",
        "key=lambda g: g.place)\n        self.regrouped()",
        "key=lambda g: g.place)",
    ),
    # --- forks
    one(
        "who was forked off is not planned for",
        "commit.py",
        "            self._line.regrouped()\n            for i",
        "            for i",
    ),
    one("planned past the fork", "sequence.py", "min(sequence.limit, sequence.num_prompt)", "sequence.limit"),
    one(
        "a fork without Admit of the parent",
        "sequence.py",
        "        parent.is_fresh = True",
        "        parent.is_fresh = False",
    ),
    one("swapped draws", "commit.py", "self._append(child, drawn[i], ", "self._append(child, drawn[-1 - i], "),
    one("log probabilities of another draw", "commit.py", "_entries(logprobs, i)", "_entries(logprobs, 0)"),
    one(
        "followers do not wait for their leader",
        "lineup.py",
        "if leader.num_computed < num_common * size:",
        "if False:",
    ),
    one(
        "every child draws from the first stream",
        "sequence.py",
        "choose=Draws(sequence.index, 1)",
        "choose=Draws(0, 1)",
    ),
    one(
        "a forked group is recomputed apart",
        "policy.py",
        "[i > 0 and len(found.device) < self.num_common for i, found in enumerate(hits)]",
        "[False for _ in hits]",
    ),
    one(
        "rows for a fork are not reserved",
        "sequence.py",
        "return len(self.live) if self.has_forked else self.n",
        "return len(self.live)",
    ),
    one(
        "a group wider than the rows is accepted",
        "scheduler.py",
        "return n <= min(self.max_rows, self.max_step_tokens)",
        "return True",
    ),
    one(
        "nobody is told that no worker came back",
        "homeless.py",
        "elif now >= stray.since + self.recovery_s:",
        "elif False:",
    ),
    # --- limits
    Mutant(
        "the limit is not tested at Submit",
        (
            ("requests.py", "if group.live[0].limit <= 0:", "if False:"),
            (
                "admission.py",
                "* self._block_size, run) >= first.limit:",
                "* self._block_size, run) >= max(first.limit, 1):",
            ),
        ),
    ),
    one(
        "the limit is not tested at admission",
        "admission.py",
        "* self._block_size, run) >= first.limit:",
        "* self._block_size, run) < 0:",
    ),
    one("the limit is not tested at commit", "commit.py", "elif computed >= sequence.limit:", "elif False:"),
    one(
        "one token too many", "sequence.py", "limit = len(prompt) + max_tokens - 1", "limit = len(prompt) + max_tokens"
    ),
    one("the budget is ignored", "step.py", "count = min(count, self.room)", "count = max(count, 1)"),
    one("stop ids are ignored", "commit.py", "if token in sequence.stop_ids:", "if False:"),
    one(
        "one plan too deep",
        "engine.py",
        "while len(scheduler.flights) < self.settings.depth:",
        "while len(scheduler.flights) <= self.settings.depth:",
    ),
    # --- faults that the world once found
    one(
        "a refusal for blocks that nobody would write",
        "policy.py",
        "if n == 1 or limit <= num_prompt:",
        "if n == 1:",
    ),
    one(
        "Gone for a lease that its own worker's Hello replaced",
        "engine.py",
        "effects, is_told=False, is_crash",
        "effects, is_told=True, is_crash",
    ),
    # --- failure
    one("steps are numbered across leases", "scheduler.py", "self._next_step = 1\n", "self._next_step = lease\n"),
    one(
        "a stale lease's messages are taken",
        "engine.py",
        "if home is None or (lease is not None and lease != home.lease.id):",
        "if home is None:",
    ),
    one(
        "a result's step is not checked",
        "ranks.py",
        "if message.step != expected or message.step > self.num_planned:",
        "if message.step > self.num_planned:",
    ),
    one(
        "a late step is waited for for ever",
        "home.py",
        "if late_at is not None and now >= late_at:",
        "if False:",
    ),
    one(
        "kv_lost after the epoch check",
        "commit.py",
        "self._lose(result.lost, effects)",
        "self._lose(tuple(x for x in result.lost if flight.sequences[x.index].epoch == flight.epochs[x.index]), "
        "effects)",
    ),
    one("a lost block keeps its name", "commit.py", "        self._memory.device.withdraw(block)\n", ""),
    one(
        "others go on with a lost block",
        "commit.py",
        "for group in self._line.holding(block):",
        "for group in self._line.running[:0]:",
    ),
    one(
        "a lease's end forgets its requests",
        "requests.py",
        "        self.homeless.displaced(group, now)\n",
        "        del self.groups[group.request_id]\n",
    ),
    # --- limits
    one(
        "waiting tokens are not counted",
        "door.py",
        "if num_over <= 0 and (tokens_over <= 0",
        "if num_over <= 0 and (True",
    ),
    one("waiting requests are not counted", "door.py", "if num_over <= 0 and", "if"),
    one(
        "who began is turned away for waiting",
        "requests.py",
        "if group is None or (limit is Limit.QUEUE and group.has_started):",
        "if group is None:",
    ),
    one("nobody waits too long", "requests.py", "(Limit.QUEUE, shorter(settings.queue_s, submit.queue_s)),", ""),
    one(
        "a request may take for ever",
        "requests.py",
        "(Limit.REQUEST, shorter(settings.request_s, submit.request_s)),",
        "",
    ),
    one(
        "whose time is up keeps its blocks",
        "requests.py",
        "        self.cancel(request_id)\n\n    def _drop",
        "\n    def _drop",
    ),
    one(
        "a client may ask for more time",
        "limits.py",
        "return min(asked_s, setting_s) if",
        "return max(asked_s, setting_s) if",
    ),
    one("a step takes as long as it takes", "scheduler.py", "        if most is not None:", "        if False:"),
    one(
        "chunks heed only the tokens of a step",
        "step.py",
        "return min(self.budget, self.prompt_budget)",
        "return self.budget",
    ),
    # --- whose turn it is
    one("who waits does not rise", "turns.py", "now + place.priority * aging_s if aging_s else", ""),
    one(
        "priorities are not heeded", "turns.py", "now + place.priority * aging_s if aging_s else", "now if aging_s else"
    ),
    one(
        "newcomers go before who was preempted",
        "turns.py",
        "return fresh if is_urgent and fresh.turn < back.turn else back",
        "return fresh",
    ),
    one(
        "who waits for a prefix waits although nobody fills it any more",
        "turns.py",
        "if step >= group.until_step or not still[group.awaits]:",
        "if step >= group.until_step:",
    ),
    one(
        "anybody is passed over while a prefix is computed",
        "admission.py",
        "            if found is None or (filler is not None and found is not filler):",
        "            found = next(iter(self._forming._fillers.values()))[0]\n            if num_found > num_hit:",
    ),
    one(
        "who is passed over loses its turn",
        "turns.py",
        "sorted(self.fresh + back, key=_by_turn)",
        "self.fresh + back",
    ),
    one(
        "victims are chosen by their turns",
        "lineup.py",
        "        insort(self.running, group, key=lambda g: g.place)",
        "        insort(self.running, group, key=lambda g: g.turn)",
    ),
    # --- two tiers
    one(
        "work in flight survives a swap",
        "sequence.py",
        "        if self.state is State.RUNNING:\n            self.epoch += 1",
        "        if self.state is State.RUNNING and to is not State.SWAPPED:\n            self.epoch += 1",
    ),
    one("a block is read before it was swapped in", "memory.py", "        moves.swaps_in.append((host, block))\n", ""),
    one(
        "a block is taken before it was swapped out",
        "memory.py",
        "            moves.device_reads.extend(table.blocks)\n",
        "            self.device.drop(table.blocks)\n",
    ),
    one(
        "a host block is taken before it was swapped in",
        "memory.py",
        "            moves.host_reads.extend(host for host in sequence.host if host is not None)\n",
        "            self.host.drop([host for host in sequence.host if host is not None])\n",
    ),
    one(
        "a host copy is found before it is made",
        "memory.py",
        "            moves.names.append((copy, name))",
        "            self.host.publish(copy, name)",
    ),
    one(
        "a host copy of several is counted once",
        "memory.py",
        "            self.host.share(copies[block])\n            return copies[block]",
        "            return copies[block]",
    ),
    one(
        "a last, partial block comes back for all together",
        "memory.py",
        "key = source if i < num_full else -1 - sequence.index",
        "key = source",
    ),
    one(
        "a sequence that ends on the host keeps its copies",
        "memory.py",
        "        self.host.drop([host for host in sequence.host if host is not None])\n        sequence.host = []",
        "        sequence.host = []",
    ),
    one(
        "what was planned comes back as computed",
        "sequence.py",
        "        self.num_planned, self.plan_end = self.num_computed, 0\n",
        "        self.num_computed, self.plan_end = self.num_planned, 0\n",
    ),
    one(
        "a lost host block keeps its name",
        "commit.py",
        "        self._memory.host.withdraw(block)\n",
        "",
    ),
    one(
        "swapped groups hold more than the device has",
        "memory.py",
        "return self.host.num_owned + sum(self._host_need(group, pinned, moves)) <= self.device.num_blocks",
        "return True",
    ),
    one(
        "a host pool that is full takes another group",
        "memory.py",
        "return sum(self._host_need(group, pinned, moves)) <= self.host.num_available",
        "return True",
    ),
    one(
        "the end of a lease leaves groups on the host",
        "lineup.py",
        "            if group.is_swapped:\n                self.forget_swap(group)",
        "            pass",
    ),
    one(
        "a group with work in the plan is its victim",
        "policy.py",
        "return None if was_granted else running[asking]",
        "return running[asking]",
    ),
    one(
        "moves of a plan without rows are dropped",
        "scheduler.py",
        "if not sequences and not moves:",
        "if not sequences:",
    ),
    # --- beams
    one(
        "a dropped beam keeps its blocks",
        "beam.py",
        "self.reserved_rows.append(parent.leave(State.FINISHED))",
        "self.reserved_rows.append(parent.row)",
    ),
    one(
        "a beam goes on in another's table", "beam.py", "parent = parents[c.parent]", "parent = parents[-1 - c.parent]"
    ),
    one("a beam feeds its own draw", "beam.py", "            beam.is_fresh = True\n", ""),
    one("beams advance apart", "beam.py", "return len(sequence.tokens) - 1 if", "return len(sequence.tokens) if"),
    one("beams step beyond the budget", "scheduler.py", "if draft.budget < len(group.live):", "if False:"),
    one(
        "blocks for the copies of beams are not counted",
        "scheduler.py",
        "return num_new + sum(n - 1 for n in holders.values())",
        "return num_new",
    ),
    one(
        "any candidate may finish",
        "beam.py",
        "for candidate in ranked[: self.settings.width]:",
        "for candidate in ranked:",
    ),
    one(
        "a search is over as soon as it can be",
        "beam.py",
        "        if self.settings.early_stopping is EarlyStopping.FULL:",
        "        if True:",
    ),
    one(
        "length is not penalized",
        "beam.py",
        "candidate.cumulative / math.pow(length, self.settings.length_penalty)",
        "candidate.cumulative",
    ),
    # --- named prefixes
    one(
        "a prefix's partial block is shared without a copy",
        "admission.py",
        "self._memory.copy_at_end(source, tables[0], draft.moves)",
        "tables[0].adopt([source])",
    ),
    one("a copy is left out", "memory.py", "        moves.copies.append((source, block))\n", ""),
    one(
        "a pinned block is swapped",
        "memory.py",
        "hosts[-1].append(None if block in kept else self._copy_down(block, copies, moves))",
        "hosts[-1].append(self._copy_down(block, copies, moves))",
    ),
    one(
        "a private prefix serves everybody",
        "prefixes.py",
        "return self.is_public or self.salt.value == salt",
        "return True",
    ),
    one(
        "the salt enters a block late",
        "prefix_index.py",
        "if i == salt.after // block_size",
        "if i == salt.after // block_size + 1",
    ),
    one(
        "a prefix is not restored",
        "engine.py",
        "        self._has_moved = True\n        times = ",
        "        times = ",
    ),
    one(
        "a deleted prefix keeps its blocks",
        "pinning.py",
        "                    home.scheduler.line.cancel(pin)",
        "                    pass",
    ),
    one(
        "pinned blocks are promised to requests",
        "scheduler.py",
        "return self.usable_blocks - self.line.num_pinned_blocks",
        "return self.usable_blocks",
    ),
    one(
        "a prefix may strand a request",
        "scheduler.py",
        "self.usable_blocks - after < most <= self.unpinned_blocks",
        "False",
    ),
    one(
        "nobody is told of a prefix that could not be computed",
        "lineup.py",
        "            effects.append(NotPinned(group.request_id, self.name, message))",
        "            pass",
    ),
    one("a prefix of any size is held", "scheduler.py", "if after > most_pinned * self.usable_blocks:", "if False:"),
    one(
        "a lost block of a prefix is copied for ever",
        "commit.py",
        "                self._withdraw(source, effects)",
        "                pass",
    ),
    one(
        "a pin goes on after its worker was drained",
        "engine.py",
        "if home.lease.state is LeaseState.DRAINING:\n            return",
        "if False:\n            return",
    ),
    # --- several worker groups
    one(
        "a group that is to leave stays",
        "engine.py",
        "        if home.is_held and not home.scheduler.flights:",
        "        if False:",
    ),
    one("a prefix is not pinned where it is used", "homeless.py", "pinning.used(home, group, self.groups)", "[]"),
    one("nobody is suspected", "blame.py", "return group.blasts.num >= TWICE and", "return False and"),
    one(
        "a suspect has company",
        "scheduler.py",
        "for sequence in self.line.sequences if self.probe is None else list(self.probe.live):",
        "for sequence in self.line.sequences:",
    ),
    one(
        "a poisonous request is tried again and again",
        "engine.py",
        "guilty = home.scheduler.lost() if is_crash else None",
        "guilty = None if home.scheduler.lost() else None",
    ),
    # --- grammars
    one("a grammar is not waited for", "grammars.py", "return held.is_ready", "return True"),
    one(
        "any answer is to any grammar",
        "grammars.py",
        "if number in held.numbers and not held.is_ready:",
        "if not held.is_ready:",
    ),
    one("a grammar is forgotten while others need it", "grammars.py", "if not held.users:", "if True:"),
    # --- a service of several controllers, and gateways before it
    Mutant(
        "everybody is put on the first group that fits",
        (("placement.py", "    return _of_two(good, group.place.arrival)", "    return fitting[0]"),),
        world="service",
    ),
    front(
        "another controller is asked after the first token",
        "passage.py",
        "if self.has_begun or self.num_tries",
        "if self.num_tries",
    ),
    front(
        "an answer begins with what another had opened",
        "passage.py",
        '        self.held, self.last = b"", b""\n        self.num_tries += 1',
        "        self.num_tries += 1",
    ),
    front("a controller that refuses for now has the last word", "passage.py", "if is_for_another(said):", "if False:"),
    front("nobody else is asked", "passage.py", "MOST_TRIES = 3", "MOST_TRIES = 1"),
    front(
        "a gateway does not see how busy controllers are",
        "roster.py",
        "+ REQUEST_TOKENS * member.num_requests",
        "",
    ),
    front("a lost controller is asked as any other", "roster.py", "(member.state.value, cost(member))", "cost(member)"),
    front(
        "streams wait for a machine that is gone",
        "roster.py",
        "            work.break_off()",
        "            pass",
    ),
    front("a controller that was once lost is lost for ever", "roster.py", "member.heard_at = now\n", "return\n"),
    front(
        "a client that leaves is worked for as if it had not", "roster.py", "member.under_way.pop(number, None)", "pass"
    ),
]


def mutated(mutant: Mutant, folder: Path) -> None:
    """A copy of its folder in `folder`, sabotaged."""
    shutil.copytree(mutant.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutant.edits:
        path = folder / file
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: its old text occurs {text.count(old)} times in {file}")
        path.write_text(text.replace(old, new))


# The first world tried for those that few worlds kill: one not long before a world that did. It saves time, no more:
# from there all others are tried.
NEAR = {
    "the limit is not tested at admission": 136,
    "a refusal for blocks that nobody would write": 283,
    "Gone for a lease that its own worker's Hello replaced": 169,
    "kv_lost after the epoch check": 404,
    "others go on with a lost block": 255,
    "a client may ask for more time": 232,
    "a step takes as long as it takes": 185,
    "who waits for a prefix waits although nobody fills it any more": 146,
    "a host block is taken before it was swapped in": 711,
    "a host copy is found before it is made": 163,
    "a sequence that ends on the host keeps its copies": 185,
    "a lost host block keeps its name": 219,
    "moves of a plan without rows are dropped": 182,
    "a pinned block is swapped": 124,
    "pinned blocks are promised to requests": 148,
    "a prefix may strand a request": 140,
    "a lost block of a prefix is copied for ever": 408,
    "a pin goes on after its worker was drained": 122,
    "a suspect has company": 560,
    "a prefix is not pinned where it is used": 99,
    "streams wait for a machine that is gone": 11,
    "another controller is asked after the first token": 11,
    "a grammar is forgotten while others need it": 21,
    "everybody is put on the first group that fits": 36,
    "a grammar is not waited for": 21,
    "any answer is to any grammar": 305,
    "a prefix of any size is held": 21,
    "a prefix is not restored": 22,
    "a private prefix serves everybody": 16,
    "a search is over as soon as it can be": 29,
    "any candidate may finish": 12,
    "blocks for the copies of beams are not counted": 29,
    "nobody is told of a prefix that could not be computed": 365,
    "beams advance apart": 12,
    "beams step beyond the budget": 12,
    "a beam goes on in another's table": 12,
    "a dropped beam keeps its blocks": 12,
    "a group with work in the plan is its victim": 29,
    "a host pool that is full takes another group": 29,
    "a last, partial block comes back for all together": 83,
    "the end of a lease leaves groups on the host": 324,
    "a block is taken before it was swapped out": 83,
    "who is passed over loses its turn": 29,
    "priorities are not heeded": 17,
    "who waits does not rise": 17,
    "chunks heed only the tokens of a step": 187,
    "waiting tokens are not counted": 56,
    "a result's step is not checked": 87,
    "a stale lease's messages are taken": 448,
    "the limit is not tested at Submit": 14,
    "nobody is told that no worker came back": 12,
    "a forked group is recomputed apart": 41,
    "followers do not wait for their leader": 37,
    "a sequence that begins anew still goes on token by token": 14,
    "a failed row's names are kept": 220,
    "nobody looks at what ranks confirm": 23,
    "cached hits are not counted as taken": 29,
    "pools as large as those of rank 0": 614,
}


def hunt(mutant: Mutant) -> Kill:
    """Worlds, one after the other, until one of them fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / mutant.of
        mutated(mutant, folder)
        command = [
            sys.executable,
            str(HERE / "core_copy.py"),
            str(folder),
            str(NEAR.get(mutant.name, 0)),
            str(NUM_SEEDS),
            str(LIMIT_S),
            mutant.of,
            mutant.world,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"mutant {mutant.name!r} could not be tried:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        return Kill(mutant.name, None, "survived")
    return Kill(mutant.name, found["worlds"], found["failure"])


def table(kills: list[Kill]) -> str:
    lines = [f"{'mutant':53} {'worlds':>6}  killed by"]
    for kill in kills:
        worlds = "-" if kill.num_worlds is None else str(kill.num_worlds)
        lines.append(f"{kill.mutant:53} {worlds:>6}  {kill.by[:100]}")
    return "\n".join(lines)


def main() -> int:
    wanted = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    with ThreadPoolExecutor(2) as pool:
        kills = []
        for kill in pool.map(hunt, wanted):
            kills.append(kill)
            print(f"\r{len(kills)} of {len(wanted)} ", end="", file=sys.stderr, flush=True)
    print("\r" + table(kills))
    return 1 if any(kill.num_worlds is None for kill in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
