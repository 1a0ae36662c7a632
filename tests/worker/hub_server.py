"""A hub on loopback: the few paths of the Hugging Face hub that fetching a snapshot needs, over files in memory."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories by name, each a map of commit to files; branches name commits. Notes what was asked for."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.asked: list[str] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[repo, commit], self.branches[repo, branch] = files, commit
        return commit

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.branches.get((repo, revision), revision)
        files = self.commits.get((repo, commit))
        return None if files is None else (commit, files)


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append(path)
            status, headers, body = respond(hub, path.split("/"))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def respond(hub: Hub, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
    match parts:
        case ["api", "models", owner, name, kind, revision, *_] if kind in ("revision", "tree"):
            repo = f"{owner}/{name}"
            found = hub.find(repo, revision)
            if found is None:
                known = any(one == repo for one, _ in hub.commits)
                return missing("RevisionNotFound" if known else "RepoNotFound")
            commit, files = found
            if kind == "tree":
                return as_json([{"type": "file", "path": file, "size": len(files[file]), "oid": ""} for file in files])
            siblings = [{"rfilename": file} for file in files]
            return as_json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []})
        case [owner, name, "resolve", revision, *path]:
            found = hub.find(f"{owner}/{name}", revision)
            if found is None or "/".join(path) not in found[1]:
                return missing("EntryNotFound")
            body = found[1]["/".join(path)]
            return 200, {"X-Repo-Commit": found[0], "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body
    return missing("RepoNotFound")


def as_json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def missing(code: str) -> tuple[int, dict[str, str], bytes]:
    return 404, {"X-Error-Code": code, "X-Error-Message": "not here"}, b"{}"
