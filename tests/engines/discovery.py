"""What kubectl asks a cluster before a client-side dry run: which kinds there are. Nothing can be made here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

KINDS = {
    "v1": ["ConfigMap", "Secret", "Service"],
    "apps/v1": ["StatefulSet"],
    "batch/v1": ["Job"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "jobset.x-k8s.io/v1alpha2": ["JobSet"],
    "monitoring.coreos.com/v1": ["ServiceMonitor", "PrometheusRule"],
}


def documents() -> dict[str, Any]:
    found: dict[str, Any] = {"/api": {"kind": "APIVersions", "versions": ["v1"]}}
    groups = []
    for name, kinds in KINDS.items():
        resources = [
            {"name": kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")}
            | {"kind": kind, "namespaced": True, "verbs": ["create", "get", "patch"]}
            for kind in kinds
        ]
        where = f"/apis/{name}" if "/" in name else f"/api/{name}"
        found[where] = {"kind": "APIResourceList", "groupVersion": name, "resources": resources}
        if "/" in name:
            version = {"groupVersion": name, "version": name.partition("/")[2]}
            groups.append({"name": name.partition("/")[0], "versions": [version], "preferredVersion": version})
    return found | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


class Discovery(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Any]] = documents()

    def do_GET(self) -> None:
        answer = self.answers.get(self.path.partition("?")[0])
        body = json.dumps(answer or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def discovery() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Discovery)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
