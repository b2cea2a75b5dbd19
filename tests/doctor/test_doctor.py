"""Faults planted one at a time: doctor finds each by name. A sound machine has none."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cli.main import main
from kdn.doctor import check, command, disk, machine, model
from kdn.doctor import node as node_checks
from kdn.doctor.check import FAIL, NOTE, OK, Check, Result, Situation, examine, ok
from kdn.errors import StoreError, UnavailableError
from tests.node.harness import Running, tenant, with_node
from tests.session.calibrated import calibrate_here

BY_NAME = {one.name: one for one in command.CHECKS}
MACHINE = (
    "python", "packages", "vllm", "cores", "gpu", "shared memory", "clock", "configuration",
    "credentials", "cache folder", "data folder", "spool",
)  # fmt: skip
NODE = ("node", "tls", "node clock", "versions", "store", "link")


class Bench:
    """A sound machine, on which faults are planted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        for name in ("cache", "data", "shm"):
            (folder / name).mkdir(mode=0o700)
        (folder / "cpuinfo").write_text("flags : sse avx2 avx512f asimd\n")
        patch.setenv("KDN_CACHE", str(folder / "cache"))
        patch.setenv("KDN_NODE_DATA", str(folder / "data"))
        patch.chdir(folder)
        patch.setattr(model, "NVIDIA_DRIVER", folder / "absent")
        self.model = "smollm2"

    def situation(self, url: str | None = None) -> Situation:
        return Situation(
            url=url, model=self.model, shared_memory=self.folder / "shm",
            cpu_info=self.folder / "cpuinfo",
        )  # fmt: skip

    def look(self, name: str, url: str | None = None) -> Result:
        return examine(BY_NAME[name], self.situation(url))

    def write(self, name: str, content: str, mode: int = 0o600) -> Path:
        path = self.folder / name
        path.write_text(content)
        path.chmod(mode)
        return path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def checkpoint(bench: Bench, tiny_model: Callable[..., Any]) -> Any:
    """A model's files, and its spec."""
    from kdn.engines.transformers import spec_of

    made = tiny_model("llama")
    made.save_pretrained(bench.folder / "model")
    bench.model = str(bench.folder / "model")
    return spec_of(made)


def at_node(
    bench: Bench, *names: str, tenants: tuple[Any, ...] = (), token: str | None = None
) -> list[Result]:
    """What checks find at a real node."""

    async def test(node: Running) -> list[Result]:
        await node.put_chunk(1, token=token)
        where = bench.situation(node.url)
        return [await asyncio.to_thread(examine, BY_NAME[name], where) for name in names]

    return with_node(bench.folder / "node", test, *tenants)


# a sound machine


def test_a_sound_machine_has_no_fault(bench: Bench) -> None:
    found = {name: bench.look(name) for name in MACHINE}
    assert {name: one for name, one in found.items() if one.status != OK} == {}


def test_a_sound_node_has_no_fault(bench: Bench) -> None:
    found = at_node(bench, *NODE)
    assert [one for one in found if one.status != OK] == []
    told = {one.name: one.told for one in found}
    assert "Mbit/s" in told["link"]
    assert "1 objects" in told["store"]


def test_a_sound_model_has_no_fault(bench: Bench, checkpoint: Any) -> None:
    calibrate_here(checkpoint)
    found = bench.look("profile")
    assert (found.status, checkpoint.fingerprint.hex() in found.told) == (OK, True)
    bench.patch.setattr(model, "quality_of", lambda _: (0.003, 19.0))
    assert bench.look("quality").status == OK


def test_without_any_node_there_is_only_a_note(bench: Bench) -> None:
    async def away(*asked: Any) -> Any:
        raise UnavailableError("nobody is there")

    bench.patch.setattr(node_checks.NodeClient, "ask", away)
    assert bench.look("node").status == NOTE
    assert bench.look("place").status == NOTE
    assert bench.look("node", "http://127.0.0.1:8470").status == FAIL


@pytest.mark.model
def test_the_quality_of_the_real_model_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdn.engines.models import smollm2_folder

    smollm2_folder()
    found = examine(BY_NAME["quality"], Situation(model="smollm2"))
    assert found.status == OK
    assert "KLD 0.0" in found.told


# faults of the machine


def nowhere() -> str:
    """A URL at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def versions(patch: pytest.MonkeyPatch, **others: str | None) -> None:
    """Of packages; None: it is not there."""
    real = metadata.version

    def version(name: str) -> str:
        found = others.get(name.replace("-", "_"), "")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found or real(name)

    patch.setattr(machine.metadata, "version", version)


def old_python(bench: Bench) -> None:
    bench.patch.setattr(machine, "LEAST_PYTHON", (9, 9))


def old_torch(bench: Bench) -> None:
    versions(bench.patch, torch="2.1.0+cu121")


def no_numba(bench: Bench) -> None:
    versions(bench.patch, numba=None)


def old_vllm(bench: Bench) -> None:
    versions(bench.patch, vllm="0.25.9")


def slow_cores(bench: Bench) -> None:
    bench.write("cpuinfo", "flags : sse\n")
    bench.patch.setattr(platform, "machine", lambda: "x86_64")


def gpu(bench: Bench, error: float, triton: object = True) -> None:
    import torch

    bench.patch.setattr(torch.cuda, "is_available", lambda: True)
    bench.patch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    bench.patch.setattr(model, "gpu_error", lambda device: error)
    bench.patch.setattr(model, "find_spec", lambda name: triton)


def wrong_gpu(bench: Bench) -> None:
    gpu(bench, 0.3)


def gpu_of_nothing(bench: Bench) -> None:
    gpu(bench, float("nan"))


def no_triton(bench: Bench) -> None:
    gpu(bench, 0.0, triton=None)


def idle_gpu(bench: Bench) -> None:
    import torch

    bench.patch.setattr(torch.cuda, "is_available", lambda: False)
    bench.patch.setattr(model, "NVIDIA_DRIVER", bench.write("version", ""))


def no_shared_memory(bench: Bench) -> None:
    (bench.folder / "shm").rmdir()


def small_shared_memory(bench: Bench) -> None:
    bench.patch.setattr(machine, "LEAST_SHARED_BYTES", 1 << 60)


def open_shared_memory(bench: Bench) -> None:
    own = bench.folder / "shm" / f"kdn-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o755)


def linked_shared_memory(bench: Bench) -> None:
    (bench.folder / "shm" / f"kdn-{os.geteuid()}").symlink_to(bench.folder)


def backward_clock(bench: Bench) -> None:
    readings = iter(range(10**6, 0, -1))
    clock = SimpleNamespace(
        monotonic=lambda: next(readings), time=time.time, sleep=lambda seconds: None
    )
    bench.patch.setattr(machine, "time", clock)


def jumping_clock(bench: Bench) -> None:
    days = iter((0.0, 86400.0))
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: next(days), sleep=time.sleep)
    bench.patch.setattr(machine, "time", clock)


def unknown_setting(bench: Bench) -> None:
    bench.write("kdn.toml", "[node]\nprot = 8470\n")


def wrong_kind(bench: Bench) -> None:
    bench.write("kdn.toml", '[node]\nport = "many"\n')


def no_toml(bench: Bench) -> None:
    bench.write("kdn.toml", "[node\n")


def open_node(bench: Bench) -> None:
    bench.write("kdn.toml", '[node]\nhost = "0.0.0.0"\n')


def half_tls(bench: Bench) -> None:
    bench.write("kdn.toml", '[node]\ntls_cert = "cert.pem"\n')


def readable_token(bench: Bench) -> None:
    path = bench.write("token", "abc\n", 0o644)
    bench.write("kdn.toml", f'[client]\ntoken_file = "{path}"\n')


def token_in_open_file(bench: Bench) -> None:
    bench.write("kdn.toml", '[client]\ntoken = "abc"\n', 0o644)


def missing_secret(bench: Bench) -> None:
    bench.write("kdn.toml", '[client]\nsecret_file = "absent"\n')


def cache_is_a_file(bench: Bench) -> None:
    bench.patch.setenv("KDN_CACHE", str(bench.write("file", "")))


def cache_for_everybody(bench: Bench) -> None:
    (bench.folder / "cache").chmod(0o777)


def data_for_everybody(bench: Bench) -> None:
    (bench.folder / "data").chmod(0o755)


def full_disk(bench: Bench) -> None:
    bench.patch.setattr(disk, "LEAST_FREE_BYTES", 1 << 62)


def failing_disk(bench: Bench) -> None:
    def fsync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    bench.patch.setattr(disk.os, "fsync", fsync)


def stuck_spool(bench: Bench) -> None:
    owner = bench.folder / "cache" / "spool" / ("a" * 32) / ("b" * 16)
    owner.mkdir(parents=True)
    path = owner / "00ff.chunk"
    path.write_bytes(b"chunk")
    os.utime(path, (time.time() - 7200,) * 2)


FAULTS: list[tuple[str, Callable[[Bench], None], str]] = [
    ("python", old_python, "needs 3.11"),
    ("packages", old_torch, "torch is 2.1.0"),
    ("packages", no_numba, "numba is not installed"),
    ("vllm", old_vllm, "made for 0.26 to 0.32"),
    ("cores", slow_cores, "without avx2"),
    ("gpu", wrong_gpu, "otherwise than the CPU"),
    ("gpu", gpu_of_nothing, "otherwise than the CPU"),
    ("gpu", no_triton, "Triton is missing"),
    ("gpu", idle_gpu, "torch finds no GPU"),
    ("shared memory", no_shared_memory, "there is no"),
    ("shared memory", small_shared_memory, "has only"),
    ("shared memory", open_shared_memory, "only this user can open"),
    ("shared memory", linked_shared_memory, "only this user can open"),
    ("clock", backward_clock, "does not run evenly"),
    ("clock", jumping_clock, "jumped by"),
    ("configuration", unknown_setting, "'prot'"),
    ("configuration", wrong_kind, "node.port: expected a whole number"),
    ("configuration", no_toml, "kdn.toml"),
    ("configuration", open_node, "refusing to listen"),
    ("configuration", half_tls, "tls_key"),
    ("credentials", readable_token, "mode 644"),
    ("credentials", token_in_open_file, "token in it"),
    ("credentials", missing_secret, "No such file"),
    ("cache folder", cache_is_a_file, "not a folder"),
    ("cache folder", cache_for_everybody, "mode 777"),
    ("data folder", data_for_everybody, "mode 755"),
    ("data folder", full_disk, "MiB are free"),
    ("data folder", failing_disk, "Input/output error"),
    ("spool", stuck_spool, "1 chunks"),
]


@pytest.mark.parametrize(
    ("name", "plant", "told"), FAULTS, ids=lambda one: getattr(one, "__name__", None)
)
def test_a_fault_of_the_machine_is_found(
    bench: Bench, name: str, plant: Callable[[Bench], None], told: str
) -> None:
    plant(bench)
    found = bench.look(name)
    assert found.status == FAIL
    assert told in found.told
    assert found.advice
    assert "abc" not in found.line()  # no token is shown


def test_a_disk_that_was_tried_is_left_as_it_was(bench: Bench) -> None:
    assert bench.look("data folder").status == OK
    failing_disk(bench)
    assert bench.look("data folder").status == FAIL
    assert list((bench.folder / "data").iterdir()) == []


# faults of a node


def test_a_node_that_is_away_is_found_once(bench: Bench) -> None:
    url = nowhere()
    found = [bench.look(name, url) for name in NODE]
    assert [(one.name, one.status) for one in found if one.status == FAIL] == [("node", FAIL)]
    assert url in found[0].told


def test_a_token_that_is_missing_is_found(bench: Bench) -> None:
    [found] = at_node(bench, "store", tenants=(tenant("a", "token-a"),), token="token-a")
    assert found.status == FAIL
    assert "401" in found.told
    assert "--token-file" in found.advice


def test_a_store_that_fails_is_found(bench: Bench) -> None:
    async def held(self: Any, tenant: Any) -> Any:
        raise StoreError("the disk is gone")

    bench.patch.setattr("kdn.depot.depot.Depot.held", held)
    [found] = at_node(bench, "store")
    assert found.status == FAIL
    assert "503 store_error" in found.told


def test_a_node_with_another_clock_is_found(bench: Bench) -> None:
    later = SimpleNamespace(time=lambda: time.time() + 900, perf_counter=time.perf_counter)
    bench.patch.setattr(node_checks, "time", later)
    [found] = at_node(bench, "node clock")
    assert found.status == FAIL
    assert re.search(r"-(899|900|901) s", found.told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"paths": {"/v2/new": {}}}, "lacks /v2/new"),
        ({"info": {"version": "2"}}, "protocol 1, this kdn 2"),
    ],
)
def test_a_node_of_another_version_is_found(
    bench: Bench, change: dict[str, Any], told: str
) -> None:
    from kdn.node.openapi import document

    own = document()
    described = {**own, **change, "paths": own["paths"] | change.get("paths", {})}
    bench.patch.setattr("kdn.node.openapi.document", lambda: described)
    [found] = at_node(bench, "versions")
    assert (found.status, told in found.told) == (FAIL, True)


def test_a_certificate_that_ends_soon_is_found(bench: Bench, certificate: tuple[str, str]) -> None:
    bench.patch.setenv("KDN_CLIENT_TLS_CA", certificate[0])
    tls = {"tls_cert": certificate[0], "tls_key": certificate[1]}
    [found] = tls_node(bench, **tls)
    assert (found.status, "days" in found.told) == (FAIL, True)
    bench.patch.setattr(node_checks, "LEAST_DAYS", 1)
    [found] = tls_node(bench, **tls)
    assert (found.status, "valid for 1 days" in found.told) == (OK, True)


def test_a_certificate_that_nobody_signed_is_found(
    bench: Bench, certificate: tuple[str, str]
) -> None:
    [found] = tls_node(bench, tls_cert=certificate[0], tls_key=certificate[1])
    assert (found.status, "not trusted" in found.told) == (FAIL, True)


def tls_node(bench: Bench, **settings: Any) -> list[Result]:
    async def test(node: Running) -> list[Result]:
        return [await asyncio.to_thread(examine, BY_NAME["tls"], bench.situation(node.url))]

    return with_node(bench.folder / "node", test, **settings)


def test_a_token_in_the_clear_is_found(bench: Bench) -> None:
    bench.patch.setenv("KDN_CLIENT_TOKEN", "abc")
    found = bench.look("tls", "http://node.example:8470")
    assert (found.status, "in the clear" in found.told) == (FAIL, True)


def test_what_a_strange_server_answers_is_no_crash(bench: Bench) -> None:
    """It says yes to everything, and nothing that makes sense."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Strange(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'[{"chunks": 3}]'
            self.send_response_only(200)
            self.send_header("Date", "yesterday")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Strange) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            found = {name: bench.look(name, url) for name in NODE}
        finally:
            server.shutdown()
            serving.join()
    assert found["versions"].status == FAIL
    assert not [one for one in found.values() if "itself failed" in one.told]


# places, profiles, quality


def test_a_folder_that_cannot_be_opened_is_found(bench: Bench) -> None:
    folder = bench.folder / "knowledge"
    assert bench.look("place", str(folder)).status == OK
    folder.mkdir()
    (folder / "names.sqlite").write_bytes(b"this is no database" * 100)
    assert bench.look("place", str(folder)).status == FAIL


def test_a_profile_that_is_missing_is_found(bench: Bench, checkpoint: Any) -> None:
    found = bench.look("profile", str(bench.folder / "knowledge"))
    assert found.status == FAIL
    assert "kdn calibrate" in found.advice


def test_a_profile_that_is_damaged_is_found(bench: Bench, checkpoint: Any) -> None:
    from kdn.codec.profiles import local_profile

    calibrate_here(checkpoint)
    local_profile(checkpoint).write_bytes(b"damaged")
    found = bench.look("profile")
    assert (found.status, "Delete it" in found.advice) == (FAIL, True)


def test_a_poor_quality_is_found(bench: Bench, checkpoint: Any) -> None:
    for kld in (0.4, float("nan")):
        bench.patch.setattr(model, "quality_of", lambda _, kld=kld: (kld, 19.0))
        assert bench.look("quality").status == FAIL


def test_a_model_that_is_not_here_is_not_fetched(bench: Bench) -> None:
    for name in ("profile", "quality"):
        found = bench.look(name)
        assert (found.status, "not on this machine" in found.told) == (NOTE, True)


# checks that fail themselves


def test_a_check_that_crashes_is_reported_without_what_it_held(bench: Bench) -> None:
    def crash(situation: Situation) -> Any:
        raise ValueError("the token is abc")

    found = examine(Check("odd", crash), bench.situation())
    assert (found.status, found.advice) == (FAIL, check.REPORT)
    assert "ValueError in test_doctor.py, line" in found.told
    assert "abc" not in found.line()


def test_a_check_that_hangs_ends_at_its_deadline(bench: Bench) -> None:
    found = examine(Check("odd", lambda _: time.sleep(2) or ok(""), 0.05), bench.situation())
    assert (found.status, found.told) == (FAIL, "no result after 0.05 s")


def test_checks_go_on_where_the_configuration_is_broken(bench: Bench) -> None:
    unknown_setting(bench)
    for name in ("credentials", "data folder", *NODE, "place"):
        found = bench.look(name)
        assert (found.status, "cannot be read" in found.told) == (NOTE, True)


def test_lines_json_and_exit_code(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [BY_NAME[name] for name in ("python", "configuration", "credentials")]
    bench.patch.setattr(command, "CHECKS", chosen)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "out.json"])
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines()[-1] == "3 checks, none failed"
    assert json.loads((bench.folder / "out.json").read_text())["sound"]
    readable_token(bench)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "out.json"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "FAIL  credentials: client.token_file" in shown.out
    assert shown.err == "kdn: failed: credentials\n"
    own = str(bench.write("own-token", "abc\n", 0o600))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--token-file", own])
    assert not ended.value.code  # the flag's file, and not the one that others may read
    told = json.loads((bench.folder / "out.json").read_text())
    assert not told["sound"]
    [wrong] = [one for one in told["checks"] if one["status"] == FAIL]
    assert (wrong["name"], wrong["advice"][:9]) == ("credentials", "chmod 600")
