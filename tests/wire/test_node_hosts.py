"""Which hosts --node-allow names, however an address is written."""

from __future__ import annotations

import pytest

from kvrelay.wire.config_checks import is_node_allowed
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

ALLOW = ("node-1.internal", "Gpu_7", "10.1.0.0/16", "192.0.2.7", "2001:db8::/32", "[::1]")
NODES = ("http://prefill.example:8100", "https://[2001:DB9:0::5]:9", "http://127.0.0.1:8100")


@pytest.mark.parametrize(
    "url",
    [
        "http://node-1.internal",
        "https://NODE-1.Internal.:8443/base/",
        "http://gpu_7:1",
        "http://10.1.255.255:65535",
        "http://[::ffff:10.1.0.1]:80",
        "http://192.0.2.7",
        "http://[2001:db8:0:0::1]:80",
        "http://[2001:0DB8::192.0.2.1]",
        "http://[0:0:0:0:0:0:0:1]:8100",
        "http://prefill.example:9999",
        "http://PREFILL.example.",
        "http://[2001:db9::0005]:80",
        "http://127.0.0.1:22",
    ],
)
def test_a_host_that_is_named_is_allowed_however_it_is_written(url: str) -> None:
    assert is_node_allowed(url, ALLOW, NODES)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "node-1.internal",
        "//node-1.internal",
        "ftp://node-1.internal",
        "http:node-1.internal",
        "http:///node-1.internal",
        # Who is named before @ is nobody's host.
        "http://node-1.internal@evil.example",
        "http://node-1.internal:80@evil.example:80",
        "http://node-1.internal%40evil.example",
        "http://evil.example\\@node-1.internal",
        "http://node-1.internal\\.evil.example",
        "http://evil.example#@node-1.internal",
        "http://evil.example?@node-1.internal",
        "http://evil.example/node-1.internal",
        # Names that begin, end or nearly read like one.
        "http://node-1.internal.evil.example",
        "http://evil-node-1.internal",
        "http://x.node-1.internal",
        "http://node-1.internal..",
        "http://.node-1.internal",
        "http://node-1\u3002internal",
        "http://\uff4eode-1.internal",
        "http://node-1.internal\u200b",
        "http://node-1%2einternal",
        "http://node-1.internal :80",
        "http://node-1.internal\t:80",
        "http://node-1.internal:80:80",
        "http://node-1.internal:99999",
        "http://node-1.internal:+80",
        # Addresses: others, in other forms, beside brackets.
        "http://10.2.0.1",
        "http://10.1.0.1.evil.example",
        "http://10.1.257",
        "http://167837953",
        "http://0x0a010101",
        "http://012.1.1.1",
        "http://127.1:8100",
        "http://2130706433:8100",
        "http://localhost:8100",
        "http://[::ffff:10.2.0.1]",
        "http://[2001:db8::1%25eth0]",
        "http://[2001:db8::1%eth0]",
        "http://[::1]evil.example",
        "http://evil.example[::1]",
        "http://[::1]:80@evil.example",
        "http://[node-1.internal]",
        "http://[v1.node-1.internal]",
        "http://[::1",
        "http://" + "a" * 600 + ".node-1.internal",
    ],
)
def test_no_other_host_is_taken_for_one(url: str) -> None:
    assert not is_node_allowed(url, ALLOW, NODES)


@pytest.mark.parametrize(
    "entry",
    ["", " ", "http://node", "node:8100", "*", "*.internal", "10.1.0.1/16", "10.1.0.0/33", "node/16", "a b", "a@b",
     "127.1", "0x7f.1", "fe80::1%eth0", "[::1]:80", "-a", "a..b", "ä.example"],
)  # fmt: skip
def test_an_entry_that_names_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="node_allow"):
        RouterConfig(node_allow=(entry,))


def test_who_may_be_a_node_matters_only_where_there_is_a_key_to_lose() -> None:
    lists = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}
    assert RouterConfig(**lists).may_be_node("http://evil.example")
    assert not RouterConfig(**lists, node_api_key="k").may_be_node("http://evil.example")
    assert RouterConfig(**lists, node_api_key="k").may_be_node("http://d:2")
    assert RouterConfig(**lists, node_api_key="k", node_allow=("evil.example",)).may_be_node(
        "http://evil.example"
    )
