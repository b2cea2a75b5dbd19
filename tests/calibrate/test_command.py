"""The one command: on a model with sliding windows, killed and resumed, with nothing chosen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from kdn.calibrate import command, first_pass, loading, make_profile, progress
from kdn.calibrate.command import Request, gradient_windows, longest_context, num_windows
from kdn.calibrate.first_pass import until
from kdn.calibrate.loading import cpu_knows_bfloat16, dtype_on, fits, load_to_calibrate
from kdn.calibrate.sizes import Shape
from kdn.calibrate.steps import STEP_ATTEMPTS, is_rounding, lacking, next_step
from kdn.codec.klt import Profile
from kdn.codec.profiles import codec_with
from kdn.engines.models import load_model, own_weights
from kdn.engines.transformers import spec_of
from kdn.errors import UnsupportedError

KILLED = """
import sys
from pathlib import Path
from kdn.calibrate import first_pass, make_profile
first_pass.CHECKPOINT_S, first_pass.CHECKPOINT_SHARE = 0.0, 1e9
folder, text, out = sys.argv[1:]
make_profile(folder, text=[Path(text)], out=Path(out), tokens=6144, device="cpu")
"""


@pytest.fixture(autouse=True)
def _hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdn.calibrate.importance.STEPS", 50)
        yield


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma-3-like model in bfloat16, and a tokenizer that begins every text with BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("gemma")
    model = tiny_model(
        "gemma3_text", head_dim=16, sliding_window=200, num_hidden_layers=6, vocab_size=260,
        max_position_embeddings=700, dtype="bfloat16",
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {one: n for n, one in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = np.random.default_rng(0).geometric(0.1, 6_000)
    path.write_text(" ".join(f"w{word:x}" for word in words))
    return path


def test_gradients_follow_what_they_cost() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    sizes = {"135M": 106_000_000, "1B": 1_000_000_000, "8B": 8_000_000_000, "70B": 70_000_000_000}
    shapes = {name: Shape(32, 2048, 128_000, 4096, used, used) for name, used in sizes.items()}
    assert {gradient_windows(shape, cpu) for shape in shapes.values()} == {48}
    found = {name: gradient_windows(shape, gpu) for name, shape in shapes.items()}
    assert found == {"135M": 1000, "1B": 384, "8B": 48, "70B": 48}


def test_killed_and_resumed_it_ends_well(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "made.safetensors"
    partial = out.with_suffix(".partial")
    with subprocess.Popen([sys.executable, "-c", KILLED, folder, text, out]) as process:
        deadline = time.monotonic() + 120
        while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert partial.exists()
    with safe_open(partial, "pt") as file:
        saved = int(file.get_tensor("count")[1])
    assert 0 < saved <= 12
    stages: list[tuple[str, int, int]] = []
    monkeypatch.setattr(command, "bar", lambda told: _Watched(lambda *what: stages.append(what)))
    assert make_profile(str(folder), text=[text], out=out, tokens=6144, device="cpu") == out
    assert stages[0][1] >= saved  # not read again
    assert stages[-1][0] == "reporting"
    assert sorted(tmp_path.iterdir()) == [out]
    profile = Profile.load(out)
    calibration = profile.meta["calibration"]
    assert (calibration["context"], calibration["tokens"]) == (512, 6144)
    assert calibration["texts"] == ["words"]
    klds = [level["kld"] for level in profile.meta["expected"]]
    assert klds == sorted(klds, reverse=True)
    codec_with(spec_of(load_model(folder)[0]), profile)
    assert "from 6,144 tokens" in " ".join(capsys.readouterr().out.split())


class _Watched:
    def __init__(self, report: Callable[[str, int, int], object]) -> None:
        self._report = report

    def __enter__(self) -> Callable[[str, int, int], object]:
        return self._report

    def __exit__(self, *_: object) -> None:
        return None


def test_little_time_ends_reading_and_says_so(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "made.safetensors"
    for name in ("make_report", "show_report"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    make_profile(str(folder), text=[text], out=out, minutes=0.01, device="cpu")
    read = Profile.load(out).meta["calibration"]["tokens"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"from {read:,} tokens of" in shown
    assert "as the time was used up" in shown


def test_a_checkpoint_that_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.partial"
    read: list[int] = []

    class Sums:
        num_windows = 0

        def tensors(self) -> dict[str, torch.Tensor]:
            return {"count": torch.tensor([7, self.num_windows])}

        def restore(self, saved: dict[str, torch.Tensor]) -> None:
            self.num_windows = int(saved["count"][1])

    def add(sums: Any, index: int) -> None:
        read.append(index)
        sums.num_windows += 1

    def run(digest: bytes) -> list[int]:
        read.clear()
        first_pass.FirstPass(add, 3, digest, path, lambda *_: None).run(Sums())  # type: ignore[arg-type]
        return list(read)

    assert run(b"one") == [0, 1, 2]
    assert run(b"one") == []  # all was read
    assert run(b"two") == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-9])
    assert run(b"two") == [0, 1, 2]
    path.write_bytes(b"\xff" * 100)
    assert run(b"two") == [0, 1, 2]
    path.unlink()
    path.mkdir()  # cannot be written: said, and gone on
    assert run(b"two") == [0, 1, 2]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"operations": 0}, {"minutes": -1.0}, {"minutes": float("nan")},
     {"device": "gpu"}, {"out": Path("/")}, {"plot": Path("a.txt")}],
)  # fmt: skip
def test_what_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        Request("no-such-model", **wrong).check()


def test_contexts_fit_into_the_positions_of_a_model() -> None:
    def of(positions: int | None) -> int:
        part = SimpleNamespace(max_position_embeddings=positions)
        return longest_context(SimpleNamespace(get_text_config=lambda decoder: part))

    assert [of(n) for n in (None, 131_072, 2048, 1024, 700)] == [3072, 3072, 1792, 768, 512]
    with pytest.raises(UnsupportedError, match="at least 672 positions"):
        of(512)
    assert num_windows(500_000, 3072) == 163 + 4 + 6
    assert num_windows(1, 3072) == 4 + 4 + 6


def test_the_dtype_a_model_runs_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_knows_bfloat16", lambda: False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    half, whole = torch.bfloat16, torch.float32
    assert own_weights(folder)[1] == half
    assert own_weights(folder)[0] == sum(p.numel() for p in load_model(folder)[0].parameters())
    assert dtype_on(cpu, half, 10**9, free=20 * 10**9) == whole
    assert dtype_on(cpu, half, 10**9, free=6 * 10**9) == half
    monkeypatch.setattr(loading, "cpu_knows_bfloat16", lambda: True)
    assert dtype_on(cpu, half, 10**9, free=20 * 10**9) == half
    assert dtype_on(cpu, torch.float16, 10**9, free=20 * 10**9) == whole
    assert dtype_on(gpu, torch.float16, 10**9, free=80 * 10**9) == torch.float16
    assert dtype_on(gpu, whole, 10**9, free=80 * 10**9) == whole
    assert fits(gpu, 16 * 10**9, 80 * 10**9)
    assert not fits(gpu, 141 * 10**9, 139 * 10**9)


def test_what_a_cpu_knows(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    assert not cpu_knows_bfloat16(told)
    for flags, known in (("flags : avx512f fma", False), ("flags : fma avx512_bf16 sse", True)):
        told.write_text(flags)
        assert cpu_knows_bfloat16(told) == known


def test_a_model_larger_than_the_machine_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdn.calibrate.loading.free_memory", lambda device: 100_000)
    with pytest.raises(UnsupportedError, match=r"take .* GB.*more memory"):
        load_to_calibrate(str(folder), "cpu", Console(quiet=True))


def test_lines_where_there_is_no_terminal() -> None:
    said: list[str] = []
    now = [0.0]
    report = progress.lines(said.append, lambda: now[0])
    for done in range(4, 11):  # resumed at 4
        report("reading", done, 10)
        now[0] += 12
    assert said == [
        "reading: 4 of 10",
        "reading: 6 of 10, about 48 s left",
        "reading: 8 of 10, about 24 s left",
        "reading: 10 of 10, 72 s",
    ]


def test_time_is_over_only_after_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(first_pass.time, "monotonic", lambda: now[0])
    never, soon = until(None, 4), until(5.0, 4)
    now[0] = 104.0
    assert not soon(9)
    now[0] = 105.0
    assert soon(4)
    assert not soon(3)
    assert not never(1_000)


def test_finer_steps_that_do_not_help() -> None:
    assert not is_rounding([(1.0, 0.01)])
    assert not is_rounding([(1.0, 0.01), (0.5, 0.0095)])
    assert not is_rounding([(1.0, 0.01), (0.5, 0.0095), (0.1, 0.0002)])
    assert is_rounding([(1.0, 0.01), (0.5, 0.0095), (0.1, 0.0094)])
    assert not is_rounding([(1.0, 0.01), (0.05, 0.0001), (0.1, 0.0095)])


def test_what_a_basis_lacks_is_told_from_two_steps() -> None:
    assert lacking([(1.0, 0.01)]) == 0.0
    for steps in ((1.0, 0.5), (0.5, 1.0), (3.0, 0.1)):
        tried = [(step, 0.002 + 0.01 * step**2) for step in steps]
        assert lacking(tried) == pytest.approx(0.002)
    assert lacking([(1.0, 0.01), (0.5, 0.0025)]) == 0.0
    assert lacking([(1.0, 0.0028), (1.06, 0.0026)]) <= 0.0026


@pytest.mark.parametrize("first", [0.001, 0.01, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("floor", [0.0, 0.0005, 0.0024, 0.003, 0.02])
def test_a_step_is_found_from_any_guess(first: float, floor: float) -> None:
    """It is as coarse as the divergence asked for allows, or what the basis lacks."""
    step, tried = first, []
    for _ in range(STEP_ATTEMPTS):
        tried.append((step, floor + 0.003 * step**2))
        _, factor = next_step(tried, 0.003)
        if factor is None:
            break
        step *= factor
    assert factor is None
    wanted = 0.003 if floor < 0.0027 else 1.5 * floor
    assert tried[-1][1] == pytest.approx(wanted, rel=0.15)
