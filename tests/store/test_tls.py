"""Nodes behind TLS: whom a client trusts, and what it says when it does not."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from kdn.cli.main import app
from kdn.config import load_config
from kdn.depot.tenants import tenants_of
from kdn.errors import StoreError, UnsupportedError
from kdn.places.places import open_places
from kdn.region.centre import CentreStore, open_clients
from kdn.store.http import HttpStore
from kdn.store.node_client import HttpLimits
from kdn.store.tls import client_tls, explain
from tests.node.harness import Running, key_of, run, tenant, with_node
from tests.places.objects import put, read

Pair = tuple[str, str]


def with_tls(folder: Path, certificate: Pair, test: Any, *tenants: Any) -> None:
    with_node(folder, test, *tenants, tls_cert=certificate[0], tls_key=certificate[1])


def test_a_private_authority_is_trusted_when_named(tmp_path: Path, certificate: Pair) -> None:
    async def test(node: Running) -> None:
        async with open_places(node.url, tls_ca=certificate[0]) as places:
            data = await put(places.publish_to.store, 1)
            assert await read(places.publish_to.store, 1) == data
            assert await places.names.get("notes") is None
            assert await read(places.profiles[0], 1) is None
        async with open_places(node.url) as places:
            store = places.publish_to.store
            for asking in (places.names.get("notes"), read(store, 1), put(store, 2)):
                with pytest.raises(StoreError, match=r"certificate is not trusted.*set tls_ca"):
                    await asking

    with_tls(tmp_path, certificate, test)


def test_an_upstream_and_its_token_file(tmp_path: Path, certificate: Pair) -> None:
    token = tmp_path / "token"
    token.write_text("T0KEN\n")
    token.chmod(0o600)

    async def test(node: Running) -> None:
        environ = {
            "KDN_NODE_UPSTREAM": node.url, "KDN_NODE_UPSTREAM_TOKEN_FILE": str(token),
            "KDN_NODE_UPSTREAM_TLS_CA": certificate[0],
        }  # fmt: skip
        settings = load_config(environ=environ).node
        [public] = tenants = tenants_of(())
        centre = CentreStore(open_clients(settings, tenants, HttpLimits()), tenants)
        try:
            assert await centre.lookup([public.store_key("chunks", key_of(1))]) == [None]
        finally:
            await centre.close()

    with_tls(tmp_path / "node", certificate, test, tenant("t", "T0KEN"))


def test_the_command_line(
    tmp_path: Path, certificate: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("T0KEN\n")
    token.chmod(0o600)
    monkeypatch.chdir(tmp_path)

    async def test(node: Running) -> None:
        def kdn(*arguments: str) -> Any:
            return CliRunner().invoke(app, ["ls", "--url", node.url, *arguments])

        flags = ("--token-file", str(token), "--tls-ca", certificate[0])
        assert (await asyncio.to_thread(kdn, *flags)).exit_code == 0
        refused = (await asyncio.to_thread(kdn, *flags[:2])).exception
        assert isinstance(refused, StoreError)
        assert "set tls_ca" in str(refused)
        refused = (await asyncio.to_thread(kdn, *flags[2:])).exception
        assert isinstance(refused, StoreError)
        assert "token" in str(refused)

    with_tls(tmp_path / "node", certificate, test, tenant("t", "T0KEN"))


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff\xfe"])
def test_what_is_no_authority(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    for wrong in (str(path), str(tmp_path), "a\0b"):
        with pytest.raises(UnsupportedError, match="tls_ca"):
            client_tls(wrong)


@pytest.mark.parametrize(
    ("code", "advice"), [(10, "renew"), (9, "clocks"), (62, "host name"), (19, "tls_ca")]
)
def test_advice(code: int, advice: str) -> None:
    error = ssl.SSLCertVerificationError(1, "failed")
    error.verify_code, error.verify_message = code, "so it is"
    assert advice in explain(error)
    assert "so it is" in explain(error)


def test_a_certificate_of_another_host(tmp_path: Path, certificate: Pair) -> None:
    async def test(node: Running) -> None:
        async with open_places(node.url, tls_ca=certificate[0]) as places:
            with pytest.raises(StoreError, match="use a host name that it was made for"):
                await places.names.get("notes")

    cert, key = certificate
    with_node(tmp_path, test, host="127.0.0.2", tls_cert=cert, tls_key=key)


def test_an_answer_that_is_no_http_does_not_show_the_token() -> None:
    """aiohttp's error holds the request, headers and all, and shows it in its repr."""

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: never\r\n\r\n")
        await writer.drain()
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, open_places(url, token="T0KEN") as places:
            store = places.publish_to.store
            assert isinstance(store, HttpStore)
            for asking in (places.names.get("notes"), store.lookup([b"k"]), store.delete(b"k")):
                with pytest.raises(StoreError, match="failed") as caught:
                    await asking
                assert isinstance(caught.value.__cause__, aiohttp.ClientResponseError)
                assert "T0KEN" in repr(caught.value.__cause__)
                assert "T0KEN" not in str(caught.value) + repr(caught.value)

    run(test())
