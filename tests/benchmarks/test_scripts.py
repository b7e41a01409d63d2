"""Every benchmark explains itself and runs to its end on the real thing. Its figures are not checked."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_reports_what_is_measured(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.syspath_prepend(FOLDER)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{name}.py" in printed
    assert len(printed.splitlines()) > 10


@pytest.mark.e2e
@pytest.mark.full
def test_through_router_measures_every_case_on_every_side(run_benchmark, tmp_path):
    printed = run_benchmark("through_router", "--quick", "--json", str(tmp_path / "f.json"))
    seconds = json.loads((tmp_path / "f.json").read_text())["seconds"]
    assert len(seconds) == 3
    for case, sides in seconds.items():
        assert case in printed
        assert {name: len(values) for name, values in sides.items()} == {"engine": 1, "router": 1, "1P1D": 1}
        assert all(value > 0 for values in sides.values() for value in values)


@pytest.mark.full
def test_growth_is_measured_on_every_axis(run_benchmark, tmp_path):
    run_benchmark("growth", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert {row["axis"] for row in figures["rows"]} == {"request", "block", "worker"}
    assert all(len(row["us"]) == len(figures["sizes"][row["axis"]]) for row in figures["rows"])
    assert all(us > 0 for row in figures["rows"] for us in row["us"])
    assert len(figures["goals"]) == 1


def test_index_of_contents_is_measured_for_every_cluster(run_benchmark, tmp_path):
    printed = run_benchmark("routing_index", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [cluster["num_workers"] for cluster in figures["clusters"]] == [2, 3]
    assert [goal["unit"] for goal in figures["goals"]] == ["ms", "ms", "bytes", "MB"]
    assert "a worker leaves" in printed


def test_scheduler_is_measured_step_by_step(run_benchmark, tmp_path):
    printed = run_benchmark("scheduler", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["num_steps"] == 10
    assert [goal["unit"] for goal in figures["goals"]] == ["us", "us"]
    assert "update_from_output" in printed


@pytest.mark.e2e
@pytest.mark.full
def test_router_is_measured_with_a_worker_that_only_emits(run_benchmark, tmp_path):
    printed = run_benchmark("router_scale", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [row["num_streams"] for row in figures["streams"]] == [3, 5]
    assert all(value > 0 for row in figures["streams"] for value in row.values())
    assert len(figures["goals"]) == 3
    assert "tokens per second and core" in printed


@pytest.mark.e2e
@pytest.mark.full
def test_disaggregation_loads_every_side_and_reports_its_goals(run_benchmark, tmp_path):
    arguments = ("--quick", "--chunks", "64", "2048", "--repeats", "1")
    printed = run_benchmark("disaggregation", *arguments, "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["sides"].keys() == {"1P1D", "2 aggregated, 64", "2 aggregated, 2048"}
    for name, side in figures["sides"].items():
        assert name in printed
        assert len(side["intervals"]["long_ttft_ms"]) == 2
        assert side["intervals"]["quiet_ms"]
        assert side["intervals"]["busy_ms"]
        assert side["good"]
    assert [goal["unit"] for goal in figures["goals"]] == ["ratio"] * 3


@pytest.mark.e2e
@pytest.mark.full
def test_handoff_measures_transfer_copy_second_token_verification_and_lost_owners(run_benchmark, tmp_path):
    printed = run_benchmark("handoff", "--quick", "--transports", "tcp", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    (found,) = figures["transports"].values()
    assert "rate / plain copy" in printed
    assert len(found["firsts"]) == 1
    for transfer in [*found["firsts"], *found["others"]]:
        assert transfer["transport"] == "tcp"
        assert transfer["num_bytes"] >= 256 * 46080  # 30 layers x (K, V) x 3 heads x 64 x 4 bytes for each token
        assert transfer["transfer_ms"] > 0
        assert transfer["copy_ms"] > 0
    assert len(found["gaps_ms"]) == len(found["aggregated_gaps_ms"]) == 15
    (recomputed_s,) = figures["recomputed_s"]
    assert recomputed_s > 0
    assert "identity / transfer" in printed
    for kind in ("identity", "digest"):
        loads = figures["verification"]["tcp"][kind]
        assert [load["num_tokens"] for load in loads] == [1, 128] * 5
        assert all(load["transfer_ms"] > 0 and load["verify_ms"] > 0 and load["copy_ms"] > 0 for load in loads)


@pytest.mark.e2e
@pytest.mark.full
def test_cluster_measures_start_and_idle_processes(run_benchmark, tmp_path):
    run_benchmark("cluster", "--quick", "--transports", "shm", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["start_s"]["shm"][0] > 0
    assert [each["role"] for each in figures["idle"]["shm"]] == ["router", "prefill", "decode"]


@pytest.mark.e2e
@pytest.mark.full
def test_encoder_measures_text_beside_late_images_and_counts_encodes(run_benchmark, tmp_path):
    printed = run_benchmark("encoder", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    for side in ("engine", "cluster"):
        assert f"in the {side}" in printed
        assert figures[side]["without"][0] > 0
        assert figures[side]["beside"][0] > 0
    assert figures["repeated"]["num_encodes"] == figures["repeated"]["num_images"] == 1
    assert len(figures["repeated"]["again_s"]) == 8


@pytest.mark.full
def test_photographs_measures_text_beside_each_way_to_decode_one(run_benchmark, tmp_path):
    printed = run_benchmark("photographs", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    for way in ("alone", "decoded on a thread beside", "decoded in the step"):
        assert way in printed
        ((num_tokens, longest_s),) = figures[way]
        assert num_tokens > 0
        assert longest_s > 0


def test_tiers_measures_every_way_to_a_store(run_benchmark, tmp_path):
    printed = run_benchmark("tiers", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert len(figures["plain_ms"]) == 1
    for way in ("same host", "frames", "embedded"):
        assert way in printed
        for what in ("put", "get", "checked", "lookup"):
            assert figures[f"{way}_{what}_ms"][0] > 0


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_plugin_digest_measures_wheels_with_and_without_a_compiler(run_benchmark, tmp_path):
    run_benchmark("plugin_digest", "--quick", "--json", str(tmp_path / "f.json"))
    seconds = json.loads((tmp_path / "f.json").read_text())["seconds"]
    assert set(seconds) == {"CompiledSums", "NumpySums"}
    for by_size in seconds.values():
        assert all(values["digest"][0] > 0 and values["copy"][0] > 0 for values in by_size.values())


@pytest.mark.full
def test_tiers_connector_computes_and_loads_the_same_prompts(run_benchmark, tmp_path):
    run_benchmark("tiers_connector", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    for tier in ("offload", "store"):
        assert len(figures[f"{tier}_computed_ms"]) == len(figures[f"{tier}_loaded_ms"]) == 1
    assert all(figures[f"{what}_ms"][0] > 0 for what in ("plain", "save", "load", "digest"))


def test_tiers_replays_a_trace_beside_the_clairvoyant_bound(run_benchmark, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 3]}\n{"hash_ids": [1, 2]}\n')
    printed = run_benchmark("tiers", "--trace", str(trace), "--capacities", "2", "10", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert "clairvoyant" in printed
    assert figures["10"] == {"lru": 0.5, "s3fifo": 0.5, "arc": 0.5, "clairvoyant": 0.5}
    assert figures["2"]["lru"] == pytest.approx(2 / 6)


def test_hybrid_counts_what_the_groups_save(run_benchmark, tmp_path):
    run_benchmark("hybrid", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["hybrid"]["pool_bytes"] == figures["all_full"]["pool_bytes"]
    assert figures["all_full"]["requests_at_once"] == 8
    assert figures["requests"] >= 3  # counted, not timed: the goals hold on every machine
    assert figures["handoff"] <= 0.35


@pytest.mark.e2e
@pytest.mark.full
def test_advice_is_compared_with_what_both_sides_carry(run_benchmark, tmp_path):
    printed = run_benchmark("advised_sides", "--quick", "--json", str(tmp_path / "f.json"))
    figures = json.loads((tmp_path / "f.json").read_text())
    (mix,) = figures["mixes"]
    assert mix["real"].keys() == mix["predicted"].keys() == {"1P1D", "aggregated"}
    for side, shares in mix["real"].items():
        assert shares.keys() == mix["predicted"][side].keys()
        assert len(shares) == 1
        assert all(0 <= share <= 1 for share in shares.values())
    assert figures["goals"][0]["goal"] == 1
    assert "advice and measurement agree in" in printed
