"""Answer questions over several documents, of which each was read only once.

Retrieval puts other documents in front of every question, so prompts share no beginning, and a
prefix cache is of no use. kdn joins documents that were learned apart, in any order.
"""

import sys
from pydoc_data.topics import topics

import kdn

DOCUMENTS = {name: topics[name] for name in ("assert", "break", "del", "global")}
"""Your documents, by name. Here: short chapters of Python's manual."""


def retrieve(question: str, count: int = 2) -> list[str]:
    """The documents that share most words with the question; yours would ask an index."""
    words = {word.strip("?.,").lower() for word in question.split()}
    shared = {name: sum(text.lower().count(word) for word in words if len(word) > 4)
              for name, text in DOCUMENTS.items()}  # fmt: skip
    return sorted(shared, key=lambda name: -shared[name])[:count]


def main(where: str = "knowledge", model: object = "smollm2", max_new_tokens: int = 40) -> list:
    answered = []
    with kdn.connect(where, model=model) as client:
        for name, text in DOCUMENTS.items():
            learned = client.learn(name, text)  # a second time, this reads nothing
            print(f"{name}: {learned.num_tokens} tokens, {learned.computed_tokens} read now")
        for question in ("Which statement terminates the nearest enclosing loop?",
                         "What does an assertion with an expression raise?"):  # fmt: skip
            found = retrieve(question)
            # A share of 0 computes nothing anew. Leave it out, and kdn chooses by the quality.
            answer = client.ask(found, question, max_new_tokens=max_new_tokens, recompute_share=0)
            print(f"\n{question} ({' + '.join(found)})")
            print(answer.read())
            print(f"{answer.stats.known_tokens} tokens known, {answer.stats.computed_tokens} read")
            answered.append(answer)
    return answered


if __name__ == "__main__":
    main(*sys.argv[1:])
