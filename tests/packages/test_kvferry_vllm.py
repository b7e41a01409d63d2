"""The wheel ``kvferry-vllm``: what it holds, what it leaves alone, and that the tests of the agent pass on it."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.plugin_wheel import BUILDER, build_wheel, unpack_wheel
from tests.support.vllm_engine import vllm_python

pytestmark = pytest.mark.slow

ALLOWED = {"kvferry_vllm", "msgspec", "zmq", "numpy", "prometheus_client", *sys.stdlib_module_names}
HEAVY = ("torch", "yaml", "litestar", "vllm")


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_kvferry_vllm", BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules_of(folder):
    for path in sorted((folder / "kvferry_vllm").rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_on(unpacked, program, *folders):
    """Run a program that finds the wheel, and what ``folders`` hold; return what it prints."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [unpacked, *folders]))}
    command = [sys.executable, "-P", "-c", program]
    run = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_it_has_one_top_level_name(unpacked):
    names = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"kvferry_vllm"}


def test_it_asks_for_what_vllm_has_anyway(unpacked):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    lines = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.M)
    needed = {re.match(r"[\w-]+", line).group() for line in lines if "extra ==" not in line}
    assert needed == {"msgspec", "pyzmq", "numpy", "prometheus-client"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_every_import_is_its_own_a_dependency_or_optional(unpacked):
    """``optional`` is what modules import inside functions or for types only, and only where it is there anyway."""
    optional = {"connector.py": {"vllm", "torch"}, "engine.py": {"vllm"}, "plugin.py": {"vllm"}, "pool.py": {"torch"}}
    optional |= {"block_copier.py": {"torch"}, "digest.py": {"torch"}, "metrics.py": {"vllm"}, "tracing.py": {"opentelemetry"}}
    optional |= {"vllm_version.py": {"vllm"}}
    found = {
        (path.name, name)
        for path in unpacked.rglob("*.py")
        for name in imports_of(path)
        if name.partition(".")[0] not in ALLOWED | optional.get(path.name, set())
    }
    assert found == set()


def test_no_module_is_named_by_a_text_that_the_build_does_not_rewrite(unpacked, builder):
    names = "|".join(name for name in builder.OURS if name != "kvferry")  # settings begin with that
    found = {
        (path.name, node.value)
        for path in unpacked.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(rf"({names})(\.\w+)+", str(node.value))
    }
    assert found == set()


def test_one_wheel_serves_every_python_from_3_11_on(wheel):
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_digests_are_equal_with_and_without_a_compiler(unpacked, tmp_path):
    slow = unpack_wheel(build_wheel(tmp_path / "wheel", CC="no-such-compiler"), tmp_path / "unpacked")
    program = (
        "import random\n"
        "from kvferry_vllm._kvferry.core.digest import BlockDigester\n"
        "from kvferry_vllm._kvferry.core.multilinear import fastest_sums\n"
        "print(fastest_sums().__name__, BlockDigester(100_000).digest(random.Random(1).randbytes(100_000)))\n"
    )
    (fast_name, fast), (slow_name, digest) = (run_on(folder, program).split() for folder in (unpacked, slow))
    assert (fast_name, slow_name) == ("CompiledSums", "NumpySums")
    assert fast == digest


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_wheel_holds_the_compiled_hash_chain(unpacked):
    program = (
        "from kvferry_vllm._kvferry.core.hash_chain import compiled_library\n"
        "from kvferry_vllm._kvferry.core.kv.hashing import BlockHasher\n"
        "print(compiled_library() is not None, BlockHasher(b'key').hash_request_blocks(bytes(256))[-1].hex())\n"
    )
    assert run_on(unpacked, program).split() == ["True", "71bafceb5bc21cef43c1616582f16fc5"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_wheel_holds_the_compiled_copy(unpacked):
    program = "from kvferry_vllm._kvferry.core.stream_copy import compiled_library\nprint(compiled_library() is not None)\n"
    assert run_on(unpacked, program).split() == ["True"]


def test_it_holds_nothing_that_the_plugin_does_not_use(builder):
    modules = set(builder.closure(builder.plugin_modules())) - {"core.config_checks"}
    assert not [name for name in modules if name.startswith(("core.engine", "core.sched", "core.config", "router", "kvstore"))]


def test_an_import_that_cannot_be_rewritten_stops_the_build(builder, monkeypatch, tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core/one.py").write_text("import core.two\n")
    monkeypatch.setattr(builder, "path_of", lambda module: tmp_path / "core/one.py")
    with pytest.raises(builder.BuildError, match=r"core\.one:1"):
        builder.imports_of("core.one")


def test_imports_are_rewritten_and_nothing_else(builder):
    source = "from core.errors import ConfigError\n\n\ndef f():\n    from connectors.vllm.pool import pool_of  # core.errors\n"
    assert builder.rewritten(source) == (
        "from kvferry_vllm._kvferry.core.errors import ConfigError\n\n\n"
        "def f():\n    from kvferry_vllm.pool import pool_of  # core.errors\n"
    )


def test_the_agent_imports_without_torch_and_without_vllm(unpacked):
    of_vllm = {"kvferry_vllm.connector", "kvferry_vllm.metrics", "kvferry_vllm.vllm_version"}
    names = [name for name in modules_of(unpacked) if name not in of_vllm]
    program = f"""
import importlib, json, sys
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps(sorted(name for name in {HEAVY!r} if name in sys.modules)))
"""
    assert json.loads(run_on(unpacked, program)) == []


@pytest.mark.parametrize("disturbance", ["no vllm", "another vllm"])
def test_the_entry_point_never_raises(unpacked, tmp_path, disturbance):
    if disturbance == "another vllm":
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm/__init__.py").touch()
    program = "from kvferry_vllm.plugin import register; register(); register()"
    run_on(unpacked, program, tmp_path)


def test_another_version_of_vllm_is_named_whatever_its_internals_are(unpacked, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.31.0'")
    program = """
try:
    import kvferry_vllm.connector
except Exception as error:
    print(type(error).__name__, error)
"""
    message = "ConfigError kvferry supports vLLM 0.32, this is 0.31.0: install a matching kvferry-vllm"
    assert run_on(unpacked, program, tmp_path).strip() == message


@pytest.mark.vllm
def test_installing_it_changes_nothing_else(wheel, tmp_path):
    python = tmp_path / "image/bin/python"
    subprocess.run([str(vllm_python()), "-m", "venv", str(tmp_path / "image")], check=True, timeout=120)
    (site,) = (tmp_path / "image/lib").glob("python3*/site-packages")
    (theirs,) = vllm_python().parents[1].glob("lib/python3*/site-packages")
    (site / "image.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
    listing = "import importlib.metadata as m, json; print(json.dumps(sorted((d.name, d.version) for d in m.distributions())))"

    def state():
        run = subprocess.run([str(python), "-c", listing], capture_output=True, text=True, check=True, timeout=60)
        return {tuple(entry) for entry in json.loads(run.stdout)}, {path.name for path in site.iterdir()}

    before, names_before = state()
    assert ("vllm", "0.32.0+cpu") in before
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-index", str(wheel)], check=True, timeout=120)
    after, names_after = state()
    assert {name for name, _ in after - before} == {"kvferry-vllm"}
    assert before - after == set()
    assert {name for name in names_after - names_before if not name.endswith(".dist-info")} == {"kvferry_vllm"}
    check = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F\n"
        "print(F.get_connector_class_by_name('KvferryConnector').__module__)"
    )
    run = subprocess.run(
        [str(python), "-c", check],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.stdout.strip().splitlines()[-1:] == ["kvferry_vllm.connector"], run.stderr[-2000:]
