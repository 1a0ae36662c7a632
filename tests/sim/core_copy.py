"""Run worlds against a copy of the core that lies in another folder.

    python tests/sim/core_copy.py FOLDER NUM_SEEDS LIMIT_S

prints one JSON line: the first seed that failed and how, or null. The folder takes the place of
kilburn.controller.core before anything of it is imported; all else is the real thing. A short
table of laws goes before (seed -1): it is for what the core, as it is now, never makes happen.
"""

import importlib
import json
import sys
import time


def main(folder: str, num_seeds: int, limit_s: float) -> dict[str, object] | None:
    core = importlib.import_module("kilburn.controller.core")
    core.__path__ = [folder]
    world = importlib.import_module("kilburn.controller.simulate.world")
    started_s = time.monotonic()
    law = broken_law()
    if law:
        return {"seed": -1, "failure": law}
    for seed in range(num_seeds):
        verdict = world.run_seed(seed)
        if verdict.failure:
            return {"seed": seed, "failure": verdict.failure}
        if time.monotonic() - started_s > limit_s:
            break
    return None


def broken_law() -> str:
    """A block with one owner is writable until it has a name. (Full blocks are never planned to be written again.)"""
    pools = importlib.import_module("kilburn.controller.core.block_pool")
    pool = pools.BlockPool(2)
    [block] = pool.take(1, 1)
    if not pool.is_writable(block):
        return "table: a block of one owner and no name is not writable"
    pool.publish(block, pools.Name(b"d" * 32, b"p" * 32, (1,)))
    return "table: a block that others find by its name is writable" if pool.is_writable(block) else ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
