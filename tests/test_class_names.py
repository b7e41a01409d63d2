"""The name of a public class is that of no other one, so that a search for it finds one thing."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.test_packaging import PACKAGES

ROOT = Path(__file__).parent.parent


def public_classes(path):
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def test_a_public_class_name_is_that_of_one_class():
    modules = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in public_classes(path):
                modules[name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 1000, "classes were found"
    assert [f"{name}: {', '.join(paths)}" for name, paths in sorted(modules.items()) if len(paths) > 1] == []
