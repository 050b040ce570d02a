"""A Hugging Face Hub on loopback that serves kernel repositories from folders: the requests that downloading one makes.

Answers `organizations/{org}/overview`, `kernels/{id}/refs`, `.../tree/{revision}`, `.../revision/{revision}` and
`HEAD`/`GET kernels/{id}/resolve/{revision}/{path}`. A repository is one folder; its commit is the hash of its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Use as a context manager.

    Args:
        repositories: "org/name" -> folder; its branch is `branch`.
        branch: name of the only branch.
        cut: "org/name/path" -> bytes after which the connection is dropped.
        stall: "org/name/path" of a file of which only a half is sent, until the hub is closed.
        stalled: set once that has happened.
        requests: what was asked for, "METHOD path", in order.
    """

    repositories: dict[str, Path]
    branch: str = "v1"
    cut: dict[str, int] = field(default_factory=dict)
    stall: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def files(self, repo: str) -> dict[str, Path]:
        folder = self.repositories[repo]
        return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}

    def commit(self, repo: str) -> str:
        content = hashlib.sha1()
        for name, file in self.files(repo).items():
            content.update(name.encode() + b"\0" + file.read_bytes())
        return content.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was killed
            super().handle()

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.owner.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "organizations"]:
            self.send_json({"name": parts[2], "fullname": parts[2], "trustedKernelPublisher": False})
            return
        parts = parts[1:] if parts[0] == "api" else parts
        repo = "/".join(parts[1:3])
        if parts[0] != "kernels" or repo not in self.owner.repositories:
            self.fail("RepoNotFound")
            return
        what, rest = parts[3], parts[4:]
        commit = self.owner.commit(repo)
        if what == "refs":
            branch = {"name": self.owner.branch, "ref": f"refs/heads/{self.owner.branch}", "targetCommit": commit}
            self.send_json({"branches": [branch], "converts": [], "tags": []})
        elif rest[0] not in (self.owner.branch, commit):
            self.fail("RevisionNotFound")
        elif what == "revision":
            self.send_json({"id": repo, "sha": commit})
        elif what == "tree":
            self.send_json(self.tree(repo, "/".join(rest[1:])))
        elif what == "resolve":
            self.send_file(repo, commit, "/".join(rest[1:]), body)
        else:
            self.fail("EntryNotFound")

    def tree(self, repo: str, under: str) -> list[dict[str, object]]:
        files = self.owner.files(repo)
        if "recursive=true" in self.path.lower():
            return [{"type": "file", "path": n, "oid": oid(f), "size": f.stat().st_size} for n, f in files.items()]
        prefix = f"{under}/" if under else ""
        names = {name[len(prefix) :].split("/")[0] for name in files if name.startswith(prefix) and "/" in name}
        return [{"type": "directory", "path": prefix + name, "oid": "0" * 40} for name in sorted(names)]

    def send_file(self, repo: str, commit: str, name: str, body: bool) -> None:
        file = self.owner.files(repo).get(name)
        if file is None:
            self.fail("EntryNotFound")
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{oid(file)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            if f"{repo}/{name}" == self.owner.stall:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.owner.stalled.set()
                self.owner._closed.wait()
                return
            limit = self.owner.cut.get(f"{repo}/{name}")
            self.wfile.write(content[:limit])
            if limit is not None:
                self.close_connection = True

    def send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def fail(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def oid(file: Path) -> str:
    """The hash git gives a file's content."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
