"""Several ranks that hold one copy of a model between them: which part is whose, and how they add up.

    every rank      embedding rows | q, k, v, gate, up: outputs | o, down: inputs | head rows      its own part of each
                         | sum              |                          | sum           | gathered by rank 0
                     hidden, whole    its own heads' KV           hidden, whole      logits, whole -> tokens

Hidden states are whole on every rank and equal to the bit, as every sum reaches all ranks from one place. KV of a head
lies with the rank that computes it, under the same block ids as everywhere: there is one block table. Rank 0 alone
sees logits; what it chose, and which rows failed, the others hear from it in one broadcast, so that all rows go on
alike. A head of K and V that there are fewer of than ranks is held by several.

Ranks meet anew for each lease, at a place that rank 0 opens and the controller's Welcome names, and part when it is
over. Before the first meeting a rank rehearses: sums and broadcasts give back what they were given, which is enough to
load, compile and measure. Nobody proves who he is in these collectives, so they are bound to one address, loopback
unless another is asked for by name.

What this file does not know: plans, models, which collective belongs to which product.
"""

import ipaddress
import os
import re
import secrets
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kilburn.kernels.dispatch import has_own_collectives
from kilburn.shared.settings import SettingsError

_PLACE = re.compile(r"\[?([0-9A-Fa-f.:]{2,45})\]?:([0-9]{1,5})/([0-9a-f]{32})")
_GET_ADDRESS, _INTERFACE_BYTES = 0x8915, 16  # SIOCGIFADDR, IFNAMSIZ
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Which of `world` ranks this one is."""

    rank: int = 0
    world: int = 1

    def share(self, size: int) -> slice:
        """This rank's of `size` like things; the shares differ by one where it does not divide."""
        return share_of(size, self.rank, self.world)


def share_of(size: int, rank: int, world: int) -> slice:
    return slice(size * rank // world, size * (rank + 1) // world)


class RanksApart(RuntimeError):
    """The ranks have no meeting now. The lease is over, or about to be."""


class Ranks:
    """One rank's view of all. A world of one has nobody to meet."""

    def __init__(self, part: Part | None = None, device: torch.device | None = None, address: str = "127.0.0.1"):
        """`address`: of this machine, the only one that the collectives use."""
        self.part = part or Part()
        self._address, self.device = address, device or torch.device("cpu")
        self._rehearses = True
        self._patience_s = self._least_patience_s = 0.0  # of a collective; in any step
        self._door: dist.TCPStore | None = None
        # Of values on the device, and of a few on the host.
        self._values: dist.ProcessGroup | None = None
        self._words: dist.ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        return self.part.world > 1

    @property
    def is_first(self) -> bool:
        return self.part.rank == 0

    # --- meeting

    def place(self) -> str:
        """Where the others find rank 0 the next time: a new one at every call; empty where nobody needs it."""
        if not self.are_several or not self.is_first:
            return ""
        if self._door is None:
            self._door = _opened(self._address)
        shown = f"[{self._address}]" if ":" in self._address else self._address
        return f"{shown}:{self._door.port}/{secrets.token_hex(16)}"

    def meet(self, place: str, patience_s: float) -> None:
        """Meet at `place`, as the Welcome names it. No collective may take longer than `patience_s`, or see `allow`."""
        if not self.are_several:
            return
        self.part_ways()
        self._rehearses, self._patience_s, self._least_patience_s = False, patience_s, patience_s
        found = _PLACE.fullmatch(place)
        if found is None:
            raise RanksApart(f"the controller names no place where ranks could meet: {place[:80]!r}")
        host, port, word = found.groups()
        if ipaddress.ip_address(host).is_loopback != ipaddress.ip_address(self._address).is_loopback:
            raise RanksApart(f"rank 0 waits at {host}, this rank is bound to {self._address}: see --collectives")
        patience = timedelta(seconds=patience_s)
        if self._door is not None:
            self._door.set_timeout(patience)
            store = self._door
        else:
            store = dist.TCPStore(host, int(port), None, False, patience, wait_for_workers=False)
        rank, world = self.part.rank, self.part.world
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = patience
        self._words = dist.ProcessGroupGloo(dist.PrefixStore(f"{word}/words", store), rank, world, options)
        self._values = self._words
        if has_own_collectives(self.device):
            of_device = dist.ProcessGroupNCCL.Options()
            of_device._timeout = patience
            values = dist.PrefixStore(f"{word}/values", store)
            self._values = dist.ProcessGroupNCCL(values, rank, world, of_device)

    def allow(self, step_s: float) -> None:
        """A step begins that may take so long, if that is more than what was said when the ranks met."""
        patience_s = max(step_s, self._least_patience_s)
        if self._words is None or self._values is None or patience_s == self._patience_s:
            return
        self._patience_s = patience_s
        self._words.set_timeout(timedelta(seconds=patience_s))
        if self._values is not self._words:
            self._values.set_timeout(timedelta(seconds=patience_s))

    def part_ways(self) -> None:
        """The lease is over. Whoever still waits for this rank in a collective hears of it."""
        values, words, self._values, self._words = self._values, self._words, None, None
        if values is not None and values is not words:
            values.abort()
        if words is not None:
            words.abort()

    # --- what is computed together

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in its place."""
        group = self._group_of(self._values)
        if group is not None:
            x = x.contiguous()
            group.allreduce([x]).wait()
        return x

    def columns(self, x: Tensor, total: int) -> Tensor:
        """x [rows, own share of total] -> [rows, total] on rank 0; the others get back what they gave."""
        if not self.are_several:
            return x
        most = -(-total // self.part.world)
        x = F.pad(x, (0, most - x.shape[1])) if x.shape[1] < most else x.contiguous()
        group = self._group_of(self._values)
        if group is None:
            return F.pad(x, (0, total - most)) if self.is_first else x
        parts = [torch.empty_like(x) for _ in range(self.part.world)] if self.is_first else []
        group.gather([parts] if self.is_first else [], [x], dist.GatherOptions()).wait()
        if not self.is_first:
            return x
        shares = [share_of(total, rank, self.part.world) for rank in range(self.part.world)]
        return torch.cat([part[:, : s.stop - s.start] for part, s in zip(parts, shares, strict=True)], dim=1)

    def columns_made(self, total: int) -> int:
        """Columns that this rank makes for `columns`, with those of a copy where its share is padded."""
        own, most = self.part.share(total), -(-total // self.part.world)
        num_own = own.stop - own.start
        return num_own if num_own == most else num_own + most

    # --- what is agreed

    def any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Per place, whether any rank says so."""
        group = self._group_of(self._words)
        if group is None or not flags.size:
            return flags
        votes = torch.from_numpy(flags.astype(np.uint8))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        group.allreduce([votes], options).wait()
        return votes.numpy().astype(np.bool_)

    def from_first(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """What rank 0 says; what others give only has the size."""
        group = self._group_of(self._words)
        if group is None or not values.size:
            return values
        told = torch.from_numpy(values)
        group.broadcast([told], dist.BroadcastOptions()).wait()
        return told.numpy()

    def _group_of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """None where there is nobody else, or not yet."""
        if group is None and self.are_several and not self._rehearses:
            raise RanksApart("the ranks of this worker group have parted")
        return group


def _opened(address: str) -> dist.TCPStore:
    """A store that listens at `address` alone: left to itself it would listen everywhere."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


# --- where collectives may be bound


def bound_address(setting: str, is_insecure: bool) -> str:
    """The address that `--collectives` means: an interface's, or one of this machine as it stands.

    Raises SettingsError for one that is not here, and beyond loopback unless `is_insecure` says that it may be.
    """
    try:
        address = str(ipaddress.ip_address(setting))
    except ValueError:
        address = _address_of(setting)
    if not ipaddress.ip_address(address).is_loopback and not is_insecure:
        problem = (
            f"--collectives: at {setting} ({address}) anybody who reaches it could join or disturb the ranks, which "
            "prove nothing to each other; give lo where they are all on this machine, or --insecure-collectives where "
            "that network is yours alone"
        )
        raise SettingsError([problem])
    return address


def _address_of(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        import fcntl  # here and not above: only where there are interfaces of this kind

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            try:
                word = struct.pack("256s", interface.encode()[: _INTERFACE_BYTES - 1])
                return socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _GET_ADDRESS, word)[20:24])
            except OSError:
                problem = f"--collectives: the interface {interface} has no IPv4 address; give the address itself"
                raise SettingsError([problem]) from None
    raise SettingsError(
        [f"--collectives: no interface {interface!r} here; give one of {', '.join(names)}, or an address"]
    )


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address, or no text where none has."""
    for _, name in socket.if_nameindex():
        try:
            if _address_of(name) == address:
                return name
        except SettingsError:
            continue
    return ""


def use_interface(address: str) -> None:
    """NCCL takes the name of an interface, from the environment, when it is first used."""
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"


# --- which heads are whose


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's share of a layer's tensors, in rows of what makes q, k (or v), and the MLP's inner values."""

    q: slice
    kv: slice
    inner: slice


def cut_of(num_heads: int, num_kv_heads: int, head_dim: int, intermediate: int, part: Part) -> Cut:
    """Of a model whose heads and MLP divide among the ranks (shared/model_shape.py refuses any other)."""
    heads = part.share(num_heads)
    kv_heads = kv_heads_of(num_kv_heads, part)
    return Cut(
        q=slice(heads.start * head_dim, heads.stop * head_dim),
        kv=slice(kv_heads.start * head_dim, kv_heads.stop * head_dim),
        inner=part.share(intermediate),
    )


def kv_heads_of(num_kv_heads: int, part: Part) -> slice:
    """The KV heads that a rank stores: its share, or the one that its heads read, which other ranks store too."""
    first = num_kv_heads * part.rank // part.world
    return slice(first, first + max(num_kv_heads // part.world, 1))
