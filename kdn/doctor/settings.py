"""The configuration, and the files that it names."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from kdn.config import SECRETS
from kdn.doctor.check import Finding, Situation, fail, ok


def check_configuration(situation: Situation) -> Finding:
    """Unknown names and wrong kinds are refused by name when it is read."""
    from kdn.node.server import check_exposure, tls_context
    from kdn.places.places import checked_places

    config = situation.config
    checked_places(config.client.url)
    check_exposure(config)
    tls_context(config.node)
    given = [source for source in config.sources.values() if source != "default"]
    files = {one for one in given if not one.startswith(("KDN_", "--"))}
    where = f", from {', '.join(sorted(files))}" if files else ""
    return ok(f"valid: {len(given)} settings{where}, {len(config.tenants)} tenants")


def check_credentials(situation: Situation) -> Finding:
    """Files with tokens, secrets and private keys: there, and for one user alone."""
    config = situation.sound_config
    _ = config.client.credentials, config.node.upstream_credentials, config.node.store_credentials
    named = list(_files(situation))
    for setting, path in named:
        try:
            mode = stat.S_IMODE(path.expanduser().stat().st_mode)
        except OSError as error:
            return fail(f"{setting}: {path}: {error.strerror}", "Correct the path.")
        if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
            return fail(f"{setting}: others may open {path} (mode {mode:o})", f"chmod 600 {path}")
    if not named:
        return ok("no files with tokens or secrets are named")
    return ok(f"{len(named)} files, for this user alone")


def _files(situation: Situation) -> Iterator[tuple[str, Path]]:
    config = situation.sound_config
    for section, settings in (("client", config.client), ("node", config.node)):
        for name in (*(f"{secret}_file" for secret in SECRETS), "tls_key"):
            if path := getattr(settings, name, ""):
                yield f"{section}.{name}", Path(path)
    for source in dict.fromkeys(
        source
        for name, source in config.sources.items()
        if name.split(".")[1] in SECRETS and source.endswith(".toml")
    ):
        yield "configuration with a token in it", Path(source)
