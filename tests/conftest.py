"""Shared by all tests: tiny random models of any family, the real SmolLM2, and a certificate."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kdn.background import faults
from tests.servers import (  # noqa: F401  (fixtures)
    moto_s3,
    rclone_s3,
    rclone_s3_as_it_is,
    redis_cluster,
    redis_sentinel,
    redis_server,
    s3_environment,
    valkey_server,
)

# Small in every direction, and no two sizes alike: a mixed-up axis shows.
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Of a tiny model whose cache holds latents (MLA)."""


@pytest.fixture(autouse=True)
def _no_faults_of_other_tests() -> None:
    """Faults are counted for a whole process, and a node's status tells them."""
    faults.clear()


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """`kdn node` takes the log for itself, and keeps what is logged from `caplog`."""
    loggers = [logging.getLogger(name) for name in ("kdn", "aiohttp", "asyncio")]
    before = [(one.handlers[:], one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model(family, **settings)`: a random model of that family, equal on every call.

    The weights are larger than at usual initialisation, so that attention is not uniform.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def make(family: str, **settings: Any) -> Any:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**TINY, **settings}))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim > 1 else 0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.copy_(noise if parameter.ndim > 1 else 1 + noise)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The real model and its tokenizer, fetched on first use."""
    from kdn.engines.models import load_model

    return load_model("smollm2")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of 127.0.0.1, signed by itself, and its key: PEM files."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
