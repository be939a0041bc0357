"""A local server that speaks the few calls of the Hugging Face hub which upload and download."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40
TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """`files` {repo: {path: bytes}} is what was uploaded, `visibility` {repo: "private"}."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.visibility = {}
        self.calls = []
        self.fails = ()  # calls that are answered with an error, such as "commit"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, body=b"", status=200, **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_call(self):
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.calls.append(f"{self.command} {path}")
        if path.endswith(tuple(hub.fails)):
            return self.send({"error": "out of order"}, 500)
        needs_login = self.command == "POST" or path == "/api/whoami-v2"
        if needs_login and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send({"error": "Invalid username or password."}, 401)
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                self.send({"name": "me", "type": "user", "auth": {"type": "access_token"}})
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.files.setdefault(repo, {})
                hub.visibility[repo] = asked.get("visibility")
                self.send({"url": f"{hub.url}/{repo}", "name": repo})
            case ["api", "validate-yaml"]:
                self.send({"errors": [], "warnings": []})
            case ["api", "models", user, name, "preupload", "main"]:
                files = []
                for file in json.loads(body)["files"]:
                    one = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    files.append(one)
                self.send({"files": files})
            case ["api", "models", user, name, "commit", "main"]:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        hub.files[f"{user}/{name}"][line["value"]["path"]] = content
                url = f"{hub.url}/{user}/{name}/commit/{COMMIT}"
                self.send({"success": True, "commitOid": COMMIT, "commitUrl": url})
            case ["api", "models", user, name, "tree", _]:
                entries = []
                for file, content in hub.files[f"{user}/{name}"].items():
                    oid = hashlib.sha1(content).hexdigest()
                    size = len(content)
                    entries.append({"type": "file", "path": file, "oid": oid, "size": size})
                self.send(entries)
            case ["api", "models", user, name, *_] if f"{user}/{name}" in hub.files:
                repo = f"{user}/{name}"
                siblings = [{"rfilename": path} for path in hub.files[repo]]
                self.send({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
            case [user, name, "resolve", _, *parts] if f"{user}/{name}" in hub.files:
                content = hub.files[f"{user}/{name}"]["/".join(parts)]
                etag = hashlib.sha1(content).hexdigest()
                self.send(content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
            case _:
                self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_GET = do_POST = do_HEAD = handle_call


@contextlib.contextmanager
def local_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
