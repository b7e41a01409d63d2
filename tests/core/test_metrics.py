"""A worker's metrics carry vLLM's names and read gauges only when scraped."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from core.metrics import EventHistogram, Metric, WorkerMetrics, read_labelled_counter


def test_gauges_are_read_at_scrape_time():
    registry, running = CollectorRegistry(), [1.0]
    WorkerMetrics(registry, {Metric("num_requests_running", "gauge", "Requests."): lambda: running[0]})
    running[0] = 5.0
    assert registry.get_sample_value("kvferry_num_requests_running") == 5.0


def test_counters_of_the_engine_are_read_at_scrape_time():
    registry, steps = CollectorRegistry(), [0]
    WorkerMetrics(registry, {Metric("engine_steps", "counter", "Steps."): lambda: steps[0]})
    steps[0] = 7
    assert registry.get_sample_value("kvferry_engine_steps_total") == 7.0


def test_labelled_counters_of_the_engine_are_read_at_scrape_time():
    registry, counts = CollectorRegistry(), {}
    read_labelled_counter(registry, "kv_load_fallbacks", "Loads.", ("reason", "policy"), lambda: list(counts.items()))
    labels = {"reason": "stale", "policy": "recompute"}
    assert registry.get_sample_value("kvferry_kv_load_fallbacks_total", labels) is None
    counts["stale", "recompute"] = 2
    assert registry.get_sample_value("kvferry_kv_load_fallbacks_total", labels) == 2


def test_counters_have_the_names_that_dashboards_of_vllm_use():
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, {})
    metrics.count_prompt(100, 64, 16)
    metrics.count_generated(3)
    metrics.count_finished("stop")
    metrics.count_failed("engine_dead")
    value = registry.get_sample_value
    assert value("kvferry_prompt_tokens_total") == 100
    assert value("kvferry_prompt_tokens_cached_total", {"source": "local"}) == 64
    assert value("kvferry_prompt_tokens_cached_total", {"source": "external"}) == 16
    assert value("kvferry_generation_tokens_total") == 3
    assert value("kvferry_request_success_total", {"finished_reason": "stop"}) == 1
    assert value("kvferry_request_failure_total", {"code": "engine_dead"}) == 1


def test_two_workers_of_one_process_do_not_share_counters():
    first, second = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(first, {}).count_generated(2)
    WorkerMetrics(second, {})
    assert second.get_sample_value("kvferry_generation_tokens_total") == 0


def test_a_histogram_of_events_shows_what_the_librarys_own_does():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.001, 0.0025, 1.0, 10.0)
    histogram = EventHistogram(ours, "gap_seconds", "Between tokens.", buckets)
    reference = Histogram("kvferry_gap_seconds", "Between tokens.", buckets=buckets, registry=theirs)
    for value in (0.0, 0.001, 0.002, 0.0025, 0.5, 10.0, 11.0):
        histogram.observe(value)
        reference.observe(value)
    shown = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == shown
