"""One check: what it found, and how it is run so that nothing it does can stop the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

from kdn.checked import checked_urls
from kdn.config import ClientSettings, Config, load_config
from kdn.defaults import MODEL
from kdn.errors import KdnError, UnsupportedError

OK, NOTE, FAIL = "ok", "note", "FAIL"
"""A note is something to know, or something that was not looked at. Only FAIL is a fault."""
MAX_CHARS = 500
REPORT = "This is a fault of the check: please report it."


@dataclass(frozen=True)
class Finding:
    status: str
    told: str
    advice: str = ""
    """What to do about it."""


def ok(told: str) -> Finding:
    return Finding(OK, told)


def note(told: str, advice: str = "") -> Finding:
    return Finding(NOTE, told, advice)


def fail(told: str, advice: str) -> Finding:
    return Finding(FAIL, told, advice)


class Skip(Exception):
    """There is nothing to look at; the message says why."""


@dataclass(frozen=True)
class Situation:
    """What is to be examined, as flags tell; paths are here so that tests can have others."""

    config_file: Path | None = None
    url: str | None = None
    model: str = MODEL
    quick: bool = False
    token_file: Path | None = None
    secret_file: Path | None = None
    tls_ca: Path | None = None
    shared_memory: Path = Path("/dev/shm")
    cpu_info: Path = Path("/proc/cpuinfo")

    @cached_property
    def config(self) -> Config:
        """UnsupportedError if there is something wrong with it."""
        files = {name: getattr(self, name) for name in ("token_file", "secret_file", "tls_ca")}
        given = {f"client.{name}": file and str(file) for name, file in files.items()}
        return load_config(self.config_file, {"client.url": self.url, **given})

    @property
    def sound_config(self) -> Config:
        """For checks of other things: they have nothing to say about a broken one."""
        try:
            return self.config
        except KdnError:
            raise Skip("the configuration cannot be read") from None

    @property
    def client(self) -> ClientSettings:
        return self.sound_config.client

    @property
    def is_default_place(self) -> bool:
        """Nobody said that there is a node."""
        return self.sound_config.sources["client.url"] == "default"

    @property
    def nodes(self) -> list[str]:
        """URLs of nodes; Skip if the place is something else."""
        from kdn.places.places import is_url
        from kdn.store.static_client import is_export

        url = self.client.url
        if not is_url(url):
            raise Skip("the place is not a node")
        if is_export(url):
            raise Skip("the place is an export on a web server, not a node")
        return checked_urls(url)


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[Situation], Finding]
    deadline_s: float = 10.0


@dataclass(frozen=True)
class Result:
    name: str
    status: str
    told: str
    advice: str
    seconds: float = field(compare=False)

    def line(self) -> str:
        told = f"{self.told}. {self.advice}" if self.advice else self.told
        return f"{self.status:<4}  {self.name}: {told}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(check: Check, situation: Situation) -> Result:
    """Run it in a thread of its own: one that hangs is left behind at its deadline."""
    found: list[Finding] = []
    worker = Thread(target=lambda: found.append(_look(check, situation)), daemon=True)
    begin = time.perf_counter()
    worker.start()
    worker.join(check.deadline_s)
    taken_s = time.perf_counter() - begin
    if not found:
        late = f"no result after {check.deadline_s:g} s"
        found.append(fail(late, "Something hangs: see what this check looks at."))
    told, advice = _line(found[0].told), _line(found[0].advice)
    return Result(check.name, found[0].status, told, advice, round(taken_s, 3))


def _line(text: str) -> str:
    """One line, in what a terminal can show, whatever a setting is made of."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()[:MAX_CHARS]


def _look(check: Check, situation: Situation) -> Finding:
    try:
        return check.look(situation)
    except Skip as reason:
        return note(f"not checked: {reason}")
    except UnsupportedError as error:
        return fail(str(error), "Correct this setting.")
    except KdnError as error:
        return fail(str(error), "")
    except OSError as error:
        told = error.strerror or type(error).__name__
        where = f" ({error.filename})" if error.filename else ""
        return fail(f"the system says: {told}{where}", "See the rights and the state of the disk.")
    except Exception as error:
        # The message is left out: it may hold whatever the check had in its hands.
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        return fail(f"the check itself failed: {type(error).__name__} in {place}", REPORT)
