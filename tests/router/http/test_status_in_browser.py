"""The status page in a real browser: its script runs under its own policy, fills the page, and keeps it up to date."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions")
VIRTUAL_MS = 5000  # of the page's own time: it asks every 2 s

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")]


@pytest.fixture
def browse(tmp_path):
    """Load a page, let its script run, and return what it has made of the document."""

    async def load(url: str) -> str:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}", f"--virtual-time-budget={VIRTUAL_MS}", "--dump-dom", url]
        pipe = asyncio.subprocess.PIPE
        browser = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        async with asyncio.timeout(60):
            out, err = await browser.communicate()
        assert browser.returncode == 0, err.decode()[-2000:]
        return out.decode()

    return load


def text_of(document: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(?:b|h1|span|tbody)>', document, re.DOTALL)
    assert found is not None, f"no {name} in {document}"
    return re.sub(r"<[^>]+>", " ", found.group(1)).strip()


async def test_page_shows_the_cluster_as_it_is(start_router, browse):
    under_test = await start_router()
    prefill, decode = await under_test.pair()
    named = await under_test.add("decode", engine_id="<img src=x onerror=alert(1)>")
    async with under_test.client() as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": "say it", "max_tokens": 50})
            assert answer.status_code == 200
    document = await browse(f"{under_test.url}/status")
    assert (text_of(document, "model"), text_of(document, "state")) == ("tiny", "ready")
    workers = text_of(document, "workers")
    assert prefill.engine_id in workers
    assert decode.engine_id in workers
    assert "&lt;img src=x" in workers, named  # markup in a name is shown as text
    assert text_of(document, "handoffs").split() == ["loaded", "2"]
    assert text_of(document, "first").split()[::2] == ["queue", "prefill", "relay"]
    assert text_of(document, "tokens") == "0.0"  # the second look was answered too: a rate needs two


async def test_page_says_when_nothing_can_be_served(start_router, browse):
    under_test = await start_router()
    assert text_of(await browse(f"{under_test.url}/status"), "state") == "not ready: no worker has registered"
