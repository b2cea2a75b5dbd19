"""Your own generation loop with transformers: load a cache, go on from it, publish what is new."""

import sys
from pydoc_data.topics import topics

import torch

import kdn

PROMPT = topics["global"] + "\n\nIn short, the global statement"


def main(where: str = "knowledge", model: object = "smollm2", max_new_tokens: int = 12) -> tuple:
    with kdn.connect(where, model=model) as client:
        tokens = client.tokenizer(PROMPT).input_ids
        # Leave at least one token for the model: its output is the first new one.
        loaded = client.load(tokens[:-1], deadline_s=5.0)
        past, known = loaded.past_key_values, loaded.num_tokens
        print(f"{known} of {len(tokens)} tokens are known")

        made: list[int] = []
        rest = tokens[known:]
        with torch.no_grad():
            for _ in range(max_new_tokens):
                ids = torch.tensor([rest], device=client.model.device)
                out = client.model(ids, past_key_values=past, use_cache=True)
                past = out.past_key_values
                rest = [int(out.logits[0, -1].argmax())]  # yours may sample
                made += rest
        print(client.tokenizer.decode(made))

        # Of the cache, the tokens that the model has read: the last one that it made is not in it.
        # `after` says what it was computed on top of: kdn never publishes what rests on losses.
        client.publish([*tokens, *made[:-1]], past, after=loaded)
        client.flush()
    return known, made


if __name__ == "__main__":
    main(*sys.argv[1:])
