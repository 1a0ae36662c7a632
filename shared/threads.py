"""How many CPU threads a model gets. Imports nothing that computes, so that it can be asked first."""

import os


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(setting: int, num_ranks: int = 1) -> int:
    """As set, else every core but one, which is the controller's; of two cores, both. Ranks that are on this machine
    divide them: threads that wait for a core hold up all ranks.

    (Of two, the second is worth more to the model than to a controller that is idle most of the time.)
    """
    cores = num_cores()
    return setting or max((cores - 1 if cores > 2 else cores) // num_ranks, 1)
