"""Settings: one description for flags and files, flags over file over defaults, wrong ones named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cluster_plan import ClusterConfig
from kvrelay.settings import build, convert, flags_of, merge, settings_of
from kvrelay.wire.config import EngineConfig, NodeConfig, Role, TransferConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig


@pytest.mark.parametrize(
    "config", [EngineConfig, TransferConfig, NodeConfig, RouterConfig, ClusterConfig]
)
def test_every_setting_has_help(config: type) -> None:
    assert not [
        setting.name for setting in settings_of(config, skip=("role",)).values() if not setting.help
    ]


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("max-num-seqs: 8\nmax_num_batched_tokens: 256\nenable-prefix-caching: no\n")
    values = merge(settings_of(EngineConfig), {"max_num_seqs": "4", "device": None}, str(file))
    config = build(EngineConfig, values | {"model": "m"})
    assert config == EngineConfig(
        "m", max_num_seqs=4, max_num_batched_tokens=256, enable_prefix_caching=False
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("port: abc", "port must be a whole number, got 'abc'"),
        ("port: 1.5", "port must be a whole number, got 1.5 (float)"),
        ("port: true", "port must be a whole number, got True (bool)"),
        ("lease_s: [1]", "lease_s must be a number, got [1] (list)"),
        ("enable_prefix_caching: 3", "enable_prefix_caching must be true or false, got 3 (int)"),
        ("chat_template: 123", "chat_template must be text, got 123 (int); put it in quotes"),
        ("api_key: 123", "api_key must be text, got int (not shown); put it in quotes"),
        ("host:", "host must be text, got None (NoneType)"),
        ("port: 1\nport : 2\nPort: 3", "unknown key 'Port'; did you mean port?"),
        ("lease-s: 5\nlease_s: 6", "key lease_s is given twice"),
        ("- a", "must hold `key: value` lines"),
        ("a: [", "cannot read config file"),
        ("cluster-secret: 12345678901234567890", "must be text, got int (not shown); put it in"),
        ("hf-token: [12345]", "must be text, got list (not shown)"),
        ('port: 1\ncluster-secret: "12345', "line 2 is not valid YAML; values with special"),
        ("cluster-secret: *12345", "line 1 is not valid YAML"),
    ],
)
def test_a_wrong_file_is_told_with_key_value_and_type_but_for_secrets(
    line: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(line)
    with pytest.raises(ConfigError) as caught:
        merge(settings_of(NodeConfig), {}, str(file))
    assert said in caught.value.message
    assert str(file) in caught.value.message
    assert "12345" not in caught.value.message


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert merge(settings_of(NodeConfig), {}, str(tmp_path / "c.yaml")) == {}


def test_numbers_may_be_written_as_yaml_reads_them_or_not() -> None:
    known = settings_of(TransferConfig)
    assert convert(known["transfer_floor_bytes_s"], "100e6", "x") == 100e6
    assert convert(known["transfer_floor_bytes_s"], 5, "x") == 5.0
    assert convert(settings_of(RouterConfig)["prefill"], "http://a", "x") == ("http://a",)
    assert convert(settings_of(RouterConfig)["prefill"], ["http://a", "http://b"], "x") == (
        "http://a",
        "http://b",
    )


def test_a_mapping_may_be_written_as_json_or_as_yaml(tmp_path: Path) -> None:
    known = settings_of(EngineConfig)
    (tmp_path / "c.yaml").write_text("override-generation-config: {temperature: 0.5}\n")
    read = merge(known, {}, str(tmp_path / "c.yaml"))
    assert read == merge(known, {"override_generation_config": '{"temperature": 0.5}'}, None)
    assert flags_of(build(EngineConfig, read | {"model": "m"})) == [
        "--model=m",
        '--override-generation-config={"temperature": 0.5}',
    ]
    for wrong in ("{", "3", "text"):
        with pytest.raises(
            ConfigError, match="--override-generation-config must be a JSON object, got"
        ):
            merge(known, {"override_generation_config": wrong}, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25.6k", 25_600), ("1.5K", 1_536), ("2g", 2 * 10**9), (" 4 Gi", 4 << 30), ("2GB", 2 * 10**9), ("1T", 1 << 40),
    ],
)  # fmt: skip
def test_whole_numbers_may_have_the_units_that_vllm_takes_and_those_of_memory(
    text: str, value: int
) -> None:
    assert convert(settings_of(EngineConfig)["kv_cache_memory_bytes"], text, "x") == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dtype", "half", "float16"), ("dtype", "float", "float32"), ("dtype", "bfloat16", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"), ("max_model_len", "auto", 0), ("max_model_len", -1, 0),
    ],
)  # fmt: skip
def test_values_may_be_written_as_vllm_has_them(name: str, text: object, value: object) -> None:
    assert convert(settings_of(EngineConfig)[name], text, "x") == value


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            '{"method": "suffix", "num_speculative_tokens": 2}',
            "method 'suffix' of speculative_config is not one of ngram",
        ),
        ('{"model": "a/b", "num_speculative_tokens": 2}', "unknown key 'model'"),
        (
            '{"method": "eagle3", "draft_tensor_parallel_size": 1}',
            "; the only method here is ngram",
        ),
        ("x", "--speculative-config must be a JSON object; its text is not JSON"),
        ("[]", "--speculative-config must be a mapping, got a list"),
        ('{"num_speculativ_tokens": 2}', "unknown key 'num_speculativ_tokens'; did you mean num_"),
    ],
)
def test_settings_in_json_are_refused_by_name(told: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge(settings_of(EngineConfig), {"speculative_config": told}, None)
    assert said in caught.value.message


@pytest.mark.parametrize(
    "text", ["4Gib/s", "25.65k0", "1.3K", "1.0001k", "k", "-1k", "4 GiB GiB", "0x4"]
)
def test_a_number_with_another_unit_or_a_fraction_left_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len must be a whole number, got '{text}'"):
        merge(settings_of(EngineConfig), {"max_model_len": text}, None)


@pytest.mark.parametrize(
    ("file", "flags", "device"),
    [
        ("cpu: true", {}, "cpu"),
        ("cpu: true", {"device": "cuda"}, "cuda"),
        ("device: cuda", {"cpu": True}, "cpu"),
        ("cpu: false\ndevice: cuda", {}, "cuda"),
    ],
)
def test_cpu_is_short_for_its_device_in_a_file_too(
    file: str, flags: dict[str, object], device: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(file)
    assert merge(settings_of(EngineConfig), flags, str(tmp_path / "c.yaml")) == {"device": device}


def test_flags_of_a_config_make_the_same_config_again() -> None:
    config = NodeConfig(
        EngineConfig("m", enable_prefix_caching=False, batch_invariant=True, threads=3),
        transfer=TransferConfig(lease_s=6.5),
        served_model_name="--odd name",
        role=Role.DECODE,
    )
    flags = flags_of(config, skip={"role"})
    assert "--no-enable-prefix-caching" in flags
    assert "--batch-invariant" in flags
    assert "--served-model-name=--odd name" in flags
    assert len(flags) == 6
    router = RouterConfig(prefill=("http://a", "http://b"), port=1)
    assert flags_of(router) == ["--port=1", "--prefill=http://a", "--prefill=http://b"]
