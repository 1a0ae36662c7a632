"""How many CPU threads the model gets. Imports nothing that computes, so that it can be asked first."""

import os


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(setting: int) -> int:
    """As set, else every core but one, which is the controller's; of two cores, both.

    (Of two, the second is worth more to the model than to a controller that is idle most of the time.)
    """
    cores = num_cores()
    return setting or (cores - 1 if cores > 2 else cores)
