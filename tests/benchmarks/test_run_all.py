"""Running benchmarks one after another, and putting what they print into a document."""

import dataclasses
import re

import pytest


@pytest.fixture(scope="module")
def run_all(load_benchmark):
    return load_benchmark("run_all")


def make_run(run_all, name, output, exit_code=0):
    (benchmark,) = [each for each in run_all.BENCHMARKS if each.name == name]
    return run_all.Run(benchmark, exit_code, output, 1.0)


def test_tables_replace_what_stands_between_their_marks(run_all, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# A\n<!-- cluster -->\nold\n<!-- /cluster -->\n# B\n<!-- engine -->\n<!-- /engine -->\nend\n")
    runs = [make_run(run_all, "cluster", "| new |\n"), make_run(run_all, "engine", r"both \1 us" + "\n")]
    run_all.put_into(document, runs)
    assert document.read_text() == (
        "# A\n<!-- cluster -->\n\n| new |\n\n<!-- /cluster -->\n# B\n<!-- engine -->\n\n```\nboth \\1 us\n```\n\n"
        "<!-- /engine -->\nend\n"
    )
    before = document.read_text()
    run_all.put_into(document, runs)
    assert document.read_text() == before


def test_a_failed_benchmark_leaves_the_document_alone(run_all, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- cluster -->\nold\n<!-- /cluster -->\n")
    run_all.put_into(document, [make_run(run_all, "cluster", "half a table", exit_code=1)])
    assert document.read_text() == "<!-- cluster -->\nold\n<!-- /cluster -->\n"


def test_a_table_that_was_measured_in_part_leaves_the_document_alone(run_all, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- schema_corpus -->\nold\n<!-- /schema_corpus -->\n")
    part = make_run(run_all, "schema_corpus", "| one row |\n")
    run_all.put_into(document, [part])
    assert document.read_text() == "<!-- schema_corpus -->\nold\n<!-- /schema_corpus -->\n"
    whole = run_all.with_corpus(part.benchmark, tmp_path)
    assert whole.arguments == ("--corpus", str(tmp_path), "--every", "4")
    run_all.put_into(document, [dataclasses.replace(part, benchmark=whole)])
    assert document.read_text() == "<!-- schema_corpus -->\n\n| one row |\n\n<!-- /schema_corpus -->\n"
    other = make_run(run_all, "growth", "").benchmark
    assert run_all.with_corpus(other, tmp_path) is other


def test_a_benchmark_that_fails_stops_no_other_and_is_reported(run_all, tmp_path, monkeypatch, capsys):
    for name, code in (("bad", "import sys; print('half'); sys.exit(3)"), ("good", "print('whole')")):
        (tmp_path / f"{name}.py").write_text(code)
    plain = {"quick": (), "writes_markdown": False}
    monkeypatch.setattr(run_all, "BENCHMARKS", (run_all.Benchmark("bad", **plain), run_all.Benchmark("good", **plain)))
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["run_all.py", "--output", str(tmp_path / "results")])
    assert run_all.main() == 1
    (kept,) = (tmp_path / "results").iterdir()
    assert (kept.name, kept.read_text()) == ("good.md", "```\nwhole\n```\n")
    assert "bad              FAILED with exit code 3" in capsys.readouterr().out


def test_figures_of_a_smoke_run_do_not_get_into_a_document(run_all, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["run_all.py", "--quick", "--docs", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit):
        run_all.main()


def test_every_benchmark_is_known_to_run_all(run_all):
    scripts = {path.name for path in run_all.FOLDER.glob("*.py") if "__main__" in path.read_text()}
    needs_a_gpu, of_routing = {"gpu.py"}, {"routing.py", "local_prefill.py", "peer_pull.py"}
    run_by_others = {"engine_peer.py", "scheduler_peer.py", "plain_proxies.py"}
    assert scripts - {"run_all.py"} - needs_a_gpu - of_routing - run_by_others == {
        benchmark.file_name for benchmark in run_all.BENCHMARKS
    }


def test_every_benchmark_has_its_marks_in_the_documentation(run_all):
    document = (run_all.FOLDER.parent / "docs" / "benchmarks.md").read_text()
    for benchmark in run_all.BENCHMARKS:
        marks = [document.find(f"<!-- {benchmark.name} -->"), document.find(f"<!-- /{benchmark.name} -->")]
        assert marks == sorted(marks)
        assert -1 not in marks


def test_each_table_is_made_by_the_command_that_the_page_names_before_it(run_all, tmp_path):
    page = (run_all.FOLDER.parent / "docs" / "benchmarks.md").read_text()
    for benchmark in run_all.BENCHMARKS:
        before = page.split(f"\n<!-- {benchmark.name} -->\n")[0]
        section = " ".join(before.rpartition("\n## ")[2].split())
        commands = re.findall(rf"`((?:\w+=\w+ )?)python benchmarks/{re.escape(benchmark.file_name)}([^`]*)`", section)
        assert commands, benchmark.name
        whole = run_all.with_corpus(benchmark, tmp_path)
        words = [*whole.environment, *whole.arguments]
        named = re.sub(r"--\w+ (FILE|FOLDER)", "", " ".join(commands[-1])).split()
        assert [word for word in named if word not in words] == [], benchmark.name
        assert [word for word in words if word not in (*re.findall(r"[^\s`]+", section), str(tmp_path))] == [], benchmark.name


def test_a_benchmark_gets_its_variables(run_all, tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("import os; print(os.environ['PAGES'])")
    benchmark = run_all.Benchmark("one", writes_markdown=False, environment=("PAGES=1=2",))
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    assert run_all.run(benchmark, tmp_path, is_quick=False).output == "1=2\n"


def test_one_script_may_serve_two_benchmarks_with_different_arguments(run_all, tmp_path, monkeypatch):
    (tmp_path / "shared.py").write_text("import sys; print(*sys.argv[1:-1])")
    plain = {"quick": ("--short",), "writes_markdown": False}
    other = run_all.Benchmark("other", **plain, script="shared", arguments=("--threads", "2"))
    monkeypatch.setattr(run_all, "BENCHMARKS", (run_all.Benchmark("shared", **plain), other))
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["run_all.py", "--quick", "--output", str(tmp_path / "results")])
    assert run_all.main() == 0
    printed = {path.stem: path.read_text().splitlines()[1] for path in (tmp_path / "results").glob("*.md")}
    assert printed == {"shared": "--short --json", "other": "--threads 2 --short --json"}
