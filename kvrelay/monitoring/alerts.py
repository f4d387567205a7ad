"""The alert rules: what an operator must hear of without looking. Each says what is wrong and where to look."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.monitoring.panels import share_within
from kvrelay.monitoring.targets import AVAILABLE, FIRST_TOKEN_S, IN_TIME, NEXT_TOKEN_S

__all__ = ["ALERTS", "Alert"]


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `expr` has had a value for as long as `after`. `severity`: critical wakes somebody, warning waits."""

    name: str
    expr: str
    after: str
    severity: str
    says: str


def _broken(span: str) -> str:
    """Share of requests that ended with a 5xx."""
    asked = f"sum(rate(kvrelay_router_requests_total[{span}]))"
    return f'sum(rate(kvrelay_router_requests_total{{status=~"5.."}}[{span}])) / {asked}'


def _burns(times: float, long: str, short: str) -> str:
    """The budget of errors is spent so many times as fast as it may be, lately and for longer."""
    limit = round(times * (1 - AVAILABLE), 6)
    return f"({_broken(long)}) > {limit} and ({_broken(short)}) > {limit}"


def _late(what: str, bound_s: float) -> str:
    """Of some model, fewer than the target are within this bound."""
    return f"({share_within(f'kvrelay_router_{what}_seconds', bound_s, 'model_name', span='10m')}) < {IN_TIME}"


_UP = "max by (node, role) (kvrelay_router_node_up)"
# By model; a node whose model is not known yet is none of a model of its own.
_UP_OF_MODEL = 'max by (node, role, model_name) (kvrelay_router_node_up{model_name=~".+"})'
_BREAKER = "kvrelay_router_breaker_state"


def _of_any_model(expr: str) -> str:
    return f'label_replace({expr}, "model_name", "any model", "", "")'


ALERTS = (
    Alert(
        "KvrelayTargetDown",
        'up{job=~".*kvrelay.*"} == 0',
        "12m",  # a pod drains for 600 s at most, and a node listens only when it has its model
        "warning",
        "{{ $labels.instance }} is not scraped: it is gone or hangs, or drains or downloads its model for very long",
    ),
    # What is gone has no series that could be 0: pods are forgotten, and a container's name leads nowhere.
    Alert(
        "KvrelayNothingServes",
        _of_any_model('absent(kvrelay_router_node_up{role="decode"})')
        + ' or group by (model_name) (kvrelay_router_node_up{role="prefill",model_name=~".+"})'
        ' unless on (model_name) group by (model_name) (kvrelay_router_node_up{role="decode"})',
        "1m",
        "critical",
        "no router is scraped that knows a decode node of {{ $labels.model_name }}: nobody is answered",
    ),
    Alert(
        "KvrelayRoleDown",
        f"sum by (role, model_name) ({_UP_OF_MODEL}) == 0 or on (role) " + _of_any_model(f"sum by (role) ({_UP}) == 0"),
        "30s",
        "critical",
        "no {{ $labels.role }} node of {{ $labels.model_name }} takes requests: without decode nodes nothing is "
        "answered, without prefill nodes decode nodes compute prompts",
    ),
    Alert(
        "KvrelayNodeDown", f"{_UP} == 0", "5m", "warning", "{{ $labels.role }} node {{ $labels.node }} takes nothing"
    ),
    Alert(
        "KvrelayBreakerOpen",
        # Open for a minute at most, then tried: it is open now and then, and never closed.
        f"max by (node, leg) ({_BREAKER}) > 0 and max by (node, leg) (max_over_time({_BREAKER}[3m])) == 2",
        "2m",
        "warning",
        "{{ $labels.leg }} legs break on {{ $labels.node }}: its log says why",
    ),
    Alert(
        "KvrelayErrorsFast",
        _burns(14.4, "1h", "5m"),
        "2m",
        "critical",
        f"errors spend the budget of a month ({1 - AVAILABLE:.2%} of requests) in two days",
    ),
    Alert(
        "KvrelayErrorsSlow", _burns(6, "6h", "30m"), "15m", "warning", "errors spend the budget of a month in five days"
    ),
    Alert(
        "KvrelayFirstTokenLate",
        _late("time_to_first_token", FIRST_TOKEN_S),
        "10m",
        "warning",
        f"fewer than {IN_TIME:.0%} of first tokens of {{{{ $labels.model_name }}}} come within {FIRST_TOKEN_S:g} s: "
        "the stages say where they wait; more prefill nodes, or fewer requests",
    ),
    Alert(
        "KvrelayTokensSlow",
        _late("inter_token_latency", NEXT_TOKEN_S),
        "10m",
        "warning",
        f"fewer than {IN_TIME:.0%} of answers of {{{{ $labels.model_name }}}} have at most {NEXT_TOKEN_S:g} s between "
        "tokens: more decode nodes, or fewer requests on each",
    ),
    Alert(
        "KvrelayRefusing",
        "sum by (reason) (rate(kvrelay_router_refused_total[5m])) > 0",
        "5m",
        "warning",
        "requests are refused ({{ $labels.reason }})",
    ),
    Alert(
        "KvrelayQueueing",
        "min_over_time(sum by (model_name) (kvrelay_router_queue_waiting)[10m:30s]) > 0",
        "5m",
        "warning",
        "requests for {{ $labels.model_name }} wait to begin all the time: all its nodes are busy",
    ),
    Alert(
        "KvrelayNotDisaggregating",
        "sum by (model_name, reason) "
        '(rate(kvrelay_router_local_prefills_total{reason=~"no_prefill_node|incompatible"}[5m])) > 0',
        "5m",
        "warning",
        "decode nodes compute prompts of {{ $labels.model_name }} ({{ $labels.reason }}): `kvrelay doctor` says "
        "which pairs of nodes work",
    ),
    Alert(
        "KvrelayFetchesFail",
        "sum by (instance) (rate(kvrelay_fetches_failed_total[5m])) / "
        "sum by (instance) (rate(kvrelay_fetches_total[5m])) > 0.01",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of KV fetches fail on {{ $labels.instance }}",
    ),
    Alert(
        "KvrelayKvCorrupted",
        "sum by (instance) (increase(kvrelay_fetch_wrong_blocks_total[1h])) > 0",
        "0s",
        "critical",
        "KV that {{ $labels.instance }} has fetched is not what its source has: the log names the source; test the "
        "memory, GPUs and network between the two",
    ),
    Alert(
        "KvrelayLeasesExpire",
        "sum by (instance) (rate(kvrelay_leases_expired_total[10m])) > 0.01",
        "10m",
        "warning",
        "nobody fetches KV that {{ $labels.instance }} has computed: decode nodes die, or a router does not release",
    ),
    Alert(
        "KvrelayBlocksQuarantined",
        "kvrelay_blocks_quarantined > 0",
        "15m",
        "warning",
        "{{ $labels.instance }} cannot use {{ $value }} KV blocks: a lost transfer may still write to them",
    ),
    Alert(
        "KvrelayKvFull",
        'vllm:kv_cache_usage_perc{role="decode"} > 0.95',
        "10m",
        "warning",
        "the KV pool of decode node {{ $labels.instance }} is full: more decode nodes",
    ),
    Alert(
        "KvrelayPreempting",
        "sum by (instance) (rate(vllm:num_preemptions_total[10m])) > 0.1",
        "10m",
        "warning",
        "{{ $labels.instance }} computes requests twice for want of KV blocks",
    ),
    Alert(
        "KvrelayRetriesRefused",
        "sum(rate(kvrelay_router_retries_refused_total[5m])) > 0",
        "5m",
        "warning",
        "so many legs break that not all are tried again",
    ),
    Alert(
        "KvrelayKvEventsLost",
        "max by (instance) (kvrelay_router_kv_event_doubted_nodes) > 0",
        "10m",
        "warning",
        "router {{ $labels.instance }} does not get the KV events of {{ $value }} nodes, and chooses without them",
    ),
    Alert(
        "KvrelayPodsUnknown",
        "time() - max by (instance) (kvrelay_router_kubernetes_listed_timestamp_seconds) > 120",
        "1m",
        "warning",
        "router {{ $labels.instance }} cannot list its pods, so new ones get nothing: its log says whether the API "
        "server is away or refuses",
    ),
    Alert(
        "KvrelayRouterProcessLost",
        "sum by (instance) (increase(kvrelay_router_worker_restarts_total[15m])) > 0",
        "0s",
        "warning",
        "router {{ $labels.instance }} has replaced a process that died or hung, whose streams are lost: its log says "
        "why",
    ),
    Alert(
        "KvrelayRestarting",
        'changes(process_start_time_seconds{job=~".*kvrelay.*"}[30m]) > 2',
        "0s",
        "warning",
        "{{ $labels.instance }} ends and is started again and again: its log says why; a GPU may have failed",
    ),
    Alert(
        "KvrelayFilesRunOut",
        "process_open_fds / process_max_fds > 0.45",
        "5m",
        "critical",
        "{{ $labels.instance }} has opened nearly half of the files that it may, and refuses connections from half on: "
        "raise its hard limit (ulimit -Hn)",
    ),
)
