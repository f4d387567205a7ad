"""TLS of the router: its certificate, which changes while it serves, and the nodes that it trusts."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest
from router_doubles import cluster, router_over, until

from kvrelay.router.server import make_server
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig
from tests.cluster.certificates import authority, signed

FILES = ("cert.pem", "key.pem")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and the certificates `first` and `second`."""
    folder = authority(tmp_path_factory.mktemp("tls"))
    signed(folder, "first")
    signed(folder, "second")
    return folder


def put(made: Path, name: str, there: Path) -> dict[str, str]:
    """Have a certificate served; the settings for it."""
    for kind, file in zip((".pem", ".key"), FILES, strict=True):
        shutil.copy(made / f"{name}{kind}", there / f"new-{file}")
        (there / f"new-{file}").replace(there / file)
    return {"ssl_certfile": str(there / FILES[0]), "ssl_keyfile": str(there / FILES[1])}


async def test_the_router_serves_https_and_trusts_nodes_by_their_authority(
    made: Path, tmp_path: Path
) -> None:
    ca = str(made / "ca.pem")
    context = ssl.create_default_context(cafile=ca)
    async with cluster(
        **put(made, "first", tmp_path)
    ) as inner:  # stands in for an https node: it has a /health
        inner_url = inner.url.replace("http://", "https://")
        async with inner.http.get(f"{inner_url}/health", ssl=context) as answer:
            assert answer.status == 503
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await inner.http.get(f"{inner_url}/health")
        for trusted, told in (
            ("", "CERTIFICATE_VERIFY_FAILED"),
            (ca, "its health check answers 503"),
        ):
            config = RouterConfig(
                prefill=(inner_url,),
                ssl_ca_certs=trusted,
                health_interval_s=0.05,
            )
            async with router_over(config) as outer:
                await until(lambda: told in outer.router.pool.nodes[0].reason)  # noqa: B023


async def test_who_has_no_certificate_is_not_served_where_one_is_wanted(
    made: Path, tmp_path: Path
) -> None:
    ca = str(made / "ca.pem")
    wanted = {"ssl_ca_certs": ca, "ssl_cert_reqs": 2}
    async with cluster(**put(made, "first", tmp_path), **wanted) as c:
        url = c.url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=ca)
        with pytest.raises(aiohttp.ClientError):
            await c.http.get(f"{url}/live", ssl=context)
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(made / "second.pem", made / "second.key")
        async with c.http.get(f"{url}/live", ssl=context) as answer:
            assert answer.status == 200


def test_files_that_cannot_be_used_are_told_before_anything_listens(
    made: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for setting in ("ssl_certfile", "ssl_ca_certs", "node_ssl_certfile"):
        for file in (wrong, tmp_path / "missing.pem"):
            with pytest.raises(ConfigError, match=f"{setting} .*cannot be used"):
                make_server(RouterConfig(**{setting: str(file)}))
    with pytest.raises(ConfigError, match="key values mismatch"):
        make_server(
            RouterConfig(ssl_certfile=str(made / "first.pem"), ssl_keyfile=str(made / "second.key"))
        )


def test_a_node_with_a_certificate_announces_an_https_address() -> None:
    assert (
        NodeConfig(EngineConfig("m"), port=8100, ssl_certfile="c").url == "https://127.0.0.1:8100"
    )
    assert (
        NodeConfig(EngineConfig("m"), host="::1", port=8100, ssl_certfile="c").url
        == "https://[::1]:8100"
    )
