"""Origins of web pages in the settings: those that a browser can send, and no others."""

import pytest

from core.config import load_config
from core.errors import ConfigError


@pytest.mark.parametrize("origin", ["abc", "a:80", "http://", "", "https://a/", "https://A.b", "https://a:443", "https://u@a"])
def test_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match=r"router\.cors_origins: '.*' is no origin") as refused:
        load_config(assignments=[f"router.cors_origins=[https://chat.example, '{origin}']"])
    assert refused.value.param == "router.cors_origins"


@pytest.mark.parametrize("origin", ["file://", "qrc://", "safari-web-extension://0A1B-2C", "app://A.b:8", "https://a:80"])
def test_origin_of_another_scheme_may_have_no_host_or_one_in_upper_case(origin):
    assert load_config(overrides={"router.cors_origins": [origin]}).router.cors_origins == (origin,)


@pytest.mark.parametrize("origin", ["file:///", "app://A/b", "://a", "https://:443", "http://a:80", "HTTP://a", "app://u@a"])
def test_origin_of_any_scheme_with_a_path_or_its_default_port_is_refused(origin):
    with pytest.raises(ConfigError, match="is no origin"):
        load_config(overrides={"router.cors_origins": [origin]})


@pytest.mark.parametrize("origin", ["*", "null", "http://a:8080", "https://[::1]:3", "https://*.b", "*.b", "app://localhost"])
def test_origin_that_a_browser_can_send_is_accepted(origin):
    assert load_config(overrides={"router.cors_origins": [origin]}).router.cors_origins == (origin,)
