"""Tables and lists of the pages against the code: error codes, paths of tests, endpoints, and state behind locks."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import typer.main

from core import errors
from core.errors import KVFerryError
from core.wire.messages import ErrorInfo
from kvferry.cli import app
from router.http.errors import error_response

ROOT = Path(__file__).parents[1]
LOCK = re.compile(r"threading\.(?:Lock|RLock|Condition)\(")
NO_CLIENT_GETS = {
    *(errors.RequestError, errors.StoreError),  # bases
    *(errors.ConfigError, errors.StartFailed, errors.RoleSwitchRefused, errors.VersionMismatch),  # of workers and commands
    *(errors.Unavailable, errors.Full),  # of an encode worker: the image is encoded elsewhere
    errors.Cancelled,  # the client has left
}


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text()
    return text.split(f"\n{heading}\n")[1].split("\n## ")[0]


def kinds_of_errors() -> set[type[KVFerryError]]:
    return {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVFerryError)}


def test_errors_of_the_api_have_every_code_that_a_client_may_get():
    codes = defaultdict(set)
    for statuses, text in re.findall(r"^\| ([\d, ]+) \| (.*) \|$", section("docs/api.md", "## Answers"), re.MULTILINE):
        for status in statuses.split(", "):
            codes[int(status)] |= set(re.findall(r"`(\w+)`", text))
    statuses = {kind.code: error_response(ErrorInfo.of(kind(""))).status_code for kind in kinds_of_errors() - NO_CLIENT_GETS}
    assert {code: status for code, status in statuses.items() if code not in codes[status]} == {}


def test_fault_tests_without_a_path_are_those_with_real_processes():
    rows = section("docs/kv-handoff.md", "## What can go wrong, and what happens")
    paths = set(re.findall(r"`([\w/]*test_\w+\.py)`", rows))
    files = [ROOT / path if "/" in path else ROOT / "tests/e2e/faults" / path for path in paths]
    assert [file for file in files if not file.exists()] == []


def test_every_lock_is_in_a_file_that_the_architecture_names():
    page = section("docs/architecture.md", "## Processes and planes")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    files = [file.relative_to(ROOT) for package in packages for file in ROOT.glob(f"{package}/**/*.py")]
    locked = [str(file) for file in files if LOCK.search((ROOT / file).read_text()) and "testing" not in file.parts]
    assert [file for file in locked if f"`{file}`" not in page] == []


def test_pages_name_all_endpoints_of_a_worker():
    served = set(re.findall(r'\("(?:GET|POST)", "(/\w+)"\)', (ROOT / "core/worker/process.py").read_text()))
    assert len(served) == 7
    in_the_plane = re.search(r"^\| ops \| (.*?) \|", section("docs/architecture.md", "## Processes and planes"), re.MULTILINE)
    in_the_setting = re.search(r"^\| `ops_port` \| `0` \| (.*?);", section("docs/settings.md", "## worker"), re.MULTILINE)
    for row in (in_the_plane, in_the_setting):
        assert set(re.findall(r"`(/\w+)`", row[1])) == served


def test_the_readme_has_the_figures_of_the_tables():
    rows = re.findall(
        r"^\| .* \| ([\d.]+ %) \| `python benchmarks/(\w+\.py)` \|$", section("README.md", "## Three figures"), re.MULTILINE
    )
    tables = {name: (ROOT / "docs/benchmarks.md").read_text().split(f"<!-- {name} -->")[1] for name in ("handoff", "hybrid")}
    (ratio,) = re.findall(r"^- shm: transfer / prefill: ([\d.]+) ratio", tables["handoff"], re.MULTILINE)
    (identity,) = re.findall(r"^- shm: identity / transfer of 2,048 tokens: ([\d.]+) ratio", tables["handoff"], re.MULTILINE)
    cells = re.findall(r"^\| (?:groups|all layers full) .* \| +([\d,]+) \|$", tables["hybrid"], re.MULTILINE)
    groups, full = (int(cell.replace(",", "")) for cell in cells)
    of_handoff = [f"{100 * float(each):.1f} %" for each in (ratio, identity)]
    assert rows == [(of_handoff[0], "handoff.py"), (of_handoff[1], "handoff.py"), (f"{100 * groups / full:.0f} %", "hybrid.py")]


def test_the_readme_shows_every_command():
    shown = section("README.md", "## Use it")
    commands = typer.main.get_command(app).commands
    names = [name for name, command in commands.items() if not command.hidden]
    assert [name for name in names if not re.search(rf"\b{name}\b", shown)] == []
