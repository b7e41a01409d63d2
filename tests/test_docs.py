"""The pages against the tree: links lead somewhere, linked code is where they say, and commands have the flags shown."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from core.config import load_config
from kvferry.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request):
    return request.param


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


def test_links_lead_to_files_and_headings(page):
    dead = []
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def names_in(file: Path) -> set[str]:
    """Return the functions, classes and methods of a module, methods as ``Class.method``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{part.name}")
    return names


def test_linked_functions_and_classes_are_defined_in_the_linked_file(page):
    lost = []
    for text, target in re.findall(r"\[([^]]*`[^]]*)\]\(([^)#\s]+\.py)\)", prose(page)):
        names = re.findall(r"`([A-Za-z_]\w*(?:\.(?!py`)[a-z_]\w*)?)`", text)
        lost += [f"{name}: {target}" for name in names if name not in names_in((page.parent / target).resolve())]
    assert lost == []


def shown_commands(page: Path) -> list[list[str]]:
    """Return the command lines of kvferry in the page's blocks and text, as words without what precedes ``kvferry``."""
    blocks = [block.replace("\\\n", " ") for block in FENCED.findall(page.read_text())]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
    matches = [re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*kvferry (?=[a-z][a-z-]*( |$))(.*)", line) for line in lines]
    return [shlex.split(match[2], comments=True) for match in matches if match]


@pytest.fixture(scope="module")
def cli():
    return typer.main.get_command(app)


def test_commands_have_the_flags_that_pages_show(page, cli):
    wrong = []
    for words in shown_commands(page):
        command, rest = cli, list(words)
        while rest and not rest[0].startswith("-") and rest[0] in getattr(command, "commands", ()):
            command = command.commands[rest.pop(0)]
        if command is cli:
            wrong.append(words)
            continue
        known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
        wrong += [(words, word) for word in rest if re.match(r"--\w", word) and word.partition("=")[0] not in known]
    assert wrong == []


def test_processes_of_the_vllm_page_listen_on_ports_of_their_own():
    start = (ROOT / "docs/vllm-cluster.md").read_text().split("\n## Start\n")[1].split("\n## ")[0]
    block = FENCED.findall(start)[0].replace("\\\n", " ")
    servers = [line for line in block.splitlines() if re.search(r"\b(vllm serve|kvferry router)\b", line)]
    default = str(load_config().router.port)
    ports = [(re.search(r"--port (\d+)", line) or [None, default])[1] for line in servers]
    assert len(servers) == 3, "two engines and a router"
    assert len(set(ports)) == 3


def test_the_picture_has_all_packages_in_the_order_of_the_import_contracts():
    rows = FENCED.findall((ROOT / "docs/architecture.md").read_text())[0].splitlines()[1:-1]
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"]
    packages, inside_core = ([set(layer.split(" | ")) for layer in layers] for layers in contracts)
    shown = [name for row in rows for name in re.findall(r"^(\w+)/", row)]
    assert shown == sorted(shown, key=lambda name: next(index for index, layer in enumerate(packages) if name in layer))
    assert set(shown) == set(linter["root_packages"])
    start = rows.index("core/")
    of_core = [set(re.findall(r"(?<!\S)(\w+)(?:/|\.py)(?!\S)", row)) for row in rows[start:] if re.match(r"  \w", row)]
    assert of_core == inside_core
    for package in sorted(ROOT.glob("[a-z]*/**/__init__.py")):
        *parents, name = package.relative_to(ROOT).parent.parts
        if parents and parents[0] in shown:
            assert re.search(rf"^ +{name}/", "\n".join(rows), re.MULTILINE), f"{package} is not in the picture"
