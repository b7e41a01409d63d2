"""The wheel holds every module, and each one imports from it alone."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from core.release import package_version
from tests.support.quick_compiler import quick_compiler

ROOT = Path(__file__).parent.parent
PACKAGES = ("core", "router", "encode", "prefill", "decode", "agent", "connectors", "kvstore", "kvferry")


def clean_tree(folder):
    """Copy what is packed: setuptools packs what an earlier build left in ``build``, so it must not see ours."""
    tree = folder / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "build_libraries.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def unpacked_wheel(folder, **environment):
    tree = clean_tree(folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        tree,
    ]
    subprocess.run(command, check=True, timeout=120, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return unpacked_wheel(folder, **quick_compiler(folder))


def modules_under(root):
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of_the_tree():
    """All but the plug-in for vLLM, which is a distribution of its own."""
    return [name for name in modules_under(ROOT) if not name.startswith("connectors.vllm")]


def installing_rule(*flags):
    """Return what make says of the file that stands for an installed tree."""
    command = ["make", "--always-make", "--dry-run", *flags, ".venv/.installed"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout


def test_make_installs_again_when_any_compiled_source_has_changed():
    (rule,) = re.findall(r"^\.venv/\.installed: (.*)$", installing_rule("--print-data-base"), re.MULTILINE)
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    sources = {source for module in modules for source in (*module["sources"], *module.get("depends", ()))}
    assert sources
    assert sources - set(rule.split()) == set()


def test_make_and_metadata_admit_the_versions_of_python_that_are_tested(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {name.rpartition(" ")[2] for name in project["classifiers"]}
    (check,) = re.findall(r"-c '(import sys; sys\.exit.*)'", installing_rule())
    for minor in range(9, 16):
        is_tested = f"3.{minor}" in tested
        assert SpecifierSet(project["requires-python"]).contains(f"3.{minor}.1") == is_tested
        monkeypatch.setattr("sys.version_info", (3, minor, 1))
        with pytest.raises(SystemExit, match=None if is_tested else f"3.11 to 3.13, and this is 3.{minor}") as end:
            exec(check)
        assert bool(end.value.code) != is_tested


@pytest.mark.slow
def test_make_says_what_to_do_if_the_python_of_its_environment_is_gone(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "upgraded-away")
    command = ["make", "--dry-run", f"VENV={tmp_path}"]
    done = subprocess.run([*command, "install"], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"{tmp_path}/bin/python cannot be run; try: make clean" in done.stderr
    subprocess.run([*command, "clean"], check=True, cwd=ROOT, capture_output=True, timeout=60)


@pytest.mark.slow
def test_wheel_holds_every_module_of_the_tree(unpacked):
    assert list(modules_under(unpacked)) == modules_of_the_tree()
    assert not (unpacked / "tests").exists()


@pytest.mark.slow
def test_wheel_marks_every_package_as_typed(unpacked):
    assert [package for package in PACKAGES if not (unpacked / package / "py.typed").is_file()] == []


@pytest.mark.slow
def test_wheel_has_the_version_that_the_processes_report(unpacked):
    (metadata,) = unpacked.glob("kvferry-*.dist-info/METADATA")
    assert f"\nVersion: {package_version()}\n" in metadata.read_text()


def test_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((ROOT / "helm/kvferry/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (package_version(), package_version())


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(unpacked):
    without_triton = importlib.util.find_spec("triton") is None  # torch's builds for CUDA bring it along
    names = [
        name
        for name in modules_under(unpacked)
        if name != "kvferry.__main__" and not (without_triton and name.rpartition(".")[2].startswith("triton_"))
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(unpacked)!r}), module.__file__\n"
    )
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_wheel_holds_the_compiled_parts(unpacked):
    assert len(list(unpacked.glob("core/_stream_copy*.so"))) == 1
    assert len(list(unpacked.glob("core/_hash_chain*.so"))) == 1
    assert len(list(unpacked.glob("core/_multilinear*.so"))) == 1
    assert len(list(unpacked.glob("core/attention/_paged_decode*.so"))) == 1
    assert len(list(unpacked.glob("core/attention/_paged_prefill*.so"))) == 1
    assert len(list(unpacked.glob("core/attention/_write_rows*.so"))) == 1
    assert len(list(unpacked.glob("core/engine/_allowed_tokens*.so"))) == 1
    assert len(list(unpacked.glob("core/model/_few_rows*.so"))) == 1
    assert len(list(unpacked.glob("core/model/_layer_chain*.so"))) == 1
    assert len(list(unpacked.glob("core/model/_layer_ops*.so"))) == 1
    program = "from core.compiled import missing_libraries; assert missing_libraries() == [], missing_libraries()"
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    subprocess.run([sys.executable, "-P", "-c", program], env=env, cwd="/", check=True, timeout=60)


@pytest.mark.slow
def test_a_source_distribution_holds_what_its_build_needs(tmp_path):
    program = "from setuptools import setup; setup()"
    command = [sys.executable, "-c", program, "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=clean_tree(tmp_path), check=True, capture_output=True, timeout=60)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    sources = {source for module in modules for source in (*module["sources"], *module.get("depends", ()))}
    assert {"pyproject.toml", "build_libraries.py", *sources} <= held


@pytest.mark.slow
def test_wheel_is_built_without_a_compiler(tmp_path):
    site = unpacked_wheel(tmp_path, CC="no-such-compiler")
    assert list(modules_under(site)) == modules_of_the_tree()
    assert not list(site.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["core.sched.scheduler", "core.kv.manager", "core.wire.codec", "core.request", "router.http.app", "agent.worker"]
)
def test_control_plane_starts_without_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr or f"{module} imports torch"


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.slow
def test_everything_imported_is_a_declared_dependency():
    """Test suites that ship may use what tests use; the rest what an installation without the extra ``test`` has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "test" for line in lines]
    declared = {re.match(r"[\w-]+", line).group().replace("-", "_").lower() for line in [*project["dependencies"], *extras]}
    names = {"pyyaml": "yaml", "pyzmq": "zmq", "pillow": "PIL", "opentelemetry_sdk": "opentelemetry", "uvicorn": "httptools"}
    names["torch"] = "triton"  # in its builds for CUDA
    allowed = {*declared, *names.values(), *PACKAGES, *sys.stdlib_module_names}
    found = {
        (name, str(path.relative_to(ROOT)))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "testing" not in path.parts
        for name in imported_names(path)
        if name not in allowed and not (name == "vllm" and path.parent.name == "vllm")  # the plug-in runs inside vLLM
    }
    assert found == set()
