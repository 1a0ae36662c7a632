"""Every error that a client can see, made in one place, in the shape that its client knows.

    OpenAI's       {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
    Anthropic's    {"type": "error", "error": {"type": ..., "message": ...}}

An ApiError is written for the client. Any other exception is ours: it is logged here and told as "internal error",
without its words, which could hold paths, addresses or other people's text.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Middleware

from kilburn.controller.core.events import Refusal, Refused
from kilburn.shared.types import FinishReason

log = logging.getLogger("kilburn.api")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: dict[Refusal, tuple[int, str]] = {
    Refusal.EMPTY: (400, "empty_prompt"),
    Refusal.TOO_LONG: (400, "context_length_exceeded"),
    Refusal.TOO_WIDE: (400, "too_many_choices"),
    Refusal.QUEUE_FULL: (429, "queue_full"),
    Refusal.NO_WORKER: (503, "no_worker"),
    Refusal.QUEUE_TIMEOUT: (503, "queue_timeout"),
    Refusal.REQUEST_TIMEOUT: (408, "request_timeout"),
    Refusal.GRAMMAR: (400, "unsupported_grammar"),
    Refusal.PINS_FULL: (409, "pins_full"),
    Refusal.SHUTTING_DOWN: (503, "shutting_down"),
}
_TYPES = {403: "permission_error", 429: "rate_limit_error"}  # others by their hundred


class ApiError(Exception):
    """What the client did, or what became of its request. `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s  # told where trying again makes sense


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, fields: Mapping[str, str]) -> ApiError:
    """The same error with fields under other names: those that its client wrote. The first that fits counts."""
    if error.param is None:
        return error
    for ours, theirs in fields.items():
        if ours in error.param:
            param = error.param.replace(ours, theirs)
            message = error.message.replace(error.param, param).replace(ours, theirs)
            return ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)
    return error


def refusal(refused: Refused) -> ApiError:
    status, code = _STATUS[refused.refusal]
    message = refused.message or refused.refusal.value
    return ApiError(status, message, code=code, retry_after_s=max(refused.retry_after_s, 1))


TOO_MANY_CONNECTIONS = "too_many_connections"
NOT_TAKEN = {code for status, code in _STATUS.values() if status == 503}  # of a 503: never begun, no failure
OTHER_REFUSAL = "invalid_request"  # of a field, say, whose name is in the message


def refusal_codes() -> list[str]:
    """By which codes refusals are counted: those of the core, and what has no code. Others are added as they occur."""
    return [*(code for _, code in _STATUS.values()), OTHER_REFUSAL]


def failure(message: str, reason: FinishReason = FinishReason.ERROR) -> ApiError:
    """A request that was accepted and could not be finished; CANCELLED: because the service stops.

    TIMEOUT: its time ran out before there was anything to give.
    """
    if reason is FinishReason.TIMEOUT:
        return ApiError(408, "the request's time ran out before its first token", code="request_timeout")
    if reason is FinishReason.CANCELLED:
        return ApiError(503, message or "the server stops", code="cut_short")
    return ApiError(500, message or "the request failed while it ran", code="request_failed")


def encoded(error: ApiError) -> str:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    about = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": about}, ensure_ascii=False)


_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def encoded_for_anthropic(error: ApiError) -> str:
    kind = _ANTHROPICS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    # There is no place for the field's name but the message.
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}, ensure_ascii=False)


def is_anthropics(request: web.Request) -> bool:
    """Whether its sender reads Anthropic's shapes: the address is theirs, or they say so. It decides nothing else."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def response(error: ApiError, request: web.Request) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    text = encoded_for_anthropic(error) if is_anthropics(request) else encoded(error)
    answer = web.Response(text=text, status=error.status, content_type="application/json", headers=headers)
    if error.code == "request_incomplete":  # its rest may still be on its way
        answer.force_close()
    return answer


_SAID = {
    404: "there is nothing at this address; the API begins with /v1",
    405: "this address does not answer to this method",
    413: "the request body is too large",
}


def counting(refused: Callable[[str], None]) -> Middleware:
    """Tells `refused` the code of every refusal on its way out. `every_error` goes around it."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            if request.method == "POST" and (error.status < 500 or error.code in NOT_TAKEN):
                refused(error.code or OTHER_REFUSAL)
            raise
        except web.HTTPRequestEntityTooLarge:
            refused("too_large")
            raise
        except web.RequestPayloadError:
            refused(OTHER_REFUSAL)
            raise

    return count


@web.middleware
async def every_error(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one way out for exceptions, and the outermost middleware."""
    try:
        return await handler(request)
    except ApiError as error:
        return response(error, request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = response(ApiError(error.status, _SAID.get(error.status, error.reason)), request)
        if allowed := error.headers.get("Allow"):
            answer.headers["Allow"] = allowed
        return answer
    except web.RequestPayloadError:  # its words quote the body
        said = "the request body is not what its Content-Encoding or Transfer-Encoding says"
        return response(ApiError(400, said), request)
    except ConnectionError:
        raise  # the client left while it was being written to
    except Exception:
        log.exception("a request to %s failed", request.match_info.route.resource)
        return response(ApiError(500, "internal error", code="internal_error"), request)
