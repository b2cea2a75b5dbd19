"""`kdn bench blend`: what joining pieces costs and saves, beside reading and beside others' ways.

Pieces of each question are learned apart into a folder, through kdn's own session and codecs, and
delivered joined; then every method goes on from there. `--seams-from` fits seams on one question
set and measures them on `--data`: with as many files as `--data` has, they belong together in
order, so that two sets can be measured both ways in one run. If both are the same file, seams are
fitted on each half of it and measured on the other: what their reports expect can then be held
against what is measured on questions of the same kind, and on the same questions (`paired.py`).

Not measured: several questions at a time, pieces that are partly unknown.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kdn.bench import options
from kdn.bench.blend import expected, paired
from kdn.bench.blend.consistency import Choices, choices_of, summary
from kdn.bench.blend.fitting import fitted_on
from kdn.bench.blend.items import Item, Story, apart, load_items, load_stories, set_name
from kdn.bench.blend.learned import FolderJoiner, Reader, session_of
from kdn.bench.blend.measure import Bench, Timings
from kdn.bench.blend.methods import METHODS, NAMES, SELDOM
from kdn.bench.blend.pieces import Prompt
from kdn.bench.blend.progress import Progress
from kdn.bench.blend.report import document, plot, print_report
from kdn.bench.blend.rows import BlendRow, Outcome, rows_of
from kdn.bench.blend.scoring import ANSWER_TOKENS
from kdn.bench.blend.timing import texts_of, time_joins
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import hardware, report_console, write_json
from kdn.blend.seams import Seams
from kdn.cache.spec import ModelSpec
from kdn.defaults import QUALITY
from kdn.engines.join_reading import drawn_orders
from kdn.engines.models import load_model
from kdn.engines.prompts import Prompts
from kdn.errors import UnsupportedError

CODECS = ("exact", "klt")
FIT_ITEMS = 30
"""Questions that seams are fitted on, whatever is measured."""
STORIES, QUESTIONS_OF_STORY, ORDERS = 8, 4, 3
ORDERS_SEED = 1
"""Of a question's orders besides its own; a report draws others."""
QUICK_ITEMS, QUICK_QUESTIONS, QUICK_TTFT_TOKENS = 3, 2, 1024


@dataclass(frozen=True)
class Plan:
    """How much of everything is done."""

    items: int
    pieces: int
    codecs: Sequence[str]
    quality: str
    questions: int
    ttft_tokens: int
    mbits: Sequence[float]
    methods: Sequence[str]
    orders: int

    def quick(self) -> Plan:
        return replace(
            self, items=min(self.items, QUICK_ITEMS), questions=QUICK_QUESTIONS,
            ttft_tokens=min(self.ttft_tokens, QUICK_TTFT_TOKENS),
        )  # fmt: skip


@dataclass
class Found:
    """All that was measured so far: written whenever there is more."""

    path: Path | None
    settings: dict[str, Any]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    seams: dict[str, dict[str, Any]] = field(default_factory=dict)
    reported: list[paired.Entry] = field(default_factory=list)
    halves: dict[str, str] = field(default_factory=dict)
    """By name: the set they are of."""
    consistency: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[BlendRow]:
        return [row for data, found in self.outcomes.items() for row in rows_of(data, found)]

    @property
    def answers(self) -> list[paired.Entry]:
        """Question by question, what reports say and what was measured."""
        measured = (paired.measured(data, found) for data, found in self.outcomes.items())
        return [*self.reported, *chain.from_iterable(measured)]

    def extra(self) -> dict[str, Any]:
        answers = self.answers
        return {
            "seams": self.seams, "paired": list(paired.pooled(answers, self.halves)),
            "answers": answers, "consistency": self.consistency, "timing": self.timing,
            "seconds": dict(self.timings.seconds), "settings": self.settings, "notes": self.notes,
        }  # fmt: skip

    def save(self) -> None:
        """Whoever reads it sees one state or the next."""
        if self.path is not None:
            aside = self.path.with_name(f".{self.path.name}.partial")
            write_json(aside, document(self.rows, self.extra()), allow_nan=False)
            aside.replace(self.path)


def run(
    data: Annotated[
        list[Path] | None,
        options.files("Question sets (.jsonl, .jsonl.gz) with passages; repeatable."),
    ] = None,
    seams_from: Annotated[
        list[Path] | None,
        options.files(
            "Sets to fit seams on: one for all data, or one for each. A set that is --data as well "
            "is halved: each half is measured with seams that were fitted on the other."
        ),
    ] = None,
    choices: Annotated[
        Path | None, options.files("Stories with multiple-choice questions, for consistency.")
    ] = None,
    items: Annotated[int, options.count(1, "Questions of each set, or half of one.")] = 30,
    orders: Annotated[int, options.count(1, "In which each has its pieces.")] = 1,
    pieces: Annotated[int, options.count(2, "Pieces of a question, at most.")] = 16,
    codecs: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(CODECS),
    methods: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(NAMES),
    quality: Annotated[str, typer.Option(help="Asked of a delivery.")] = QUALITY,
    ttft_tokens: Annotated[
        int, options.count(0, "Tokens of the joins that are timed from a node; 0: none are.")
    ] = 4096,
    mbits: Annotated[str, typer.Option(help="Links besides loopback, comma-separated.")] = "50",
    quick: Annotated[bool, typer.Option("--quick", help="A little of everything.")] = False,
    model: Annotated[str, typer.Option(help="smollm2, a folder, or a hub name.")] = "smollm2",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Joined pieces beside one reading of everything, and beside CacheBlend and EPIC."""
    plan = Plan(
        items, pieces, options.words("codecs", codecs, CODECS), quality, QUESTIONS_OF_STORY,
        ttft_tokens, options.numbers("mbits", mbits, 0.1, 1e6) if mbits else (),
        options.words("methods", methods, NAMES), orders,
    )  # fmt: skip
    plan = plan.quick() if quick else plan
    sets = _sets(data or [], seams_from or [], plan)
    stories = load_stories(choices, STORIES) if choices else []
    loaded, tokenizer = _loaded(model, device)
    _check(sets, stories, loaded, tokenizer)
    if plan.ttft_tokens:
        texts_of(sets[-1].items, tokenizer, plan.ttft_tokens, len(Prompts(tokenizer).begin()))
    settings = {
        "model": model, "device": device, "items": plan.items, "orders": plan.orders,
        "pieces": plan.pieces, "codecs": list(plan.codecs), "methods": list(plan.methods),
        "quality": quality,
    }  # fmt: skip
    found = Found(json_file, settings | {"hardware": hardware(device)})
    asyncio.run(_Work(loaded, tokenizer, plan, found).run(sets, stories))
    if plot_file:
        plot(plot_file, found.rows)
    print_report(report_console(), found.rows, found.extra())


def _loaded(model: str, device: str) -> tuple[Any, Any]:
    from kdn.engines.grouped import use_grouped_attention

    loaded, tokenizer = load_model(model, device=options.device(device))
    use_grouped_attention(loaded)
    return loaded, tokenizer


def _check(sets: Sequence[QuestionSet], stories: Sequence[Story], model: Any, tok: Any) -> None:
    """What would fail after an hour fails before."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for one in sets:
        for item in one.items:
            prompt = Prompt.of(item, tok)
            count = len(prompt.tokens) + len(prompt.question) + ANSWER_TOKENS
            if limit is not None and count > limit:
                raise UnsupportedError(
                    f"{one.name}, {item.name}: {count:,} tokens, this model reads {limit:,}: "
                    "take fewer --pieces"
                )
    for story in stories:
        for question in story.questions:
            Choices.of(question, tok)


@dataclass(frozen=True)
class QuestionSet:
    name: str
    items: Sequence[Item]
    fitted_on: Sequence[Item]
    """Empty: there are no seams."""
    fitted_name: str
    half_of: str = ""


def _sets(data: Sequence[Path], seams_from: Sequence[Path], plan: Plan) -> list[QuestionSet]:
    """All files are read before anything is measured."""
    if not data:
        raise UnsupportedError("data: expected at least one question set, as --data FILE")
    if len(seams_from) not in (0, 1, len(data)):
        raise UnsupportedError(
            f"seams-from: expected one set for all, or one for each of {len(data)}"
        )
    sources = list(seams_from) * (len(data) if len(seams_from) == 1 else 1)
    fitted = dict(zip(data, sources, strict=False))
    sets = [one for path in data for one in _sets_of(path, fitted.get(path), plan)]
    if len({one.name for one in sets}) < len(sets):
        raise UnsupportedError("data: expected files of different names")
    return sets


def _sets_of(path: Path, source: Path | None, plan: Plan) -> list[QuestionSet]:
    name = set_name(path)
    if source is None:
        return [QuestionSet(name, load_items(path, plan.items, plan.pieces), [], "")]
    if source.resolve() == path.resolve():
        return _halves(path, plan)
    own = load_items(path, plan.items, plan.pieces)
    others = apart(load_items(source, FIT_ITEMS, plan.pieces), own)
    if not others:
        raise UnsupportedError(f"seams-from: {source} has nothing that {path} has not")
    return [QuestionSet(name, own, others, set_name(source))]


def _halves(path: Path, plan: Plan) -> list[QuestionSet]:
    """Without the passages that both have: so a question is about the same ones in its report and
    when it is measured."""
    name, loaded = set_name(path), load_items(path, 2 * max(FIT_ITEMS, plan.items), plan.pieces)
    every = [*{item.question: item for item in loaded}.values()]  # told apart by their words
    half = len(every) // 2
    parts = (every[:half], every[half:]), (every[half:], every[:half])
    first, second = ([item for item in apart(*both) if len(item.pieces) > 1] for both in parts)
    if not first or not second:
        raise UnsupportedError(
            f"seams-from: {path} has {len(every)} questions. To be fitted and measured on, its "
            "halves need questions and passages of their own"
        )
    names = f"{name}, first half", f"{name}, second half"
    return [
        QuestionSet(names[1], second[: plan.items], first[:FIT_ITEMS], names[0], name),
        QuestionSet(names[0], first[: plan.items], second[:FIT_ITEMS], names[1], name),
    ]


class _Work:
    def __init__(self, model: Any, tokenizer: Any, plan: Plan, found: Found) -> None:
        from kdn.engines.transformers import spec_of

        self._model, self._tokenizer = model, tokenizer
        self._plan, self._found = plan, found
        self._spec: ModelSpec = spec_of(model)
        self._told = Progress()

    async def run(self, sets: Sequence[QuestionSet], stories: Sequence[Story]) -> None:
        self._found.halves = {one.name: one.half_of for one in sets if one.half_of}
        with self._told:
            for one in sets:
                seams = self._fit(one)
                async with self._bench(seams) as bench:
                    await self._ask_all(bench, one)
                    if stories and one is sets[-1]:
                        await self._choose_all(bench, stories)
                if self._plan.ttft_tokens and one is sets[-1]:
                    await self._time(one, seams)

    def _fit(self, one: QuestionSet) -> Seams | None:
        if not one.fitted_on:
            self._found.notes.append(f"{one.name}: no seams (--seams-from)")
            return None
        what = f"fitting seams on {one.fitted_name}"
        with self._found.timings.of("fitting seams"), self._told.of(what, 100) as step:
            seams, answers = fitted_on(
                one.fitted_on, self._model, self._tokenizer, self._spec, step.part
            )
            step.part(1.0)
        self._found.reported += paired.reported(one.fitted_name, answers)
        self._found.seams[one.name] = {"from": one.fitted_name, **expected.as_json(seams)}
        self._found.save()
        return seams

    @asynccontextmanager
    async def _bench(self, seams: Seams | None) -> AsyncIterator[Bench]:
        reader = Reader(self._model)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdn-blend-")))
            joiners = []
            for codec in self._plan.codecs:
                session = session_of(folder / codec, codec, self._spec, self._model.dtype)
                await stack.enter_async_context(session)
                joiners.append(FolderJoiner(session, reader, self._plan.quality, seams))
            methods = [one for one in METHODS if one.name in self._plan.methods]
            methods = [one for one in methods if seams is not None or not one.needs_seams]
            yield Bench(
                self._model, self._tokenizer, self._spec, joiners, methods, self._found.timings
            )

    async def _ask_all(self, bench: Bench, one: QuestionSet) -> None:
        outcomes = self._found.outcomes.setdefault(one.name, [])
        with self._told.of(one.name, len(one.items)) as step:
            for number, item in enumerate(one.items):
                orders = drawn_orders(
                    len(item.pieces),
                    self._plan.orders,
                    np.random.default_rng([ORDERS_SEED, number]),
                )
                prompt = Prompt.of(item, self._tokenizer)
                new = await bench.measure(prompt, item.answers, number % SELDOM == 0, orders)
                outcomes += (replace(one, question=item.question) for one in new)
                self._found.save()
                step.done(_line(new))

    async def _choose_all(self, bench: Bench, stories: Sequence[Story]) -> None:
        """With the last codec: what it does to values comes on top of joining."""
        choices = []
        with self._told.of("consistency", len(stories)) as step:
            for story in stories:
                choices += await choices_of(
                    bench, bench.joiners[-1], story, self._plan.questions, ORDERS
                )
                self._found.consistency = summary(choices)
                self._found.save()
                step.done(story.name)

    async def _time(self, one: QuestionSet, seams: Seams | None) -> None:
        with self._found.timings.of("timing"), self._told.of("timing", 1) as step:
            timed = time_joins(
                self._model, self._tokenizer, one.items, seams, self._plan.ttft_tokens,
                self._plan.mbits,
            )  # fmt: skip
            async for row in timed:
                self._found.timing.append(row)
                self._found.save()
                step.say(f"{row['method']} over {row['link']}: {row['ttft_s']:.3f} s")


def _line(outcomes: Sequence[Outcome]) -> str:
    """What one question came to, in short."""
    rows = [row for row in rows_of("", outcomes) if row.method in ("join", "seams")]
    return ", ".join(f"{row.label} ({row.codec}) {row.kld_first:.3f}" for row in rows)
