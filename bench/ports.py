"""Ports for processes that must be told theirs before they start.

One that the kernel gives (port 0) may be given to somebody else as soon as it is let go of: as a listener's, or as the
near end of any connection. So it is drawn from below those that the kernel gives; only who draws as we do may take it.
"""

import secrets
import socket
from pathlib import Path

LOWEST = 10_240
GIVEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """One on loopback that nobody listens at."""
    above = int(GIVEN_BY_KERNEL.read_text().split()[0])
    while True:
        port = LOWEST + secrets.randbelow(above - LOWEST) if above > LOWEST else 0
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue  # taken
            found: int = tried.getsockname()[1]
            return found
