"""Policies by the names that an operator gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from router.policies.cost import cost
from router.policies.least_queue import least_queue
from router.policies.policy import Policy
from router.policies.power_of_two import power_of_two
from router.policies.prefix import prefix
from router.policies.random_node import random_node
from router.policies.round_robin import round_robin
from router.policies.session import session

__all__ = ["POLICIES"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "cost": cost,
        "least_queue": least_queue,
        "power_of_two": power_of_two,
        "prefix": prefix,
        "random": random_node,
        "round_robin": round_robin,
        "session": session,
    }
)
