"""The worker groups, for those who run the service.

GET   /admin/groups               which there are, in which state, and how much they have to do
POST  /admin/groups/{name}/drain  this one is to leave: it gets no more requests, those that it has go on elsewhere (or
                                  end there, where no other group takes them), and then its worker ends
"""

from aiohttp import web

from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.service import Service
from kilburn.controller.core.snapshot import GroupSnapshot


class GroupRoutes:
    """See the file's head."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def listed(self, request: web.Request) -> web.Response:
        groups = [_row(group) for group in self._service.snapshot().groups]
        return web.json_response({"object": "list", "data": groups}, dumps=to_json)

    async def drain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = [group for group in self._service.snapshot().groups if group.name == name]
        if not found:
            raise ApiError(404, "there is no worker group of that name", param="name", code="group_not_found")
        self._service.retire(name)
        return web.json_response(_row(found[0]) | {"state": "leaving"}, status=202, dumps=to_json)


def _row(group: GroupSnapshot) -> dict[str, object]:
    return {
        "object": "group",
        "name": group.name,
        "lease": group.lease,
        "state": "leaving" if group.is_leaving else group.state.value,
        "running_requests": group.running_requests,
        "waiting_requests": group.waiting_requests,
        "num_blocks": group.num_blocks,
        "owned_blocks": group.owned_blocks,
    }
