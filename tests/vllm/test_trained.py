"""Models that `kdn bench models` trained, in vLLM: `exact` token for token, `klt` at its quality.

KDN_TRAINED names their folders (`--out` of the benchmark, and a shape in it), separated as in PATH;
without it tiny ones are trained here, for the exact part alone. Where a folder has a profile, `klt`
is held against what its report expects. What vLLM published must also be what transformers reads,
channel by channel: models that were hardly trained say the same with a wrong cache. kdn refuses the
latents of `mla` with vLLM, so these are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch

from kdn.bench.models.documents import Split
from kdn.bench.models.judging import PROFILE, REPORT
from kdn.bench.models.material import Material
from kdn.bench.models.shapes import BOS, QUICK
from kdn.bench.models.training import Order, trained
from kdn.calibrate.corpus import Text, default_texts
from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.models import load_model
from kdn.engines.reading import read_whole
from kdn.errors import UnsupportedError
from tests.vllm.harness import Engine, Node, connector
from tests.vllm.sharing import load

CONTEXT, SCORED, ANSWER = 512, 128, 16
STEPS = 20.0
SAME = 1e-3
"""Largest error of a channel, relative to its usual size: two engines round differently."""
GIVEN = [Path(one) for one in os.environ.get("KDN_TRAINED", "").split(os.pathsep) if one]
NO_CACHE = {"kdn": {"load": False, "publish": False}}
WITH_CACHE = {"kdn": {"publish": False}}


@pytest.fixture(scope="module")
def material() -> Material:
    [text] = default_texts()
    parts = [Text(str(i), text.content[i * 60_000 : (i + 1) * 60_000]) for i in range(3)]
    return Material(Split(parts[:1], parts[1:2], parts[2:]), QUICK)


@pytest.fixture(scope="module", params=[one.name for one in GIVEN] or ["mha", "gemma"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for one in GIVEN:
        if one.name == request.param:
            return one
    ticks, path = count(), tmp_path_factory.mktemp("trained") / request.param
    order = Order(request.param, STEPS, torch.device("cpu"))
    trained(path, order, request.getfixturevalue("material"), str, lambda: float(next(ticks)))
    return path


def known_to_vllm(folder: Path) -> Path:
    try:
        spec_of_checkpoint(folder)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return folder


def prompt_of(folder: Path, number: int) -> list[int]:
    """A context and what follows it, of real text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = default_texts()[0].content[200_000 + 40_000 * number :][:40_000]
    ids: list[int] = tokenizer(content, add_special_tokens=False).input_ids
    return [BOS, *ids][: CONTEXT + SCORED]


def opened(folder: Path, node: Node, log: Path, codec: str, cache: Path) -> Engine:
    """In float32. All layers keep all tokens: kdn wants them, also of layers with a window."""
    return Engine(
        log,
        environ={"KDN_CACHE": str(cache)},
        model=str(folder),
        kv_transfer_config=connector(node.url, codec=codec),
        max_model_len=CONTEXT + SCORED + ANSWER,
        max_num_batched_tokens=CONTEXT + SCORED + ANSWER,
        disable_hybrid_kv_cache_manager=True,
    )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest of all channels of all layers: one in a wrong place shows."""
    error = (found - wanted).square().mean(dim=1).sqrt()
    return float((error / wanted.square().mean(dim=1).sqrt().clamp_min(1e-6)).max())


def test_exact_is_token_for_token(folder: Path, node: Node, logs: Path, tmp_path: Path) -> None:
    known_to_vllm(folder)
    prompts = [prompt_of(folder, number) for number in range(2)]
    with opened(folder, node, logs / f"{folder.name}-exact", "exact", tmp_path) as engine:
        own = engine.generate(prompts=prompts, max_tokens=ANSWER)
        assert own["cached"] == [0, 0]
        assert engine.flush()["published"] > 0
        engine.reset()
        again = engine.generate(prompts=prompts, max_tokens=ANSWER, kdn={"publish": False})
    assert min(again["cached"]) >= CONTEXT
    assert again["tokens"] == own["tokens"]
    model, _ = load_model(folder)
    cache, _ = asyncio.run(load(node.url, "exact", model, prompts[0][:CONTEXT]))
    own_cache = read_whole(model, prompts[0][:CONTEXT])
    off = [distance(cache.keys, own_cache.keys), distance(cache.values, own_cache.values)]
    print(f"\n{folder.name}: off by {off[0]:.1e} in keys, {off[1]:.1e} in values")  # noqa: T201
    assert max(off) < SAME


def test_klt_is_as_good_as_its_report_says(
    folder: Path, node: Node, logs: Path, tmp_path: Path
) -> None:
    known_to_vllm(folder)
    if not (folder / PROFILE).exists():
        pytest.skip(f"{folder} has no profile: `kdn bench models` makes one")
    from kdn.codec.klt import Profile

    model = Profile.load(folder / PROFILE).meta["model"]
    (tmp_path / "profiles").mkdir()
    shutil.copy(folder / PROFILE, tmp_path / "profiles" / f"{model}.safetensors")
    report = json.loads((folder / REPORT).read_text())
    found = []
    with opened(folder, node, logs / f"{folder.name}-klt", "klt", tmp_path) as engine:
        for number in range(3):
            prompt = prompt_of(folder, number)
            engine.generate(prompts=[prompt[:CONTEXT]], max_tokens=1)
            engine.flush()
            engine.reset()
            own, loaded = engine.teach(
                prompt=prompt, num_scored=SCORED - 1, runs=[NO_CACHE, WITH_CACHE]
            )
            assert (own["cached"], loaded["cached"]) == (0, CONTEXT)
            found.append(loaded["kld"])
    kld = sum(found) / len(found)
    print(f"\n{folder.name}: KLD {kld:.5f}, reported {report['figures']['kld']:.5f}")  # noqa: T201
    # Other text, at another length: the size of it, not its second digit.
    assert 0.0 < kld <= 4 * report["figures"]["kld"]
