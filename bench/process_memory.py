"""Peak memory of a service that runs, all its processes, and their CPU time: from /proc (Linux)."""

import os
from pathlib import Path

LISTENING = "0A"  # state of a socket in /proc/net/tcp


def tree_under(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended since
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def tree_that_listens(port: int) -> list[int]:
    """The process that listens on a TCP port of this machine, and all that descend from it.

    Raises SystemExit where no process that we may look into does.
    """
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{rest[5]}]")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(str(link.readlink()) in sockets for link in (folder / "fd").iterdir()):
                return tree_under(int(folder.name))
        except OSError:
            continue
    raise SystemExit(f"no process that this user may look into listens on port {port}")


def peak_mb(pids: list[int]) -> float:
    """Sum of their largest resident sizes; pages that several share are counted for each."""
    total_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total_kb += int(line.split()[1])
    return total_kb / 1e3


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, its threads included and its children not; in hundredths."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
