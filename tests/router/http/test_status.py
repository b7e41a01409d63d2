"""``/status`` shows the cluster and its counters, without a key and without external assets."""

import base64
import hashlib
import re

import core.errors
from core.errors import EngineDead, KVFerryError, Overloaded
from core.release import package_version
from core.wire.codec import WIRE_VERSION
from core.wire.messages import ErrorInfo
from router.http.status import status_of
from router.http.status_page import CONTENT_SECURITY_POLICY, PAGE, SCRIPT, STYLE
from router.metrics import CLIENT_ERRORS


async def get(under_test, path):
    async with under_test.client() as client:
        return await client.get(path)


async def test_report_names_workers_and_counts_what_was_served(served):
    async with served.client() as client:
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "say it", "max_tokens": 50})
    assert answer.status_code == 200
    report = (await get(served, "/status.json")).json()
    assert (report["model"], report["is_ready"], report["reason"], report["num_requests"]) == ("tiny", True, "", 0)
    assert sorted(worker["role"] for worker in report["workers"]) == ["decode", "prefill"]
    assert {worker["state"] for worker in report["workers"]} == {"ready"}
    assert sum(report["handoffs"].values()) == 1
    assert (report["finished"], report["generation_tokens"]) == (1, 12)
    parts = report["first_token_parts"]
    assert set(parts) == {"queue", "prefill", "relay"}
    assert {part["num_requests"] for part in parts.values()} == {1}


async def test_report_names_the_versions_of_router_and_workers(start_router):
    under_test = await start_router(has_http=False)
    await under_test.add("aggregated", version="1.2.3")
    await under_test.add("aggregated")
    report = (await get(under_test, "/status.json")).json()
    assert (report["version"], report["wire_version"]) == (package_version(), WIRE_VERSION)
    assert sorted(worker["version"] for worker in report["workers"]) == ["", "1.2.3"]
    assert (await get(under_test, "/version")).json() == {"version": package_version(), "wire_version": WIRE_VERSION}


async def test_report_says_that_it_is_of_one_of_several_processes(start_router):
    alone = await start_router(has_http=False)
    report = (await get(alone, "/status.json")).json()
    assert (report["num_processes"], report["process_number"]) == (1, 0)
    second = await start_router(has_http=False, processes_at_port=4, process_number=1)
    report = (await get(second, "/status.json")).json()
    assert (report["num_processes"], report["process_number"]) == (4, 1)
    assert second.metric("kvferry_router_processes") == 4


async def test_report_tells_workers_that_are_full_from_those_that_take_nothing(served):
    prefill, decode = served.router.gateway.core.membership.workers
    prefill.note_failure(ErrorInfo.of(Overloaded("no room")))
    decode.note_failure(ErrorInfo.of(EngineDead("it died")))
    report = status_of(served.router.endpoints, "1.0")
    assert [worker.state for worker in report.workers] == ["full", "closed"]
    assert (report.is_ready, report.reason) == (False, "no decode worker is available, and no aggregated one: it died")
    assert served.metric("kvferry_workers_draining") == 0
    decode.is_draining = True
    assert status_of(served.router.endpoints, "1.0").workers[1].state == "draining"
    assert served.metric("kvferry_workers_draining") == 1


async def test_report_names_encode_workers_too(served):
    await served.add("encode")
    report = (await get(served, "/status.json")).json()
    (found,) = (worker for worker in report["workers"] if worker["role"] == "encode")
    assert (found["state"], found["max_num_seqs"], found["transports"]) == ("ready", 8, ["shared"])


async def test_report_gives_the_reason_why_nothing_can_be_served(start_router):
    report = (await get(await start_router(has_http=False), "/status.json")).json()
    assert report["is_ready"] is False
    assert report["reason"]
    assert report["workers"] == []


async def test_mistakes_of_clients_are_no_failures(served):
    async with served.client() as client:
        await client.post("/v1/completions", json={"prompt": "p", "temperature": 9})
        await client.get("/v2/nothing")
    report = (await get(served, "/status.json")).json()
    assert report["failures"] == {}
    assert report["refusals"] == {"invalid_request": 1, "not_found": 1}


def test_clients_errors_are_those_of_the_error_tree_that_blame_the_client():
    kinds = [kind for kind in vars(core.errors).values() if isinstance(kind, type) and issubclass(kind, KVFerryError)]
    blame = {kind.code for kind in kinds if 400 <= kind.http_status < 500 and not kind.retryable}
    assert blame <= CLIENT_ERRORS
    assert not CLIENT_ERRORS & {kind.code for kind in kinds if kind.code not in blame}


async def test_page_is_open_like_the_metrics_and_loads_nothing_from_elsewhere(start_router):
    under_test = await start_router(has_http=False, api_key="secret")
    page = await get(under_test, "/status")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert not re.search(r"src=|href=\"(?!#)|@import|url\(", page.text)
    assert set(re.findall(r"\w+://[\w./]+", page.text)) == {"http://www.w3.org/2000/svg"}  # the name of a namespace


def test_policy_allows_this_style_and_this_script_only():
    for name, text in (("style", STYLE), ("script", SCRIPT)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in CONTENT_SECURITY_POLICY
        assert PAGE.count(f"<{name}>{text}</{name}>") == 1
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert " style=" not in PAGE  # the policy would block it


def test_page_shows_every_place_that_its_script_fills():
    filled = set(re.findall(r'(?:byId|rows)\("([\w-]+)"', PAGE))
    assert filled
    assert filled <= set(re.findall(r'id="([\w-]+)"', PAGE))


def test_script_puts_in_text_and_never_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
