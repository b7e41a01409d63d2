"""Probes, metrics, version and status page of a router, for operators and their programs.

The API's port serves them. With ``router.ops_port`` a separate small server does, which shares no connections or limits with
clients and stays reachable when clients fill the API's port.
"""

from __future__ import annotations

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from core.wire.codec import WIRE_VERSION
from core.worker.ops_http import OpsResponse, Query, QueryRoutes, Routes
from router.http.endpoints import Endpoints
from router.http.status import requests_of, status_of
from router.http.status_page import CONTENT_SECURITY_POLICY, PAGE

_encoder = msgspec.json.Encoder()


class ProbeAnswers:
    """The answers of one router."""

    def __init__(self, endpoints: Endpoints, version: str) -> None:
        self._endpoints = endpoints
        self._version = version

    def routes(self) -> Routes:
        """Return all answers by method and path."""
        answers = {
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/readyz": self.ready,
            "/metrics": self.metrics,
            "/version": self.version,
            "/status": self.status_page,
            "/status.json": self.status,
            "/status/history.json": self.history,
        }
        return {("GET", path): answer for path, answer in answers.items()}

    def query_routes(self) -> QueryRoutes:
        """Return the answers that read the query: ``?id=NAME``."""
        return {("GET", "/status/requests.json"): self._requests_of}

    def _requests_of(self, query: Query) -> OpsResponse:
        return self.requests(query.get("id", ""))

    def health(self) -> OpsResponse:
        """Report whether the process is alive and working."""
        is_alive = self._endpoints.gateway.is_alive
        return _json(200 if is_alive else 503, {"status": "ok" if is_alive else "dead"})

    def ready(self) -> OpsResponse:
        """Report whether a request could be served now, and if not, why."""
        reason = self._endpoints.not_ready_reason
        return _json(200 if reason is None else 503, {"status": "ready" if reason is None else "not ready", "reason": reason})

    def metrics(self) -> OpsResponse:
        """Return all metrics in Prometheus's text format."""
        return OpsResponse(200, generate_latest(self._endpoints.metrics.registry), CONTENT_TYPE_LATEST)

    def version(self) -> OpsResponse:
        """Return the version of kvferry."""
        return _json(200, {"version": self._version, "wire_version": WIRE_VERSION})

    def status_page(self) -> OpsResponse:
        """Return the status page for browsers."""
        headers = (("content-security-policy", CONTENT_SECURITY_POLICY), ("cache-control", "no-store"))
        return OpsResponse(200, PAGE.encode(), "text/html; charset=utf-8", headers)

    def status(self) -> OpsResponse:
        """Return what the page shows of now: workers, traffic, handoffs, failures, and where time goes."""
        return _json(200, status_of(self._endpoints, self._version))

    def history(self) -> OpsResponse:
        """Return the last ten minutes."""
        gateway = self._endpoints.gateway
        return _json(200, gateway.observer.history.report(gateway.now))

    def requests(self, name: str) -> OpsResponse:
        """Return the latest requests; with the id of a request also its timelines."""
        return _json(200, requests_of(self._endpoints, name))


def _json(status: int, content: object) -> OpsResponse:
    return OpsResponse(status, _encoder.encode(content), "application/json")
