"""How `kdn bench node` is told: tables, JSON, a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kdn.bench.report import drawing, print_end, table_of

_COLOURS = {"kdn": "#d1495b", "redis": "#2e6f95", "nginx": "#3f7d20"}
_ORDERS = {"fair": "fair", "fifo": "first in, first out", "inverse": "random, inverse length"}


def print_report(console: Console, results: dict[str, Any]) -> None:
    console.print(_speed_table(results))
    console.print(_clients_line(results))
    console.print(_slow_line(results))
    console.print(_fairness_table(results))
    console.print(_attack_table(results["attack"]))
    console.print(_attack_line(results["attack"]))
    print_end(console, results)


def _speed_table(results: dict[str, Any]) -> Table:
    by_size = results["bytes_per_s_by_size"]
    sizes = list(by_size["kdn"])
    headings = ["GB/s: median (min-max)", *(f"{int(size) >> 10} KiB" for size in sizes), "all"]
    table = table_of("Batch reads over loopback", [*headings, "server CPU s/GB"])
    for name, figures in by_size.items():
        cells = [
            f"{f['median'] / 1e9:.2f} ({f['min'] / 1e9:.2f}-{f['max'] / 1e9:.2f})"
            for f in figures.values()
        ]
        cpu = " / ".join(f"{f['cpu_s_per_gb']:.2f}" for f in figures.values())
        table.add_row(name, *cells, f"{results['bytes_per_s'][name] / 1e9:.2f}", cpu)
    if "of_redis" in results:
        ratios = results["of_redis"]
        cells = [f"{ratios[size]:.2f}" for size in sizes]
        table.add_row("kdn / redis", *cells, f"{ratios['all']:.2f}", "", style="bold")
    return table


def _clients_line(results: dict[str, Any]) -> str:
    many = results["clients"]
    told = f"{many['clients']} clients at once: {many['errors']} errors, every byte compared, "
    told += f"{many['bytes_per_s'] / 1e9:.2f} GB/s"
    return told + (f" (first: {many['first_error']})" if many["first_error"] else "")


def _slow_line(results: dict[str, Any]) -> str:
    slow = results["slow_readers"]
    before, peak = slow["rss_before_bytes"] / 2**20, slow["rss_peak_bytes"] / 2**20
    return (
        f"{slow['readers']} readers that stop, {slow['asked_bytes'] / 2**30:.1f} GiB asked for: "
        f"the node's memory grows from {before:.0f} to {peak:.0f} MiB, "
        f"{slow['growth_bytes_per_reader'] / 2**10:.0f} KiB a reader; another client still gets "
        f"{slow['beside']['bytes_per_s'] / 1e9:.2f} GB/s"
    )


def _fairness_table(results: dict[str, Any]) -> Table:
    load = results["fairness"]["load"]
    title = (
        f"Egress limit {load['bits_per_s'] / 1e6:.0f} Mbit/s (a frame of "
        f"{load['frame_bytes'] >> 10} KiB takes {load['frame_s'] * 1e3:.2f} ms); {load['heavy']} "
        f"heavy clients with {load['depth']} requests waiting each"
    )
    uneven = "/".join(map(str, load["uneven_depths"]))
    table = table_of(
        title,
        [
            "order", "alone\np50 ms", "\np99 ms", "beside\np50 ms", "\np99 ms", "bar\nms", "asked",
            "link\nuse", "heavy clients'\nshares, %", "most over\nleast",
            f"shares, % with\n{uneven} waiting",
        ],
    )  # fmt: skip
    for order, one in results["fairness"].items():
        if order != "load":
            table.add_row(
                _ORDERS[order],
                *(
                    f"{one[name] * 1e3:.2f}"
                    for name in (
                        "unloaded_p50_s",
                        "unloaded_p99_s",
                        "loaded_p50_s",
                        "loaded_p99_s",
                        "limit_s",
                    )
                ),
                str(one["samples"]),
                f"{one['link_use']:.1%}",
                _percent(one["shares"]),
                f"+{one['spread']:.1%}",
                _percent(one["uneven_shares"]),
            )
    return table


def _attack_table(attack: dict[str, Any]) -> Table:
    load = attack["load"]
    title = (
        f"A tenant beside one that attacks: {load['clients']} clients read contexts of "
        f"{load['chunks']} chunks of {load['chunk_bytes'] >> 10} KiB"
    )
    table = table_of(title, ["", "p50 ms", "p99 ms", "puts' p99 ms", "hits, %"])
    for name in ("alone", "attacked"):
        times = (attack[f"{name}_{what}_s"] * 1e3 for what in ("p50", "p99", "put_p99"))
        table.add_row(name, *(f"{ms:.2f}" for ms in times), f"{attack[f'{name}_hits']:.1%}")
    bars = [f"{attack['ratio']:.2f} times, at most {load['ratio_bar']:g}", ""]
    table.add_row("", "", *bars, f"at most {load['hits_bar']:.0%} fewer", style="bold")
    return table


def _attack_line(attack: dict[str, Any]) -> str:
    done = ", ".join(f"{count} {what}" for what, count in sorted(attack["attack"].items()))
    before, peak = attack["rss_before_bytes"] / 2**20, attack["rss_peak_bytes"] / 2**20
    return (
        f"{attack['failures']} of the tenant's requests failed; the node's memory grows from "
        f"{before:.0f} to {peak:.0f} MiB (at most {attack['load']['rss_bar_bytes'] / 2**20:.0f}); "
        f"the attacker: {done}"
    )


def _percent(shares: list[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def plot(path: Path, results: dict[str, Any]) -> None:
    with drawing(path) as pyplot:
        _, (speed, light, beside) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
        _plot_speed(speed, results["bytes_per_s_by_size"])
        _plot_light(light, results["fairness"])
        _plot_attack(beside, results["attack"])


def _plot_speed(panel: Any, by_size: dict[str, Any]) -> None:
    width = 0.8 / len(by_size)
    for number, (name, figures) in enumerate(by_size.items()):
        at = [place + number * width for place in range(len(figures))]
        middle = [f["median"] / 1e9 for f in figures.values()]
        low = [(f["median"] - f["min"]) / 1e9 for f in figures.values()]
        high = [(f["max"] - f["median"]) / 1e9 for f in figures.values()]
        panel.bar(at, middle, width, yerr=[low, high], label=name, color=_COLOURS[name], capsize=2)
    sizes = next(iter(by_size.values()))
    places = [place + width * (len(by_size) - 1) / 2 for place in range(len(sizes))]
    panel.set_xticks(places, [f"{int(size) >> 10} KiB" for size in sizes])
    panel.set_ylabel("GB/s over loopback")
    panel.set_title("Batch reads: median, least and most", fontsize=10, loc="left")
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)


def _plot_light(panel: Any, fairness: dict[str, Any]) -> None:
    orders = [order for order in fairness if order != "load"]
    for number, order in enumerate(orders):
        one = fairness[order]
        panel.bar(number, one["loaded_p99_s"] * 1e3, 0.6, color="#2e6f95")
        panel.plot(
            [number - 0.3, number + 0.3], [one["limit_s"] * 1e3] * 2, color="#d1495b", linewidth=2,
            label=None if number else "bar: twice alone, and a frame of each heavy client",
        )  # fmt: skip
    panel.set_xticks(range(len(orders)), orders)
    panel.set_yscale("log")
    panel.set_ylim(1, 4 * max(fairness[order]["loaded_p99_s"] for order in orders) * 1e3)
    panel.set_ylabel("p99 latency, ms")
    panel.set_title("A light client beside heavy ones", fontsize=10, loc="left")
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _plot_attack(panel: Any, attack: dict[str, Any]) -> None:
    for number, name in enumerate(("alone", "attacked")):
        panel.bar(number, attack[f"{name}_p99_s"] * 1e3, 0.6, color="#2e6f95")
    limit_ms = attack["load"]["ratio_bar"] * attack["alone_p99_s"] * 1e3
    panel.plot([0.7, 1.3], [limit_ms] * 2, color="#d1495b", linewidth=2, label="bar: twice alone")
    hits = (f"{name}\n{attack[f'{name}_hits']:.0%} hits" for name in ("alone", "attacked"))
    panel.set_xticks((0, 1), list(hits))
    panel.set_ylabel("p99 latency, ms")
    panel.set_title("A tenant beside one that attacks", fontsize=10, loc="left")
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
