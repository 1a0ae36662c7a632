"""A step that never ends is the end of its process, and of nothing else."""

import subprocess
import sys
from queue import Queue

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
    questions = iter([False, True, False])  # the second time it was a false alarm
    watchdog = Watchdog(lambda: next(questions, True), grace_s=0.0, poll_s=SOON_S, end=ends.put)
    for _ in range(3):
        with watchdog.limit(3600.0):
            pass
    assert ends.empty()
    with watchdog.limit(3600.0):
        assert ends.get(timeout=60) == EXIT_CODE
    assert next(questions, None) is None
