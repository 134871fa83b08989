"""A small stand-in for the part of the Hugging Face hub's HTTP API that publishes a model."""

import base64
import hashlib
import json
from urllib.parse import urlsplit

from local_server import LocalServer, lower_case, read_body, send


class UploadHub(LocalServer):
    """The server's files and recorded requests; use as a context manager.

    Attributes:
        endpoint: its address, for HF_ENDPOINT.
        tokens: {token: what it may, "write" or "read"}, all of user.
        repos: {OWNER/NAME: {path: bytes}}, as committed.
        lfs: {SHA-256: bytes}, as they were put.
        failures: {end of path: [(status, answer), ...]}: each is given once instead.
        requests: list of (method, path, {lower-case header: value}).
    """

    def __init__(self, tokens, user="tester"):
        self.tokens, self.user = tokens, user
        self.repos, self.lfs, self.failures, self.requests = {}, {}, {}, []
        super().__init__()

    def answer(self, request):
        body, headers = read_body(request), lower_case(request.headers)
        path = urlsplit(request.path).path
        self.requests.append((request.command, path, headers))
        status, answer = self.call(request.command, path, headers, body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        send(request, status, content, {"Content-Type": "application/json"})

    def call(self, method, path, headers, body):
        """(status, bytes or an object to send as JSON) of a request."""
        for end, failures in self.failures.items():
            if path.endswith(end) and failures:
                return failures.pop(0)
        if path.startswith("/storage/"):  # signed addresses: they take no token
            self.lfs[path.removeprefix("/storage/")] = body
            return 200, b""
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        role = self.tokens.get(headers.get("authorization", "").removeprefix("Bearer "))
        if role is None:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            token = {"type": "access_token", "accessToken": {"role": role}}
            return 200, {"type": "user", "name": self.user, "auth": token}
        if path == "/api/repos/create":
            return self.create(json.loads(body), role)
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, self.lfs_batch(json.loads(body))
        if path == "/lfs/verify":
            wanted = json.loads(body)
            content = self.lfs.get(wanted["oid"], b"")
            good = hashlib.sha256(content).hexdigest() == wanted["oid"]
            return (200, {}) if good and len(content) == wanted["size"] else (422, {})
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        repo_id = f"{owner}/{name}"
        if repo_id not in self.repos:
            return 404, {"error": "Repository not found"}
        if method == "GET" and not rest:
            return 200, {"id": repo_id, "sha": "0" * 40}
        if role != "write":
            return 403, {"error": "This token may not write."}
        if rest == ["preupload", "main"]:
            return 200, {"files": [upload_mode(file) for file in json.loads(body)["files"]]}
        if rest == ["commit", "main"]:
            return self.commit(repo_id, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"no {method} {path} here"}

    def create(self, wanted, role):
        repo_id = f"{wanted['organization'] or self.user}/{wanted['name']}"
        if role != "write" or not repo_id.startswith(f"{self.user}/"):
            return 403, {"error": f"You may not create {repo_id}."}
        status = 409 if repo_id in self.repos else 200
        self.repos.setdefault(repo_id, {})
        return status, {"url": f"{self.endpoint}/{repo_id}"}

    def lfs_batch(self, wanted):
        objects = []
        for entry in wanted["objects"]:
            upload = {"href": f"{self.endpoint}/storage/{entry['oid']}"}
            verify = {"href": f"{self.endpoint}/lfs/verify"}
            have = entry["oid"] in self.lfs
            actions = {} if have else {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": entry["oid"], "size": entry["size"], **actions})
        return {"transfer": "basic", "objects": objects}

    def commit(self, repo_id, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[repo_id][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.lfs:
                    return 400, {"error": f"no LFS object {value['oid']}"}
                self.repos[repo_id][value["path"]] = self.lfs[value["oid"]]
        address = f"{self.endpoint}/{repo_id}/commit/{'1' * 40}"
        return 200, {"commitUrl": address, "commitOid": "1" * 40, "success": True}


def upload_mode(file):
    large = file["path"].endswith((".safetensors", ".png"))
    mode = "lfs" if large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
