"""Files are told apart by what stands in them, and cut to what a small model can solve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.bench.tasks import choices, documents, lines, topics
from kdn.bench.tasks.problems import Ask, Choose, Follow, Problem, Task, Writer
from kdn.bench.tasks.sources import KINDS, open_source, open_sources
from kdn.errors import FormatError, UnsupportedError
from tests.client.letters import Letters

WRITER = Writer(Letters())
PAGE = "<P> " + "nothing here. " * 200 + "The tower was built in 1887 by Ada. " + "more. " * 400


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def made(path: Path, most: int = 100) -> Task:
    return open_source(path).make(WRITER, most)


def text(problem: Problem) -> str:
    return Letters().decode([int(token) for token in problem.tokens])


def shown(row: tuple[int, ...]) -> str:
    return Letters().decode(row)


def record_of_lines(count: int) -> dict[str, Any]:
    told = "\n".join(f"line name-{i}: REGISTER_CONTENT is <{i + 100}>" for i in range(count))
    asked = {"question": "what is in line name-3?", "answers": ["103"]}
    return {"id": f"l{count}", "context": f"Below.\n\n{told}", "questions": [asked]}


def record_of_topics(count: int) -> dict[str, Any]:
    names = [f"Thing {i}" for i in range(count)]
    told = "\n".join(
        f"USER: I would like to discuss the topic of {name}.\nASSISTANT: Yes." for name in names
    )
    return {
        "context": f"A record on {count} different topics. Now the record start. {told} "
        "Now the record ends.",
        "questions": [{"question": "What is the first topic?", "answers": [names[0]]}],
        "topics": names,
    }


def test_lines_are_shortened_and_asked_for_by_their_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", record_of_lines(95), record_of_lines(40))
    task = made(path)
    assert (task.kind, len(task.problems)) == ("lines", 3)
    assert task.num_items == 3 * lines.QUESTIONS
    # The first part of every record comes before the second of any.
    assert [one.name for one in task.problems] == ["l95+0", "l40+0", "l95+40"]
    assert "line name-41: <141>\n" in text(task.problems[2])
    for question in task.problems[2].questions:
        assert isinstance(question, Ask)
        assert shown(question.row) + question.expected[0] in text(task.problems[2])
    assert made(path, most=1).num_items == lines.QUESTIONS


def test_a_number_is_right_digit_by_digit() -> None:
    assert lines.is_number("4242", ["4242"]) == 1
    assert lines.is_number("42421", ["4242"]) == 0
    assert lines.is_number("I do not know", ["4242"]) == 0


def test_a_record_of_topics_is_cut_into_shorter_ones(tmp_path: Path) -> None:
    task = made(write(tmp_path / "some.jsonl", record_of_topics(2 * topics.NUM_TOPICS + 1)))
    assert (task.kind, len(task.problems)) == ("topics", 2)
    second = task.problems[1]
    assert f"on {topics.NUM_TOPICS} different topics" in text(second)
    assert "Thing 0" not in text(second)
    [question] = second.questions
    assert isinstance(question, Ask)
    assert question.expected == (f"Thing {topics.NUM_TOPICS}",)


def test_a_topic_may_be_named_in_other_letters() -> None:
    assert topics.names_topic('the Role of Bees"', ["The role of bees"])
    assert not topics.names_topic("role of", ["The role of bees"])


def test_options_are_scored_after_the_question_alone(tmp_path: Path) -> None:
    asked = "Who did it?\n\n (A) The cat\n (B) The dog\n (C) Nobody at all"
    record = {
        "context": "x " * 4000 + "here the animal slept, nobody else " + "y " * 4000,
        "questions": [{"question": asked, "answers": ["(C) Nobody at all"]}],
    }
    task = made(write(tmp_path / "some.jsonl", record))
    assert task.kind == "choices"
    assert task.chance == pytest.approx(1 / 3)
    [problem] = task.problems
    assert "nobody else" in text(problem)
    [question] = problem.questions
    assert isinstance(question, Choose)
    assert [shown(one) for one in question.options] == ["The cat", "The dog", "Nobody at all"]
    assert question.right == 2
    assert "(A)" not in shown(question.row)


def test_a_question_whose_letter_is_no_option_is_refused(tmp_path: Path) -> None:
    asked = {"question": "Who?\n (A) x\n (B) y", "answers": ["(D) z"]}
    with pytest.raises(FormatError, match="letter"):
        made(write(tmp_path / "some.jsonl", {"context": "c", "questions": [asked]}))


def test_of_a_document_the_part_around_the_answer_is_kept(tmp_path: Path) -> None:
    questions = [
        {"question": "when was the tower built", "answers": ["1887"]},
        {"question": "who paid", "answers": ["a man who is not in the text"]},
    ]
    task = made(
        write(tmp_path / "some.jsonl", {"id": "d", "context": PAGE, "questions": questions})
    )
    assert (task.kind, [one.name for one in task.problems]) == ("documents", ["d.0"])
    kept = text(task.problems[0])
    assert "built in 1887" in kept
    assert "<P>" not in kept
    assert len(kept) < documents.PART_CHARS + 100
    [question] = task.problems[0].questions
    assert isinstance(question, Ask)
    assert "when was the tower built" in shown(question.row)
    assert shown(question.row).endswith("]here. nothing here. The tower was built in")
    assert question.expected == ("1887",)


def test_of_many_places_the_one_near_the_question_is_kept() -> None:
    page = f"in 7 {'far ' * 900} the castle has 7 towers {'away ' * 900}"
    place = documents.place_of(page, "how many towers has the castle", ["7"])
    assert place is not None
    assert place.lead[-3:] == ["the", "castle", "has"]
    assert "castle has 7 towers" in place.part(100)
    assert len(place.part(100)) == 100
    assert documents.place_of(page, "how many", ["77"]) is None
    assert documents.place_of("in 7", "when", ["7"]) is None  # too few words lead up to it


def test_passages_become_one_context(tmp_path: Path) -> None:
    chunks = [{"title": f"T{i}", "text": f"text {i}", "gold": i == 9} for i in range(10)]
    item = {"question": "q", "answers": ["9"], "chunks": chunks}
    task = made(write(tmp_path / "a.jsonl", item, {**item, "answers": ["yes"]}))
    assert len(task.problems) == 1
    assert task.kind == "passages"
    assert "text 9" in text(task.problems[0])
    assert "text 5" not in text(task.problems[0])


def test_f1_counts_as_many_words_as_are_expected() -> None:
    assert documents.begun_f1("the tower of london is tall", ["Tower of London"]) == 1
    assert documents.begun_f1("tower in london", ["Tower of London"]) == pytest.approx(2 / 3)
    assert documents.begun_f1("", ["tower"]) == 0


def test_a_text_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(map(chr, np.random.default_rng(0).integers(97, 123, 7000))))
    task = made(path, most=4)
    assert (task.kind, task.name, len(task.problems)) == ("perplexity", "book", 2)
    [follow] = task.problems[0].questions
    assert isinstance(follow, Follow)
    assert text(task.problems[0])[-20:] + shown(follow.row) in path.read_text()


def test_only_kinds_that_were_asked_for_are_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", record_of_lines(40))
    assert [one.kind for one in open_sources([path], KINDS)] == ["lines"]
    with pytest.raises(UnsupportedError, match="expected files with tasks of topics"):
        open_sources([path], ["topics"])
    with pytest.raises(UnsupportedError, match="different names"):
        open_sources([path, path], KINDS)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"context": "c", "questions": []}, "at least one question"),
        ({"context": "c", "questions": [{"question": "q", "answers": []}]}, "at least one answer"),
        ({"context": "c", "questions": ["q"]}, "to be objects"),
        ({"context": 5, "questions": [{"question": "q", "answers": ["a"]}]}, "'context'"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(
    tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    with pytest.raises(FormatError, match=f"line 1: .*{said}"):
        open_source(write(tmp_path / "some.jsonl", record))


def test_a_file_without_a_question_for_a_small_model_is_refused(tmp_path: Path) -> None:
    asked = {"question": "what happens", "answers": ["very much, " * 20]}
    path = write(tmp_path / "some.jsonl", {"context": "c", "questions": [asked]})
    with pytest.raises(FormatError, match="stand in their text"):
        made(path)


def test_options_need_not_be_four() -> None:
    assert choices.OPTION.findall("Q\n(A) one\n  (B)  two")[1] == ("B", "two")
