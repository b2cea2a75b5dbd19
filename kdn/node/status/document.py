"""The status in the OpenAPI document (`openapi.py`)."""

from __future__ import annotations

from typing import Any

from kdn.checked import NAME, NAME_PART
from kdn.node.schema import (
    COUNT,
    LIMIT,
    SECONDS,
    TEXT,
    VERSION,
    Json,
    content_of,
    list_of,
    object_of,
    operation,
    parameter,
)

NUMBER: Json = {"type": "number", "minimum": 0}
FLAG: Json = {"type": "boolean"}
RATIO: Json = {"type": "number", "minimum": 0, "maximum": 1}


def _or_null(schema: Json) -> Json:
    return {**schema, "nullable": True}


def _by_name(schema: Json) -> Json:
    return {"type": "object", "additionalProperties": schema}


def _counts(*names: str) -> Json:
    return dict.fromkeys(names, COUNT)


FOUND = object_of(_counts("found", "missing"))
TRAFFIC = object_of(
    {
        **_counts("requests", "sent_bytes", "received_bytes"),
        "lookups": FOUND,
        "reads": FOUND,
        "hit_ratio": _or_null(RATIO),
        "tier_hits": _by_name(COUNT),
        "p50_s": _or_null(SECONDS),
        "p99_s": _or_null(SECONDS),
        "levels": _by_name(COUNT),
        "errors": _by_name(COUNT),
    }
)
MODELS = list_of(object_of({"model": TEXT, **_counts("chunks", "size_bytes")}))
_TENANT: Json = {
    "tenant": TEXT,
    **_counts("names", "manifest_bytes", "chunks", "profiles", "objects", "size_bytes"),
    "versions": _or_null(COUNT),
    "quota_bytes": COUNT,
    "weight": NUMBER,
    **_counts("waiting_objects", "waiting_bytes"),
    "rates": object_of({"sent_bytes_per_s": NUMBER, "requests_per_s": NUMBER}),
    "traffic": TRAFFIC,
}
RATES: Json = {
    "sent_bytes_per_s": NUMBER,
    "received_bytes_per_s": NUMBER,
    "requests_per_s": NUMBER,
    "hit_ratio": _or_null(RATIO),
    "errors_per_s": NUMBER,
}
TIER = object_of(
    {
        "name": TEXT,
        "answers": FLAG,
        **_counts("objects", "size_bytes", "capacity_bytes", "hits", "errors", "corruptions"),
        "evictions": COUNT,
    }
)
DELIVERY = object_of(
    {"tenant": TEXT, "client": TEXT, **_counts("sent_bytes", "asked_bytes"), "seconds": SECONDS}
)
REGION = object_of(
    {
        "centre_answers": FLAG,
        **_counts(
            "waiting_objects", "waiting_bytes", "outbox_bytes", "outbox_capacity_bytes",
            "sent_objects", "send_failures", "refused_objects", "lost_objects", "pulled_bytes",
        ),
        "names_late": FLAG,
        "feeds": list_of(
            object_of({"tenant": TEXT, "position": COUNT, "age_s": _or_null(SECONDS)})
        ),
    }
)  # fmt: skip


def _snapshot() -> dict[str, Any]:
    return object_of(
        {
            "node": object_of(
                {
                    "version": TEXT,
                    "role": {"type": "string", "enum": ["node", "region", "shared"]},
                    "started_s": SECONDS, "now_s": SECONDS,
                    **_counts("workers", "workers_answering"), "stopping": FLAG,
                }
            ),
            "health": object_of(
                {
                    "status": {"type": "string", "enum": ["ok", "warning", "error"]},
                    "problems": list_of(
                        object_of({"severity": TEXT, "code": TEXT, "message": TEXT})
                    ),
                }
            ),
            "known": object_of(
                {
                    **_counts("names", "manifest_bytes", "chunks", "profiles", "objects"),
                    "versions": _or_null(COUNT), "names_answer": FLAG, "size_bytes": COUNT,
                    "models": MODELS, "models_counted": RATIO,
                }
            ),
            "tiers": list_of(TIER),
            "rates": object_of(RATES),
            "traffic": TRAFFIC,
            "num_tenants": COUNT,
            "tenants": list_of(object_of(_TENANT)),
            "deliveries": object_of({"number": COUNT, "longest": list_of(DELIVERY)}),
            "evictions": object_of(
                {
                    "number": COUNT,
                    "by": list_of(
                        object_of(
                            {"tier": TEXT, "tenant": _or_null(TEXT), "why": TEXT, "number": COUNT}
                        )
                    ),
                }
            ),
            "region": _or_null(REGION),
            "followers": COUNT,
            "limits": list_of(
                object_of(
                    {"name": TEXT, "unit": TEXT, **_counts("used", "limit"), "may_fill": FLAG}
                )
            ),
            "errors": _by_name(COUNT),
            **_counts("cut_readers", "refused_puts"),
            "faults": _by_name(COUNT),
            "history": object_of(
                {"step_s": SECONDS, **{name: list_of(one) for name, one in RATES.items()}}
            ),
        }
    )  # fmt: skip


def status_paths() -> Json:
    part = {"type": "string", "pattern": f"^{NAME_PART.pattern}$"}
    limit, after = parameter("query", "limit", LIMIT), parameter("query", "after", part)
    whole = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    tenant, name = parameter("path", "tenant", whole), parameter("path", "name", whole)
    tenants = object_of({"tenants": list_of(object_of(_TENANT)), "next": _or_null(TEXT)})
    whole_tenant = object_of({**_TENANT, "models": MODELS})
    names = object_of(
        {
            "tenant": TEXT,
            "names": list_of(object_of({"name": TEXT, **VERSION})),
            "next": _or_null(TEXT),
        }
    )
    listed = [
        parameter("query", "tenant", whole), parameter("query", "prefix", part), after, limit
    ]  # fmt: skip
    model = object_of(
        {
            "model": TEXT,
            **_counts("chunks", "found", "size_bytes", "tokens"),
            "levels_bytes": list_of(COUNT),
        }
    )
    detail = object_of(
        {
            "tenant": TEXT, "name": TEXT, "versions": list_of(object_of(VERSION)),
            "num_models": COUNT, "models": list_of(model),
        }
    )  # fmt: skip
    events, page = content_of(TEXT, "text/event-stream"), content_of(TEXT, "text/html")

    def get(summary: str, told: Json, errors: tuple[int, ...] = (), *given: Any) -> Json:
        return {"get": operation(summary, {200: told}, errors, *given)}

    return {
        "/": {"get": operation("Dashboard.", {200: page}, (), open_to_all=True)},
        "/v1/status": get("Status of the whole node.", content_of(_snapshot())),
        "/v1/status/events": get("The same, every second.", events),
        "/v1/status/tenants": get("All tenants.", content_of(tenants), (), [after, limit]),
        "/v1/status/tenants/{tenant}": get(
            "One tenant.", content_of(whole_tenant), (404,), [tenant]
        ),
        "/v1/status/names": get("Names of a tenant.", content_of(names), (404,), listed),
        "/v1/status/names/{tenant}/{name}": get(
            "One name.", content_of(detail), (404,), [tenant, name]
        ),
    }
