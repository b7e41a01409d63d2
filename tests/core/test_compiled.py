"""Libraries built from C: one that is broken, of another release or wrong here is not used."""

import ctypes
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from core import compiled, hash_chain, multilinear, stream_copy
from core.engine import allowed_tokens

ROOT = Path(__file__).parents[2]

LOADERS = {
    multilinear: "kvferry_digest_sums",
    hash_chain: "kvferry_hash_chain",
    stream_copy: "kvferry_stream_copy",
    allowed_tokens: "kvferry_keep_allowed",
}


@pytest.fixture(params=LOADERS, ids=lambda module: module.__name__)
def module(request):
    return request.param


def test_a_library_that_cannot_be_loaded_is_none(module, load_from, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert load_from(module.compiled_library, tmp_path / "broken.so") is None
    assert load_from(module.compiled_library, tmp_path / "missing.so") is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("has_function", [False, True])
def test_a_library_that_computes_something_else_is_none(module, load_from, tmp_path, has_function):
    name = LOADERS[module] if has_function else "another"
    (tmp_path / "other.c").write_text(f"void kvferry_hash_chain_start() {{}} void {name}() {{}}")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    assert load_from(module.compiled_library, tmp_path / "other.so") is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("change", ["", "source", "header", "no digest"])
def test_a_library_of_other_sources_than_those_beside_it_is_none(load_from, tmp_path, change, caplog):
    source, header, library = tmp_path / "pack" / "_thing.c", tmp_path / "_shared.h", tmp_path / "pack" / "_thing.so"
    source.parent.mkdir()
    header.write_text("int shared;\n")
    source.write_text('#include "../_shared.h"\nint thing(void) { return shared; }\n')
    stamp = "" if change == "no digest" else f'const char {compiled.DIGEST_SYMBOL}[] = "{compiled.sources_digest(source)}";'
    (tmp_path / "digest.c").write_text(stamp)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, tmp_path / "digest.c"], check=True)
    for file in [source] * (change == "source") + [header] * (change == "header"):
        file.write_text(f"{file.read_text()}/* changed */\n")
    loaded = load_from(lambda: compiled.load_library(ctypes.CDLL, "_thing", "core", "thing"), library)
    assert (loaded is None) == bool(change)
    assert ("event=compiled_library_off library=_thing" in caplog.text) == bool(change)
    header.unlink()  # as where a library was installed with only some of its sources
    assert load_from(lambda: compiled.load_library(ctypes.CDLL, "_thing", "core", "thing"), library) is not None


def test_a_library_of_another_checkout_with_other_sources_is_none(module, load_from, tmp_path, caplog):
    if module.compiled_library() is None:
        pytest.skip("it was not built")
    name = f"_{module.__name__.rpartition('.')[2]}"
    folder = Path(module.__file__).parent
    for source in [*ROOT.glob("core/*.h"), *folder.glob("*.[ch]")]:
        (tmp_path / source.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / source.relative_to(ROOT))
    built = Path(module.compiled_library()._name)
    there = tmp_path / folder.relative_to(ROOT)
    assert load_from(module.compiled_library, shutil.copy(built, there / "same.so")) is not None
    source = there / f"{name}.c"
    source.write_text(f"{source.read_text()}/* of another time */\n")
    digest = compiled.sources_digest(source).encode()
    own = compiled.sources_digest(folder / f"{name}.c").encode()
    assert built.read_bytes().count(own) == 1
    library = there / "other.so"
    library.write_bytes(built.read_bytes().replace(own, digest))
    assert load_from(module.compiled_library, library) is None
    assert f"it is that of another checkout, {library}" in caplog.text


def test_a_library_that_computes_something_else_is_named_in_the_log(module, monkeypatch, caplog):
    if module.compiled_library() is None:
        pytest.skip("it was not built")
    monkeypatch.setattr(module, "_is_right", lambda library: False)
    assert module.compiled_library.__wrapped__() is None
    package, _, name = module.__name__.removeprefix("core.").rpartition(".")
    full_name = f"{package}._{name}".lstrip(".")
    assert full_name in compiled.LIBRARIES
    assert f"event=compiled_library_off library={full_name} reason=" in caplog.text


def test_an_older_library_is_said_once_by_its_full_name(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "sources_digest", lambda source: "another")
    if "attention._paged_decode" not in compiled.missing_libraries():
        pytest.skip("it was not built")
    assert caplog.text == ""
    assert compiled.load_library(ctypes.CDLL, "_paged_decode", "core.attention") is None
    assert caplog.text.count("event=compiled_library_off library=attention._paged_decode") == 1


def test_the_libraries_of_the_build_are_those_that_are_looked_for(monkeypatch):
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert sorted(f"core.{name}" for name in compiled.LIBRARIES) == sorted(module["name"] for module in modules)
    monkeypatch.setattr(compiled, "_load", lambda kind, name, package: (None if "paged" in name else kind, None))
    assert compiled.missing_libraries() == ["attention._paged_decode", "attention._paged_prefill"]


def test_the_library_that_was_built_is_found(module):
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    assert module.compiled_library() is not None, "it was not built: make install, or pip install --editable ."
