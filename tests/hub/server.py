"""A hub of models and data sets on this machine, for tests: the paths of the API that huggingface_hub, transformers and
datasets use, with ranges, tokens, commits, large files on a storage of another host (Git LFS), and faults on demand. It
records what it sends."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class Sent(NamedTuple):
    "One answer."

    method: str
    path: str
    status: int
    size: int  # bytes of the body
    authorization: str | None  # header of the request


class Refusal(Exception):
    def __init__(self, status, code, message):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Fault:
    "What goes wrong with answers to paths that match, so many times."

    path: str  # regular expression, found in the path
    method: str  # "GET", "HEAD", ...; "": any
    times: int
    status: int  # of the answer; 0: as without the fault
    headers: dict
    body: bytes
    cut: int | None  # so many bytes of the body are sent, then the connection is closed
    change: Callable | None  # of the body, of its length


class Hub:
    "Models by id; each has revisions, a revision has files. `sent` lists the answers."

    def __init__(self):
        self.models, self.sent, self.stored = {}, [], {}
        self.reset()
        self.server, self.storage = (ThreadingHTTPServer(("127.0.0.1", 0), handler(self)) for _ in "ab")
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage_url = f"http://localhost:{self.storage.server_port}"  # another host by its name
        for server in (self.server, self.storage):
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def reset(self):
        "As new, but for the models."
        self.tokens, self.gated, self.granted, self.datasets, self.faults = {}, set(), {}, set(), []
        self.ranges, self.large = True, ()  # large: endings of files that are on the storage
        self.sent.clear()

    def fail(self, path, status=0, method="", times=1, body=b"", cut=None, change=None, **headers):
        "From now on `times` answers to a path that matches fail."
        self.faults.append(Fault(path, method, times, status, headers, body, cut, change))

    def fault(self, method, path):
        "The fault that this answer has, if any."
        for fault in self.faults:
            if fault.times and fault.method in ("", method) and re.search(fault.path, path):
                fault.times -= 1
                return fault

    def add(self, name, folder=None, revision="main", token=None, files=None):
        "Publish the files of a folder; with a token the model is private."
        files = files or {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        commit = hashlib.sha1(repr(sorted((n, hashlib.sha1(c).hexdigest()) for n, c in files.items())).encode())
        self.models.setdefault(name, {})[revision] = (commit.hexdigest(), dict(files))
        if token:
            self.tokens[name] = token
        return commit.hexdigest()

    def bytes(self, since=0):
        "How many were sent, of all bodies."
        return sum(s.size for s in self.sent[since:])

    def find(self, name, revision, authorization, as_data=False):
        "(commit, files)"
        token = self.tokens.get(name)
        if name in self.datasets and not as_data:
            raise Refusal(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        if name not in self.models or (token and authorization != f"Bearer {token}"):
            raise Refusal(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        if name in self.gated and authorization != f"Bearer {self.granted.get(name)}":
            raise Refusal(401 if authorization is None else 403, "GatedRepo", f"Access to model {name} is restricted")
        revisions = self.models[name]
        for known, (commit, files) in revisions.items():
            if revision in (known, commit):
                return commit, files
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")


def handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: apart, each answer waits 40 ms for an acknowledgement

        def log_message(self, *words):
            "Nothing."

        def answer(self, body=b"", status=200, **headers):
            if not isinstance(body, bytes):
                body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
            self.send_response(status)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            body = b"" if self.command == "HEAD" else body
            if self.cut is not None:
                body, self.close_connection = body[: self.cut], True
            hub.sent.append(Sent(self.command, self.path, status, len(body), self.headers.get("Authorization")))
            self.wfile.write(body)

        def handle_method(self):
            path = unquote(urlsplit(self.path).path)
            fault = hub.fault(self.command, path)
            self.cut, self.change = (fault.cut, fault.change) if fault else (None, None)
            try:
                if fault and fault.status:
                    self.body()
                    return self.answer(fault.body, fault.status, **fault.headers)
                for pattern, method in ROUTES:
                    if match := re.fullmatch(pattern, path):
                        return method(self, **match.groupdict())
                raise Refusal(404, "NotFound", f"no such path: {path}")
            except Refusal as e:
                self.answer({"error": str(e)}, e.status, X_Error_Code=e.code, X_Error_Message=str(e))

        do_GET = do_HEAD = do_POST = do_PUT = handle_method

        def found(self, name, revision):
            as_data = self.path.startswith(("/api/datasets/", "/datasets/"))
            return hub.find(name, revision, self.headers.get("Authorization"), as_data)

        def body(self):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def file(self, name, revision, file):
            commit, files = self.found(name, revision)
            if file not in files:
                raise Refusal(404, "EntryNotFound", f"Entry not found: {file}")
            content, digest = files[file], hashlib.sha256(files[file]).hexdigest()
            headers = dict(X_Repo_Commit=commit)
            if not file.endswith(hub.large or ("/",)):
                return self.content(content, **headers, ETag=f'"{digest}"')
            hub.stored[digest] = content
            headers |= dict(
                X_Linked_Etag=f'"{digest}"', X_Linked_Size=len(content), Location=f"{hub.storage_url}/{digest}"
            )
            self.answer(b"Found. Redirecting", 302, **headers)

        def stored(self, digest):
            "A large file: read, or (PUT) written."
            if self.command == "PUT":
                content = self.body()
                if hashlib.sha256(content).hexdigest() != digest:
                    raise Refusal(400, "BadDigest", "the content has another sha256")
                hub.stored[digest] = content
                return self.answer()
            if digest not in hub.stored:
                raise Refusal(404, "NoSuchKey", "no such object")
            self.content(hub.stored[digest], ETag=f'"{digest}"')

        def content(self, content, **headers):
            "A file, or a range of it."
            if self.change:
                content = self.change(content)
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not asked or not hub.ranges:
                return self.answer(content, **headers)
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(content[first : last + 1], 206, **headers)

        def info(self, name, revision="main"):
            commit, files = self.found(name, revision)
            self.answer({"id": name, "sha": commit, "siblings": [{"rfilename": f} for f in files]})

        def tree(self, name, revision, folder=""):
            "What is in a folder, or (POST) what there is of some paths: files, and folders above them."
            _, files = self.found(name, revision)
            entries = {
                f: {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in files.items()
            }
            for file in files:
                for above in list(PurePosixPath(file).parents)[:-1]:
                    entries[str(above)] = {"type": "directory", "path": str(above), "oid": "0" * 40}
            if self.command == "POST":
                asked = parse_qs(self.body().decode())["paths"]
                return self.answer([entries[path] for path in asked if path in entries])
            if "recursive=true" not in self.path.lower():
                entries = {f: e for f, e in entries.items() if str(PurePosixPath(f).parent) == (folder or ".")}
            self.answer([e for f, e in entries.items() if f.startswith(folder)])

        def create(self):
            asked = json.loads(self.body())
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            hub.models.setdefault(name, {"main": ("0" * 40, {})})
            self.answer({"url": f"{hub.url}/{name}", "name": name})

        def preupload(self, name, revision):
            self.found(name, revision)
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(hub.large or ("/",)) else "regular"}
                for f in json.loads(self.body())["files"]
            ]
            self.answer({"files": [f | {"shouldIgnore": False, "oid": None} for f in files]})

        def batch(self, name):
            "Where large files are put: nowhere if they are stored already."
            self.found(name, "main")
            objects = []
            for wanted in json.loads(self.body())["objects"]:
                where = {
                    "upload": {"href": f"{hub.storage_url}/{wanted['oid']}"},
                    "verify": {"href": f"{hub.url}/api/verify"},
                }
                objects.append(wanted | ({} if wanted["oid"] in hub.stored else {"actions": where}))
            self.answer({"transfer": "basic", "objects": objects})

        def verify(self):
            wanted = json.loads(self.body())
            if len(hub.stored.get(wanted["oid"], b"")) != wanted["size"]:
                raise Refusal(404, "NoSuchKey", "no such object")
            self.answer({})

        def commit(self, name, revision):
            _, files = self.found(name, revision)
            lines = [json.loads(line) for line in self.body().splitlines() if line.strip()]
            new = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            new |= {x["value"]["path"]: hub.stored[x["value"]["oid"]] for x in lines if x["key"] == "lfsFile"}
            commit = hub.add(name, revision=revision, files=files | new)
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit})

        def valid(self):
            self.body()
            self.answer({"errors": [], "warnings": []})

    model = r"(?P<name>[\w.-]+/[\w.-]+)"
    kind = "(?:models|datasets)"
    ROUTES = [
        (r"/api/repos/create", Handler.create),
        (r"/api/validate-yaml", Handler.valid),
        (r"/api/verify", Handler.verify),
        (r"/(?P<digest>[0-9a-f]{64})", Handler.stored),
        (rf"/(?:datasets/)?{model}\.git/info/lfs/objects/batch", Handler.batch),
        (rf"/api/{kind}/{model}", Handler.info),
        (rf"/api/{kind}/{model}/revision/(?P<revision>[^/]+)", Handler.info),
        (rf"/api/{kind}/{model}/tree/(?P<revision>[^/]+)/?(?P<folder>.*)", Handler.tree),
        (rf"/api/{kind}/{model}/paths-info/(?P<revision>[^/]+)", Handler.tree),
        (rf"/api/models/{model}/preupload/(?P<revision>[^/]+)", Handler.preupload),
        (rf"/api/models/{model}/commit/(?P<revision>[^/]+)", Handler.commit),
        (rf"/(?:datasets/)?{model}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", Handler.file),
    ]
    return Handler
