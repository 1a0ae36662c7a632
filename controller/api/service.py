"""What the routes stand on, and what each does first: read its body, look whose model is meant."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from kilburn.controller.api.asking import Asking
from kilburn.controller.api.checks import read_as, read_json
from kilburn.controller.api.errors import ApiError
from kilburn.controller.health import Health
from kilburn.controller.metrics import Metrics
from kilburn.controller.named import NamedPrefixes
from kilburn.controller.page.feed import Feed
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams
from kilburn.controller.text import Text

T = TypeVar("T")


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

    @property
    def text(self) -> Text:
        return self.asking.text

    async def read(self, cls: type[T], request: web.Request) -> T:
        """The body as a request of that kind. Raises ApiError."""
        return read_as(cls, read_json(await request.read()))

    def check_model(self, name: str) -> None:
        if name and name != self.model_name:
            message = f"this server has no model of that name; it serves {self.model_name}"
            raise ApiError(404, message, param="model", code="model_not_found")
