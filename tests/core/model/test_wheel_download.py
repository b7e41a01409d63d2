"""A wheel is fetched from an index without pip, as in the images."""

import http.server
import json
import threading

import pytest

from core.errors import ConfigError
from core.model import wheel_download
from core.model.wheel_download import download_from_index, download_wheel

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def index():
    """Serve an index with one project of three files."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            names = ["tiny_model-1.0.tar.gz", "tiny_model-1.0.1-py3-none-any.whl", WHEEL]
            page = json.dumps({"files": [{"filename": name, "url": f"../../files/{name}"} for name in names]}).encode()
            found = {"/simple/tiny-model/": page, f"/files/{WHEEL}": b"the wheel"}.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_takes_the_wheel_of_the_version(index, tmp_path):
    path = download_from_index("tiny-model==1.0", tmp_path, index)
    assert (path.name, path.read_bytes()) == (WHEEL, b"the wheel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requirement", "why"),
    [("tiny-model==2.0", "has no wheel of tiny-model==2.0"), ("other==1.0", "404"), ("tiny-model==1.0.1", "404")],
)
def test_says_what_is_missing(index, tmp_path, requirement, why):
    with pytest.raises(ConfigError, match=why):
        download_from_index(requirement, tmp_path, index)


def test_index_that_cannot_be_reached_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"could not be fetched from http://127\.0\.0\.1:9/simple"):
        download_from_index("tiny-model==1.0", tmp_path, "http://127.0.0.1:9/simple")


@pytest.mark.slow
def test_without_pip_the_index_of_the_environment_is_asked(index, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PIP_INDEX_URL", index)
    assert download_wheel("tiny-model==1.0", tmp_path).read_bytes() == b"the wheel"
