"""A chat that moves between machines: the node knows what was said, so nobody reads it again.

What travels between the machines is only the list of messages, which your application has anyway.
Here both machines are in one process; each has a client of its own.
"""

import sys
from pydoc_data.topics import topics

import kdn

SYSTEM = "Answer in one sentence, by these rules.\n\n" + topics["global"]
CHAT = "chat-42"


def turn(client: kdn.Client, messages: list, question: str, max_new_tokens: int) -> kdn.Learned:
    """Ask, and keep question and answer. `messages` is changed."""
    # The model reads what was said since the last turn, on whichever machine that was. What it
    # reads is published; at the quality "exact", so is all that is computed on top.
    learned = client.learn(CHAT, messages)
    answer = client.ask(CHAT, question, quality="exact", max_new_tokens=max_new_tokens)
    text = answer.read()
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    print(f"> {question}\n{text.strip()}")
    print(f"  ({learned.num_tokens} tokens so far, {learned.computed_tokens} of them read now)")
    return learned


def main(where: str, model: object = "smollm2", max_new_tokens: int = 24) -> list:
    messages = [{"role": "system", "content": SYSTEM}]
    read = []
    with kdn.connect(where, model=model) as first:
        read.append(turn(first, messages, "What does global do?", max_new_tokens))
        read.append(turn(first, messages, "And for a name that is a parameter?", max_new_tokens))
    print("--- the other machine ---")
    with kdn.connect(where, model=model) as second:
        read.append(turn(second, messages, "Where may it stand?", max_new_tokens))
    return read


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: chat_moves.py URL_OF_A_NODE  (a folder has one user at a time)")
    main(sys.argv[1])
