"""Texts and conversations to token ids, so that what was learned is a prefix of every prompt.

A prompt is made of parts that are tokenised one by one: what is known ends exactly where a part
ends, whatever follows. The parts of a conversation come out of the model's own chat template, by
rendering it around markers and cutting at them. A tokenizer without a template gets a plain form.

A text stands behind a head (a system prompt, the template's beginning) that texts share. It is
tokenised apart from it, so that its tokens are the same behind any head, and behind other texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from kdn.cache.keys import Tokens
from kdn.checked import checked_text
from kdn.errors import UnsupportedError

ANSWER_MARK = "@@kdn-answer@@"
QUESTION_MARK = "@@kdn-question@@"
FOLLOWING = "A"
"""Stands for whatever may follow a text."""
CHAT, PLAIN = "chat", "plain"
"""How questions are put: by the chat template, or just as they are."""

Message = Mapping[str, str]
Knowledge = str | Tokens | Sequence[Message]


class Prompts:
    """The prompts of one tokenizer."""

    def __init__(self, tokenizer: Any, **template: Any) -> None:
        """`template`: what else its chat template is told, such as another `chat_template`."""
        self._tokenizer, self._template = tokenizer, template
        own = getattr(tokenizer, "chat_template", None)
        self.has_template = bool(template.get("chat_template") or own)

    def learn(self, what: Knowledge, system: str | None = None) -> tuple[list[int], str]:
        """Token ids of a text, a conversation, or given ones; and how to ask about them. A text
        stands behind `begin(system)`."""
        if isinstance(what, str):
            own = self._own(what)
            return [*self.begin(system), *own], CHAT if self.has_template else PLAIN
        if system is not None:
            raise UnsupportedError("only a text is learned behind a system prompt")
        if isinstance(what, Sequence) and what and isinstance(what[0], Mapping):
            return self._learn_messages(what), CHAT  # type: ignore[arg-type]
        try:
            ids = np.asarray(what)
        except (TypeError, ValueError):
            ids = np.zeros(())
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UnsupportedError("expected a text, a list of token ids, or a list of messages")
        return [int(token) for token in ids], PLAIN

    def _own(self, text: str) -> list[int]:
        """Of a text and the empty line that ends it, as they come out where another text follows:
        many tokenizers make one token of an empty line at the very end, and two before a word."""
        whole, after = self._ids(f"{text}\n\n{FOLLOWING}"), self._ids(FOLLOWING)
        if whole[-len(after) :] != after:
            return self._ids(f"{text}\n\n")
        return whole[: -len(after)]

    def _learn_messages(self, messages: Sequence[Message]) -> list[int]:
        if not self.has_template:
            raise UnsupportedError("this tokenizer has no chat template: learn a text instead")
        for one in messages:
            if not isinstance(one, Mapping) or not {"role", "content"} <= set(one):
                raise UnsupportedError("expected messages of a role and a content")
            for value in one.values():
                checked_text("message", value, empty=True)
        head, _ = self._around(messages, QUESTION_MARK)
        return self._ids(head)

    def ask(self, question: str, style: str) -> list[int]:
        """What follows something learned."""
        if style == PLAIN:
            return self._ids(question)
        _, tail = self._around([], QUESTION_MARK)
        return self._ids(question + tail)

    def begin(self, system: str | None = None) -> list[int]:
        """A conversation's beginning, up to where the first question stands: the head that texts
        are learned behind. With a system prompt, or what the template has of its own."""
        if not self.has_template:
            return self._ids("" if system is None else f"{system}\n\n", special=True)
        before = [] if system is None else [{"role": "system", "content": system}]
        head, _ = self._around(before, QUESTION_MARK)
        if system is not None and system.strip() not in head:
            raise UnsupportedError("the chat template drops system prompts")
        return self._ids(head)

    def first_tokens(self) -> list[int]:
        """What every prompt begins with, whatever it says: the tokens that the tokenizer puts
        before any text (BOS), else the special token that its chat template begins with, else
        nothing. It is what later tokens attend to when nothing else matters (the attention sink);
        the rest of a template's head differs between system prompts, and even between days."""
        plain, whole = self._ids(FOLLOWING), self._ids(FOLLOWING, special=True)
        for count in range(1, len(whole) - len(plain) + 1):
            if whole[count : count + len(plain)] == plain:
                return whole[:count]
        if not self.has_template:
            return []
        try:
            head = self.begin()
        except UnsupportedError:  # a template that no prompt of ours can be made with
            return []
        special = set(getattr(self._tokenizer, "all_special_ids", None) or ())
        return head[:1] if head and head[0] in special else []

    def follow_up(self, question: str, style: str) -> list[int]:
        """What follows an answer: the end of the turn, and the next question."""
        if style == PLAIN:
            return self._ids(f"\n\n{question}")
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER_MARK}]
        head, tail = self._around(turns, QUESTION_MARK)
        _, found, between = head.partition(ANSWER_MARK)
        if not found:
            raise UnsupportedError("the chat template drops answers: no follow-up is possible")
        return self._ids(between + question + tail)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Of a whole one, what stands before its first question, and all from that on: what was
        learned belongs between them."""
        if not self.has_template:
            raise UnsupportedError("this tokenizer has no chat template")
        first = next((n for n, one in enumerate(messages) if one["role"] == "user"), None)
        if first is None:
            raise UnsupportedError("expected a message of a user")
        marked = [dict(one) for one in messages]
        marked[first]["content"] = QUESTION_MARK + marked[first]["content"]
        head, rest = self._cut(marked)
        return self._ids(head), self._ids(rest)

    def _around(self, before: Sequence[Message], content: str) -> tuple[str, str]:
        """The conversation with one more user message, cut at the question's mark."""
        return self._cut([*(dict(one) for one in before), {"role": "user", "content": content}])

    def _cut(self, messages: Sequence[Message]) -> tuple[str, str]:
        try:
            shown = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._template
            )
        except TemplateError as error:  # as of roles that it does not know
            raise UnsupportedError(f"the chat template refuses these messages: {error}") from error
        parts = shown.split(QUESTION_MARK)
        if len(parts) != 2:
            raise UnsupportedError("the chat template does not show a message exactly once")
        return parts[0], parts[1]

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ids(self, text: str, special: bool = False) -> list[int]:
        """A template brings its special tokens itself."""
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return [int(token) for token in ids]
