"""The registry in Redis: what several controllers know together.

    kilburn:names:NAMESPACE    a hash, one field for each name: signed NamedEntry
    kilburn:hint:DIGEST        a hash, one field for each worker group: signed expiry; the key itself expires too
    kilburn:fleet:NAMESPACE    a hash, one field for each controller: signed Announcement and expiry

One task talks to Redis, in turns of bounded length: send what has gathered, read the names. `learn` and `publish` only
put down what there is to send, in bounded lists, so nobody ever waits for Redis, and of what it says nothing is
believed that is not signed (registry_entries.py). A turn that fails, for whatever reason, costs the hints that were to
be sent in it; names are kept and sent again. What Redis loses, those who registered it publish anew. A hint is sent
again at half its life for as long as the group holds the block; so is a controller's word of itself.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from kilburn.controller.redis_urls import SOCKET_S, Client
from kilburn.controller.registry import (
    Announcement,
    Announcer,
    FleetHeard,
    InProcessRegistry,
    NamedEntry,
    NameKey,
    NamesHeard,
    RegistryCounters,
)
from kilburn.controller.registry_entries import EntrySigner

log = logging.getLogger("kilburn.registry")

TURN_S = 2.0  # what one turn may take in all
PAUSE_S = 0.1  # between turns that had something to send
NAMES_S = 1.0  # between looks at the names
MOST_PAUSE_S = 5.0  # between tries while it is down
MOST_QUEUED = 1 << 16  # hints
BATCH = 512  # hints in one turn
MOST_NAMES = 4096  # read in one turn
MOST_FETCHED = 128  # digests asked about at once
HINT_TTL_S = 600.0
FLEET_TTL_S = 10.0
MOST_CONTROLLERS = 1024  # read in one turn
MOST_ASKING = 2  # fetches at once: the client has few connections, and a turn wants one
DELETED_S = 3600.0  # how long the word that a name was deleted is kept: those cut off for longer may bring it back


class RedisRegistry:
    """See the file's head. `controller` tells this process's worker groups from those of others."""

    def __init__(self, connect: Callable[[], Client], signer: EntrySigner, namespace: str, controller: str) -> None:
        self._connect, self._signer = connect, signer
        self._names_at, self._fleet_at = f"kilburn:names:{namespace}", f"kilburn:fleet:{namespace}"
        self._controller = controller
        self._client: Client = None
        self._here, self._there = InProcessRegistry(), InProcessRegistry(ttl_s=HINT_TTL_S)
        self._hints: deque[tuple[bytes, bytes, bool]] = deque()  # (digest, group, whether it has it)
        self._names: dict[NameKey, NamedEntry] = {}  # to be published
        self._heard: NamesHeard = lambda entries, is_whole: ()
        self._about: Announcer | None = None
        self._fleet_heard: FleetHeard | None = None
        self._asking = asyncio.Semaphore(MOST_ASKING)
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._read_at = 0.0
        self.counters = RegistryCounters(is_up=False)

    @property
    def is_up(self) -> bool:
        return self.counters.is_up

    # --- what everybody calls: nothing here waits

    def learn(self, group: str, published: Sequence[bytes], withdrawn: Sequence[bytes], now: float) -> None:
        self._here.learn(group, published, withdrawn, now)
        field = f"{self._controller}/{group}".encode()
        self._hints.extend([(digest, field, False) for digest in withdrawn])
        self._hints.extend([(digest, field, True) for digest in published])
        while len(self._hints) > MOST_QUEUED:
            self._hints.popleft()
            self.counters.dropped += 1
        self._work.set()

    def holders(self, digest: bytes, now: float) -> frozenset[str]:
        """Groups of this process by their names, those of others as `controller/name`."""
        return self._here.holders(digest, now) | self._there.holders(digest, now)

    def publish(self, entry: NamedEntry) -> None:
        self._names[entry.key] = entry
        self._work.set()

    def listen(self, heard: NamesHeard) -> None:
        self._heard = heard

    def announce(self, about: Announcer) -> None:
        self._about = about

    def watch(self, heard: FleetHeard) -> None:
        self._fleet_heard = heard

    # --- the task

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(TURN_S):
                    await self._turn()
            except Exception as error:  # whatever Redis, or what poses as it, makes the client raise
                self._failed(error)
                await self._disconnect()
                pause_s = min(pause_s * 2, MOST_PAUSE_S)
                await asyncio.sleep(pause_s)
                continue
            self.counters.turn_s.observe(time.monotonic() - begun)
            if not self.counters.is_up:
                log.info("the prefix registry answers")
            self.counters.is_up, pause_s = True, PAUSE_S
            await asyncio.sleep(PAUSE_S)
            if not self._hints and not self._names:
                self._work.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(NAMES_S):  # not wait_for: of Python 3.11, it may swallow a cancellation
                        await self._work.wait()

    def _failed(self, error: Exception) -> None:
        self.counters.failures += 1
        if self.counters.is_up or self.counters.failures == 1:
            # Not its words: they may hold what a hostile server said.
            log.warning("the prefix registry does not answer (%s); serving goes on without it", type(error).__name__)
        self.counters.is_up = False

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(SOCKET_S):
                    await client.aclose()

    async def _turn(self) -> None:
        if self._client is None:
            self._client = self._connect()
        await self._send_hints()
        await self._send_names()
        if time.monotonic() - self._read_at >= NAMES_S:
            await self._read_names()
            await self._say_who_we_are()
            await self._read_fleet()
            self._read_at = time.monotonic()
            self._renew(asyncio.get_running_loop().time())

    def _renew(self, now: float) -> None:
        """Hints whose life is half over, for what is held still. The newest wait for a later turn."""
        for digest, groups in self._here.ageing(now - HINT_TTL_S / 2, min(2 * BATCH, MOST_QUEUED - len(self._hints))):
            for group in groups:
                self.learn(group, [digest], [], now)

    async def _send_hints(self) -> None:
        batch = [self._hints.popleft() for _ in range(min(BATCH, len(self._hints)))]
        if not batch:
            return
        expires_ms = int((time.time() + HINT_TTL_S) * 1000)
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                for digest, group, is_there in batch:
                    at = f"kilburn:hint:{digest.hex()}"
                    if is_there:
                        pipeline.hset(at, group, self._signer.write_hint(digest, group, expires_ms))
                        pipeline.pexpire(at, int(HINT_TTL_S * 1000))
                    else:
                        pipeline.hdel(at, group)
                await pipeline.execute()
        except BaseException:
            self.counters.dropped += len(batch)  # hints: not worth a second try
            raise
        self.counters.sent += len(batch)

    async def _send_names(self) -> None:
        for entry in list(self._names.values()):
            await self._client.hset(self._names_at, self._signer.field_of(*entry.key), self._signer.write_name(entry))
            self.counters.sent += 1
            if self._names.get(entry.key) is entry:
                del self._names[entry.key]

    async def _read_names(self) -> None:
        found: dict[NameKey, NamedEntry] = {}
        outdated: list[bytes] = []
        num_read, is_whole, too_old = 0, True, (time.time() - DELETED_S) * 1e6
        async for field, value in self._client.hscan_iter(self._names_at, count=64):
            num_read += 1
            if num_read > MOST_NAMES:
                is_whole = False  # what was not read may well be there
                break
            entry = self._signer.read_name(field, value)
            if entry is None or self._signer.field_of(*entry.key) != field:
                self.counters.ignored += 1
                continue
            found[entry.key] = entry
            if entry.is_deleted and entry.stamp < too_old:
                outdated.append(field)
        self.counters.names = sum(not entry.is_deleted for entry in found.values())
        if outdated:
            await self._client.hdel(self._names_at, *outdated)
        for entry in self._heard(found, is_whole):
            self._names.setdefault(entry.key, entry)

    async def _say_who_we_are(self) -> None:
        if self._about is None:
            return
        about, field = self._about(), self._controller.encode()
        if about is None:
            await self._client.hdel(self._fleet_at, field)
            return
        expires_ms = int((time.time() + FLEET_TTL_S) * 1000)
        await self._client.hset(self._fleet_at, field, self._signer.write_controller(field, about, expires_ms))

    async def _read_fleet(self) -> None:
        if self._fleet_heard is None:
            return
        found: dict[str, Announcement] = {}
        over: list[bytes] = []
        num_read, now_ms = 0, time.time() * 1000
        async for field, value in self._client.hscan_iter(self._fleet_at, count=64):
            num_read += 1
            if num_read > MOST_CONTROLLERS:
                break
            match self._signer.read_controller(field, value):
                case None:
                    self.counters.ignored += 1
                case _, expires_ms if expires_ms <= now_ms:
                    over.append(field)
                case about, expires_ms if expires_ms <= now_ms + 2000 * FLEET_TTL_S:
                    found[field.decode("utf-8", "replace")] = about
        if over:
            await self._client.hdel(self._fleet_at, *over)
        self._fleet_heard(found)

    # --- for whoever places requests

    async def fetch(self, digests: Iterable[bytes], now: float, within_s: float = SOCKET_S) -> None:
        """Ask which groups of other controllers hold these; `holders` knows afterwards. Fails as if none did."""
        if self._client is None:
            return
        wanted = list(islice(digests, MOST_FETCHED))
        try:
            async with (
                asyncio.timeout(within_s),
                self._asking,
                self._client.pipeline(transaction=False) as pipeline,
            ):
                for digest in wanted:
                    pipeline.hgetall(f"kilburn:hint:{digest.hex()}")
                answers = await pipeline.execute(raise_on_error=False)
        except Exception:
            self.counters.failures += 1
            return
        for digest, answer in zip(wanted, answers if isinstance(answers, list) else [], strict=False):
            self._note_holders(digest, answer, now)

    def _note_holders(self, digest: bytes, answer: object, now: float) -> None:
        own, now_ms = f"{self._controller}/".encode(), time.time() * 1000
        held: set[str] = set()
        for group, value in islice(answer.items(), MOST_FETCHED) if isinstance(answer, Mapping) else ():
            expires_ms = self._signer.read_hint(digest, group, value)
            if expires_ms is None:
                self.counters.ignored += 1
            elif not group.startswith(own) and now_ms < expires_ms <= now_ms + 2000 * HINT_TTL_S:
                held.add(group.decode("utf-8", "replace"))
        for group_name in self._there.holders(digest, now) - held:  # it was withdrawn since
            self._there.learn(group_name, [], [digest], now)
        for group_name in held:
            self._there.learn(group_name, [digest], [], now)
        self.counters.hits += bool(held)
        self.counters.misses += not held
