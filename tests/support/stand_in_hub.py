"""A stand-in of the Hugging Face Hub's HTTP interface on this machine, as far as its client needs it to push and load.

Repositories are dictionaries in memory. Large files take the client's plain LFS protocol, not Xet.

    POST /api/repos/create                                   POST /{repo}.git/info/lfs/objects/batch
    POST /api/validate-yaml                                  PUT  /lfs/{oid}
    POST /api/models/{repo}/preupload/{revision}             GET  /api/models/{repo}/revision/{revision}
    POST /api/models/{repo}/commit/{revision}                GET  /api/models/{repo}/tree/{revision}
                                                             HEAD, GET /{repo}/resolve/{revision}/{file}
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 20_000
"""Files from so many bytes on are uploaded as LFS objects."""
TOKEN = "hf_token_of_ada"
WRONG_TOKEN = "Invalid credentials in Authorization header"


@dataclass
class Repository:
    """The commits of one model: the files of each, by the commit's hash, and the newest commit of each branch."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        named = json.dumps([sorted(files), len(self.commits)]).encode() + b"".join(files.values())
        digest = hashlib.sha1(named).hexdigest()
        self.commits[digest], self.refs[revision] = dict(files), digest
        return digest

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        digest = self.refs.get(revision, revision)
        return (digest, self.commits[digest]) if digest in self.commits else None


class StandInHub(ThreadingHTTPServer):
    """The server; `url` is its address, `requests` what was asked, and `fail` a status with which it answers all."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_request()

    do_HEAD = do_POST = do_PUT = do_GET

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self.read_chunks()
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.fail:
            return self.answer(self.server.fail, {"error": "as asked"})
        for method, pattern, act in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split():
                return act(self, body, *found.groups())
        return self.answer(501, {"error": f"the stand-in has no {self.command} {path}"})

    def read_chunks(self) -> bytes:
        """Read a body of unknown length."""
        found = b""
        while self.headers.get("Transfer-Encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            found += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                break
        return found

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    @property
    def is_ada(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def may(self, repo: str, write: bool = False) -> Repository | None:
        """Return a repository that the sender may read or write; otherwise answer with an error, as the hub does."""
        found = self.server.repositories.get(repo)
        given = self.headers.get("Authorization")
        if given and not self.is_ada:
            self.answer(
                401,
                {"error": "Invalid username or password."},
                X_Error_Message=WRONG_TOKEN,
            )
        elif found is None or (found.private and not self.is_ada):
            self.answer(404 if self.is_ada else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif write and (not self.is_ada or not repo.startswith("ada/")):
            self.answer(403, {"error": "Forbidden"})
        else:
            return found
        return None

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked.get('organization') or 'ada'}/{asked['name']}"
        if not self.is_ada:
            return self.answer(401, {"error": "Invalid"}, X_Error_Message=WRONG_TOKEN)
        if not repo.startswith("ada/"):
            return self.answer(403, {"error": f"You don't have the rights to create a model under {repo}"})
        if repo in self.server.repositories:
            return self.answer(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo}"}
            )
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        self.server.repositories[repo] = Repository(private=private)
        self.server.repositories[repo].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.answer(200, {"url": f"{self.server.url}/{repo}", "name": repo, "id": repo})

    def validate(self, body: bytes) -> None:
        """Check the header of a card, as the hub does."""
        import yaml

        content = json.loads(body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        tree = yaml.safe_load(found[1]) if found else {}
        errors = [] if {"license", "tags"} <= set(tree) else [{"message": "the header has no license or tags"}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if self.may(repo, write=True):
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self.answer(200, {"files": modes})

    def batch(self, body: bytes, repo: str) -> None:
        if self.may(repo, write=True):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, {"error": "the content has another hash"})
        self.server.objects[oid] = body
        return self.answer(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        repository = self.may(repo, write=True)
        if repository is None:
            return
        _, files = repository.files(revision) or ("", {})
        files = dict(files)
        for line in body.splitlines():
            record = json.loads(line)
            if record["key"] == "file":
                files[record["value"]["path"]] = base64.b64decode(record["value"]["content"])
            elif record["key"] == "lfsFile":
                files[record["value"]["path"]] = self.server.objects[record["value"]["oid"]]
        digest = repository.commit(files, revision)
        self.answer(
            200, {"commitOid": digest, "commitUrl": f"{self.server.url}/{repo}/commit/{digest}", "success": True}
        )

    def revision(self, body: bytes, repo: str, revision: str = "main") -> None:
        found = self.find(repo, revision)
        if found:
            digest, files = found
            siblings = [{"rfilename": name} for name in files]
            self.answer(200, {"id": repo, "modelId": repo, "sha": digest, "siblings": siblings, "tags": []})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        found = self.find(repo, revision)
        if found:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in found[1].items()
            ]
            self.answer(200, listed)

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        found = self.find(repo, revision)
        if found and name not in found[1]:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        elif found:
            digest, files = found
            etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
            self.answer(200, files[name], ETag=etag, X_Repo_Commit=digest, Accept_Ranges="bytes")

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.may(repo)
        found = repository.files(revision) if repository else None
        if repository and not found:
            self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return found


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", rf"/api/models/{REPO}/preupload/(.+)", Handler.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(.+)", Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(\w+)", Handler.store),
    ("GET", rf"/api/models/{REPO}/revision/(.+)", Handler.revision),
    ("GET", rf"/api/models/{REPO}", Handler.revision),
    ("GET", rf"/api/models/{REPO}/tree/(.+?)/?", Handler.tree),
    ("GET HEAD", rf"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextlib.contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Run the server in a thread of this process."""
    server = StandInHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
