"""The Triton set against the reference over the whole table and grid, in the interpreter, by hand.

`python tests/kernels/triton_twins.py [word ...]` runs the cases whose names hold one of the words; with none, all of
them, which takes a quarter of an hour.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.interpreted import triton_kernels
from tests.kernels.shapes import CASES, attention_world, grid


def main(words: list[str]) -> int:
    kernels, faults, begun = triton_kernels(), 0, time.monotonic()
    cases = [case for case in (*CASES, *grid()) if not words or any(word in case.name for word in words)]
    for number, case in enumerate(cases, 1):
        world = attention_world(case)
        try:
            world.check(world.run(kernels))
            verdict = ""
        except AssertionError as error:
            faults, verdict = faults + 1, f"FAULT {error}"
        print(f"{number}/{len(cases)} {time.monotonic() - begun:6.0f} s  {case.name} {verdict}", flush=True)
    print(f"{len(cases)} cases, {faults} faults")
    return 1 if faults or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
