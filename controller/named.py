"""Named prefixes, as the edge knows them: who registered what, under which name, and where it is held.

    POST  -> register -> Pin -> engine -> Pinned (again after each restart of a worker)      ours: we keep the name
    registry --heard--> a name of another controller                                         theirs: known, not pinned
    Submit that begins with it --used_by--> Pin, ahead of the Submit                         theirs: pinned at first use

A name is its tenant's own, or public. The controller that registered it keeps it, and has the registry publish it
again whenever it is missing there. A name of theirs is forgotten once the registry has been without it for a while;
silence of the registry changes nothing. A deletion is an entry too, and ends every registration before it.
What this file does not know: HTTP, how a registry keeps entries, how prefixes are held.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kilburn.controller.core.events import Event, NotPinned, Pin, Pinned, Refused, Submit, Unpin
from kilburn.controller.core.prefixes import common_run
from kilburn.controller.registry import NamedEntry, NameKey, PrefixRegistry
from kilburn.controller.salts import Salts

GRACE_S = 60.0  # how long the registry may be without a name of theirs
RETRY_S = 60.0  # after a name could not be pinned
MOST_THEIRS = 1024
MOST_DELETED = 4096


class NameTaken(Exception):
    """Another prefix has that name."""


class NamesFull(Exception):
    """The tenant has as many names as it may have."""


@dataclass(slots=True)
class Named:
    """One name. `prefix_id` is None while nothing was asked of the engine."""

    entry: NamedEntry
    salt: bytes  # of who may use it; b"" for everybody
    is_ours: bool
    prefix_id: int | None = None
    num_blocks: int = 0
    held: dict[str, int] = field(default_factory=dict)  # worker group -> its lease when it told us
    refused: Refused | None = None
    trouble: str = ""  # why it is not held, where it could not be
    retry_at: float = 0.0
    missing_since: float | None = None  # in the registry


class NamedPrefixes:
    """All names that this controller knows. `leases` tells the present lease of each worker group."""

    def __init__(
        self,
        post: Callable[[Event], None],
        next_id: Callable[[], int],
        salts: Salts,
        registry: PrefixRegistry,
        leases: Callable[[], dict[str, int]],
        vocab_size: Callable[[], int],
        most_names: int,
    ) -> None:
        self._post, self._next_id, self._salts = post, next_id, salts
        self._registry, self._leases, self._vocab_size = registry, leases, vocab_size
        self._most_names = most_names
        self._named: dict[NameKey, Named] = {}
        self._by_id: dict[int, Named] = {}
        self._deleted: OrderedDict[NameKey, int] = OrderedDict()  # stamps; oldest first
        self._unheard: list[asyncio.Future[None]] = []
        registry.listen(self.heard)

    # --- for the routes

    async def register(self, tenant: str, name: str, cache_salt: str, tokens: Sequence[int]) -> Named:
        """Names a prefix; `tenant` is "" for a public one. Returns when the engine has taken or refused it.

        Look at `refused` of what is returned. The same prefix under the same name is the same registration.
        """
        # After any deletion that we know of, even one by a controller whose clock is ahead of ours.
        stamp = max(time.time_ns() // 1000, self._deleted.get((tenant, name), -1) + 1)
        entry = NamedEntry(tenant, name, cache_salt, tuple(tokens), stamp)
        known = self._named.get(entry.key)
        if known is not None and (known.entry.tokens, known.entry.cache_salt) != (entry.tokens, cache_salt):
            raise NameTaken
        if known is None and sum(key[0] == tenant for key in self._named) >= self._most_names:
            raise NamesFull
        named = known or Named(entry, self._salt_of(entry), is_ours=True)
        self._named[entry.key], named.is_ours = named, True
        is_asked_now = named.prefix_id is None or self._has_failed(named)
        if is_asked_now:
            self._pin(named)
        if is_asked_now or self._unheard:  # somebody else's asking for it may be under way
            try:
                await self._engine_heard()
            except asyncio.CancelledError:
                if is_asked_now:
                    self._drop(entry.key)
                raise
        if named.refused is not None:
            self._drop(entry.key)
        else:
            self._registry.publish(named.entry)
        return named

    def delete(self, tenant: str, name: str) -> bool:
        """Whether there was such a name."""
        if (tenant, name) not in self._named:
            return False
        stamp = max(time.time_ns() // 1000, self._named[tenant, name].entry.stamp)
        self._drop((tenant, name))
        self._remember_deleted((tenant, name), stamp)
        self._registry.publish(NamedEntry(tenant, name, "", (), stamp))
        return True

    def find(self, tenant: str, name: str) -> Named | None:
        """The tenant's own, or else the public one."""
        return self._named.get((tenant, name)) or self._named.get(("", name))

    def visible_to(self, tenant: str) -> Iterator[Named]:
        return (named for (owner, _), named in sorted(self._named.items()) if owner in ("", tenant))

    def is_held(self, named: Named) -> bool:
        """Whether some worker group holds it now."""
        leases = self._leases()
        return any(leases.get(group) == lease for group, lease in named.held.items())

    # --- for the driver

    def used_by(self, submit: Submit) -> None:
        """A request is about to be submitted: names that it begins with and that nobody holds are pinned now.

        Those are names of theirs, and any that could not be pinned when that was tried.
        """
        waiting = [n for n in self._named.values() if (n.prefix_id is None and not n.is_ours) or self._has_failed(n)]
        if not waiting:
            return
        prompt, now = tuple(submit.prompt), asyncio.get_running_loop().time()
        for named in waiting:
            tokens = named.entry.tokens
            may_use = named.entry.is_public or named.salt == submit.salt
            # Half of it: a prompt that has the first words in common with it does not ask for it.
            if may_use and now >= named.retry_at and 2 * common_run(prompt, tokens) >= len(tokens):
                self._pin(named)

    def perform(self, effect: Pinned | NotPinned | Refused) -> bool:
        """Whether this effect is about a prefix."""
        named = self._by_id.get(effect.request_id if isinstance(effect, Refused) else effect.prefix_id)
        if named is None:
            return not isinstance(effect, Refused)  # its name was deleted meanwhile
        match effect:
            case Pinned(group=group, num_blocks=num_blocks):
                named.num_blocks, named.trouble = num_blocks, ""
                named.held[group] = self._leases().get(group, 0)
            case Refused(request_id=prefix_id):
                del self._by_id[prefix_id]
                named.prefix_id, named.refused = None, effect
                self._note_trouble(named, effect.message)
            case NotPinned(message=message):
                self._note_trouble(named, message)
        return True

    def turn_ended(self) -> None:
        """The engine has handled every event posted so far."""
        for heard in self._unheard:
            if not heard.done():
                heard.set_result(None)
        self._unheard.clear()

    # --- for the registry

    def heard(self, entries: Mapping[NameKey, NamedEntry], is_whole: bool) -> list[NamedEntry]:
        """What the registry knows, or a part of it. Returns what should be published (again)."""
        room = MOST_THEIRS - sum(not named.is_ours for named in self._named.values())
        deletions: list[NamedEntry] = []
        for key, entry in entries.items():
            deleted_at = self._deleted.get(key, -1)
            if entry.is_deleted:
                known = self._named.get(key)
                if known is not None and known.entry.stamp <= entry.stamp:
                    self._drop(key)
                self._remember_deleted(key, entry.stamp)
            elif entry.stamp <= deleted_at:  # somebody who had not heard of it published the name once more
                deletions.append(NamedEntry(*key, "", (), deleted_at))
            elif self._note_theirs(entry, room > 0):
                room -= 1
        if is_whole:
            self._forget_theirs(entries)
        return deletions + [
            named.entry
            for key, named in self._named.items()
            if named.is_ours and named.refused is None and (entries[key].is_deleted if key in entries else is_whole)
        ]

    def _note_theirs(self, entry: NamedEntry, has_room: bool) -> bool:
        """Whether the entry is of a name that is new here."""
        known = self._named.get(entry.key)
        if (known is None and not has_room) or max(entry.tokens) >= self._vocab_size():
            return False
        if known is not None and (known.is_ours or known.entry.stamp >= entry.stamp):
            return False
        self._drop(entry.key)
        self._named[entry.key] = Named(entry, self._salt_of(entry), is_ours=False)
        return known is None

    def _forget_theirs(self, entries: Mapping[NameKey, NamedEntry]) -> None:
        now = asyncio.get_running_loop().time()
        for key, named in list(self._named.items()):
            if key in entries or named.is_ours:
                named.missing_since = None
            elif named.missing_since is None:
                named.missing_since = now
            elif now - named.missing_since > GRACE_S:
                self._drop(key)

    # ---

    def _salt_of(self, entry: NamedEntry) -> bytes:
        return b"" if entry.is_public else self._salts.of(entry.tenant, entry.cache_salt)

    def _has_failed(self, named: Named) -> bool:
        return bool(named.trouble) and not self.is_held(named)

    def _note_trouble(self, named: Named, message: str) -> None:
        named.trouble, named.retry_at = message, asyncio.get_running_loop().time() + RETRY_S

    def _pin(self, named: Named) -> None:
        self._unpin(named)
        named.prefix_id, named.refused, named.trouble = self._next_id(), None, ""
        self._by_id[named.prefix_id] = named
        self._post(Pin(named.prefix_id, named.entry.tokens, named.salt, named.entry.is_public))

    def _drop(self, key: NameKey) -> None:
        named = self._named.pop(key, None)
        if named is not None:
            self._unpin(named)

    def _unpin(self, named: Named) -> None:
        if named.prefix_id is not None:
            self._by_id.pop(named.prefix_id, None)
            self._post(Unpin(named.prefix_id))

    def _remember_deleted(self, key: NameKey, stamp: int) -> None:
        self._deleted[key] = max(stamp, self._deleted.get(key, -1))
        self._deleted.move_to_end(key)
        while len(self._deleted) > MOST_DELETED:
            self._deleted.popitem(last=False)

    async def _engine_heard(self) -> None:
        heard = asyncio.get_running_loop().create_future()
        self._unheard.append(heard)
        await heard
