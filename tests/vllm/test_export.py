"""vLLM with nothing but the URL of an export: it loads what another engine published, and offers
nothing to a web server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kdn.bench.web_server import start_web
from kdn.places.export import export
from kdn.places.places import open_places
from kdn.session.exporting import STREAMS
from tests.places.exports import needs_nginx
from tests.vllm.harness import TINY_VOCAB, Engine, Node, connector, tiny_model

pytestmark = needs_nginx


def test_an_engine_loads_from_a_web_server(node: Node, logs: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    settings = {"model": model, "skip_tokenizer_init": True, "max_model_len": 1024}
    prompts = [[(i * i + 7 * n) % (TINY_VOCAB - 3) + 3 for i in range(700)] for n in range(3)]

    async def exported() -> int:
        async with open_places(node.url) as places:
            return (await export(places, tmp_path / "files", STREAMS)).chunks

    transfer = connector(node.url, codec="exact")
    with Engine(logs / "first", kv_transfer_config=transfer, **settings) as engine:
        own = engine.generate(prompts=prompts[:2])
        assert own["cached"] == [0, 0]
        engine.flush()
    assert asyncio.run(exported()) >= 6
    with start_web(tmp_path / "files", tmp_path / "web") as web:
        transfer = connector(web.url, codec="exact", spool_bytes=1 << 20)
        environ = {"KDN_CACHE": str(tmp_path / "cache")}
        with Engine(logs / "second", environ, kv_transfer_config=transfer, **settings) as engine:
            found = engine.generate(prompts=prompts)
            assert found["tokens"][:2] == own["tokens"]
            assert min(found["cached"][:2]) >= 512
            assert found["cached"][2] == 0
            counts = engine.flush()
        assert not any(counts.values())
        assert not (tmp_path / "cache" / "spool").exists()
        assert not any(line.startswith(("PUT", "POST", "DELETE")) for line in web.requests())
