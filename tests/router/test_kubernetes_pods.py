"""Which nodes follow from pods: one by one, and after any lists."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_double import pod_of

from kvrelay.router.membership.kubernetes_pods import Pod, PodList, Pods
from kvrelay.router.nodes.members import NodeSpec
from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError

P = "http://10.0.0.1:8100"


def pod(changes: dict[str, Any] | None = None, url: str = P, **fields: Any) -> Pod:
    """A pod of a prefill node; `changes` are by dotted path."""
    made = pod_of(fields.pop("name", "p"), url, fields.pop("role", "prefill"), **fields)
    for path, value in (changes or {}).items():
        inner = made
        *way, last = path.split("|")
        for step in way:
            inner = inner[step]
        inner[last] = value
    return msgspec.json.decode(msgspec.json.encode(made), type=Pod)


def told(*there: Pod) -> list[NodeSpec]:
    return list(Pods().listed(there).nodes)


def test_a_pod_is_a_node_by_its_labels_its_port_and_its_uid() -> None:
    assert told(pod()) == [NodeSpec(P, Role.PREFILL, "", "uid-p")]
    labelled = pod(
        {"metadata|labels|kvrelay/model": "tiny", "metadata|annotations": {"kvrelay/port": "81"}}
    )
    assert told(labelled) == [NodeSpec("http://10.0.0.1:81", Role.PREFILL, "tiny", "uid-p")]
    slashed = pod(
        {
            "metadata|labels|kvrelay/model": "tiny",
            "metadata|annotations": {"kvrelay/model": "org/tiny"},
        }
    )
    assert [node.model for node in told(slashed)] == ["org/tiny"]
    assert [node.url for node in told(pod(url="http://[fd00::1]:8100"))] == [
        "http://[fd00::1]:8100"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"status|conditions": [{"type": "Ready", "status": "False"}]},
        {"status|conditions": [{"type": "Ready", "status": "Unknown"}]},
        {"status|conditions": None},
        {"metadata|deletionTimestamp": "2026-01-01T00:00:30Z"},
        {"status|phase": "Failed"},
        {"status|phase": "Succeeded"},
        {"status|containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 1}}}]},
        {
            "status|containerStatuses": [
                {"name": "node", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
            ]
        },
        {"status": {}},
    ],
)
def test_only_pods_that_are_ready_and_stay_are_nodes(changes: dict[str, Any]) -> None:
    told = Pods().listed([pod(changes)])
    assert (told.nodes, told.complaints) == ((), ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"metadata|labels": {"kvrelay/role": "both"}},
            "kvrelay/role must be prefill or decode, got 'both'",
        ),
        ({"spec|containers": [{"name": "node"}]}, "container port named http"),
        ({"spec|containers": None}, "container port named http"),
        ({"metadata|annotations": {"kvrelay/port": "x"}}, "kvrelay/port must be a port, got 'x'"),
        ({"metadata|annotations": {"kvrelay/port": "70000"}}, "kvrelay/port must be a port"),
        (
            {"metadata|annotations": {"kvrelay/port": "000001" + "0" * 5000}},
            "kvrelay/port must be a port",
        ),
        ({"status|podIP": None}, "no address"),
        ({"status|podIP": "not an address"}, "node address"),
    ],
)
def test_a_pod_that_cannot_be_a_node_is_complained_of_once_and_harms_no_other(
    changes: dict[str, Any], said: str
) -> None:
    wrong = pod(changes, name="wrong")
    with pytest.raises(RequestError, match=said):
        wrong.node()
    pods = Pods()
    first = pods.listed([wrong, pod()])
    assert [node.url for node in first.nodes] == [P]
    assert said in first.complaints[0]
    assert pods.listed([wrong, pod()]).complaints == ()


def test_an_end_is_told_once_and_only_if_it_is_known() -> None:
    ends = pod({"metadata|deletionTimestamp": "2026-01-01T00:00:30Z"})
    for last, gone in ((ends, {P}), (pod(), set())):  # the other one has lost its label
        pods = Pods()
        pods.listed([pod()])
        assert pods.listed([last]).gone == set()  # it drains
        assert pods.listed([]).gone == gone
        assert pods.listed([]).gone == set()


def test_a_container_that_ended_is_told_and_may_come_back() -> None:
    pods = Pods()
    pods.listed([pod()])
    ended = pod(
        {"status|containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 137}}}]}
    )
    assert pods.listed([ended]).gone == {P}
    assert [node.url for node in pods.listed([pod()]).nodes] == [P]
    assert pods.listed([pod({"status|phase": "Failed"})]).gone == {P}
    # An evicted pod may be listed for days, and its address be another's.
    assert pods.listed([pod({"status|phase": "Failed"})]).gone == set()


def test_an_address_that_another_pod_has_now_is_not_gone() -> None:
    younger = pod({"metadata|creationTimestamp": "2026-01-02T00:00:00Z"}, uid="b", name="p2")
    pods = Pods()
    pods.listed([pod()])
    assert [node.generation for node in pods.listed([younger, pod()]).nodes] == ["b"]
    again = pods.listed([younger, pod({"status|phase": "Failed"})])
    assert ([node.generation for node in again.nodes], again.gone) == (["b"], set())


def test_a_pod_that_moves_leaves_its_address() -> None:
    pods = Pods()
    pods.listed([pod()])
    moved = pods.listed([pod(url="http://10.0.0.2:8100")])
    assert ([node.url for node in moved.nodes], moved.gone) == (["http://10.0.0.2:8100"], {P})


def test_what_go_writes_as_null_is_read() -> None:
    text = b"""{"metadata": {"resourceVersion": "7", "continue": null, "remainingItemCount": 2}, "items": [{"metadata":
        {"name": "p", "labels": null, "annotations": null, "creationTimestamp": null}, "spec": {"containers": null},
        "status": {"podIP": null, "conditions": null, "containerStatuses": [{"name": "c", "state": null}]}}]}"""
    listed = msgspec.json.decode(text, type=PodList)
    assert listed.metadata.resource_version == "7"
    assert told(*(listed.items or ())) == []
    assert msgspec.json.decode(b'{"metadata": {}, "items": null}', type=PodList).items is None


STATES: list[dict[str, Any]] = [
    {},
    {"metadata|deletionTimestamp": "2026-01-01T00:00:30Z"},
    {"status|conditions": [{"type": "Ready", "status": "False"}]},
    {"status|phase": "Failed"},
]
some_pods = st.builds(
    lambda uid, ip, state, day: pod(
        {**copy.deepcopy(STATES[state]), "metadata|creationTimestamp": f"2026-01-0{day}T00:00:00Z"},
        f"http://10.0.0.{ip}:80",
        uid=uid,
        name=uid,
    ),
    st.sampled_from("abcd"),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
)
unique_pods = st.lists(some_pods, max_size=4, unique_by=lambda each: each.metadata.uid)


@given(st.lists(unique_pods, max_size=12), unique_pods)
def test_after_a_list_all_is_as_it_says_whatever_was_there_before(
    lists: list[list[Pod]], truth: list[Pod]
) -> None:
    pods = Pods()
    named: set[str] = set()
    for there in [*lists, truth]:
        told_now = pods.listed(there)
        urls = {node.url for node in told_now.nodes}
        assert len(urls) == len(told_now.nodes)
        assert not told_now.gone & urls
        assert told_now.gone <= named
        named |= urls
    assert list(told_now.nodes) == told(*truth)
    assert pods.listed(truth).gone == set()
