"""Policies by the names that an operator gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from router.policies.least_queue import least_queue
from router.policies.policy import Policy
from router.policies.prefix import prefix
from router.policies.round_robin import round_robin
from router.policies.session import session

__all__ = ["POLICIES"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"least_queue": least_queue, "prefix": prefix, "round_robin": round_robin, "session": session}
)
