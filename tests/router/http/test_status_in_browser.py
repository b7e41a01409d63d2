"""The status page in a real Chromium: its script runs under its own policy, and shows the cluster at every width.

Screenshots of every width and scheme stay in ``build/screenshots``.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from core.wire.messages import TransferUsage
from tests.support.browser import chromium, new_page, running_chromium
from tests.support.busy_cluster import BusyCluster

SCREENSHOTS = Path(__file__).parents[3] / "build/screenshots"
WIDTHS = (390, 768, 1440)  # px: a phone, a tablet, a desk
MARKUP = "<img src=x onerror=alert(1)>"
IS_LIVE = "document.getElementById('age').textContent === 'live'"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium-headless-shell"),
]

# The lowest contrast of any text that is shown, with that text, by the formula of WCAG 2.
LOWEST_CONTRAST = """
(() => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  let lowest = [99, ""];
  for (const node of document.body.querySelectorAll("*:not(script)")) {
    const text = [...node.childNodes].filter(each => each.nodeType === 3).map(each => each.textContent.trim()).join("");
    if (!text || !node.checkVisibility() || node.closest("svg, .hidden-text, .skip")) continue;
    const pair = [light(channels(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, text];
  }
  return lowest;
})()
"""
# Elements that stick out of the window, apart from what scrolls by itself and what is hidden.
STICKING_OUT = """
[...document.body.querySelectorAll("*:not(script)")].filter(node => {
  const box = node.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5) && !node.closest(".scroll, .skip, .hidden-text, svg");
}).map(node => node.outerHTML.slice(0, 120))
"""


@pytest.fixture
async def browser(tmp_path):
    profile = tmp_path / "profile"
    async with running_chromium(chromium(), profile) as url:
        yield url
    named = [process for process in psutil.process_iter(["cmdline"]) if str(profile) in " ".join(process.info["cmdline"] or ())]
    assert psutil.wait_procs(named, timeout=30)[1] == [], "the browser has ended"


@pytest.fixture
async def busy(start_router):
    """Return a function that starts a router with workers by role, and ten busy minutes behind it."""

    async def start(**counts):
        under_test = await start_router(heartbeat_timeout_s=900.0, heartbeat_interval_s=1.0)
        cluster = BusyCluster(under_test.router.gateway, under_test.router.endpoints.metrics)
        for role, count in counts.items():
            cluster.register(role, count)
        cluster.serve_for_ten_minutes()
        return under_test, cluster

    return start


async def complete(under_test, **headers):
    async with under_test.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "say it", "max_tokens": 50}, headers=headers)
    assert answer.status_code == 200
    return answer.json()


async def test_page_shows_the_cluster_as_it_is(start_router, browser):
    under_test = await start_router()
    prefill, decode = await under_test.pair()
    for _ in range(2):
        await complete(under_test)
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until(IS_LIVE)
        assert (await page.text("model"), await page.text("state")) == ("tiny", "ready")
        assert prefill.engine_id in await page.text("prefill")
        assert decode.engine_id in await page.text("decode")
        assert "via tcp" in await page.text("decode")
        assert (await page.text("handoffs")).split() == ["loaded", "2"]
        assert [line.split()[0] for line in (await page.text("first")).splitlines()] == ["queue", "prefill", "relay"]
        arrows = await page.evaluate("document.getElementById('wires').getAttribute('aria-label')")
        assert f"{prefill.engine_id} to {decode.engine_id}" in arrows
        assert len((await page.text("latest")).splitlines()) == 2
        await page.until("document.getElementById('finished').textContent === '0'")  # a rate needs two answers
        assert page.errors == []


async def test_page_says_that_it_is_of_one_of_several_processes(start_router, browser):
    alone = await start_router()
    second = await start_router(processes_at_port=4, process_number=1)
    async with new_page(browser) as page:
        await page.open(f"{alone.url}/status")
        await page.until(IS_LIVE)
        assert "process" not in await page.text("router")
        assert await page.evaluate("document.getElementById('partial').hidden")
        await page.open(f"{second.url}/status")
        await page.until("document.getElementById('router').textContent.startsWith('as process 2 of 4, ')")
        assert (await page.text("partial")).startswith("4 router processes serve one port.")
        assert page.errors == []


async def test_page_says_when_nothing_can_be_served_and_when_the_router_is_gone(start_router, browser):
    under_test = await start_router()
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until("document.getElementById('state').textContent === 'not ready: no worker has registered'")
        assert "No worker has registered" in await page.text("cluster-note")
        assert page.errors == []
        await under_test.router.stop()
        await page.until("document.getElementById('state').textContent.startsWith('no answer')")


async def test_mistakes_of_clients_are_not_shown_as_failures(start_router, browser):
    under_test = await start_router()
    await under_test.pair()
    async with under_test.client() as client:
        assert (await client.post("/v1/completions", json={"prompt": "p", "temperature": 9})).status_code == 400
    under_test.router.gateway.observer.history.tick(under_test.router.gateway.now + 5)
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until(IS_LIVE)
        assert await page.text("failed") == "0"
        assert (await page.text("failures")).strip() == "none"
        assert (await page.text("refusals")).split() == ["invalid", "request", "1"]


async def test_names_from_outside_are_shown_as_text(start_router, browser):
    under_test = await start_router()
    cost = TransferUsage(transport=MARKUP, fallback_reason=MARKUP, recomputed_tokens=3)
    await under_test.add("prefill", engine_id=f"p{MARKUP}", version=MARKUP, transports=(MARKUP, "tcp"))
    await under_test.add("decode", engine_id=f"d{MARKUP}", transports=("tcp",), script=under_test.script(cost=cost))
    await complete(under_test, **{"x-request-id": "<b>mine</b>"})
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status#request=%3Cb%3Emine%3C/b%3E")
        await page.until(IS_LIVE)
        await page.until("document.querySelectorAll('#timeline article').length === 1")
        for name in ("prefill", "decode", "handoffs", "timeline"):
            assert MARKUP in await page.text(name), name
        await page.evaluate(f"location.hash = 'request=' + encodeURIComponent({MARKUP!r})")
        await page.until("document.getElementById('timeline').innerText.includes('is known')")
        assert MARKUP in await page.text("timeline")
        await page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert await page.evaluate("document.querySelectorAll('img, [onerror], #timeline b').length") == 0
        assert page.errors == []


async def test_the_timeline_of_a_request_is_reached_by_keyboard_and_by_address(busy, browser):
    under_test, cluster = await busy(prefill=2, decode=2)
    cluster.add_request("5eb1c0", "the-client-s-id", is_retried=True)
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until(IS_LIVE)
        await page.evaluate("document.getElementById('request-id').focus()")
        await page.call("Input.insertText", text="the-client-s-id")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#timeline article').length === 1")
        assert await page.evaluate("location.hash") == "#request=the-client-s-id"
        shown = await page.text("timeline")
        for part in (
            "5eb1c0: finished, stop",
            "prefill-1 → decode-0",
            "predicted 151 ms",
            "113 blocks verified",
            "further tokens",
        ):
            assert part in shown
        assert "prefill-0 failed it (peer unreachable)" in shown
        starts = await page.evaluate("[...document.querySelectorAll('.lane span')].map(each => parseFloat(each.style.left))")
        assert starts == sorted(starts)
        assert len(starts) == 9
        assert await page.evaluate("document.activeElement.id") == "timeline"
        await page.press("Tab")
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "5eb1c0", "the table has it as a button"
        assert page.errors == []


async def test_charts_are_read_by_keyboard_and_described_for_who_does_not_see_them(busy, browser):
    under_test, _ = await busy(prefill=2, decode=2)
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until(IS_LIVE)
        described = [name for role, name in await page.accessible_nodes() if role in ("image", "img")]
        charts = ("Time to the first token", "Time between tokens", "Tokens", "KV in use", "Handoffs by outcome", "Hit rate")
        for title in charts:
            assert any(name.startswith(title) and "latest" in name for name in described), title
        await page.evaluate("document.querySelector('.plot').focus()")
        for key in ("ArrowLeft", "ArrowLeft"):
            await page.press(key)
        spoken = await page.evaluate("document.querySelector('figure .hidden-text').textContent")
        assert " ago: p50 " in spoken
        assert "p99 " in spoken
        assert page.errors == []


async def test_a_press_on_a_worker_leaves_its_own_handoffs(busy, browser):
    under_test, _ = await busy(prefill=3, decode=3)
    async with new_page(browser) as page:
        await page.open(f"{under_test.url}/status")
        await page.until(IS_LIVE)
        faded = "document.querySelectorAll('#wires path.faded').length"
        assert await page.evaluate(faded) == 0
        await page.evaluate("document.querySelector('#prefill button').focus()")
        await page.press("Enter")
        assert await page.evaluate(faded) > 0
        await page.evaluate("window.pressed = document.activeElement")
        await page.until("document.getElementById('finished').textContent === '0'")  # a later update keeps button and focus
        assert await page.evaluate(
            "document.activeElement === window.pressed && pressed.getAttribute('aria-pressed') === 'true'"
        )


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_every_width_holds_the_page_and_its_text_is_readable(busy, browser, is_dark):
    under_test, cluster = await busy(prefill=3, decode=4, aggregated=1)
    cluster.load("decode", 2, 0.97)
    cluster.load("prefill", 1, 0.4, is_draining=True)
    cluster.add_request("9f2c41d07ab34e55b1c0", "c1", is_retried=True)
    async with new_page(browser) as page:
        for width in WIDTHS:
            await page.open(f"{under_test.url}/status#request=9f2c41d07ab34e55b1c0", width=width, is_dark=is_dark)
            await page.until(IS_LIVE)
            await page.until("document.querySelectorAll('#wires path').length > 4")
            await page.screenshot(SCREENSHOTS / f"status-{width}-{'dark' if is_dark else 'light'}.png")
            assert await page.evaluate(OVERFLOW) <= 0, width
            assert await page.evaluate(STICKING_OUT) == [], width
            contrast, text = await page.evaluate(LOWEST_CONTRAST)
            assert contrast >= 4.5, (width, text)
        unnamed = [
            role for role, name in await page.accessible_nodes() if role in ("button", "image", "searchbox") and not name
        ]
        assert unnamed == []
        assert page.errors == []


async def test_sixty_four_workers_hold_the_layout_at_every_width(busy, browser):
    under_test, cluster = await busy(prefill=32, decode=32)
    cluster.register("aggregated", 2, name=f"{'long-name-' * 20}{{number}}")
    async with new_page(browser) as page:
        for width in WIDTHS:
            await page.open(f"{under_test.url}/status", width=width)
            await page.until("document.querySelectorAll('.worker').length === 66")
            await page.until("document.querySelectorAll('#wires path').length > 40")
            await page.screenshot(SCREENSHOTS / f"status-64-workers-{width}.png")
            assert await page.evaluate(STICKING_OUT) == [], width
            heights = await page.evaluate("[...document.querySelectorAll('.dense .worker')].map(each => each.offsetHeight)")
            assert (len(heights), max(heights) <= 40) == (64, True), "a worker takes one line"
        assert page.errors == []
