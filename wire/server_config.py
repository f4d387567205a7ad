"""Settings that a router and a node have in common: addresses, keys, TLS, browsers, limits, logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.wire.config_checks import LogFormat, Port, Positive, Some, check_fields, require

__all__ = ["ServerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """A server of HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on."""
    api_key: str = field(default="", repr=False)
    """If set, clients must send `Authorization: Bearer <api_key>`, except for health checks."""
    ssl_certfile: str = ""
    """PEM file with the server's certificate and chain, to serve https."""
    ssl_keyfile: str = ""
    """PEM file with the certificate's private key, if in a separate file."""
    ssl_ca_certs: str = ""
    """PEM file with the authorities of clients' certificates, with ssl_cert_reqs; a router also
    trusts them for https:// nodes, where empty takes the system's.
    """
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """2 serves only clients with a certificate from ssl_ca_certs, even for health checks; 1 checks
    certificates that clients present; 0 asks for none.
    """
    root_path: str = ""
    """The path under which a proxy serves this, for example /llm, whether or not the proxy strips
    it from requests.
    """
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser, for example '["https://chat.example"]';
    ["*"] allows all. None by default, unlike vLLM: without a key, any page visited from this
    network could.
    """
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that these pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that these pages may send."""
    allow_credentials: bool = False
    """Let these pages send what the browser adds, such as a client's certificate; not with ["*"].
    """
    max_body_bytes: Some = 16 << 20
    """Longest request body, not counting a hand-over sent with it."""
    request_deadline_s: Positive = 600.0
    """A request may take this long."""
    log_bodies: bool = False
    """Log the first 2,000 characters of each request's body: users' own words."""
    log_format: LogFormat = "text"
    """Log lines as text or json (an object each, with request and trace ids)."""
    otlp_traces_endpoint: str = ""
    """Send a trace of each request to this address by OTLP over HTTP, for example
    http://127.0.0.1:4318/v1/traces; empty takes OTEL_EXPORTER_OTLP_ENDPOINT, if set.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_keys("api_key")
        require(
            re.fullmatch(r"(/[\w.~!$&'()*+,;=:@-]+)*", self.root_path) is not None,
            f"root_path must begin with / and not end with it, for example /llm, got "
            f"{self.root_path!r}",
        )
        for origin in self.allowed_origins:
            require(
                origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None,
                f"allowed_origins must be * or like https://chat.example, without a path, got "
                f"{origin!r}",
            )
        require(
            not (self.allow_credentials and "*" in self.allowed_origins),
            "allow_credentials with allowed_origins * would let any page act for whoever visits "
            "it; name the origins",
        )
        require(
            bool(self.ssl_certfile) or not self.ssl_keyfile,
            "ssl_keyfile needs ssl_certfile, the certificate that it belongs to",
        )
        require(
            not self.ssl_cert_reqs or bool(self.ssl_certfile and self.ssl_ca_certs),
            f"ssl_cert_reqs {self.ssl_cert_reqs} needs ssl_certfile, to serve https, and "
            "ssl_ca_certs, whose certificates are good",
        )

    def url_at(self, host: str) -> str:
        """Return the server's address by a name of its host."""
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def check_keys(self, *names: str) -> None:
        """Raise ConfigError for a key that no client can send as a bearer token."""
        for name in names:
            key = getattr(self, name)
            require(
                key.isascii() and key.isprintable() and key == key.strip(),
                f"{name} must be ASCII, without line ends and without spaces at its ends: it is "
                f"sent in a header",
            )
