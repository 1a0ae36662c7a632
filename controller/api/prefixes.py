"""Named prefixes over REST: a system prompt or few-shot examples that are computed once and held.

    POST /v1/prefixes          {"name", "text" or "messages", "public"}   -> 201, or 200 where it was there already
    GET /v1/prefixes           all that the tenant may use
    GET, DELETE /v1/prefixes/NAME        ?public=true: the public one, where a tenant has another of that name

A private name is its tenant's alone: to others it does not exist. A public one is made and deleted with an admin key,
and used by everybody.
"""

from aiohttp import web

from kilburn.controller.api.errors import ApiError, bad_request, refusal
from kilburn.controller.api.guard import TENANT
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.messages import for_template
from kilburn.controller.api.schema import PrefixRequest
from kilburn.controller.api.service import Service
from kilburn.controller.auth import Tenant
from kilburn.controller.named import Named, NamesFull, NameTaken
from kilburn.controller.template import TemplateRefused
from kilburn.controller.text import ChatOptions


class PrefixRoutes:
    """The handlers. Each returns a response or raises ApiError."""

    def __init__(self, service: Service) -> None:
        self._service, self._text, self._names = service, service.text, service.names

    async def create(self, request: web.Request) -> web.Response:
        wanted = await self._service.read(PrefixRequest, request)
        tenant = request[TENANT]
        self._service.check_model(wanted.model)
        if wanted.public and not tenant.is_admin:
            raise ApiError(
                403, "public prefixes are for admin keys; leave out public", param="public", code="forbidden"
            )
        owner = "" if wanted.public else tenant.name
        is_known = (named := self._names.find(owner, wanted.name)) is not None and named.entry.tenant == owner
        try:
            named = await self._names.register(owner, wanted.name, wanted.cache_salt, await self._tokens(wanted))
        except NameTaken:
            message = f"name: {wanted.name} is taken by another prefix; DELETE it first, or choose another name"
            raise ApiError(409, message, param="name", code="name_taken") from None
        except NamesFull:
            raise ApiError(
                409, "there are too many named prefixes; DELETE one, or raise --max-prefixes", code="too_many_names"
            ) from None
        if named.refused is not None:
            raise refusal(named.refused)
        return web.json_response(self._about(named), status=200 if is_known else 201, dumps=to_json)

    async def listed(self, request: web.Request) -> web.Response:
        found = [self._about(named) for named in self._names.visible_to(request[TENANT].name)]
        return web.json_response({"object": "list", "data": found}, dumps=to_json)

    async def show(self, request: web.Request) -> web.Response:
        named = self._wanted(request)
        return web.json_response(self._about(named), dumps=to_json)

    async def delete(self, request: web.Request) -> web.Response:
        tenant: Tenant = request[TENANT]
        named = self._wanted(request)
        if named.entry.is_public and not tenant.is_admin:
            raise ApiError(403, "public prefixes are deleted with an admin key", code="forbidden")
        self._names.delete(named.entry.tenant, named.entry.name)
        return web.json_response({"name": named.entry.name, "object": "prefix", "deleted": True}, dumps=to_json)

    def _wanted(self, request: web.Request) -> Named:
        """The name that an address is about: the tenant's own before the public one. Raises ApiError."""
        match request.query.get("public", "false"):
            case "true":
                owner = ""
            case "false":
                owner = request[TENANT].name
            case _:
                raise bad_request("public", "public: must be true or false")
        named = self._names.find(owner, request.match_info["name"])
        if named is None:
            raise _unknown()
        return named

    async def _tokens(self, wanted: PrefixRequest) -> list[int]:
        if wanted.messages is None:
            (ids,) = await self._text.encode(
                [wanted.text or ""], add_special=wanted.add_special_tokens, trusted=wanted.allow_special_tokens
            )
        elif not self._text.has_template:
            raise bad_request("messages", "this model has no chat template; give text")
        else:
            options = ChatOptions(add_generation_prompt=False, trusted=wanted.allow_special_tokens)
            try:
                ids = await self._text.encode_chat(for_template(wanted.messages), options)
            except TemplateRefused as error:
                raise bad_request("messages", str(error)) from None
        if not ids:
            raise bad_request("text", "text: this is a prefix of no tokens; give at least one")
        most = self._text.max_len
        if most is not None and len(ids) >= most:  # a request that begins with it must have room for an answer
            field = "text" if wanted.messages is None else "messages"
            message = f"{field}: this prefix has {len(ids)} tokens, the model takes {most - 1} at most; shorten it"
            raise ApiError(400, message, param=field, code="context_length_exceeded")
        return list(ids)

    def _about(self, named: Named) -> dict[str, object]:
        entry, is_held = named.entry, self._names.is_held(named)
        state = "ready" if is_held else "failed" if named.trouble else "known" if named.prefix_id is None else "pending"
        # known: of another controller, and pinned here by the first request that begins with it
        # failed: `message` says why; tried again by a POST of the same, and after a while by a request that wants it
        about: dict[str, object] = {
            "name": entry.name,
            "object": "prefix",
            "public": entry.is_public,
            "tokens": len(entry.tokens),
            "blocks": named.num_blocks if is_held else 0,
            "state": state,
        }
        return {**about, "message": named.trouble} if state == "failed" else about


def _unknown() -> ApiError:
    return ApiError(404, "there is no prefix of that name", param="name", code="prefix_not_found")
