"""A step that never ends is the end of its process, and of nothing else."""

import subprocess
import sys
from queue import Queue
from threading import Event

from kilburn.worker.watchdog import EXIT_CODE, Watchdog

SOON_S = 0.01


def test_a_step_past_its_deadline_ends_the_process() -> None:
    program = (
        "import time\n"
        "from kilburn.worker.watchdog import Watchdog\n"
        f"with Watchdog(lambda: False, grace_s=0.0, poll_s={SOON_S}).limit({SOON_S}): time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CODE
    assert "a step is stuck" in done.stderr


def test_a_step_that_outlives_its_lease_ends_the_process_and_others_do_not() -> None:
    ends: Queue[int] = Queue()
    questions, is_stuck = iter([False, True, False]), Event()  # the second time it was a false alarm

    def is_over() -> bool:
        return is_stuck.is_set() and next(questions, True)

    watchdog = Watchdog(is_over, grace_s=0.0, poll_s=SOON_S, end=ends.put)
    for _ in range(3):
        with watchdog.limit(3600.0):
            pass
    assert ends.empty()
    is_stuck.set()
    with watchdog.limit(3600.0):
        assert ends.get(timeout=60) == EXIT_CODE
    assert next(questions, None) is None
