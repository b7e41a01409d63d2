"""The image: a linter has nothing to say, it can run under the chart's restrictions, and its steps work."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

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
    done = subprocess.run([hadolint, "--failure-threshold", "info", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter_would_find_something(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /src\n")
    done = subprocess.run([Path(sys.executable).parent / "hadolint", bad], capture_output=True, text=True, check=False)
    assert "DL3007" in done.stdout


def test_runs_as_the_user_of_the_chart_and_not_as_root(instructions):
    (user,) = values(instructions, "USER")
    pod = (ROOT / "helm/kvferry/templates/_pod.tpl").read_text()
    assert user == "10001:10001"
    assert "runAsUser: 10001" in pod


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


def run_step(instructions, step, source, prefix):
    """Run the RUN instruction of a step as it stands, but for where it installs."""
    (command,) = (value for value in values(instructions, "RUN") if f"install.sh {step}" in value)
    environment = {"PATH": os.environ["PATH"], "HOME": str(source.parent), "VARIANT": "cpu", "TORCH_INDEX": ""}
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
    """What the build stage copies, and nothing else."""
    folder = tmp_path_factory.mktemp("image") / "src"
    folder.mkdir()
    for value in values(instructions, "COPY"):
        *names, target = value.split()
        for name in names if not value.startswith("--from") else ():
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / target).mkdir(exist_ok=True)
                shutil.copy(path, folder / target)
    return folder


@pytest.mark.parametrize(("variant", "wanted"), [("cpu", "nixl-cu12"), ("cuda", "nixl-cu13")])
def test_nixl_is_the_one_for_torchs_cuda(tmp_path, variant, wanted):
    """Torch of the usual index is built for CUDA 13. Nothing is installed here: pip is a script that does nothing."""
    prefix = tmp_path / "prefix"
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$1" in -) exec {sys.executable} "$@" ;; esac\n')
    python.chmod(0o755)
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(python)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["docker/install.sh", "dependencies", variant, prefix], cwd=ROOT, env=env, check=True, timeout=60)
    names = re.findall(r"^nixl[\w-]*", (prefix / "requirements.txt").read_text(), re.MULTILINE)
    assert names == [wanted]


@pytest.mark.slow
def test_package_step_installs_a_command_that_runs(instructions, source, tmp_path):
    prefix = tmp_path / "prefix"  # with the dependencies of this environment
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    site = next((prefix / "lib").glob("python*/site-packages"))
    (site / "here.pth").write_text(str(next(Path(sys.prefix, "lib").glob("python*/site-packages"))))
    assert run_step(instructions, "package", source, prefix).strip().splitlines()[-1]
    command = [prefix / "bin" / "kvferry", "prefill", "--help"]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.full
def test_all_steps_run_in_a_clean_environment(instructions, source, tmp_path):
    prefix = tmp_path / "prefix"
    run_step(instructions, "dependencies", source, prefix)
    run_step(instructions, "package", source, prefix)
    modules = "torch, zmq, core.engine.worker, router.main, connectors.p2p, opentelemetry.exporter.otlp.proto.http"
    program = f"import {modules}; print(torch.__version__)"
    done = subprocess.run([prefix / "bin" / "python", "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
