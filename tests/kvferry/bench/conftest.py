"""An HTTP server that answers as OpenAI servers do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["max_tokens"] == 99:
            self.send_error(503, "busy")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.server.script is not None:
            for payload in self.server.script:
                self.wfile.write(b"data: [DONE]\n\n") if payload == "[DONE]" else self.event(payload)
            return
        for _ in range(body["max_tokens"]):
            self.event({"choices": [{"text": "x", "index": 0, "finish_reason": None}]})
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 5}}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, payload):
        self.wfile.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

    def log_message(self, *_args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    server.script = None  # events to answer with, in place of one per token
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
