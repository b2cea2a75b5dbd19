"""The command line: arguments, and wiring the parts together.

`kdn --help` must answer at once, so nothing heavy (torch, transformers) is imported until a command
really runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kdn.checked import MAX_COUNT
from kdn.cli.lazy import lazy_group
from kdn.defaults import CODEC, DEVICE, MAX_NEW_TOKENS, MODEL, QUALITY
from kdn.errors import KdnError, UnsupportedError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Knowledge delivery network: what one model instance has read, every other one knows.",
)

bench = lazy_group(
    {
        "codec": ("kdn.bench.codec:run", "Rate, quality and speed of every codec on a real model."),
        "tasks": (
            "kdn.bench.tasks.command:run",
            "Answers after every codec beside the exact cache's: accuracy, F1, perplexity.",
        ),
        "blend": (
            "kdn.bench.blend.command:run",
            "Joined pieces beside one reading of everything, and others' ways.",
        ),
        "layering": ("kdn.bench.layering:run", "What levels cost klt against coding at once."),
        "cache": ("kdn.bench.cache:run", "Hit ratio of eviction policies on recorded requests."),
        "node": ("kdn.bench.node:run", "A node beside nginx and Redis, and how fairly it sends."),
        "delivery": (
            "kdn.bench.delivery.command:run",
            "Planning policies on recorded links, beside an oracle.",
        ),
        "ttft": ("kdn.bench.ttft:run", "Time to first token over shaped links, with a real model."),
        "vllm": ("kdn.bench.vllm:run", "First token of a fresh vLLM engine, beside LMCache."),
        "cluster": (
            "kdn.bench.cluster.command:run",
            "Shards, nodes, regions, and their faults.",
        ),
        "gpu": ("kdn.bench.gpu:run", "Decoding on a GPU beside prefill, and over links."),
        "models": (
            "kdn.bench.models.command:run",
            "Models of other shapes: trained in minutes, calibrated, judged.",
        ),
        "export": ("kdn.bench.export:run", "A delivery from plain nginx beside one from a node."),
        "observed": (
            "kdn.bench.observed.command:run",
            "What metrics, the request log and traces cost.",
        ),
    }
)
app.add_typer(bench, name="bench", help="Measure on real data, with tables, JSON and plots.")

importing = lazy_group(
    {
        "lmcache-config": (
            "kdn.cli.importing:lmcache_config",
            "LMCache's settings as kdn's, and what has no counterpart.",
        ),
    }
)
app.add_typer(importing, name="import", help="Settings of other systems, as kdn's.")

FILE_OPTIONS = ("--text", "--calibration", "--requests", "--names", "--data", "--seams-from")
"""Options that take one or more values; so a command's own arguments come before them."""

ModelOption = Annotated[str, typer.Option(help="smollm2, a local folder, or a name on the hub.")]
DeviceOption = Annotated[
    str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")
]
DTypeOption = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; by default float32 on a CPU, bfloat16 on a GPU."
    ),
]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; by default kdn.toml if there is one.")
]
UrlOption = Annotated[
    str | None, typer.Option(help="The node to ask, or several of one store: URL,URL.")
]
TokenOption = Annotated[
    Path | None, typer.Option(help="Holds the tenant's token; by default client.token_file.")
]
SecretOption = Annotated[
    Path | None, typer.Option(help="Holds the secret; by default client.secret_file.")
]
TlsOption = Annotated[
    Path | None, typer.Option(help="The private authority of the node's certificate, as PEM.")
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(help="A node's URL or a folder, or several; by default client.url."),
]
CodecOption = Annotated[str, typer.Option(help="klt, or exact without any loss.")]
QualityOption = Annotated[
    str, typer.Option(help="draft, default, high, exact, or the KL divergence that is enough.")
]
LatestOption = Annotated[
    bool, typer.Option("--latest", help="The newest version that any region has acknowledged.")
]
StaleOption = Annotated[
    bool, typer.Option("--stale-ok", help="If nobody can tell what is newest: what is known.")
]
NameArgument = Annotated[str, typer.Argument(help="What it is called.")]
PiecesOption = Annotated[
    list[str] | None, typer.Option("--with", help="The name of a piece to join, in order.")
]


@app.command()
def learn(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="A text to read.")],
    head: Annotated[
        str | None,
        typer.Option(help="A system prompt to read it behind; only texts behind one are joined."),
    ] = None,
    where: WhereOption = None,
    model: ModelOption = MODEL,
    device: DeviceOption = DEVICE,
    dtype: DTypeOption = None,
    codec: CodecOption = CODEC,
    stored_quality: Annotated[
        str | None,
        typer.Option(help="Store no more levels than this quality takes: default, draft, ..."),
    ] = None,
    token_file: TokenOption = None,
    secret_file: SecretOption = None,
    tls_ca: TlsOption = None,
    config: ConfigOption = None,
) -> None:
    """Let the model read a text once, for everybody, and give it a name."""
    from kdn.cli import client

    own = client.Own(token_file, secret_file, tls_ca)
    door = client.Door(
        config, where, model, device, dtype, codec, stored_quality=stored_quality, own=own
    )
    client.learn(door, name, file, head)


@app.command()
def ask(
    name: Annotated[str, typer.Argument(help="What it is called; left out where --with says it.")],
    question: Annotated[str | None, typer.Argument(help="What you want to know.")] = None,
    pieces: PiecesOption = None,
    where: WhereOption = None,
    model: ModelOption = MODEL,
    device: DeviceOption = DEVICE,
    dtype: DTypeOption = None,
    codec: CodecOption = CODEC,
    quality: QualityOption = QUALITY,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds; what is not there by then, the model reads.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Longest answer.")
    ] = MAX_NEW_TOKENS,
    share: Annotated[
        float | None,
        typer.Option(
            "--recompute-share",
            min=0,
            max=1,
            help="With --with: compute this share of the tokens anew, where the question looks. "
            "Else as much as the quality takes.",
        ),
    ] = None,
    latest: LatestOption = False,
    stale_ok: StaleOption = False,
    token_file: TokenOption = None,
    secret_file: SecretOption = None,
    tls_ca: TlsOption = None,
    config: ConfigOption = None,
) -> None:
    """Ask about something learned, or about several things joined (--with A --with B): the answer,
    what was known, and what had to be read."""
    from kdn.cli import client

    about, asked = client.asked_about(name, question, pieces or [])
    own = client.Own(token_file, secret_file, tls_ca)
    door = client.Door(config, where, model, device, dtype, codec, quality, own)
    freshness = client.Freshness(latest, stale_ok)
    client.ask(door, about, asked, deadline, max_tokens, freshness, share)


@app.command()
def explain(
    prompt_file: Annotated[Path | None, typer.Argument(help="A text.")] = None,
    pieces: PiecesOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="It is a whole prompt, not a text as `learn` reads it.")
    ] = False,
    request: Annotated[
        str | None,
        typer.Option(help="Instead: what was decided for the request of this id, and why."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="With --request: the log, if not that of the cache folder.")
    ] = None,
    where: WhereOption = None,
    model: ModelOption = MODEL,
    device: DeviceOption = DEVICE,
    dtype: DTypeOption = None,
    codec: CodecOption = CODEC,
    token_file: TokenOption = None,
    secret_file: SecretOption = None,
    tls_ca: TlsOption = None,
    config: ConfigOption = None,
) -> None:
    """Which chunks of a prompt, or of several things joined, are known, and why the others are
    not. With --request ID: what was done for a request, and why."""
    if request is not None:
        from kdn.cli import requests

        if prompt_file is not None or pieces:
            raise UnsupportedError("expected a text, --with or --request, found several of them")
        requests.explain(request, log)
        return
    if log is not None:
        raise UnsupportedError("--log goes with --request")
    from kdn.cli import client

    own = client.Own(token_file, secret_file, tls_ca)
    door = client.Door(config, where, model, device, dtype, codec, own=own)
    client.explain(door, prompt_file, raw, pieces or [])


@app.command()
def seams(
    what: Annotated[list[str], typer.Argument(help="Names, texts, or sets of questions (.jsonl).")],
    tag: Annotated[str, typer.Option(help="Tells them from others of the same model.")] = "",
    json: Annotated[Path | None, typer.Option(help="Where to write the report.")] = None,
    where: WhereOption = None,
    model: ModelOption = MODEL,
    device: DeviceOption = DEVICE,
    dtype: DTypeOption = None,
    codec: CodecOption = CODEC,
    token_file: TokenOption = None,
    secret_file: SecretOption = None,
    tls_ca: TlsOption = None,
    config: ConfigOption = None,
) -> None:
    """Fit what repairs joins of such pieces, and say how far off answers will be."""
    from kdn.cli import client
    from kdn.cli.seams import run

    own = client.Own(token_file, secret_file, tls_ca)
    door = client.Door(config, where, model, device, dtype, codec, own=own)
    run(door, what, tag, json)


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="A document instead of Python's own manual.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short document, one question, a short answer.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=512, max=MAX_COUNT, help="Tokens of it to read; by default 6144, quick 1024."
        ),
    ] = None,
    mbit: Annotated[float, typer.Option(help="The node's link, in Mbit/s.")] = 100.0,
    quality: Annotated[
        str | None, typer.Option(help="As for `ask`; by default 0.008, quick high.")
    ] = None,
    device: DeviceOption = DEVICE,
    out: Annotated[Path, typer.Option(help="Where the timeline goes.")] = Path("kdn-demo.png"),
    json: Annotated[Path | None, typer.Option(help="Write what was measured as JSON.")] = None,
    blend: Annotated[
        bool, typer.Option("--blend", help="Three documents learned apart, one question over all.")
    ] = False,
) -> None:
    """One process reads a document; another, which never saw it, answers questions about it."""
    quality = quality or ("high" if quick else "0.008")
    if blend:
        from kdn.cli.demo_blend import run as run_blend

        run_blend(mbit, quality, device)
        return
    from kdn.cli.demo import Extent, run

    run(text, Extent.of(quick, tokens), mbit, quality, device, out, json)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="smollm2, a local folder, or a name on the hub.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files to learn from; by default what Python carries. 'self': the model writes."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_COUNT, help="Tokens to read; by default up to 500,000."),
    ] = None,
    time: Annotated[
        float | None, typer.Option(min=0.01, help="Minutes: reading stops in time for the rest.")
    ] = None,
    operations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="Multiplications that decoding a value may take; two stages where one takes more.",
        ),
    ] = None,
    device: DeviceOption = DEVICE,
    out: Annotated[Path | None, typer.Option(help="Where to write the profile.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Of a fine-tune: its base's profile (a file, 'shipped', or the base model).",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report as PNG.")] = None,
) -> None:
    """Make the profile that the klt codec needs for a model."""
    if base is not None:
        from kdn.calibrate.renew_command import renew_profile

        if json or plot or time or operations:
            raise UnsupportedError("--time, --operations, --json and --plot do not go with --from")
        told = {} if tokens is None else {"tokens": tokens}
        renew_profile(model, base, text=text or (), out=out, device=device, **told)
        return
    from kdn.calibrate import make_profile

    make_profile(
        model, text=text, out=out, tokens=tokens, minutes=time, operations=operations,
        device=device, json=json, plot=plot,
    )  # fmt: skip


@app.command()
def node(
    config: ConfigOption = None,
    data: Annotated[Path | None, typer.Option(help="Folder for everything it keeps.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that answer, each on a core of its own.")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback without tokens.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="A store that many nodes share, as redis:// or s3://.")
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(help="The centre's URL: this node is a region of it.")
    ] = None,
) -> None:
    """Serve stores over HTTP. Works without any configuration, on loopback."""
    from kdn.config import load_config
    from kdn.node.server import run

    flags = {"data": data, "host": host, "port": port, "insecure": insecure, "workers": workers}
    flags |= {"store": store, "upstream": upstream}
    run(load_config(config, {f"node.{name}": value for name, value in flags.items()}))


@app.command()
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot and end, as without a terminal.")
    ] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Watch a node: health, traffic, tenants, deliveries. Takes a token that may operate."""
    from kdn.cli.remote import Whom
    from kdn.cli.top import run

    run(Whom(config, url, token_file, tls_ca), once)


@app.command(name="ls")
def list_command(
    prefix: Annotated[str, typer.Argument(help="Only what begins so.")] = "",
    chunks: Annotated[bool, typer.Option("--chunks", help="Chunks instead of names.")] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """List the names at a node or in a folder, or its chunks."""
    from kdn.cli.remote import Whom, list_all

    list_all(Whom(config, url, token_file, tls_ca), prefix, chunks)


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="A name, or the key of a chunk.")],
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
    latest: LatestOption = False,
) -> None:
    """Show a name's versions and chunks, or a chunk's levels."""
    from kdn.cli.remote import Whom, show_one

    show_one(Whom(config, url, token_file, tls_ca), what, latest)


@app.command()
def rm(
    what: Annotated[str, typer.Argument(help="A name, or the key of a chunk.")],
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Also delete the chunks that only this name uses.")
    ] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Delete a name or a chunk at a node or in a folder."""
    from kdn.cli.remote import Whom, remove

    remove(Whom(config, url, token_file, tls_ca), what, chunks)


@app.command(name="export")
def export_command(
    place: Annotated[str, typer.Argument(help="A folder, or the URL of a node or a store.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; it may hold an earlier export.")],
    names: Annotated[
        list[str] | None,
        typer.Option(help="What to export, as docs or 'docs-*'; by default everything."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove from the folder what is not exported now.")
    ] = False,
    config: ConfigOption = None,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Write names and chunks as files that any web server or CDN can serve."""
    from kdn.cli.export import run
    from kdn.cli.remote import Whom

    run(Whom(config, place, token_file, tls_ca), folder, names or [], prune)


@app.command(name="config")
def config_command(
    config: ConfigOption = None,
    new_token: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Make a token for a tenant.")
    ] = None,
    right: Annotated[
        str, typer.Option(help="What the new token may do: read, publish or operate.")
    ] = "publish",
) -> None:
    """Show the effective settings and where each came from."""
    from kdn.cli.config import print_new_token, show_config

    if new_token is not None:
        print_new_token(new_token, right)
    else:
        show_config(config)


@app.command()
def doctor(
    url: Annotated[
        str | None, typer.Option(help="A node, several, or any other place; else client.url.")
    ] = None,
    model: ModelOption = MODEL,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without decoding on a GPU and running the model.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write what was found as JSON.")] = None,
    token_file: TokenOption = None,
    secret_file: SecretOption = None,
    tls_ca: TlsOption = None,
    config: ConfigOption = None,
) -> None:
    """Is this machine and its configuration sound? What is wrong, and what to do about it."""
    from kdn.checked import checked_output
    from kdn.doctor.check import Situation
    from kdn.doctor.command import run

    if json is not None:
        checked_output(json)
    situation = Situation(config, url, model, quick, token_file, secret_file, tls_ca)
    if failed := run(situation, json, typer.echo):
        raise KdnError(f"failed: {', '.join(failed)}")


def spread(arguments: list[str]) -> list[str]:
    """`--text A B` as `--text A --text B`: so a shell pattern may follow, as in `--text *.txt`."""
    result: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option = argument
        elif option in FILE_OPTIONS and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Entry point: what kdn refuses is one clear line, not a traceback."""
    try:
        app(spread(sys.argv[1:] if arguments is None else arguments))
    except KdnError as error:
        from rich.console import Console
        from rich.text import Text

        # One line, in what a terminal can show, whatever a file name is made of.
        line = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
        Console(stderr=True, soft_wrap=True).print(Text(f"kdn: {line}", style="red"))
        sys.exit(1)


if __name__ == "__main__":
    main()
