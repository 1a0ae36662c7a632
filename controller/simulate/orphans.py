"""Processes that end with the one that forked them, however that one ends. Linux only."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # found before anybody forks


def end_with(parent: int) -> None:
    """Called in the child, of the process that forked it. To the kernel that is a thread: it ends with that one."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
