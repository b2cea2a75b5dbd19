"""What was learned is a prefix of every prompt about it."""

from __future__ import annotations

from typing import Any

import pytest

from kdn.engines.prompts import CHAT, PLAIN, Prompts
from kdn.errors import UnsupportedError
from tests.client.letters import Letters


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_texts() -> None:
    prompts = Prompts(Letters())
    tokens, style = prompts.learn("some text")
    assert (text_of(tokens), style) == ("\x01[user]some text\n\n", CHAT)
    assert text_of(prompts.ask("why?", style)) == "why?<end>[assistant]"
    assert text_of(prompts.follow_up("and?", style)) == "<end>[user]and?<end>[assistant]"
    assert text_of(prompts.begin()) == "\x01[user]"


def test_a_text_stands_behind_its_head() -> None:
    prompts = Prompts(Letters())
    tokens, style = prompts.learn("some text", "be kind")
    assert (text_of(tokens), style) == ("\x01[system]be kind<end>[user]some text\n\n", CHAT)
    assert tokens == [*prompts.begin("be kind"), *prompts.learn("some text")[0][7:]]
    plain = Prompts(Letters(chat=False))
    assert text_of(plain.learn("some text", "be kind")[0]) == "\x01be kind\n\nsome text\n\n"
    for odd in ([5, 6, 7], [{"role": "user", "content": "hello"}]):
        with pytest.raises(UnsupportedError, match="only a text"):
            prompts.learn(odd, "be kind")  # type: ignore[arg-type]

    class Deaf(Letters):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return super().apply_chat_template(messages[-1:], **options)

    with pytest.raises(UnsupportedError, match="drops system prompts"):
        Prompts(Deaf()).begin("be kind")


@pytest.mark.parametrize("bos", [True, False])
def test_texts_without_a_template(bos: bool) -> None:
    prompts = Prompts(Letters(chat=False, bos=bos))
    tokens, style = prompts.learn("some text")
    assert (text_of(tokens), style) == ("\x01" * bos + "some text\n\n", PLAIN)
    assert text_of(prompts.ask("why?", style)) == "why?"
    assert text_of(prompts.follow_up("and?", style)) == "\n\nand?"
    assert prompts.begin() == [1] * bos


def test_messages_and_ids() -> None:
    prompts = Prompts(Letters())
    messages = [{"role": "system", "content": "be kind"}]
    tokens, style = prompts.learn(messages)
    assert (text_of(tokens), style) == ("\x01[system]be kind<end>[user]", CHAT)
    assert prompts.learn([5, 6, 7]) == ([5, 6, 7], PLAIN)
    assert prompts.learn([]) == ([], PLAIN)
    for odd in ([0.5], [[1, 2]]):
        with pytest.raises(UnsupportedError, match="token ids"):
            prompts.learn(odd)  # type: ignore[arg-type]


def test_templates_that_hide_what_is_said() -> None:
    class Silent(Letters):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return "nothing"

    with pytest.raises(UnsupportedError, match="exactly once"):
        Prompts(Silent()).learn("text")

    class Forgetful(Letters):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return super().apply_chat_template(messages[-1:], **options)

    with pytest.raises(UnsupportedError, match="follow-up"):
        Prompts(Forgetful()).follow_up("and?", CHAT)


@pytest.mark.model
def test_the_real_template(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    prompts = Prompts(tokenizer)
    tokens, style = prompts.learn("A text.")
    shown = tokenizer.decode([*tokens, *prompts.ask("Why?", style)])
    messages = [{"role": "user", "content": "A text.\n\nWhy?"}]
    assert shown == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_a_text_ends_as_it_does_where_another_follows() -> None:
    class Greedy(Letters):
        """Makes one token of an empty line at the very end, and two before anything else."""

        def __call__(self, text: str, **options: Any) -> Any:
            found = super().__call__(text, **options)
            if found.input_ids[-2:] == [10, 10]:
                found.input_ids[-2:] = [127]
            return found

    class Merging(Letters):
        """Makes one token of what follows and the line before it."""

        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.replace("\nA", "\x7f"), **options)

    for tokenizer in (Letters(), Greedy(), Merging()):
        tokens, _ = Prompts(tokenizer).learn("some text")
        assert text_of(tokens) == "\x01[user]some text\n\n"


@pytest.mark.model
def test_texts_one_behind_another_are_the_tokens_of_the_whole(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    prompts = Prompts(tokenizer)
    begin, texts = prompts.begin(), ["A text.", "Another one,\nlonger", "(3 of them)"]
    parts = [prompts.learn(text)[0][len(begin) :] for text in texts]
    rest = prompts.ask("Why?", CHAT)
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\n\n".join([*texts, "Why?"])}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    whole = tokenizer(shown, add_special_tokens=False).input_ids
    assert [*begin, *(token for part in parts for token in part), *rest] == whole


def test_what_was_learned_stands_before_the_first_question() -> None:
    prompts = Prompts(Letters())
    messages = [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "so."}, {"role": "user", "content": "and?"},
    ]  # fmt: skip
    before, after = map(text_of, prompts.conversation(messages))
    assert before == "\x01[system]be kind<end>[user]"
    assert after == "why?<end>[assistant]so.<end>[user]and?<end>[assistant]"
    for odd, why in (
        (messages[:1], "user"),
        ([{**messages[1], "content": "@@kdn-question@@"}], "exactly once"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            prompts.conversation(odd)
    with pytest.raises(UnsupportedError, match="no chat template"):
        Prompts(Letters(chat=False)).conversation(messages)


class Special(Letters):
    all_special_ids = (0, 1, 2)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Letters(chat=False), [1]),
        (Letters(), [1]),  # both begin with it
        (Special(bos=False), [1]),  # only its template does
        (Letters(bos=False), []),  # its template begins with nothing special
        (Letters(chat=False, bos=False), []),
    ],
)
def test_what_every_prompt_begins_with(tokenizer: Letters, expected: list[int]) -> None:
    assert Prompts(tokenizer).first_tokens() == expected


def test_what_ends_a_text_is_no_beginning() -> None:
    class Ending(Letters):
        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
            found = super().__call__(text, add_special_tokens, **options)
            found.input_ids += [2] if add_special_tokens else []
            return found

    assert Prompts(Ending(chat=False)).first_tokens() == [1]
    assert Prompts(Ending(chat=False, bos=False)).first_tokens() == []


@pytest.mark.model
def test_smollm2_begins_with_its_start_of_a_turn(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    assert tokenizer.decode(Prompts(tokenizer).first_tokens()) == "<|im_start|>"
