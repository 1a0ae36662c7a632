"""The worlds that judge the core, by seed.

The real core runs among virtual clients, links and workers (`virtual`). A world ends well, or with a failure: its seed,
the law that broke, and the story of the requests involved.

    python -m kilburn.controller.simulate.world --seed 17 --story
    python -m kilburn.controller.simulate.world --seeds 0:100000 --jobs 8
    python -m kilburn.controller.simulate.world --steps 1000000 --jobs 8
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kilburn.controller.simulate.scenario import draw_scenario
from kilburn.controller.simulate.story import Story
from kilburn.controller.simulate.virtual import World
from kilburn.controller.simulate.witness import WorldBroken

CHUNK = 16  # seeds handed to a process at once
MOST_SEEDS = 1 << 40
BAND = 512  # seeds by process, after which all wait for the last
COMMAND = "kilburn.controller.simulate.world"


@dataclass(slots=True)
class Verdict:
    """How a world ended. `failure` is empty if all was well."""

    seed: int
    failure: str = ""
    requests: frozenset[int] = frozenset()
    turns: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    story: Story = field(default_factory=Story)
    command: str = COMMAND  # that runs it again

    def report(self, whole: bool = False) -> str:
        about = None if whole or not self.requests else self.requests
        lines = [f"seed {self.seed}: {self.failure or 'well'} ({self.turns} turns)"]
        if self.failure or whole:
            whose = "everybody" if about is None else f"request {', '.join(map(str, sorted(about)))}"
            lines += [f" the story of {whose}:", self.story.tell(about)]
            lines += [f" again: python -m {self.command} --seed {self.seed} --story"]
        return "\n".join(lines)


def run_seed(seed: int) -> Verdict:
    """The world of one seed. Never raises."""
    return judge_world(World(draw_scenario(seed)))


def judge_world(world: World) -> Verdict:
    """Let a world take its course. Never raises."""
    verdict = Verdict(world.scenario.seed, seen=world.seen, story=world.story)
    try:
        world.run()
    except WorldBroken as broken:
        verdict.failure, verdict.requests = str(broken), broken.requests
    except Exception as error:  # whatever the core raises is the finding
        verdict.failure = f"{type(error).__name__}: {error}"
    verdict.turns = world.turn
    return verdict


def _run_many(run: Callable[[int], Verdict], seeds: range, jobs: int) -> Iterator[Verdict]:
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for start in range(seeds.start, seeds.stop, BAND * jobs):  # all at once they might be 2**40
            yield from pool.imap_unordered(run, seeds[start - seeds.start :][: BAND * jobs], chunksize=CHUNK)


def run_seeds(
    seeds: range,
    jobs: int = 1,
    stop_at: int = 1,
    show: bool = True,
    run: Callable[[int], Verdict] = run_seed,
    num_steps: int = 0,
) -> tuple[list[Verdict], Counter[str]]:
    """The failures among these seeds (at most `stop_at`), and what was seen in all worlds together.

    `num_steps`: end once so many were planned; 0: with the last seed.
    """
    failures: list[Verdict] = []
    seen: Counter[str] = Counter()
    started_s = told_s = time.monotonic()
    done = 0
    for done, verdict in enumerate(_run_many(run, seeds, jobs), start=1):
        seen += verdict.seen
        seen["turn"] += verdict.turns
        if verdict.failure:
            failures.append(verdict)
        if len(failures) >= stop_at or (num_steps and seen["plan"] >= num_steps):
            break
        if show and time.monotonic() - told_s > 1.0:
            told_s = time.monotonic()
            share = seen["plan"] / num_steps if num_steps else done / len(seeds)
            left_s = (told_s - started_s) * (1 / max(share, 1e-9) - 1)
            of = f"{seen['plan']:,} steps" if num_steps else f"{len(seeds):,} seeds"
            print(f"\r{done:,} seeds of {of}, {left_s:.0f} s left ", end="", file=sys.stderr)
    if show:
        print(f"\r{done:,} seeds in {time.monotonic() - started_s:.1f} s{' ' * 40}", file=sys.stderr)
    return failures, seen


def command(what: str, about: str, seeds: str, run: Callable[[int], Verdict]) -> int:
    """What the command line asks for; the exit status. `seeds`: those that are run where none are given."""
    parser = argparse.ArgumentParser(prog=what, description=about)
    parser.add_argument("--seed", type=int, help=f"one {what}")
    parser.add_argument("--seeds", default=seeds, help="many, as FIRST:END")
    parser.add_argument("--steps", type=int, default=0, help="from the first seed on, until so many were planned")
    parser.add_argument("--story", action="store_true", help="tell all that happened, not only where it failed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    options = parser.parse_args()
    if options.seed is not None:
        verdict = run(options.seed)
        print(verdict.report(whole=options.story))
        return 1 if verdict.failure else 0
    first, _, end = options.seeds.partition(":")
    wanted = range(int(first), MOST_SEEDS if options.steps else int(end or int(first) + 1))
    failures, seen = run_seeds(wanted, options.jobs, options.failures, run=run, num_steps=options.steps)
    for verdict in failures:
        print(verdict.report(whole=options.story))
    print("seen:", ", ".join(f"{count:,} {name}" for name, count in sorted(seen.items())))
    print("all well" if not failures else f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(command("world", "Run the core in worlds full of faults.", "0:2000", run_seed))
