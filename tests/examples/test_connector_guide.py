"""docs/connectors.md shows the whole example, part by part, and its test runs as it stands there."""

from __future__ import annotations

import re
import textwrap

import pytest

from connectors.testing.connector_pair import PROMPT


@pytest.fixture(scope="module")
def excerpts(examples_dir):
    guide = (examples_dir.parent / "docs" / "connectors.md").read_text()
    return re.findall(r"```python\n(.*?)```", guide, re.DOTALL)


def test_the_guide_shows_the_whole_example_and_nothing_else(examples_dir, excerpts):
    left = (examples_dir / "folder_connector" / "folder_connector.py").read_text()
    for code in excerpts[:-1]:
        part = next((form for form in (code, textwrap.indent(code, "    ")) if form in left), None)
        assert part is not None, f"not in the example, or shown twice:\n{code}"
        left = left.replace(part, "")
    assert re.sub(r'""".*?"""', "", left, count=1, flags=re.DOTALL).split() == [], "the guide leaves this out"


@pytest.mark.slow
async def test_the_suite_of_the_guide_runs_on_the_example(folder_connector, excerpts, tmp_path):
    namespace = {}
    exec(excerpts[-1], namespace)
    suite = namespace["TestFolder"]()
    suite.folder = tmp_path / "made at start"
    async with suite.started_pair() as pair:
        assert isinstance(pair.producer.connector, folder_connector.FolderConnector)
        await pair.make_handoff("a", PROMPT)
        await pair.drained()
