"""Calls of tools as OpenAI's chats tell them, whole and in chunks.

whole    {"content": "Let me see.", "tool_calls": [{"id": ..., "function": {"name": "add", "arguments": "{...}"}}]}
chunks   a first one with index, id, type and name, then the arguments, piece by piece
"""

from typing import Any

from kilburn.controller.calls.reading import Argued, Called, CallReader, News, Said


class Calls:
    """Those in one choice."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self.has_any = False

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a message."""
        content, calls = "", list[dict[str, Any]]()
        for news in self._read(text, True):
            match news:
                case Said(text=words):
                    content += words
                case Called(id=id, name=name):
                    calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                case Argued(index=index, text=arguments):
                    calls[index]["function"]["arguments"] += arguments
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What has become certain, each as a chunk's `delta`."""
        said: list[dict[str, Any]] = []
        for news in self._read(text, is_last):
            match news:
                case Said(text=words):
                    said.append({"content": words})
                case Called(index=index, id=id, name=name):
                    function = {"name": name, "arguments": ""}
                    said.append({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
                case Argued(index=index, text=arguments):
                    said.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        return said

    def _read(self, text: str, is_last: bool) -> list[News]:
        found = self._reader.feed(text) + (self._reader.end() if is_last else [])
        self.has_any |= any(isinstance(news, Called) for news in found)
        return found
