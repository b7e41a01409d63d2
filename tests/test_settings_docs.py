"""docs/settings.md lists every setting with its default and, where there are some, the values that it may have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml

from core.config import KVFerryConfig

PAGE = (Path(__file__).parents[1] / "docs/settings.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\S.*?) \| (\S.*?) \|$", re.MULTILINE)
BY_ENVIRONMENT = {
    "cache_dir": "$KVFERRY_CACHE",
    "api_key": "$KVFERRY_API_KEY",
    "cluster_key": "$KVFERRY_CLUSTER_KEY",
    "other_cluster_keys": "$KVFERRY_OTHER_CLUSTER_KEYS",
    "redis_password": "$KVFERRY_REDIS_PASSWORD",
}


def documented() -> dict[str, tuple[str, str]]:
    """Path of every row → what it says of the default, and of the meaning."""
    _, *parts = re.split(r"^###? ([\w.]+)\n", PAGE, flags=re.MULTILINE)
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {f"{section}.{name}": (default, text) for section, body in sections for name, default, text in ROW.findall(body)}


def settings(kind: type[msgspec.Struct] = KVFerryConfig, prefix: str = "") -> dict[str, msgspec.structs.FieldInfo]:
    found = {}
    for field in msgspec.structs.fields(kind):
        path = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= settings(field.type, f"{path}.")
        else:
            found[path] = field
    return found


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def test_every_setting_has_one_row_and_no_row_is_about_another():
    assert documented().keys() == settings().keys()
    assert len(ROW.findall(PAGE)) == len(settings())


@pytest.mark.parametrize("path", settings())
def test_a_row_says_the_default_and_the_other_values(path):
    default, text = documented()[path]
    field = settings()[path]
    if field.name in BY_ENVIRONMENT:
        assert default == f"**`{BY_ENVIRONMENT[field.name]}`**"
    elif default.startswith("**"):
        assert default_of(field) == "", "the page has words where there is a value"
    else:
        value = default_of(field)
        assert yaml.safe_load(default.strip("`")) == (list(value) if isinstance(value, tuple) else value)
    if get_origin(field.type) is Literal:
        assert {f"`{value}`" for value in get_args(field.type)} - {default} <= set(re.findall(r"`\S+?`", text))
