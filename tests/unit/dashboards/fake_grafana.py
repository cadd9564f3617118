"""A small Grafana: folders, data sources and dashboards over HTTP, with the rules that a client meets.

After Grafana 11's HTTP API: a token is needed (401), a viewer may not write (403), what is missing is a 404, a name or
uid may not be taken twice (409, 412), and a stored dashboard comes back with Grafana's own id, version and meta.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Store:
    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.tokens = {"editor": True, "viewer": False}

    def answer(self, method: str, path: str, body: Any, token: str) -> tuple[int, Any]:
        if token not in self.tokens:
            return 401, {"message": "Invalid API key"}
        if method != "GET" and not self.tokens[token]:
            return 403, {"message": "You'll need additional permissions to perform this action."}
        if method != "GET":
            self.writes.append(f"{method} {path}")
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "folders"] if method == "POST":
                if body["uid"] in self.folders:
                    return 409, {"message": "a folder with this uid exists"}
                self.folders[body["uid"]] = {"id": len(self.folders) + 1, "version": 1, **body}
                return 200, self.folders[body["uid"]]
            case ["api", "folders", uid]:
                return self._one(self.folders, uid, method, body)
            case ["api", "datasources"] if method == "POST":
                if any(source["name"] == body["name"] for source in self.sources.values()):
                    return 409, {"message": "data source with the same name already exists"}
                self.sources[body["uid"]] = {"id": 1, "orgId": 1, "readOnly": False, "jsonData": {}, **body}
                return 200, {"datasource": self.sources[body["uid"]]}
            case ["api", "datasources", "uid", uid]:
                return self._one(self.sources, uid, method, body)
            case ["api", "dashboards", "uid", uid] if method == "GET":
                return (
                    (200, self.dashboards[uid]) if uid in self.dashboards else (404, {"message": "Dashboard not found"})
                )
            case ["api", "dashboards", "db"] if method == "POST":
                return self._save(body)
        return 404, {"message": f"no route {method} {path}"}

    @staticmethod
    def _one(things: dict[str, dict[str, Any]], uid: str, method: str, body: Any) -> tuple[int, Any]:
        if uid not in things:
            return 404, {"message": "not found"}
        if method == "PUT":
            things[uid] |= {key: value for key, value in body.items() if key != "overwrite"}
            things[uid]["version"] = things[uid].get("version", 1) + 1
        return 200, things[uid]

    def _save(self, body: Any) -> tuple[int, Any]:
        model = dict(body["dashboard"])
        folder = body.get("folderUid", "")
        if folder and folder not in self.folders:
            return 400, {"message": "folder not found"}
        there = self.dashboards.get(model["uid"])
        if there and not body.get("overwrite") and model.get("version") != there["dashboard"]["version"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = there["dashboard"]["version"] + 1 if there else 1
        model |= {"id": there["dashboard"]["id"] if there else len(self.dashboards) + 1, "version": version}
        self.dashboards[model["uid"]] = {"dashboard": model, "meta": {"folderUid": folder, "version": version}}
        return 200, {"uid": model["uid"], "id": model["id"], "version": version, "status": "success"}


@contextmanager
def fake_grafana() -> Iterator[tuple[str, Store]]:
    """(its URL, what it holds); listens on loopback until the block ends."""
    store = Store()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            status, answer = store.answer(self.command, self.path.partition("?")[0], body, token)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", store
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
