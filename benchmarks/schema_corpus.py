"""How much of JSON Schema the structured output supports, by public corpora: supported, or refused with the reason.

    python benchmarks/schema_corpus.py [--corpus FOLDER] [--every N] [--walks N] [--json FILE] [--markdown] [--quick]

Two corpora, both pinned:

* suite    JSON-Schema-Test-Suite, draft 2020-12, as the source distribution of jsonschema 4.26.0 has it (fetched by pip):
           every schema, and each of its examples. An invalid example that the grammar accepts is a violation.
* bench    JSONSchemaBench, a checkout of github.com/guidance-ai/jsonschemabench at ba103c73, with ``--corpus FOLDER``: schemas
           of real applications, without examples.

A schema is supported if it is compiled for the tokenizer of smollm2-135m within the limits of docs/api.md. It is refused
clearly if the error is a 400 with a reason. With ``--walks N``, N random outputs of each supported schema of JSONSchemaBench
are made from its masks, and those that end within 400 tokens are validated by jsonschema.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from common import MODEL, Machine, Outcome, Table, at_least, at_most, goal_notes, make_parser, publish

from core.config_types import default_cache_dir
from core.errors import InvalidRequest
from core.grammar.checker import GrammarChecker
from core.grammar.child import Setup
from core.grammar.compiled import CompiledGrammar, Vocabulary
from core.model.hub import resolve_model
from core.model.tokenizer import Tokenizer
from core.wire.sampling import StructuredOutput

SDIST = "jsonschema==4.26.0"
SDIST_SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
COMMIT = "ba103c73"
WALK_TOKENS = 400
GOAL = 0.80  # of JSONSchemaBench supported


@dataclass(slots=True)
class Found:
    """What became of the schemas of one part of a corpus."""

    supported: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the beginning of the reason
    unclear: int = 0
    violations: list[str] = field(default_factory=list)
    valid_examples: int = 0
    accepted_examples: int = 0
    num_walks: int = 0  # that ended
    seconds: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.supported + self.refused.total() + self.unclear


class Judge:
    """Compiles schemas and checks examples."""

    def __init__(self) -> None:
        files = resolve_model(MODEL, Path(default_cache_dir()))
        self.tokenizer = Tokenizer(files)
        setup = Setup(self.tokenizer.backend.to_str(), self.tokenizer.vocab_size, tuple(files.eos_token_ids))
        self.vocabulary = Vocabulary(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
        self.checker = GrammarChecker(lambda: setup)
        texts = (self.tokenizer.decode([token_id]) for token_id in range(self.tokenizer.vocab_size))
        self.closing = np.array([bool(text) and set(text) <= set('"}],:{[ 0123456789truefalsn') for text in texts])

    def compile(self, schema: object, found: Found) -> CompiledGrammar | None:
        output = StructuredOutput(kind="json_schema", value=json.dumps(schema, separators=(",", ":")))
        try:
            self.checker.check(output)
            started = time.process_time()
            grammar = CompiledGrammar(output, self.vocabulary)
        except InvalidRequest as refusal:
            found.refused[" ".join(refusal.message.split()[:12])] += 1
            found.unclear += not refusal.message
            return None
        found.seconds.append(time.process_time() - started)
        found.supported += 1
        return grammar

    def accepts(self, grammar: CompiledGrammar, example: object) -> bool:
        text = json.dumps(example, ensure_ascii=False)
        matcher = grammar.start(self.tokenizer.encode(text, add_special_tokens=False))
        allowed = matcher.allowed() if matcher.error is None else None
        return allowed is not None and bool(allowed[list(self.vocabulary.eos_token_ids)].any())

    def walk(self, grammar: CompiledGrammar, schema: Any, generator: np.random.Generator) -> str | None:  # noqa: ANN401
        """Return how a random output violates its schema, empty if it does not; None if it does not end in time."""
        matcher, ids = grammar.start(), []
        ends = list(self.vocabulary.eos_token_ids)
        for _ in range(WALK_TOKENS):
            allowed = matcher.allowed()
            if allowed is None:
                return str(matcher.error)
            can_end = bool(allowed[ends].any())
            allowed[ends] = False
            if can_end and (not allowed.any() or generator.random() < 0.7):
                return _violation(schema, self.tokenizer.decode(ids, skip_special_tokens=False))
            likely = np.flatnonzero(allowed & self.closing) if generator.random() < 0.85 else ()
            ids.append(int(generator.choice(likely if len(likely) else np.flatnonzero(allowed))))
            matcher.accept(ids[-1:])
        return None


def _violation(schema: Any, text: str) -> str:  # noqa: ANN401
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    try:
        error = jsonschema.exceptions.best_match(judge.iter_errors(json.loads(text)))
    except json.JSONDecodeError as broken:
        return f"no JSON: {broken}"
    except Exception:  # what is no schema at all constrains nothing that could be judged
        return ""
    return error.message if error is not None else ""


def fetch_suite(folder: Path) -> Path:
    """Return the folder of the suite's draft 2020-12."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-binary", ":all:", "--dest", str(folder), SDIST], check=False)
    (archive,) = folder.glob("jsonschema-*.tar.gz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise SystemExit(f"{archive.name} has sha256 {found}, expected {SDIST_SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json/tests/draft2020-12"))


def run_suite(judge: Judge, folder: Path) -> Found:
    found = Found()
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            grammar = judge.compile(case["schema"], found)
            for example in case["tests"] if grammar is not None else ():
                assert grammar is not None
                is_accepted = judge.accepts(grammar, example["data"])
                if example["valid"]:
                    found.valid_examples += 1
                    found.accepted_examples += is_accepted
                elif is_accepted:
                    found.violations.append(f"{path.name}: {case['description']}: {example['description']}")
    return found


def parts_of_bench(folder: Path, every: int) -> Iterator[tuple[str, list[Path]]]:
    for part in sorted(path for path in (folder / "data").iterdir() if path.is_dir()):
        yield part.name, sorted(part.glob("*.json"))[::every]


def run_bench(judge: Judge, paths: list[Path], num_walks: int) -> Found:
    found, generator = Found(), np.random.default_rng(1)
    for path in paths:
        schema = json.loads(path.read_text())
        grammar = judge.compile(schema, found)
        for _ in range(num_walks if grammar is not None else 0):
            assert grammar is not None
            violation = judge.walk(grammar, schema, generator)
            found.num_walks += violation is not None
            if violation:
                found.violations.append(f"{path.name}: {violation[:200]}")
    return found


def row(name: str, found: Found) -> list[str]:
    share = f"{100 * found.supported / found.total:.1f} %" if found.total else ""
    milliseconds = sorted(found.seconds)[int(0.99 * len(found.seconds))] * 1e3 if found.seconds else 0.0
    cells = [f"{found.total:,}", f"{found.supported:,}", share, f"{found.refused.total():,}", str(found.unclear)]
    return [name, *cells, f"{milliseconds:.0f} ms"]


def measure(arguments: argparse.Namespace) -> Outcome:
    judge = Judge()
    rows, figures, notes = [], {}, []
    bench = Found()
    with tempfile.TemporaryDirectory() as folder:
        suite = run_suite(judge, fetch_suite(Path(folder)))
    rows.append(row("JSON-Schema-Test-Suite, draft 2020-12", suite))
    figures["suite"] = {"supported": suite.supported, "refused": dict(suite.refused), "violations": suite.violations}
    notes.append(
        f"Examples of supported schemas of the suite: {len(suite.violations)} invalid ones accepted; "
        f"{suite.accepted_examples} of {suite.valid_examples} valid ones accepted."
    )
    notes += suite.violations
    if arguments.corpus is not None:
        for name, paths in parts_of_bench(arguments.corpus, arguments.every):
            part = run_bench(judge, paths, arguments.walks)
            rows.append(row(f"JSONSchemaBench {name}", part))
            bench.supported += part.supported
            bench.refused += part.refused
            bench.unclear += part.unclear
            bench.seconds += part.seconds
            bench.num_walks += part.num_walks
            bench.violations += part.violations
        rows.append(row(f"JSONSchemaBench {COMMIT}, all", bench))
        figures["bench"] = {"supported": bench.supported, "refused": dict(bench.refused), "unclear": bench.unclear}
        if arguments.walks:
            notes.append(
                f"Random outputs that ended: {bench.num_walks:,}; {len(bench.violations)} of them violate their schema."
            )
            notes += bench.violations
        notes += [f"refused {count} times: {reason}" for reason, count in bench.refused.most_common(12)]
    judge.checker.close()
    columns = ["corpus", "schemas", "supported", "share", "refused", "without reason", "compile, 99 %"]
    goals = goals_of(bench)
    return Outcome([Table(columns, rows)], [*goal_notes(goals), *notes], figures, goals)


def goals_of(bench: Found) -> list[dict[str, object]]:
    """Return the aims, which are those of JSONSchemaBench; without a checkout of it nothing is measured."""
    share, unclear = (bench.supported / bench.total, bench.unclear) if bench.total else (None, None)
    return [
        at_least("JSONSchemaBench: supported", share, GOAL, "share"),
        at_most("JSONSchemaBench: refused without a reason", unclear, 0, "schemas"),
    ]


def main() -> None:
    parser = make_parser(__doc__, 1, takes_model=False)
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="a checkout of JSONSchemaBench")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th schema of it")
    parser.add_argument("--walks", type=int, default=0, metavar="N", help="random outputs of each of its supported schemas")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.every = 100
    machine = Machine.now()
    publish(measure(arguments), machine, arguments)


if __name__ == "__main__":
    main()
