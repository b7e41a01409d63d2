"""Clients that applications use, each in its own process against one prefill and one decode worker of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import API_KEY, MODEL, clients_folder
from tests.support.vllm_engine import vllm_python

pytestmark = [pytest.mark.clients, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "scripts"
NUM_CHECKS = {"openai": 15, "litellm": 10, "langchain": 13, "instructor": 8, "agents": 10, "pydantic_ai": 10}


@pytest.mark.parametrize("client", NUM_CHECKS)
def test_every_check_of_the_client_passes(cluster, run, client):
    output = run(clients_folder() / "bin/python", SCRIPTS / f"{client}_client.py", f"{cluster.base_url}/v1")
    assert sum(line.startswith("ok ") for line in output.splitlines()) == NUM_CHECKS[client]


def test_lm_eval_gets_the_log_probabilities_of_given_texts(cluster, run, model_folder, tmp_path):
    documents = [{"text": f"A ferry number {number} crosses the"} for number in range(4)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(one | {"last": " water"}) + "\n" for one in documents))
    task = {
        "task": "last_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{last}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    (tmp_path / "last_word.yaml").write_text(json.dumps(task))
    server = f"model={MODEL},base_url={cluster.base_url}/v1/completions"
    arguments = f"{server},tokenizer={model_folder},num_concurrent=2,max_retries=1"
    output = run(
        *(clients_folder() / "bin/lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "last_word", "--include_path", tmp_path, "--output_path", tmp_path / "results", "--batch_size", "2"),
    )
    (found,) = (tmp_path / "results").rglob("results_*.json")
    result = json.loads(found.read_text())["results"]["last_word"]
    assert 0 < result["perplexity,none"] < 1e4, output


def test_vllm_bench_serve_counts_no_failure(cluster, run, model_folder, tmp_path):
    run(
        *(vllm_python().with_name("vllm"), "bench", "serve", "--backend", "openai-chat", "--base-url", cluster.base_url),
        *("--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", model_folder, "--dataset-name", "random"),
        *("--random-input-len", "48", "--random-output-len", "12", "--num-prompts", "6", "--request-rate", "4"),
        *("--ignore-eos", "--save-result", "--result-dir", tmp_path, "--result-filename", "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 72)


def test_guidellm_counts_no_failure(cluster, run, model_folder, tmp_path):
    backend = f"kind=openai_http,target={cluster.base_url},model={MODEL},api_key={API_KEY}"
    run(
        *(clients_folder() / "bin/guidellm", "run", "--backend", backend, "--profile", "kind=synchronous"),
        *("--constraint", "kind=max_requests,count=4", "--tokenizer", f"kind=hf_auto,model={model_folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'found.json'}", "--disable-console"),
    )
    totals = json.loads((tmp_path / "found.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
