"""`kdn bench models`: models of other shapes, trained here in minutes, then calibrated and judged.

Random weights show speed and correctness; ratio and quality are those of real models alone. Each
model keeps its folder in `--out`: what is trained and calibrated there is not done again.

Not measured: vLLM (`tests/vllm/test_trained.py` takes a folder made here), large models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kdn.bench import options
from kdn.bench.models.documents import read_documents, split
from kdn.bench.models.judging import judge
from kdn.bench.models.material import Material
from kdn.bench.models.report import Row, document, plot, print_report
from kdn.bench.models.shapes import FULL, QUICK, SHAPES
from kdn.bench.models.training import Order, trained
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import report_console, write_json
from kdn.cache.folder import cache_folder
from kdn.calibrate.command import DEFAULT_TOKENS, MAX_MINUTES
from kdn.defaults import DEVICE
from kdn.engines.device import chosen_device
from kdn.errors import UnsupportedError

TRAIN_S, QUICK_TRAIN_S = 90.0, 20.0
MOST_TRAIN_S = 24 * 3600.0
QUICK_TOKENS = 12_000
"""To calibrate with."""


def run(
    text: Annotated[
        list[Path],
        options.files("Documents, several kinds of them: .txt, or .jsonl with `context` fields."),
    ],
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    train: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TRAIN_S, help=f"Seconds for each model; {TRAIN_S:g}."),
    ] = None,
    calibrate: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=MAX_MINUTES, help="Minutes for each model; as long as it takes."
        ),
    ] = None,
    tokens: Annotated[
        int | None, options.count(1, f"To calibrate with; {DEFAULT_TOKENS:,}.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = DEVICE,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models, for the CPU: to see that it works.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keeps the models; by default the cache folder.")
    ] = None,
    json: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Models of other shapes, trained in minutes on your text, then calibrated and judged."""
    chosen = options.words("shapes", shapes, list(SHAPES))
    where = chosen_device(device)
    folder = out or cache_folder() / "bench" / ("models-quick" if quick else "models")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"out: expected a folder that can be made: {error}") from error
    material = Material(split(read_documents(text)), QUICK if quick else FULL)
    seconds = train or (QUICK_TRAIN_S if quick else TRAIN_S)
    tokens = tokens or (QUICK_TOKENS if quick else DEFAULT_TOKENS)
    rows: dict[str, Row] = {}
    for shape in chosen:
        order = Order(shape, seconds, where)
        rows[shape] = _row(folder / shape, order, material, tokens, calibrate)
        results = document(rows, str(where))
        if json is not None:  # what is done is kept, whatever becomes of the next one
            write_json(json, results)
    if plot_file is not None:
        plot(plot_file, rows)
    print_report(report_console(), rows, results)


def _row(folder: Path, order: Order, material: Material, tokens: int, minutes: float | None) -> Row:
    told = Console(stderr=True)

    def say(line: str) -> None:
        told.print(line, highlight=False)

    made = trained(folder, order, material, say)
    if order.device.type == "cuda":
        torch.cuda.empty_cache()  # calibration chooses its sizes by what is free
    device, texts = str(order.device), material.texts
    return Row(made, judge(folder, texts, device, say, tokens=tokens, minutes=minutes))
