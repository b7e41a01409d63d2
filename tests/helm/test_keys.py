"""The cluster key: where pods have it from, what replaces them when it changes, and that rendering does not invent one."""

import base64

import pytest
import yaml

pytestmark = pytest.mark.slow

KEY, OTHER = "k" * 40, "o" * 40
ROLES = ("router", "prefill", "decode")


def checksum(find, role, *sets, preset="cpu-minimal"):
    template = find(preset, "Deployment", role, *sets)["spec"]["template"]
    return template["metadata"]["annotations"]["kvferry/secret-checksum"]


@pytest.mark.parametrize("role", ROLES)
def test_another_key_replaces_the_pods(find, role):
    given = f"security.clusterKey.value={KEY}"
    assert checksum(find, role, given) == checksum(find, role, given)
    assert checksum(find, role, given) != checksum(find, role, f"security.clusterKey.value={OTHER}")
    assert checksum(find, role, given) != checksum(find, role, given, f"security.clusterKey.others={{{OTHER}}}")


@pytest.mark.parametrize("role", ROLES)
def test_revision_replaces_the_pods_where_secrets_cannot_be_read(find, role):
    assert checksum(find, role, preset="ha") != checksum(find, role, "security.revision=2", preset="ha")


def test_checksum_does_not_give_the_key_away(find, helm):
    rendered = helm.template("cpu-minimal", sets=(f"security.clusterKey.value={KEY}",))
    assert KEY not in rendered
    assert rendered.count(base64.b64encode(KEY.encode()).decode()) == 1  # in the Secret


def test_a_router_with_a_secret_for_its_clients_does_not_start_without_a_key(find):
    for sets, is_required in ((["security.apiKeys.existingSecret=keys"], True), ([], False)):
        files = find("cpu-minimal", "ConfigMap", "router", *sets)["data"]
        assert ("requires_api_key: true" in files["config.yaml"]) == is_required
        assert "requires_api_key" not in find("cpu-minimal", "ConfigMap", "prefill", *sets)["data"]["config.yaml"]


def test_rendering_twice_without_a_cluster_gives_the_same(helm):
    sets = ("security.clusterKey.existingSecret=kvferry-cluster", "security.clusterKey.value=")
    assert helm.template("cpu-minimal", sets=sets) == helm.template("cpu-minimal", sets=sets)


def test_made_key_is_one_in_a_rendering(helm):
    """The checksum is of the key that the Secret holds, so the next upgrade, which finds that one, replaces nothing."""
    text = helm.template("cpu-minimal", sets=("security.clusterKey.value=", "security.clusterKey.generate=true"))
    manifests = [item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item]
    (secret,) = (item for item in manifests if item["kind"] == "Secret")
    made = base64.b64decode(base64.b64decode(secret["data"]["cluster-key"])).hex()
    assert len(made) == 64
    sums = {
        item["spec"]["template"]["metadata"]["annotations"]["kvferry/secret-checksum"]
        for item in manifests
        if item["kind"] == "Deployment"
    }
    assert len(sums) == 1


@pytest.mark.parametrize("role", ROLES)
def test_pods_may_be_told_keys_that_servers_hold_besides(find, role):
    (container,) = find("ha", "Deployment", role)["spec"]["template"]["spec"]["containers"]
    (entry,) = (entry for entry in container["env"] if entry["name"] == "KVFERRY_OTHER_CLUSTER_KEYS")
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "kvferry-cluster", "key": "other-cluster-keys", "optional": True}


def test_given_other_keys_are_in_the_secret(find):
    sets = (f"security.clusterKey.value={KEY}", f"security.clusterKey.others={{{OTHER}}}")
    secret = find("cpu-minimal", "Secret", "cluster-key", *sets)
    assert base64.b64decode(secret["data"]["other-cluster-keys"]).decode() == OTHER
