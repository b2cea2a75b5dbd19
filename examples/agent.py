"""An agent's context grows with every step: instructions, actions, what its tools said.

Before each step the context is learned under one name. That reads only what is new, and lets any
other process go on with the agent, or ask what it knows.
"""

import sys
from pydoc_data.topics import topics

import kdn

TASK = "You look things up in Python's manual. Say which of these chapters to read next: "
CHAPTERS = ("assert", "del", "global")


def tool(chapter: str) -> str:
    """What the agent's tool finds. Yours would search, run code or ask a service."""
    return topics[chapter]


def main(where: str = "knowledge", model: object = "smollm2", max_new_tokens: int = 16) -> list:
    messages = [{"role": "system", "content": TASK + ", ".join(CHAPTERS)}]
    steps = []
    with kdn.connect(where, model=model) as client:
        for chapter in CHAPTERS:
            step = client.learn("agent", messages)  # reads what the last step added
            steps.append(step)
            print(f"{step.num_tokens} tokens, {step.computed_tokens} read, {step.seconds:.1f} s")
            said = client.ask("agent", "What next?", max_new_tokens=max_new_tokens).read()
            # A real agent would do what the model said. This one reads chapter by chapter.
            messages += [
                {"role": "user", "content": "What next?"},
                {"role": "assistant", "content": said},
                {"role": "user", "content": tool(chapter)},
                {"role": "assistant", "content": f"I have read {chapter}."},
            ]
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])
