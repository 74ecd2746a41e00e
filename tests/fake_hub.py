"""A hub in this process, as far as its client needs one to publish a model and to fetch it. Not a test."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub:
    """`address` is what clients are told; `files` has what was committed, by repository, revision and path."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub.answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def do_GET(self) -> None:
                hub.answer(self, b"")

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit_of(self, name: str, revision: str) -> str:
        """Of a branch; a commit is its own."""
        known = [one for (repo, one) in self.files if repo == name]
        if revision not in known:
            found = [one for one in known if self.commit_of(name, one) == revision]
            return revision if found else ""
        return hashlib.sha1(repr(sorted(self.files[name, revision].items())).encode()).hexdigest()

    def content(self, name: str, commit: str) -> dict[str, bytes]:
        for (repo, revision), files in self.files.items():
            if repo == name and commit in (revision, self.commit_of(name, revision)):
                return files
        return {}

    def answer(self, request: Any, body: bytes) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(f"{request.command} {path}")
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            values = json.loads(body)
            self.created.append(values)
            return self.reply(request, {"url": f"{self.address}/{values.get('organization')}/{values['name']}"})
        if path == "/api/validate-yaml":
            return self.reply(request, {"errors": [], "warnings": []})
        if parts[:2] == ["api", "models"] and len(parts) >= 5:
            name, what, rest = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
            if what == "branch":
                return self.reply(request, {})
            if what == "preupload":
                files = [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
                return self.reply(request, {"files": files})
            if what == "commit":
                lines = [json.loads(line) for line in body.splitlines() if line.strip()]
                files = self.files.setdefault((name, rest), {})
                for line in lines:
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = self.commit_of(name, rest)
                return self.reply(
                    request,
                    {"commitOid": commit, "commitUrl": f"{self.address}/{name}/commit/{commit}", "success": True},
                )
            if what == "revision" and self.commit_of(name, rest):
                commit = self.commit_of(name, rest)
                siblings = [{"rfilename": file} for file in self.content(name, commit)]
                return self.reply(request, {"id": name, "modelId": name, "sha": commit, "siblings": siblings})
            if what == "tree":
                files = self.content(name, parts[5])
                found = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return self.reply(request, found)
        if len(parts) > 4 and parts[2] == "resolve":
            name, commit, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            content = self.content(name, commit).get(file)
            if content is not None:
                tag = hashlib.sha1(content).hexdigest()
                headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.commit_of(name, commit) or commit}
                return self.send(request, 200, content, {**headers, "Content-Type": "application/octet-stream"})
        return self.send(request, 404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})

    def reply(self, request: Any, values: Any) -> None:
        self.send(request, 200, json.dumps(values).encode(), {"Content-Type": "application/json"})

    def send(self, request: Any, status: int, content: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)
