"""python -m kilburn.worker FOLDER --connect tcp://127.0.0.1:5557 ...

Exit codes: 0 told to stop or drained, 1 rejected or broken, 2 a setting needs a change.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kilburn.shared import logs
from kilburn.shared.config import SettingsError, WorkerSettings, complain, load_or_exit
from kilburn.shared.keys import CONTROLLER_FILE, SettingError, WorkerKeys, default_name
from kilburn.shared.model_files import ModelRefused
from kilburn.shared.threads import threads_for
from kilburn.worker import phases
from kilburn.worker.daemon import Daemon, watch_parent
from kilburn.worker.link import WorkerLink
from kilburn.worker.phases import phase, say
from kilburn.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from kilburn.worker.start import Ready

PROGRAM = "kilburn worker"
ABOUT = "Computes what a controller plans: holds one model and a pool of KV blocks, and runs steps."


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    settings = load_or_exit(WorkerSettings, arguments, PROGRAM, ABOUT, positional="model")
    logs.set_up(settings.log_level, settings.log_format)
    if settings.log_format == "json":
        phases.say_to_log()
    stop = threading.Event()
    try:
        return serve(settings, stop)
    except SettingsError as error:
        complain(PROGRAM, error.problems)
    except (SettingError, ModelRefused) as error:
        complain(PROGRAM, [str(error)])
    except KeyboardInterrupt:
        return 0  # told to stop before there was anything to leave


def serve(settings: WorkerSettings, stop: threading.Event) -> int:
    if settings.exit_with_parent:
        watch_parent(stop)
    if settings.tp > 1 and settings.rank < 0:
        raise SettingsError([f"--rank: which of the {settings.tp} is this? Give 0 to {settings.tp - 1}"])
    settings = replace(settings, name=settings.name or default_name())
    # First, since it finds faults of settings at once; what computes takes seconds to import.
    link = WorkerLink(settings.connect, settings.name, keys=keys_of(settings))
    try:
        # The libraries below torch read their thread counts when they load.
        threads = threads_for(settings.threads, settings.sharers)
        os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(threads)
        # Threads that wait by spinning take the core from the one that they wait for wherever something else runs too:
        # a step of the bundled model on two busy cores took 0.8 s so, and takes 0.08 s asleep.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with phase("importing"):
            from kilburn.worker.start import make_ready, use_threads

            use_threads(threads)
        ready = make_ready(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        if settings.profile:
            return serve_profiled(settings, ready, link, stop)
        which = f" (rank {settings.rank} of {settings.tp})" if settings.tp > 1 else ""
        say(f"ready: {settings.name}{which} connects to {settings.connect}")
        return Daemon(ready.hello, ready.executor, link, stop, watchdog=watchdog_of(settings, link)).run()
    finally:
        link.close()


def serve_profiled(settings: WorkerSettings, ready: "Ready", link: WorkerLink, stop: threading.Event) -> int:
    from kilburn.worker.profiling import ProfiledSteps

    asked = threading.Event()
    name = f"{settings.name}-rank{settings.rank}" if settings.tp > 1 else settings.name
    steps = ProfiledSteps(ready.executor, settings.profile, name, settings.profile_steps, asked)
    signal.signal(signal.SIGUSR2, lambda *_: asked.set())
    say(f"ready: {settings.name} connects to {settings.connect}, traces of steps go to {settings.profile}")
    try:
        return Daemon(ready.hello, steps, link, stop, watchdog=watchdog_of(settings, link)).run()
    finally:
        steps.close()


def watchdog_of(settings: WorkerSettings, link: WorkerLink) -> Watchdog | None:
    """What several ranks do together may never end."""
    return Watchdog(link.is_over) if settings.tp > 1 else None


def keys_of(settings: WorkerSettings) -> WorkerKeys | None:
    """The worker's own file in the folder of keys: the one of its name, or the only one there is."""
    if not settings.curve_keys:
        return None
    folder = Path(settings.curve_keys)
    if folder.is_file():
        return WorkerKeys.read(folder)
    named = folder / f"{settings.name}.key"
    if settings.name and named.exists():
        return WorkerKeys.read(named)
    own = [file for file in sorted(folder.glob("*.key")) if file.name != CONTROLLER_FILE]
    if len(own) != 1:
        found = ", ".join(file.stem for file in own) or "none"
        problem = f"--curve-keys: {folder} holds the keys of {found}; give --name one of them, or name the file itself"
        raise SettingsError([problem])
    return WorkerKeys.read(own[0])


if __name__ == "__main__":
    sys.exit(main())
