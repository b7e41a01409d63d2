"""Configuration: where values come from, and how wrong ones are refused."""

import base64
import os

import pytest

from core.config import KVFerryConfig, dump_config, load_config
from core.config_types import default_cache_dir
from core.errors import ConfigError
from core.model.image_file import MAX_PIXELS


def test_defaults_are_valid():
    assert load_config() == KVFerryConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "cache:\n  block_size: 16\nrouter: {port: 9000}\n"),
        ("c.toml", "[cache]\nblock_size = 16\n[router]\nport = 9000\n"),
        ("c.json", '{"cache": {"block_size": 16}, "router": {"port": 9000}}'),
    ],
)
def test_reads_yaml_toml_and_json(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    config = load_config(path)
    assert (config.cache.block_size, config.router.port) == (16, 9000)


def test_empty_file_means_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == KVFerryConfig()


@pytest.mark.parametrize("text", ["router:\n", "router:\n  images:\n", "router:\n  # port: 9000\n", "connector: {extra: }\n"])
def test_a_section_without_settings_means_defaults(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load_config(path) == KVFerryConfig()
    changed = load_config(path, ["router.images.max_count=3", "connector.extra.a=1"])
    assert (changed.router.images.max_count, changed.connector.extra) == (3, {"a": 1})


def test_assignment_beats_file_and_flag_beats_assignment(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router: {port: 1, host: a}\nlog: {level: DEBUG}\n")
    config = load_config(path, ["router.port=2", "router.host=b"], {"router.port": 3})
    assert (config.router.port, config.router.host, config.log.level) == (3, "b", "DEBUG")


def test_assignment_parses_lists_numbers_and_booleans():
    config = load_config(
        assignments=[
            "connector.transports=[tcp]",
            "worker.router_addresses=[tcp://r1:1, tcp://r2:1]",
            "worker.pin_cpus=false",
            "connector.transfer_deadline_s=2.5",
        ]
    )
    assert config.connector.transports == ("tcp",)
    assert config.worker.router_addresses == ("tcp://r1:1", "tcp://r2:1")
    assert config.worker.pin_cpus is False
    assert config.connector.transfer_deadline_s == 2.5


@pytest.mark.parametrize("text", ["12345", "007", "", "true", "null", "a: b", "[x]", " padded "])
def test_text_settings_are_taken_as_they_stand(text):
    config = load_config(assignments=[f"router.api_key={text}", f"worker.engine_id={text}"])
    assert (config.router.api_key, config.worker.engine_id) == (text, text)


@pytest.mark.parametrize(
    ("text", "transports"),
    [("shm", ("shm",)), ("shm,tcp", ("shm", "tcp")), ("nixl, tcp", ("nixl", "tcp")), ("[tcp, shm]", ("tcp", "shm"))],
)
def test_lists_of_text_are_written_with_or_without_brackets(text, transports):
    assert load_config(assignments=[f"connector.transports={text}"]).connector.transports == transports


def test_transports_of_other_connectors_are_their_own_business():
    config = load_config(assignments=["connector.name=my.connector:Bundle", "connector.transports=pigeon"])
    assert config.connector.transports == ("pigeon",)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5570",
        "tcp://[::1]:5570",
        "tcp://[fe80::1%2]:5570",
        "tcp://[fe80::1%eth0]:5570",
        "tcp://router-0.kvferry.svc:5570",
        "tcp://0.0.0.0:0",
    ],
)
def test_addresses_of_every_kind_of_host_are_accepted(address):
    assert load_config(assignments=[f"router.worker_address={address}"]).router.worker_address == address


def test_connector_extra_takes_any_keys():
    config = load_config(assignments=["connector.extra.bucket.name=x"])
    assert config.connector.extra == {"bucket": {"name": "x"}}


@pytest.mark.parametrize(
    ("assignment", "param", "hint"),
    [
        ("cache.blok_size=16", "cache.blok_size", "did you mean cache.block_size?"),
        ("cahce.block_size=16", "cahce", "did you mean cache?"),
        ("cache.block_size=0", "cache.block_size", "cache.block_size = 0: expected a whole number, at least 1"),
        ("cache.block_size=24", "cache.block_size", "not a multiple of the hash block size 16"),
        ("router.port=70000", "router.port", "router.port = 70000: expected a whole number, at least 0 and at most 65535"),
        ("log.level=loud", "log.level", "log.level = 'loud': expected one of: DEBUG, INFO, WARNING, ERROR"),
        ("cache=3", "cache", "is a section"),
        ("cache.block_size.x=3", "cache.block_size", "expected a whole number"),
        (
            "cache.memory_bytes=1gig",
            "cache.memory_bytes",
            "= '1gig': expected a whole number, at least 1, or a size such as 1GiB",
        ),
        ("cache.memory_bytes=64K", "cache.memory_bytes", "or a size such as 1GiB, 512MiB or 64k"),
        ("router.images.max_bytes=1TiB", "router.images.max_bytes", "at least 1 and at most 20971520"),
        ("worker.ops_port=1k", "worker.ops_port", "= '1k': expected a whole number"),
        ("router.ops_port=70000", "router.ops_port", "= 70000: expected a whole number, at least 0 and at most 65535, or null"),
        ("connector.lease_s=soon", "connector.lease_s", "= 'soon': expected a number of seconds, above 0 and at most 31536000"),
        ("cache.kv_events=3", "cache.kv_events", "= 3: expected true or false"),
        ("tracing.endpoint=abc", "tracing.endpoint", "expected text of the form"),
        ("tracing.endpoint=http://x:99999", "tracing.endpoint", "Port out of range 0-65535; give http://HOST:PORT"),
        ("tracing.endpoint=http://x:0", "tracing.endpoint", "port 0 is none to connect to"),
        ("tracing.endpoint=http://[::1", "tracing.endpoint", "Invalid IPv6 URL; give http://HOST:PORT"),
        ("connector.lmcache.http_address=http://x:99999", "connector.lmcache.http_address", "Port out of range"),
        ("cache.block_size", "cache.block_size", "expected a.b=value"),
        ("connector.transports=shm,rdma", "connector.transports", "'rdma' is not a transport; allowed: shm, nixl, tcp"),
        (
            "ec_connector={name: p2p, transports: []}",
            "ec_connector.transports",
            "is empty: name at least one of shm, nixl, tcp",
        ),
        ("model.name=", "model.name", "expected text that is not empty"),
        ("worker.router_addresses=", "worker.router_addresses", "is empty: name the routers"),
        ("worker.router_addresses=[]", "worker.router_addresses", "is empty: name the routers"),
        ("connector.transports={a: 1}", "connector.transports", "is not a transport"),
        ("router.worker_address=127.0.0.1:5570", "router.worker_address", "expected tcp://host:port with port 0 to 65535"),
        ("router.worker_address=ipc:///tmp/x", "router.worker_address", "expected tcp://host:port"),
        ("worker.control_address=tcp://h:65536", "worker.control_address", "expected tcp://host:port"),
        ("worker.control_address=", "worker.control_address", "expected tcp://host:port"),
        ("worker.router_addresses=tcp://r1:1,r2:1", "worker.router_addresses", "'r2:1': expected tcp://host:port"),
        ("worker.router_addresses=tcp://r1:0", "worker.router_addresses", "with port 1 to 65535"),
        ("worker.router_addresses=tcp://r1:1,tcp://*:1", "worker.router_addresses", "'tcp://*:1': * is only for binding"),
        ("kvstore.address=tcp://*:5580", "kvstore.address", "* is only for binding; name the host to connect to"),
        ("agent.kv_events_address=tcp://*:5557", "agent.kv_events_address", "* is only for binding"),
        ("ec_connector.kvstore_address=tcp://*:5580", "ec_connector.kvstore_address", "* is only for binding"),
        ("connector.lmcache.server_address=tcp://*:5555", "connector.lmcache.server_address", "* is only for binding"),
        ("connector.lmcache.server_address=h:5555", "connector.lmcache.server_address", "expected tcp://host:port"),
        ("connector.lmcache.http_address=127.0.0.1:8080", "connector.lmcache.http_address", "expected http://host:port"),
    ],
)
def test_wrong_key_or_value_is_refused_with_its_path_and_what_is_allowed(assignment, param, hint):
    with pytest.raises(ConfigError) as caught:
        load_config(assignments=[assignment])
    assert caught.value.param == param
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1GiB", 1 << 30),
        ("512MiB", 512 << 20),
        ("1.5Gi", 3 << 29),
        ("64k", 64_000),
        ("64kB", 64_000),
        ("2 GB", 2 * 10**9),
        ("4096", 4096),
        ("1TiB", 1 << 40),
    ],
)
def test_size_with_a_unit_is_a_number(text, number):
    assert load_config(assignments=[f"cache.memory_bytes={text}"]).cache.memory_bytes == number


def test_sizes_are_read_from_files_and_for_tokens(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {max_model_len: 32Ki}\nrouter: {images: {max_bytes: 1MiB}}\n")
    config = load_config(path, overrides={"kvstore.memory_bytes": "2MiB"})
    assert (config.model.max_model_len, config.router.images.max_bytes, config.kvstore.memory_bytes) == (
        32768,
        1 << 20,
        2 << 20,
    )


def test_refused_secret_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"router.api_key": ["hunter2"]})
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis_password: @hunter2", r"found character '@' that cannot start any token \(at line 1, column 17\)"),
        ("redis_password: %hunter2", "found character '%'"),
        ("redis_password: *hunter2", r"found undefined alias \(at"),
        ("redis_password: !hunter2 x", r"constructor for the tag \(at"),
        ("redis_password: !hunter2!x y", r"undefined tag handle \(at"),
        ("a: &hunter2 x\nb: &hunter2 y", "found duplicate anchor; first occurrence: second occurrence"),
        ("redis_password: hunter2: x", "mapping values are not allowed here"),
        ("redis_password: 'hunter2", "found unexpected end of stream"),
        ("security: {other_cluster_keys: [hunter2]}", r"security\.other_cluster_keys = \(not shown\): expected text"),
        ("security: hunter2", "security is a section: expected a mapping, got text"),
        ("security: [hunter2]", "security is a section: expected a mapping, got a list"),
        ("security: {cluster_key:hunter2}", r"security\.cluster_key\.\.\.: a space is missing after its colon"),
        ("security: {cluster_key=hunter2}", r"security\.cluster_key\.\.\.: no key, write it as KEY: VALUE"),
        ("security:\n  ? cluster_key hunter2", r"security\.cluster_key\.\.\.: no key"),
        ("=hunter2: 1", r"unknown configuration key \.\.\.: no key"),
        ("router: {api_key: !!int hunter2}", r"a value with a tag \(!!\) is none of its type"),
        ("router: {api_key: !!bool hunter2}", r"a value with a tag \(!!\) is none of its type"),
        ("router: {api_key: !!timestamp hunter2}", r"a value with a tag \(!!\) is none of its type"),
        ("tracing: {endpoint: 'http://u:hunter2@h:1 x'}", r"tracing\.endpoint = \(not shown\)"),
        ("local: {vllm_arguments: [--api-key, hunter2]}", r"local\.vllm_arguments = \(not shown\)"),
    ],
)
def test_no_error_of_a_file_shows_a_secret(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert "hunter2" not in caught.value.message


def test_value_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="block_size is a value, not a section"):
        load_config(assignments=["cache.block_size=16", "cache.block_size.x=3"])


NO_UTF8 = os.fsdecode(b"ab\xff")  # as a process gets it from its command line and its environment


@pytest.mark.parametrize(
    "path", ["model.served_name", "model.cache_dir", "log.level", "router.api_key", "router.cors_origins", "connector.extra.x"]
)
def test_text_that_is_not_utf8_is_refused_with_its_path(path):
    with pytest.raises(ConfigError, match=rf"^{path}: character 3 of the text is a byte that is not UTF-8") as caught:
        load_config(assignments=[f"{path}={NO_UTF8}"])
    assert NO_UTF8 not in caught.value.message


def test_a_key_that_is_not_utf8_is_refused_as_it_can_be_shown():
    with pytest.raises(ConfigError, match=r"^model.ab\\udcff: character 3"):
        load_config(assignments=[f"model.{NO_UTF8}=1"])


def test_a_variable_that_is_not_utf8_is_refused_with_the_path_of_its_setting(monkeypatch):
    monkeypatch.setenv("KVFERRY_API_KEY", NO_UTF8)
    with pytest.raises(ConfigError, match=r"^router.api_key: character 3"):
        load_config()


def test_half_a_character_of_a_file_is_refused_with_its_path(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text('model: {served_name: "\\uD83D"}')
    with pytest.raises(ConfigError, match=r"^model.served_name: character 1"):
        load_config(path)


def test_an_alias_that_leads_to_itself_is_no_endless_search_for_text(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("connector: {extra: &all {again: *all}, name: x}\nunknown: 1")
    with pytest.raises(ConfigError, match="unknown"):
        load_config(path)


@pytest.mark.parametrize("text", ["fähre", "渡し船", "⛴️", "a b"])
def test_any_text_of_utf8_is_allowed(text):
    assert load_config(assignments=[f"model.served_name={text}"]).model.served_name == text


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "a: [1"), ("c.toml", "a = "), ("c.json", "{"), ("c.yaml", "- 1"), ("c.yaml", "\xff\x00")]
)
def test_broken_file_is_refused_with_its_path(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=name):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "log: {}\nrouter: {port: 1}\nrouter: {port: 2}\n", "key router is written twice, at lines 2 and 3"),
        ("c.yaml", "router:\n  images:\n    max_count: 1\n    'max_count': 2\n", "key max_count is written twice, at lines 3"),
        ("c.yaml", "router: {port: 1, port: 1}\n", "key port is written twice, at lines 1 and 1"),
        ("c.yaml", "router:\n  api_key:SECRET:\n  api_key:SECRET:\n", "key api_key is written twice, at lines 2 and 3"),
        ("c.json", '{"router": {"port": 1}, "router": {"port": 2}}', "key router is written twice"),
        ("c.json", '{"router": {"images": {"max_count": 1, "max_count": 2}}}', "key max_count is written twice"),
        ("c.toml", "[router]\nport = 1\n[router]\nport = 2\n", "Cannot declare ('router',) twice (at line 3"),
        ("c.toml", "[router]\nport = 1\nport = 2\n", "Cannot overwrite a value (at line 3"),
    ],
)
def test_a_key_that_is_written_twice_is_refused_though_parsers_take_the_last_one(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}: {said}" in caught.value.message
    assert "SECRET" not in caught.value.message


def test_keys_of_several_merges_are_all_taken(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router:\n  images: {<<: {max_count: 1}, <<: {max_bytes: 2}}\n")
    images = load_config(path).router.images
    assert (images.max_count, images.max_bytes) == (1, 2)


def test_a_key_that_is_written_twice_in_an_assignment_is_refused():
    with pytest.raises(ConfigError, match="key port is written twice"):
        load_config(assignments=["router={port: 1, port: 2}"])


def test_a_merged_mapping_may_be_overridden(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router: &r {images: &i {max_count: 1, max_bytes: 2}}\nconnector: {extra: {<<: *i, max_count: 3}}\n")
    assert load_config(path).connector.extra == {"max_count": 3, "max_bytes": 2}


def test_missing_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_dump_is_read_back_equal(tmp_path):
    config = load_config(assignments=["connector.transports=[tcp]", "connector.extra.a=1", "worker.engine_id=p0"])
    path = tmp_path / "dump.json"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_redis_password_comes_from_the_environment_as_it_is(monkeypatch):
    monkeypatch.setenv("KVFERRY_REDIS_PASSWORD", "a/b#c@d:e%f")
    config = load_config(assignments=["kvstore.redis_url=redis://redis:6379/0"])
    assert (config.kvstore.redis_password, config.kvstore.redis_url) == ("a/b#c@d:e%f", "redis://redis:6379/0")
    assert load_config().kvstore.redis_password == "a/b#c@d:e%f"
    monkeypatch.delenv("KVFERRY_REDIS_PASSWORD")
    assert load_config().kvstore.redis_password == ""


def test_api_key_comes_from_the_environment_unless_it_is_set(monkeypatch):
    monkeypatch.setenv("KVFERRY_API_KEY", "secret")
    assert load_config().router.api_key == "secret"
    assert load_config(assignments=["router.port=1"]).router.api_key == "secret"
    assert load_config(assignments=["router.api_key="]).router.api_key == ""
    monkeypatch.delenv("KVFERRY_API_KEY")
    assert load_config().router.api_key == ""


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("KVFERRY_CACHE", raising=False)
    assert default_cache_dir() == "/xdg/kvferry"
    monkeypatch.setenv("KVFERRY_CACHE", "/explicit")
    assert default_cache_dir() == "/explicit"


@pytest.mark.parametrize(
    ("assignments", "hint"),
    [
        (["connector.lease_renew_interval_s=30"], "connector.lease_renew_interval_s = 30 must be below connector.lease_s = 30"),
        (
            ["connector.transport_retry_s=61"],
            "connector.transport_retry_s = 61 must be at most connector.transport_retry_max_s = 60",
        ),
        (
            ["router.max_body_bytes=12582913", "router.max_upload_bytes=12582912"],
            "router.max_body_bytes = 12582913 must be at most router.max_upload_bytes = 12582912: lower",
        ),
        (
            ["router.max_body_bytes=1152921504606846977", "router.max_upload_bytes=1152921504606846976"],
            "router.max_body_bytes = 1152921504606846977 must be at most router.max_upload_bytes = 1152921504606846976: lower",
        ),
        (["connector.lease_s=601"], "connector.lease_s = 601 must be at most connector.lease_max_s = 600"),
        (["router.heartbeat_interval_s=5"], "router.heartbeat_interval_s = 5 must be below router.heartbeat_timeout_s = 5"),
        (
            ["kvstore.heartbeat_interval_s=5"],
            "kvstore.heartbeat_interval_s = 5 must be below kvstore.client_timeout_s = 5",
        ),
        (
            ["kvstore.redis_timeout_s=2", "kvstore.redis_url=redis://redis:6379/0"],
            "kvstore.redis_timeout_s = 2 must be below kvstore.request_timeout_s = 2",
        ),
        (["worker.host_slot=1"], "worker.host_slot = 1 must be below worker.workers_on_host = 1"),
        (["router.process_number=1"], "router.process_number = 1 must be below router.processes_at_port = 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_paths_and_the_fix(assignments, hint):
    with pytest.raises(ConfigError, match=hint) as refused:
        load_config(assignments=assignments)
    assert refused.value.param == assignments[0].partition("=")[0]
    assert "raise the second" in refused.value.message


@pytest.mark.parametrize(("setting", "value"), [("router.ops_port", "65534"), ("router.worker_address", "tcp://[::1]:65534")])
def test_the_ports_of_several_router_processes_are_ports(setting, value):
    for num_processes, is_right in ((2, True), (3, False)):
        assignments = [f"{setting}={value}", f"router.processes={num_processes}"]
        if is_right:
            load_config(assignments=assignments)
            continue
        with pytest.raises(ConfigError, match=r"router\.processes = 3: .* choose a port up to 65533") as refused:
            load_config(assignments=assignments)
        assert refused.value.param == setting


@pytest.mark.parametrize(
    "assignment",
    [
        "cache.watermark=1.0",
        "cache.watermark=.nan",
        "scheduler.max_num_seqs=65537",
        "connector.lease_s=.inf",
        "connector.lease_s=.nan",
        "kvstore.redis_ttl_s=.inf",
        "kvstore.redis_ttl_s=1.0e+15",
        "worker.drain_timeout_s=1.0e+9",
        "worker.cpu_threads=1025",
        "worker.cpu_threads=99999999999999999999",
        "kvstore.redis_url=abc",
        "kvstore.redis_url=http://redis:6379",
        "kvstore.redis_url=redis://redis:port",
        "kvstore.redis_url=redis://redis:0/0",
        "kvstore.redis_url=redis://:secret@redis/0",
        "kvstore.redis_url=REDIS://redis:6379/0",
        "kvstore.redis_url=redis:redis",
        "kvstore.redis_url=unix:/run/redis.sock",
        "kvstore.redis_url=redis://a..b/0",
    ],
)
def test_values_that_nothing_could_work_with_are_refused(assignment):
    with pytest.raises(ConfigError) as refused:
        load_config(assignments=[assignment])
    assert refused.value.param == assignment.partition("=")[0]


def test_no_more_pixels_can_be_allowed_than_a_worker_decodes():
    allowed = load_config(assignments=[f"router.images.max_pixels={MAX_PIXELS}"])
    assert allowed.router.images.max_pixels == MAX_PIXELS
    with pytest.raises(ConfigError, match=rf"router\.images\.max_pixels = .* at most {MAX_PIXELS}"):
        load_config(assignments=[f"router.images.max_pixels={MAX_PIXELS + 1}"])


def test_a_body_holds_a_data_url_of_the_largest_image_and_some_text():
    router = load_config().router
    assert router.max_body_bytes >= len(base64.b64encode(bytes(router.images.max_bytes))) + (1 << 20)


def test_equal_lease_bounds_are_allowed_and_survive_the_round_trip(tmp_path):
    config = load_config(assignments=["connector.lease_max_s=30", "worker.workers_on_host=3", "worker.host_slot=2"])
    path = tmp_path / "c.json"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_several_connectors_are_named_in_order():
    config = load_config(assignments=["connector.name=multi", "connector.connectors=[p2p,store]"])
    assert config.connector.names == ("p2p", "store")
    assert load_config().connector.names == ("p2p",)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["connector.name=multi"], "needs connector.connectors"),
        (["connector.connectors=[p2p,store]"], "is for connector.name = multi"),
        (["connector.name=multi", "connector.connectors=[p2p,p2p]"], "'p2p' is named twice"),
        (["connector.name=multi", "connector.connectors=[p2p,multi]"], "one of its own parts"),
        (["connector.name=multi", "connector.connectors=[p2p]", "connector.transports=[pigeon]"], "'pigeon' is not"),
    ],
)
def test_connectors_that_cannot_be_meant_are_refused(assignments, said):
    with pytest.raises(ConfigError, match=said):
        load_config(assignments=assignments)


@pytest.mark.parametrize("choice", ["on", "off", "auto"])
def test_a_choice_is_taken_as_it_stands_though_yaml_has_other_words_for_it(choice):
    assert load_config(assignments=[f"scheduler.async_scheduling={choice}"]).scheduler.async_scheduling == choice


@pytest.mark.parametrize("choice", ["on", "off", "auto"])
def test_a_choice_in_a_file_may_be_a_word_that_yaml_reads_as_true_or_false(tmp_path, choice):
    path = tmp_path / "c.yaml"
    path.write_text(f"scheduler: {{async_scheduling: {choice}}}")
    assert load_config(path).scheduler.async_scheduling == choice
    path.write_text("log: {level: on}")
    with pytest.raises(ConfigError, match=r"log\.level = True: expected one of"):
        load_config(path)


@pytest.mark.parametrize("names", ["connector.name=lmcache", "connector.name=multi"])
def test_async_scheduling_is_refused_beside_a_connector_that_judges_each_step_first(names):
    assignments = [names, "scheduler.async_scheduling=on"]
    if names.endswith("multi"):
        assignments.append("connector.connectors=p2p,lmcache")
    with pytest.raises(ConfigError, match="lmcache judges each step") as caught:
        load_config(assignments=assignments)
    assert caught.value.param == "scheduler.async_scheduling"


def test_a_planner_sees_all_prompts_of_its_router():
    with pytest.raises(ConfigError, match=r"router\.processes = 2.*own prompts only") as caught:
        load_config(assignments=["router.planner.enabled=true", "router.processes=2"])
    assert caught.value.param == "router.planner.enabled"
    assert load_config(assignments=["router.planner.enabled=true"]).router.planner.enabled


def test_a_local_prefill_needs_predicted_times():
    path = "router.local_prefill_itl_ms"
    with pytest.raises(ConfigError, match=r"local_prefill_itl_ms = 50.*least_loaded.*set predicted") as caught:
        load_config(assignments=[f"{path}=50", "router.routing=least_loaded"])
    assert caught.value.param == path
    assert load_config(assignments=[f"{path}=50"]).router.local_prefill_itl_ms == 50
