"""The image: a linter has nothing to say, it can run under the chart's restrictions, and its steps work."""

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.quick_compiler import quick_compiler

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


@pytest.fixture(scope="module")
def instructions():
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line and not line.startswith("#")]


def values(instructions, name):
    return [value for instruction, value in instructions if instruction == name]


def test_linter_finds_nothing():
    hadolint = Path(sys.executable).parent / "hadolint"
    files = (DOCKERFILE, DOCKERFILE.with_suffix(".vllm-plugin"))
    done = subprocess.run([hadolint, "--failure-threshold", "info", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter_would_find_something(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /src\n")
    done = subprocess.run([Path(sys.executable).parent / "hadolint", bad], capture_output=True, text=True, check=False)
    assert "DL3007" in done.stdout


def test_runs_as_the_user_of_the_chart_and_not_as_root(instructions):
    (user,) = values(instructions, "USER")
    pod = yaml.safe_load((ROOT / "helm/kvferry/values.yaml").read_text())["podSecurityContext"]
    assert user == "10001:10001" == f"{pod['runAsUser']}:{pod['runAsGroup']}"


def test_no_base_floats(instructions):
    (base,) = (value for value in values(instructions, "ARG") if value.startswith("BASE="))
    assert re.fullmatch(r"BASE=\S+:\d+\.\d+\.\d+-\S+", base)


def test_every_package_of_the_project_is_copied_and_let_through(instructions):
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in include}
    copied = {source for value in values(instructions, "COPY") for source in value.split()[:-1]}
    let_through = {
        line[1:] for line in (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert packages <= copied & let_through
    assert all(not fnmatch.fnmatch(name, "tests*") for name in copied)


def test_ports_of_the_chart_are_exposed(instructions):
    ports = yaml.safe_load((ROOT / "helm/kvferry/values.yaml").read_text())["ports"]
    (exposed,) = values(instructions, "EXPOSE")
    assert set(map(int, exposed.split())) == {port for port in ports.values() if isinstance(port, int)}


def run_step(instructions, step, source, prefix, variant="cpu", **more):
    """Run the RUN instruction of a step as it stands, but for where it installs. ``more`` is of its environment."""
    (command,) = (value for value in values(instructions, "RUN") if f"install.sh {step}" in value)
    environment = {"PATH": os.environ["PATH"], "HOME": str(source.parent), "VARIANT": variant, "TORCH_INDEX": "", **more}
    for name in ("PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_FIND_LINKS"):
        if name in os.environ:
            environment[name] = os.environ[name]
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("/opt/kvferry", str(prefix))],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(instructions, tmp_path_factory):
    """The files that the build stage copies, and no others."""
    folder = tmp_path_factory.mktemp("image") / "src"
    folder.mkdir()
    for value in values(instructions, "COPY"):
        *names, target = value.split()
        for name in names if not value.startswith("--from") else ():
            path = ROOT / name
            if name == "docker":
                shutil.copytree(path, folder / name)
            elif path.is_dir():
                shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                (folder / target).mkdir(exist_ok=True)
                shutil.copy(path, folder / target)
    return folder


def locked(variant):
    """Return version and sum of every package of a lock file."""
    text = (ROOT / f"docker/requirements-{variant}.lock").read_text()
    lines = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line) for line in text.splitlines()]
    assert all(lines), "every line pins one package by its sum"
    return {line[1]: (line[2], line[3]) for line in lines}


@pytest.mark.parametrize("variant", ["cpu", "cuda", "agent"])
def test_lock_pins_what_ci_tests(variant):
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    packages = locked(variant)
    differing = {name for name, (version, _) in packages.items() if pins.get(name, version) != version.partition("+")[0]}
    assert not differing, f"write it again: python3.11 docker/lock.py {variant}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in project["dependencies"]}
    computing = {"torch", "safetensors", "gguf"} if variant == "agent" else set()
    assert names - computing <= packages.keys() | {"uvicorn[standard]"}
    assert not computing & packages.keys()


def test_variants_differ_in_what_belongs_to_cuda_only():
    cpu, cuda = locked("cpu"), locked("cuda")
    differing = {name for name in cpu.keys() | cuda.keys() if cpu.get(name) != cuda.get(name)}
    assert cpu["torch"][0].endswith("+cpu")
    assert {name for name in differing if not name.startswith(("nvidia-", "cuda-"))} == {
        "torch",
        "triton",
        "nixl-cu12",
        "nixl-cu13",
    }


def test_sums_are_demanded_and_no_pip_is_left():
    script = (ROOT / "docker/install.sh").read_text()
    installs = re.findall(r"^\s*pip install (.*)$", script, re.MULTILINE)
    assert all("--require-hashes" in command or command.endswith("--no-build-isolation .") for command in installs)
    assert 'rm -rf "$prefix"/bin/pip*' in script
    assert "rm -rf /usr/local/bin/pip*" in DOCKERFILE.read_text()


@pytest.mark.slow
def test_bill_of_materials_names_every_package_of_the_lock_with_its_sum(tmp_path):
    """Of an environment that holds three packages, by their metadata."""
    lock = ""
    for number, name in enumerate(("Alpha_One", "beta", "kvferry")):
        folder = tmp_path / f"{name}-1.{number}.dist-info"
        folder.mkdir()
        licence = "License-Expression: MIT\n" if name == "beta" else ""
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.{number}\n{licence}")
        lock += f"{name.lower()}==1.{number} --hash=sha256:{number:064x}\n" if name != "kvferry" else ""
    (tmp_path / "some.lock").write_text(lock)

    def bill(text=lock):
        (tmp_path / "some.lock").write_text(text)
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            PROGRAM,
            str(tmp_path),
            str(ROOT / "docker/sbom.py"),
            str(tmp_path / "some.lock"),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    found = json.loads(bill().stdout)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/kvferry@1.2"
    assert [(one["purl"], one["hashes"][0]["content"][-1]) for one in found["components"]] == [
        ("pkg:pypi/alpha-one@1.0", "0"),
        ("pkg:pypi/beta@1.1", "1"),
    ]
    assert found["components"][1]["licenses"] == [{"expression": "MIT"}]
    assert bill().stdout == bill().stdout
    assert "gamma 1 is listed, but nothing is installed" in bill(lock + f"gamma==1 --hash=sha256:{0:064x}\n").stderr


# Runs a script with one folder for all packages.
PROGRAM = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); del sys.argv[:2]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def has_package(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
def test_package_step_installs_a_command_that_runs(instructions, source, tmp_path):
    prefix = tmp_path / "prefix"  # with the dependencies of this environment
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    site = next((prefix / "lib").glob("python*/site-packages"))
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    source = shutil.copytree(source, tmp_path / "src")
    installed = {name: importlib.metadata.version(name) for name in locked("cpu") if has_package(name)}
    lines = [f"{name}=={version} --hash=sha256:{0:064x}\n" for name, version in installed.items()]
    (source / "docker/requirements-cpu.lock").write_text("".join(lines))
    assert run_step(instructions, "package", source, prefix, **quick_compiler(tmp_path)).strip().splitlines()[-1]
    command = [prefix / "bin" / "kvferry", "prefill", "--help"]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert json.loads((prefix / "sbom.cdx.json").read_text())["metadata"]["component"]["name"] == "kvferry"
    assert not list(prefix.glob("bin/pip*"))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1200)  # it downloads and compiles some 800 MB
def test_all_steps_run_in_a_clean_environment(instructions, source, tmp_path):
    prefix = tmp_path / "prefix"
    run_step(instructions, "dependencies", source, prefix)
    run_step(instructions, "package", source, prefix)
    assert not list(prefix.glob("lib/python3*/site-packages/pip*"))
    assert {one["name"] for one in json.loads((prefix / "sbom.cdx.json").read_text())["components"]} == locked("cpu").keys()
    modules = "torch, zmq, core.worker.process, router.main, connectors.p2p, opentelemetry.exporter.otlp.proto.http"
    program = f"import {modules}; print(torch.__version__)"
    done = subprocess.run([prefix / "bin" / "python", "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def distribution(name):
    """Return a distribution of this environment, and not what building it has left in the working directory."""
    return next(iter(importlib.metadata.distributions(name=name, path=[sysconfig.get_path("purelib")])))


@pytest.mark.slow
def test_agent_without_torch_runs_router_and_agent_and_refuses_to_compute(instructions, source, tmp_path):
    """The environment holds what the lock lists, by links to the packages of this one, and nothing else."""
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    site = next((prefix / "lib").glob("python*/site-packages"))
    for name in ("kvferry", *filter(has_package, locked("agent"))):  # of kvferry its entry points
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()}:
            is_wanted = top.endswith(".dist-info") or (name != "kvferry" and top not in ("..", "__pycache__"))
            if is_wanted and not (site / top).exists():
                (site / top).symlink_to(Path(found.locate_file(top)))
    for package in ("core", "router", "agent", "connectors", "kvferry", "prefill", "decode", "encode", "kvstore"):
        (site / package).symlink_to(source / package)

    def run(*arguments):
        command = [prefix / "bin" / "python", "-P", "-m", "kvferry", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    refused = run("prefill", "--model", str(tmp_path), "--ops-port", "0")
    assert (refused.returncode, "has no torch" in refused.stderr) == (2, True), refused.stderr
    modules = "router.main, agent.worker, agent.engine, kvferry.doctor, kvferry.operate"
    probe = f"import {modules}, importlib.util as util; print(util.find_spec('torch'))"
    done = subprocess.run([prefix / "bin/python", "-P", "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "None", done.stderr
