"""What the routes stand on, and what each does first: read its body, look whose model is meant."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from kilburn.controller.api.asking import Asking
from kilburn.controller.api.checks import Limits, read_as, read_json, unknown_fields
from kilburn.controller.api.errors import ApiError
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.health import Health
from kilburn.controller.metrics import Metrics
from kilburn.controller.named import NamedPrefixes
from kilburn.controller.page.feed import Feed
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams
from kilburn.controller.text import Text

T = TypeVar("T")
UNREAD: web.RequestKey[tuple[str, ...]] = web.RequestKey("unread", tuple)
MOST_UNREAD = 32


@dataclass(frozen=True, slots=True)
class Service:
    """All that the routes stand on."""

    asking: Asking
    streams: Streams
    names: NamedPrefixes
    chronicle: Chronicle
    metrics: Metrics
    feed: Feed
    model_name: str
    created: int  # when this service began, in seconds
    max_len: Callable[[], int | None]
    health: Callable[[], Health]
    snapshot: Callable[[], Snapshot]
    retire: Callable[[str], None]  # have a worker group leave
    limits: Limits

    @property
    def text(self) -> Text:
        return self.asking.text

    async def read(self, cls: type[T], request: web.Request) -> T:
        """The body as a request of that kind. Raises ApiError."""
        value = read_json(await request.read())
        wanted = read_as(cls, value, limits=self.limits)
        request[UNREAD] = tuple(itertools.islice(unknown_fields(cls, value), MOST_UNREAD))
        return wanted

    def check_model(self, name: str) -> None:
        if name and name != self.model_name:
            message = f"this server has no model of that name; it serves {self.model_name}"
            raise ApiError(404, message, param="model", code="model_not_found")


def warning_of(request: web.Request) -> str | None:
    """The header of that name: which fields nobody here has read. As with OpenAI they are no error."""
    names = request.get(UNREAD, ())
    if not names:
        return None
    shown = ", ".join(name if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) else "(a strange name)" for name in names)
    return f'299 kilburn "fields that are not known here were ignored: {shown}"'
