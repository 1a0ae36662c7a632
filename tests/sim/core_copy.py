"""Run worlds against a copy of the core, or of the gateway, that lies in another folder.

    python tests/sim/core_copy.py FOLDER FIRST_SEED NUM_SEEDS LIMIT_S core|gateway world|service

prints one JSON line: after how many worlds one failed and how, or null. The folder takes the place of
kilburn.controller.core, or .gateway, before anything of it is imported; all else is the real thing. A short
table of laws goes before (0 worlds): it is for what the core, as it is now, never makes happen.
"""

import importlib
import json
import sys
import time
from typing import Any


def main(
    folder: str, first_seed: int, num_seeds: int, limit_s: float, replaced: str, kind: str
) -> dict[str, object] | None:
    importlib.import_module(f"kilburn.controller.{replaced}").__path__ = [folder]
    module = importlib.import_module(f"kilburn.controller.simulate.{kind}")
    run = module.run_service if kind == "service" else module.run_seed
    started_s = time.monotonic()
    law = broken_law()
    if law:
        return {"worlds": 0, "failure": law}
    for num_before in range(num_seeds):
        verdict = run((first_seed + num_before) % num_seeds)
        if verdict.failure:
            return {"worlds": num_before + 1, "failure": verdict.failure}
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
    if pool.is_writable(block):
        return "table: a block that others find by its name is writable"
    return broken_bound()


def broken_bound() -> str:
    """Swapped groups hold no more on the host than the device has, however large the host is.

    Worlds rarely come near, since nobody is admitted past one who was swapped out.
    """

    def of(name: str) -> Any:
        return importlib.import_module(f"kilburn.controller.core.{name}")

    hasher = importlib.import_module("kilburn.shared.digest").BlockHasher(b"m" * 32, 4)
    sampling = importlib.import_module("kilburn.shared.sampling").Sampling()
    memory = of("memory").Memory(of("block_pool").BlockPool(4), of("block_pool").BlockPool(40), hasher, 4)
    leaving = of("leaving").Leaving(memory, of("policy").Costs(64), of("policy").Preemption.SWAP)
    for number in range(3):
        group = of("sequence").Group(number, of("sequence").Place(0, number), range(8), 4, sampling)
        (sequence,) = group.live
        sequence.start(0, table := of("block_table").BlockTable(memory.device), 8, 8, 8)
        memory.grow(table, 2, of("memory").Moves(number))
        departure = leaving.choose(group, [], moves := of("memory").Moves(number))
        if departure.way is of("departure").Way.SWAP:
            sequence.swap_out(memory.swap_out(group, [], moves)[0])
            try:
                memory.seal(moves)
            except importlib.import_module("kilburn.shared.types").LawBroken:
                return ""  # of another law, which is the world's to find
    return "table: swapped groups hold more than the device has" if memory.host.num_owned > 4 else ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:7])))
