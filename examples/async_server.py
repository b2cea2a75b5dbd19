"""A server that answers many users about one document, which nobody but the first has read.

Users send a question in a line and get the answer as it is made, over plain TCP. Here three of them
ask at once, and then the server stops; yours would go on.
"""

import asyncio
import sys
from pydoc_data.topics import topics

import kdn

QUESTIONS = ("What does global do?", "What is a free variable?", "Where must it not stand?")
PATIENCE_S = 60.0
"""Longest wait for a question, and for all of an answer."""


async def answer(client: kdn.AsyncClient, reader, writer, max_new_tokens: int) -> None:
    """One user. A deadline: better a coarse beginning of an answer than a long silence."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            question = (await reader.readline()).decode()
            said = client.ask("global", question, deadline_s=5.0, max_new_tokens=max_new_tokens)
            async for piece in said:
                writer.write(piece.encode())
                await writer.drain()
    except (TimeoutError, kdn.KdnError, UnicodeDecodeError) as error:
        writer.write(f"sorry: {type(error).__name__}".encode())
    finally:
        writer.close()


async def user(port: int, question: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{question}\n".encode())
    said = (await reader.read()).decode()
    writer.close()
    return said


async def main(where: str = "knowledge", model: object = "smollm2", max_new_tokens: int = 24):
    async with kdn.AsyncClient(where, model=model) as client:
        await client.learn("global", topics["global"])
        server = await asyncio.start_server(
            lambda reader, writer: answer(client, reader, writer, max_new_tokens), "127.0.0.1", 0
        )
        async with server:
            port = server.sockets[0].getsockname()[1]
            answers = await asyncio.gather(*(user(port, question) for question in QUESTIONS))
        for question, said in zip(QUESTIONS, answers, strict=True):
            print(f"> {question}\n{said.strip()}")
        print(client.metrics)
        return answers


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
