"""A stand-in for the Hub on this machine: the few requests that an upload takes, over HTTP, and what they brought."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from transformers.utils.hub import hf_api


@dataclass
class Commit:
    """One commit: its message, and the content of each file that was sent."""

    message: str
    revision: str
    files: dict[str, bytes]


@dataclass
class LocalHub:
    """Repositories by name, every request's token, and what was seen whenever an upload was asked for."""

    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    refuses: bool = False
    seen: list[Any] = field(default_factory=list)
    look: Callable[[], Any] = lambda: None

    @property
    def sent(self) -> dict[str, bytes]:
        """The repository as it is after the last commit."""
        return {name: content for commit in self.commits for name, content in commit.files.items()}

    @property
    def card(self) -> str:
        return self.sent["README.md"].decode()

    def download(self, folder: Path, under: str = "") -> Path:
        """Write out what was sent, or one folder of it."""
        for name, content in self.sent.items():
            if name.startswith(under):
                path = folder / name.removeprefix(under).lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return folder

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization'] or 'me'}/{wanted['name']}"
            self.repositories[name] = wanted
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            # What the Hub refuses: names of models and data sets that cannot be any.
            bad = [metadata[key] for key in ("base_model", "datasets") if str(metadata.get(key, "")).count("/") > 1]
            return (400 if bad else 200), {"errors": [{"message": f"{name!r} is no Hub id"} for name in bad]}
        if self.refuses:
            return 403, {"error": "You have no permission to write here."}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {
                "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            }
        if "/commit/" in path:
            header, *items = [json.loads(line) for line in body.splitlines()]
            files = {item["value"]["path"]: base64.b64decode(item["value"]["content"]) for item in items}
            self.commits.append(Commit(header["value"]["summary"], path.rpartition("/")[2], files))
            oid, name = f"{len(self.commits):040d}", path.removeprefix("/api/models/").partition("/commit/")[0]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        return 404, {"error": f"{path} is not part of this stand-in."}

    url: str = ""


def only_loopback(request: Any) -> None:
    assert request.url.host == "127.0.0.1", request.url


@contextmanager
def local_hub(monkeypatch) -> Iterator[LocalHub]:
    """A stand-in that transformers' uploads go to. Everything else stays offline."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                raise NotImplementedError
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
            status, content = hub.answer(self.path, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    upload_folder = HfApi.upload_folder

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        hub.seen.append(hub.look())
        return upload_folder(self, *args, **kwargs)

    def client() -> Any:
        result = default_client_factory()
        result.event_hooks = {"request": [only_loopback]}  # in place of the one that offline mode refuses with
        return result

    monkeypatch.setattr(hf_api(), "endpoint", hub.url)
    monkeypatch.setattr(HfApi, "upload_folder", watched)
    set_client_factory(client)
    try:
        yield hub
    finally:
        set_client_factory(default_client_factory)
        server.shutdown()
        server.server_close()
