"""LMCache's settings as kdn's: files as people have them, and files that mean harm."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kdn.cli.main import main
from kdn.config import load_config
from kdn.engines.vllm.settings import Settings
from kdn.errors import FormatError, KdnError, LimitError, UnsupportedError
from kdn.migrate.lmcache import Plan, translate
from kdn.migrate.lmcache_file import MAX_BYTES, from_variables, read_file
from kdn.migrate.lmcache_text import engine_text, node_text, whole_text

GIB = 1 << 30

LOCAL = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20.0
local_disk: "file:///mnt/nvme0/cache/"
max_local_disk_size: 500
cache_policy: "LRU"
"""
REDIS = """
chunk_size: 512
local_cpu: False
remote_url: "redis://:hunter2@cache.internal:6379/2"
remote_serde: "cachegen"
lookup_timeout_ms: 3000
blocking_timeout_secs: 10
lmcache_instance_id: engine-7
"""
S3 = """
remote_url: "s3://kv-cache.s3.eu-west-1.amazonaws.com"
extra_config:
  s3_region: "eu-west-1"
  s3_num_io_threads: 64
  aws_access_key_id: hunter2
  aws_secret_access_key: hunter2
enable_async_loading: true
save_unfull_chunk: false
"""
DISAGGREGATED = """
enable_pd: true
transfer_channel: nixl
pd_role: sender
nixl_proxy_host: "proxy"
nixl_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: cuda
"""
BLENDING = """
enable_blending: true
blend_special_str: " # # "
blend_recompute_ratios: 0.15
blend_check_layers: 1
use_layerwise: true
"""
VARIABLES = """
# as in a unit file
export LMCACHE_CHUNK_SIZE=256
LMCACHE_LOCAL_CPU=True
LMCACHE_MAX_LOCAL_CPU_SIZE="5.5"
LMCACHE_REMOTE_URL='valkey://cache:6379'
LMCACHE_LOG_LEVEL=DEBUG
LMCACHE_EXTRA_CONFIG={"valkey_mode": "cluster"}
"""


def imported(tmp_path: Path, text: str) -> Plan:
    """The plan for a file; what it prints is valid for a node and for vLLM."""
    path = tmp_path / "lmcache.yaml"
    path.write_text(text)
    plan = translate(read_file(path))
    for made in (node_text(plan), whole_text(plan)):
        assert "hunter2" not in made
        (tmp_path / "kdn.toml").write_text(made)
        config = load_config(tmp_path / "kdn.toml", environ={})
        assert {name: getattr(config.node, name) for name in plan.node if name != "data"} == {
            name: value for name, value in plan.node.items() if name != "data"
        }
    told = json.loads(engine_text(plan))
    assert told["kv_connector"] == "KdnConnector"
    Settings.parse(told["kv_connector_extra_config"])
    return plan


def notes(plan: Plan) -> dict[str, str]:
    return dict(plan.notes)


def test_memory_and_disk_of_a_host(tmp_path: Path) -> None:
    plan = imported(tmp_path, LOCAL)
    assert plan.node == {
        "data": "/mnt/nvme0/cache/kdn", "disk_bytes": 500 * GIB, "policy": "lru",
    }  # fmt: skip
    assert plan.engine == {
        "url": "http://127.0.0.1:8470", "codec": "exact", "host_bytes": 20 * GIB,
    }  # fmt: skip
    assert "chunk_size" not in notes(plan)


def test_a_redis_and_its_password(tmp_path: Path) -> None:
    plan = imported(tmp_path, REDIS)
    assert plan.node == {"store": "redis://cache.internal:6379/2"}
    assert plan.engine == {
        "url": "http://127.0.0.1:8470", "quality": "default", "lookup_s": 3.0, "deadline_s": 10.0,
        "client": "engine-7", "host_bytes": 0,
    }  # fmt: skip
    assert "256 tokens" in notes(plan)["chunk_size"]
    assert ("remote_url", "the password is not repeated here: put it into a file and set "
            "store_token_file") in plan.notes  # fmt: skip


def test_a_bucket_and_its_keys(tmp_path: Path) -> None:
    plan = imported(tmp_path, S3)
    assert plan.node == {"store": "s3://kv-cache/kdn?region=eu-west-1"}
    assert {"extra_config.s3_num_io_threads", "extra_config.aws_secret_access_key"} <= {
        *notes(plan)
    }
    assert "always" in notes(plan)["enable_async_loading"]
    assert "save_unfull_chunk" not in notes(plan)


@pytest.mark.parametrize(
    ("url", "extra", "store"),
    [
        ("redis-sentinel://a:26379,b:26379", {}, "redis+sentinel://a:26379,b:26379/redismaster"),
        ("redis-cluster://u:hunter2@a:7000,b:7000", {}, "redis+cluster://a:7000,b:7000"),
        ("rediss://cache:6380", {}, "rediss://cache:6380"),
        ("valkey://cache:6379", {"valkey_mode": "cluster"}, "valkey+cluster://cache:6379"),
        ("s3://bucket.minio.local:9000", {"disable_tls": True},
         "s3://bucket/kdn?endpoint=http://minio.local:9000"),
        ("azure://box", {"azure_account_url": "https://acme.blob.core.windows.net"},
         "az://box?account=acme"),
        ("fs://host:0/mnt/shared", {}, "file:///mnt/shared"),
    ],
)  # fmt: skip
def test_stores_that_both_know(tmp_path: Path, url: str, extra: dict[str, Any], store: str) -> None:
    told = json.dumps({"remote_url": url, "extra_config": extra})  # JSON is YAML
    assert imported(tmp_path, told).node == {"store": store}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncakestore://h:1/", "Mooncake is not supported"),
        ("infinistore://h:1/", "RDMA"),
        ("plugin://mine", "no code of others"),
        ("gopher://h", "knows no store 'gopher'"),
        ("redis://", "cannot be used"),
        ("s3://", "cannot be used"),
        ("nothing", "expected a URL"),
        (17, "expected a URL"),
        ("lm:///", "expected lm://HOST:PORT"),
    ],
)
def test_stores_that_kdn_does_not_know(tmp_path: Path, url: Any, why: str) -> None:
    plan = imported(tmp_path, json.dumps({"remote_url": url}))
    assert plan.node == {}
    assert why in notes(plan)["remote_url"]


def test_a_server_of_lmcache_becomes_a_node(tmp_path: Path) -> None:
    plan = imported(tmp_path, "remote_url: lm://cache.internal:65432")
    assert plan.engine["url"] == "http://cache.internal:8470"


def test_prefill_and_decode_apart(tmp_path: Path) -> None:
    plan = imported(tmp_path, DISAGGREGATED)
    assert plan.role == "kv_producer"
    assert "no RDMA" in notes(plan)["enable_pd"]
    assert {"pd_proxy_host", "pd_proxy_port", "transfer_channel"} <= {*notes(plan)}


def test_blending(tmp_path: Path) -> None:
    plan = imported(tmp_path, BLENDING)
    assert plan.engine["blend"] == "auto"
    assert '" # # "' in notes(plan)["blend_special_str"]
    assert "recompute_share" in notes(plan)["blend_recompute_ratios"]


def test_variables_in_a_file(tmp_path: Path) -> None:
    plan = imported(tmp_path, VARIABLES)
    assert plan.engine["host_bytes"] == int(5.5 * GIB)
    assert plan.node == {"store": "valkey+cluster://cache:6379"}
    assert "log_level" not in notes(plan)


def test_what_nobody_knows_is_named(tmp_path: Path) -> None:
    assert "does not know" in notes(imported(tmp_path, "new_in_lmcache_9: 1"))["new_in_lmcache_9"]


def test_values_of_the_wrong_kind_are_named_and_left_out(tmp_path: Path) -> None:
    lines = (
        "max_local_cpu_size: much", "lookup_timeout_ms: .nan", "local_disk: 3",
        "lmcache_instance_id: 'a b'", "max_local_disk_size: -1", "extra_config: 4",
    )  # fmt: skip
    plan = imported(tmp_path, "\n".join(lines))
    assert plan.engine == {"url": "http://127.0.0.1:8470", "codec": "exact"}
    assert plan.node == {}
    assert len([why for _, why in plan.notes if why.startswith("left out")]) == 4


def test_an_empty_file_is_a_plain_node(tmp_path: Path) -> None:
    assert imported(tmp_path, "").engine == {"url": "http://127.0.0.1:8470", "codec": "exact"}


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        (b"!!python/object/apply:os.system ['true']", FormatError, "expected YAML"),
        (b"a: [1, 2", FormatError, "line 1"),
        (b"- a\n- b", FormatError, "found list"),
        (b"just words", FormatError, "found str"),
        (b"\xff\xfe", FormatError, "UTF-8"),
        (b"a: \x00", FormatError, "expected YAML"),
        (b"1: 2", FormatError, "names of settings"),
        (b"? [a, b]\n: 3", FormatError, "expected YAML"),
        (LAUGHS.encode(), FormatError, "no aliases"),
        (b"a: " + b"[" * 5000, FormatError, "expected YAML"),
        (b"a: " + b"x" * MAX_BYTES, LimitError, "at most"),
        (b"\n".join(b"a%d: 1" % i for i in range(2000)), LimitError, "settings"),
        (b"a: 2001-99-99", FormatError, "expected YAML"),
    ],
)  # fmt: skip
def test_hostile_files_give_named_errors(
    tmp_path: Path, content: bytes, kind: type[KdnError], told: str
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_bytes(content)
    with pytest.raises(kind, match=told):
        read_file(path)


def test_what_is_printed_stays_one_line_each(tmp_path: Path) -> None:
    plan = imported(tmp_path, json.dumps({"a\n[node]\nport = 1\n#": 1, "remote_url": "x\n://"}))
    assert tomllib.loads(node_text(plan)) == {"node": {}}


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(LOCAL)
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")
    outputs = {}
    for only in ("node", "vllm", "all"):
        with pytest.raises(SystemExit) as ended:
            main(["import", "lmcache-config", str(path), "--environment", "--only", only])
        assert not ended.value.code
        outputs[only] = capsys.readouterr().out
    assert tomllib.loads(outputs["node"]) == tomllib.loads(outputs["all"])
    extra = json.loads(outputs["vllm"])["kv_connector_extra_config"]
    assert extra["host_bytes"] == 2 * GIB  # the environment wins, as in LMCache


def test_neither_file_nor_environment_is_refused() -> None:
    from kdn.cli.importing import lmcache_config

    with pytest.raises(UnsupportedError, match="--environment"):
        lmcache_config(None)
    with pytest.raises(UnsupportedError, match="expected a file"):
        read_file(Path("/no/such/file"))


def test_without_pyyaml_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256")
    with pytest.raises(UnsupportedError, match="pip install pyyaml"):
        read_file(path)
    path.write_text("LMCACHE_CHUNK_SIZE=256")
    assert read_file(path) == {"chunk_size": 256}  # which needs none


def test_variables_of_others_are_left_alone() -> None:
    assert from_variables(
        {"PATH": "x", "LMCACHE_CONFIG_FILE": "y", "LMCACHE_LOCAL_CPU": "False"}
    ) == {"local_cpu": False}
