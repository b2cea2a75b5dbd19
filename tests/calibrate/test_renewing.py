"""A base model's profile for fine-tunes of it: random changes of low rank of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Namespace, cut
from kdn.calibrate.base_profile import (
    Point,
    bits_at_equal_kld,
    load_base,
    shipped_profile,
    token_codes,
)
from kdn.calibrate.moments import normalised_embeddings
from kdn.calibrate.renewing import Renewed, TransformVerdict, judge_transform, measure_base, renew
from kdn.calibrate.run import CalibrationOptions, calibrate
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.profile import to_bytes
from kdn.engines.quality import QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import FormatError, MismatchError, UnsupportedError

OPTIONS = CalibrationOptions(
    context=384, group_layers=3, embedding_dims=24, predictor_rank=8, metric_rank=4, components=400,
    fine_components=16, second_pass_windows=2, table_windows=4,
)  # fmt: skip
VOCABULARY, ADDED = 128, 5
TRANSFORM = ("embed.", "predict.", "importance", "g0.weight", "g0.metric", "g0.gain", "g1.weight")


def windows(count: int, seed: int = 0) -> list[np.ndarray]:
    """Text-like: common tokens are common."""
    rng = np.random.default_rng(seed)
    return [np.minimum(rng.geometric(0.05, OPTIONS.window), VOCABULARY - 1) for _ in range(count)]


def tuned(model: Any, strength: float, rank: int = 4) -> Any:
    """The model with an adapter merged into its q and v projections; `strength` is the change
    relative to their weights."""
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            rows, columns = part.weight.shape
            left = torch.randn(rows, rank, generator=generator)
            change = left @ torch.randn(rank, columns, generator=generator)
            part.weight.data += strength * part.weight.norm() / change.norm() * change
    return model


def with_tokens(model: Any, count: int) -> Any:
    """The model with added tokens, whose embeddings are like the others."""
    model.resize_token_embeddings(VOCABULARY + count, mean_resizing=False)
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(count, model.config.hidden_size, generator=generator)
    model.get_input_embeddings().weight.data[VOCABULARY:] = 0.2 * rows
    return model


@pytest.fixture(scope="module")
def fine_tune(tiny_model: Callable[..., Any]) -> Any:
    return with_tokens(tuned(tiny_model("llama"), 0.02), ADDED)


@pytest.fixture(scope="module")
def base(tiny_model: Callable[..., Any]) -> Iterator[Profile]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 150)
        yield calibrate(tiny_model("llama"), windows(10), OPTIONS)


@pytest.fixture(scope="module")
def renewed(tiny_model: Callable[..., Any], fine_tune: Any, base: Profile) -> Renewed:
    given = windows(8, seed=3)
    reference = measure_base(tiny_model("llama"), base, given)
    return renew(fine_tune, base, given, reference=reference, source={"texts": ["t"]})


def test_it_keeps_the_transform_and_says_where_it_came_from(
    fine_tune: Any, base: Profile, renewed: Renewed
) -> None:
    profile = renewed.profile
    assert profile.meta["model"] == spec_of(fine_tune).fingerprint.hex() != base.meta["model"]
    told = profile.meta["calibration"]
    assert told["renewed_from"] == base.profile_id.hex()
    assert told["base_model"] == base.meta["model"]
    assert (told["windows"], told["tokens"], told["texts"]) == (4, 4 * OPTIONS.context, ["t"])
    assert told["base"] == base.meta["calibration"]
    assert told["verdict"]["good"] is renewed.verdict.good
    for name, tensor in base.tensors.items():
        if name.startswith(TRANSFORM):
            np.testing.assert_array_equal(profile.tensors[name][: len(tensor)], tensor)
    for group in ("g0", "g1"):
        kept = profile.tensors[f"{group}.basis"]
        np.testing.assert_array_equal(kept, base.tensors[f"{group}.basis"][: len(kept)])
    assert not np.array_equal(profile.tensors["sink.mean"], base.tensors["sink.mean"])


def test_added_tokens_get_codes_by_the_map_of_the_base(
    fine_tune: Any, base: Profile, renewed: Renewed
) -> None:
    model = fine_tune
    codes, scale = base.tensors["embed.codes"].astype(float), None
    own = normalised_embeddings(model)
    _, directions = torch.linalg.eigh((own[:VOCABULARY].T @ own[:VOCABULARY]).double())
    projected = own.double() @ directions[:, -OPTIONS.embedding_dims :].flip(1)
    scale = projected[:VOCABULARY].abs().amax(dim=0) / 127
    # Eigenvectors have no sign of their own.
    sign = np.sign((projected[:VOCABULARY].numpy() * codes).sum(axis=0))
    expected = (projected[VOCABULARY:] / scale).clamp(-127, 127).numpy() * sign
    added = renewed.profile.tensors["embed.codes"][VOCABULARY:]
    assert added.shape == (ADDED, OPTIONS.embedding_dims)
    assert np.abs(added - expected).max() < 4


def test_a_base_without_a_map_gives_added_tokens_zeros() -> None:
    codes = np.ones((20, 3), np.int8)
    found = token_codes(codes, torch.ones(22, 16))
    np.testing.assert_array_equal(found, np.concatenate([codes, np.zeros((2, 3), np.int8)]))


def test_tokens_that_the_fine_tune_dropped_are_dropped() -> None:
    table = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
    codes = (table @ torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) * 20).round()
    whole = codes.clamp(-127, 127).to(torch.int8).numpy()
    np.testing.assert_array_equal(token_codes(whole, table[:80]), whole[:80])


def test_the_base_profile_itself_is_refused_by_the_fine_tune(fine_tune: Any, base: Profile) -> None:
    with pytest.raises(MismatchError, match="another model"):
        KltCodec(spec_of(fine_tune), base)


def test_what_it_expects_is_what_other_text_gets(fine_tune: Any, renewed: Renewed) -> None:
    codec = KltCodec(spec_of(fine_tune), renewed.profile)
    text = windows(1, seed=9)[0]
    text[40::40] = VOCABULARY + np.arange(len(text[40::40])) % ADDED
    probe = QualityProbe(fine_tune, text, OPTIONS.context)
    chunks = cut(probe.tokens[: OPTIONS.context].numpy(), Namespace(codec.spec.fingerprint, b""))
    streams = [Bitstream.parse(codec.encode(c, probe.cache.slice(c.start, c.end))) for c in chunks]
    for level, expected in enumerate(renewed.profile.meta["expected"]):
        parts = [codec.decode(s, c, levels=level + 1) for s, c in zip(streams, chunks, strict=True)]
        keys = torch.cat([p.keys for p in parts], dim=1)
        values = torch.cat([p.values for p in parts], dim=1)
        found = probe.measure(type(probe.cache)(keys, values)).kld
        assert expected["kld"] / 2 < found < 2 * expected["kld"]
        size = sum(stream.level_end(level) for stream in streams)
        bits = 8 * size / OPTIONS.context / codec.spec.values_per_token
        assert bits == pytest.approx(expected["bits"], rel=0.1)


def test_a_small_change_is_good_enough_and_a_large_one_is_not(
    tiny_model: Callable[..., Any], base: Profile, renewed: Renewed
) -> None:
    assert renewed.verdict.good
    assert 0.95 < renewed.verdict.bits < 1.05
    assert renewed.verdict.reason.startswith(f"good enough: {renewed.verdict.bits:.2f} times")
    far = renew(tuned(tiny_model("llama"), 0.5), base, windows(8, seed=3))
    assert not far.verdict.good
    assert far.verdict.reason.startswith("calibrate anew: ")
    assert far.profile.meta["expected"][-1]["kld"] < 0.001, "the last level corrects anything"
    assert far.profile.meta["calibration"]["verdict"]["good"] is False


def test_a_model_that_only_looks_like_the_base_is_refused(
    tiny_model: Callable[..., Any], base: Profile
) -> None:
    with pytest.raises(UnsupportedError, match=r"too far .* calibrate it anew, without --from"):
        renew(tuned(tiny_model("llama"), 30.0), base, windows(8, seed=3))


def test_another_shape_is_refused(tiny_model: Callable[..., Any], base: Profile) -> None:
    with pytest.raises(MismatchError, match="another shape: num_kv_heads expected 4, found 2"):
        renew(tiny_model("llama", num_key_value_heads=4), base, windows(8))


def test_another_vocabulary_is_refused(tiny_model: Callable[..., Any], base: Profile) -> None:
    model = tiny_model("llama")
    table = model.get_input_embeddings().weight
    table.data = table.data[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    with pytest.raises(MismatchError, match="another vocabulary"):
        renew(model, base, windows(8))


def test_too_little_text_is_refused(tiny_model: Callable[..., Any], base: Profile) -> None:
    with pytest.raises(UnsupportedError, match="at least 8 windows of 544 tokens, found 7"):
        renew(tiny_model("llama"), base, windows(7))


def test_a_profile_that_expects_nothing_is_refused(
    tiny_model: Callable[..., Any], base: Profile
) -> None:
    for expected in ([{}] * 4, [{"bits": "a", "kld": 1}] * 4, [{"bits": 1, "kld": 0}] * 4):
        bare = Profile.build(dict(base.meta) | {"expected": expected}, base.tensors)
        with pytest.raises(UnsupportedError, match="does not say what its levels reach"):
            renew(tiny_model("llama"), bare, windows(8))


def test_broken_files_and_other_versions_are_named(base: Profile, tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    for data, message in (
        (b"nothing", r"base\.safetensors: expected a kdn klt profile"),
        (base.to_bytes()[:-9], r"base\.safetensors: expected a kdn klt profile"),
        (to_bytes(dict(base.meta) | {"version": 99}, base.tensors), "found .* of version 99"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            load_base(path)
    with pytest.raises(FormatError, match="absent"):
        load_base(tmp_path / "absent.safetensors")


def test_what_was_shipped_is_found_by_shape(fine_tune: Any, base: Profile, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(base.to_bytes())
    spec = spec_of(fine_tune)
    assert shipped_profile(spec, tmp_path).profile_id == base.profile_id
    with pytest.raises(UnsupportedError, match=r"found 0 \(shipped: 4x2x16\)"):
        shipped_profile(replace(spec, head_dim=64), tmp_path)
    (tmp_path / "b.safetensors").write_bytes(base.to_bytes())
    with pytest.raises(UnsupportedError, match="found 2"):
        shipped_profile(spec, tmp_path)


def test_bits_are_compared_at_equal_divergence() -> None:
    base = [Point(0.1, 0.1), Point(0.4, 0.01), Point(1.6, 0.001), Point(3, 1e-4)]
    same = [Point(0.2, 10 ** -(1 + np.log(2) / np.log(4))), Point(0.8, 10**-2.5), Point(9, 1e-5)]
    assert bits_at_equal_kld(base, base) == pytest.approx(1)
    assert bits_at_equal_kld(same, base) == pytest.approx(1)
    twice = [replace(point, bits=2 * point.bits) for point in base]
    assert bits_at_equal_kld(twice, base) == pytest.approx(2)
    assert bits_at_equal_kld([replace(p, kld=1000 * p.kld) for p in base], base) is None
    two = [Point(1, 0.1), Point(2, 0.01)]
    assert bits_at_equal_kld([replace(p, bits=3 * p.bits) for p in two], two) == pytest.approx(3)


def test_the_verdict_has_limits_and_a_reason() -> None:
    assert judge_transform(1.05, 1.1, 0.01) == TransformVerdict(
        True, 1.05, 0.01,
        "good enough: 1.05 times the base's bits at equal divergence (limit 1.10); the basis "
        "leaves out 1.0% of the variance (limit 2%)",
    )  # fmt: skip
    for bits, left_out in ((1.2, 0.01), (1.0, 0.2), (None, 0.01)):
        verdict = judge_transform(bits, 1.1, left_out)
        assert not verdict.good
        assert verdict.reason.startswith("calibrate anew: ")


class Letters:
    """A tokenizer of letters, which begins every prompt with token 1."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        ids = [2 + ord(letter) % 100 for letter in text]
        return SimpleNamespace(input_ids=[1] * add_special_tokens + ids)


@pytest.fixture
def command(
    tiny_model: Callable[..., Any], base: Profile, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`renew_profile` where there are two models, and a profile of one."""
    from kdn.calibrate import renew_command

    models = {"base": tiny_model("llama"), "tuned": tuned(tiny_model("llama"), 0.1)}
    known = {spec_of(models["base"]).fingerprint: base}

    def load(name: str, device: str, told: object) -> tuple[Any, Letters]:
        return models[name], Letters()

    monkeypatch.setattr(renew_command, "load_to_calibrate", load)
    monkeypatch.setattr(renew_command, "find_profile", lambda spec: known.get(spec.fingerprint))
    return renew_command.renew_profile


def test_the_command_measures_the_base_model_beside_its_fine_tune(
    command: Callable[..., Path], base: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "some.txt"
    text.write_text(" ".join(str(number**3) for number in range(900)))
    path = command("tuned", "base", text=[text], out=tmp_path / "p.safetensors", tokens=1536)
    profile = load_base(path)
    assert profile.meta["calibration"]["renewed_from"] == base.profile_id.hex()
    assert profile.meta["calibration"]["texts"] == ["some"]
    shown = " ".join(capsys.readouterr().out.split())
    assert profile.meta["calibration"]["verdict"]["reason"] in shown
    assert "(limit 1.10)" in shown, "the limit for equal text"


def test_the_command_refuses_by_name(command: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"absent\.safetensors"):
        command("tuned", str(tmp_path / "absent.safetensors"))
    with pytest.raises(UnsupportedError, match="no klt profile of the base model 'tuned'"):
        command("base", "tuned")
    with pytest.raises(UnsupportedError, match="expected one shipped profile for 4 layers"):
        command("tuned", "shipped")
