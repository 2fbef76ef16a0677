"""``tollgate plan``: memory, speed, cost and margin of a model on a device."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import click

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import Catalog
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    open_database,
    print_json,
    print_rows,
    read_settings,
)
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import GIGA, PRECISIONS, TERA, choose_devices, gpus
from gateway.plan.measured import Measured, read_measured
from gateway.plan.planning import make_plan
from gateway.plan.question import PlanQuestion
from gateway.plan.roofline import EFFICIENCY
from gateway.plan.subjects import find_subject
from gateway.plan.this_machine import devices_here
from gateway.plan.views import MeasuredView, MillionView, PartView, PlannedDeviceView, PlanView
from gateway.pricing import parse_usd
from gateway.settings import DATABASE_FILE, Settings


class Count(click.ParamType[int]):
    """Whole number; ``70e9`` and ``70B`` are accepted for seventy billion."""

    name = "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        scale = {"b": 10**9, "m": 10**6}.get(text[-1:], 1)
        try:
            number = Fraction(text.rstrip("bm")) * scale
        except (ValueError, ZeroDivisionError):
            number = Fraction(1, 2)
        if number.denominator != 1 or number < 1:
            self.fail(f"{value!r} is not a whole number, such as 70e9 or 70B", param, ctx)
        return int(number)


DAY_S: Final = 86_400
_positive = click.FloatRange(0, min_open=True)


@click.command(
    "plan",
    epilog=example(
        "tollgate plan pocket-chat",
        "tollgate plan llama-3.3-70b --gpu h200 --dtype fp8 --gpu-hour-usd 3.2 --batch 64",
        "tollgate plan sdxl --gpu l40s --gpu-hour-usd 1.1 --steps 30 --per-day 100000",
        "tollgate plan ours --params 70e9 --layers 80 --kv-heads 8 --head-dim 128 --dtype fp8",
    ),
)
@click.argument("model")
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    help="Device, such as H200; may be repeated.  [default: all known, and this machine's]",
)
@click.option("--memory", type=_positive, help="Memory of an own GPU, in GB.")
@click.option("--bandwidth", type=_positive, help="Its memory bandwidth, in GB/s.")
@click.option("--tflops", type=_positive, help="Its dense TFLOP/s at --dtype.")
@click.option(
    "--gpu-hour-usd",
    "--price",
    type=Usd(),
    help="Price of a GPU hour in USD.  [default: gpu_hours of the catalog, TOLLGATE_GPU_HOUR_USD]",
)
@click.option("--dtype", type=click.Choice(list(PRECISIONS)), help="Precision of the weights.")
@click.option("--kv-dtype", type=click.Choice(list(PRECISIONS)), help="Precision of the KV cache.")
@click.option("--batch", type=click.IntRange(1), help="Number of results generated together.")
@click.option("--context", type=click.IntRange(1), help="Length of each sequence in tokens.")
@click.option("--input", "input_tokens", type=click.IntRange(1), help="Tokens of a prompt.")
@click.option("--output", "output_tokens", type=click.IntRange(1), help="Tokens of an answer.")
@click.option("--size", help="Width and height of a picture or video, such as 1024x1024.")
@click.option("--steps", type=click.IntRange(1), help="Denoising steps.")
@click.option("--guidance", type=click.FloatRange(0), help="Guidance; above 1, steps are double.")
@click.option("--seconds", type=_positive, help="Duration of a video or recording.")
@click.option("--fps", type=_positive, help="Frames per second of a video.")
@click.option("--per-second", type=_positive, help="Load in results per second.")
@click.option("--per-day", type=_positive, help="Load in results per day.")
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    default=float(EFFICIENCY),
    show_default=True,
    help="Assumed fraction of the roofline that is reached.",
)
@click.option("--params", type=Count(), help="Number of weights, such as 70e9.")
@click.option("--layers", type=click.IntRange(1), help="Number of layers.")
@click.option("--kv-heads", type=click.IntRange(1), help="Number of KV heads.")
@click.option("--head-dim", type=click.IntRange(1), help="Dimension of an attention head.")
@json_option
def plan_command(
    model: str,
    gpu_names: tuple[str, ...],
    memory: float | None,
    bandwidth: float | None,
    tflops: float | None,
    gpu_hour_usd: str | None,
    per_second: float | None,
    per_day: float | None,
    params: int | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Calculate whether a model fits a device, its maximum speed, the cost of a result and its
    margin, and the devices that a load needs.

    MODEL is an entry of the catalog, a well-known model, a directory with its configuration, or any
    name with --params, --layers, --kv-heads and --head-dim. Figures measured on this installation
    are shown beside the computed ones.
    """
    if per_second is not None and per_day is not None:
        raise click.UsageError("give --per-second or --per-day, not both")
    settings = read_settings()
    catalog = _catalog(settings.catalog)
    subject = find_subject(
        model,
        () if catalog is None else catalog.models,
        root=settings.catalog.resolve().parent,
        dimensions={
            "params": params,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        },
        directories=True,
    )
    load = per_day / DAY_S if per_day is not None else per_second
    question = PlanQuestion(per_second=load, **asked)
    own = {"memory": memory, "bandwidth": bandwidth, "tflops": tflops}
    devices = choose_devices(gpu_names, own) or (*gpus(), *devices_here())
    view = make_plan(
        subject,
        question,
        devices,
        rates=_rates(settings, catalog, gpu_hour_usd),
        measured=() if subject.entry is None else _read_measured(settings, subject.entry.name),
    )
    if as_json:
        print_json(view)
    else:
        _print(view)


def _catalog(path: Path) -> Catalog | None:
    try:
        return load_catalog(path)
    except FileNotFoundError:
        return None


def _rates(settings: Settings, catalog: Catalog | None, given: str | None) -> ExpenseRates:
    if given is not None:
        return ExpenseRates(hour_nanos=parse_usd(given))
    hours = {} if catalog is None else catalog.gpu_hours
    return ExpenseRates(hours=hours, hour_nanos=settings.gpu_hour_nanos)


def _read_measured(settings: Settings, model: str) -> tuple[Measured, ...]:
    """Read receipts, if this installation has a database."""
    if settings.database_url is None and not (settings.home / DATABASE_FILE).is_file():
        return ()
    with open_database(settings) as database, database.snapshot() as connection:
        return read_measured(connection, model)


# --- Tables ---------------------------------------------------------------------------------------


def _print(view: PlanView) -> None:
    click.echo(f"{view['model']} ({view['task']}): {_subject(view)} ({view['source']})")
    click.echo(_request(view))
    if view["parts"] is not None:
        click.echo("")
        print_rows(view["parts"], _part_cells, False)
    rows = view["devices"]
    click.echo("")
    print_rows(rows, lambda row: _memory_cells(row, view), False)
    if view["shape"] is not None:
        click.echo("\nmaximum tokens per second:")
        print_rows(rows, lambda row: _speed_cells(row, view), False)
        costs = [cost for row in rows for cost in _costs(row)]
        if costs:
            click.echo("\nUSD per million tokens:")
            print_rows(costs, lambda cost: _cost_cells(*cost), False)
    results: list[tuple[str, Any]] = [
        (row["name"], row["result"]) for row in rows if row["result"] is not None
    ]
    results += [(_measured_name(one), one) for one in view["measured"]]
    if results:
        click.echo("\none result:" if view["shape"] is None else "\none request:")
        print_rows(results, lambda item: _result_cells(*item), False)
    if all(row["hour_usd"] is None for row in rows):
        click.echo("\nSet the price of a GPU hour (--gpu-hour-usd) to see costs.")
    click.echo("")
    for assumption in view["assumptions"]:
        click.echo(assumption)


def _subject(view: PlanView) -> str:
    shape = view["shape"]
    if shape is None:
        return f"{view['parameters']:,} weights"
    mixture = ""
    if shape["active_parameters"] != shape["parameters"]:
        mixture = f" ({shape['active_parameters']:,} for a token)"
    return (
        f"{shape['parameters']:,} weights{mixture}, {shape['layers']} layers, "
        f"{shape['kv_heads']} KV heads of {shape['head_dim']}"
    )


def _request(view: PlanView) -> str:
    request: Any = view["request"]
    weights = f"{request['dtype']}: {_gb(view['weight_bytes'])} of weights"
    if "kv_dtype" in request:
        return (
            f"{weights}; {request['kv_bytes_per_token']:,} bytes of KV cache per token "
            f"({request['kv_dtype']}); a request of {request['input_tokens']:,} and "
            f"{request['output_tokens']:,} tokens"
        )
    task = view["task"]
    order = []
    if "image" in task or "video" in task:
        order.append(f"{request['width']}x{request['height']}")
    if "video" in task:
        order.append(f"{request['frames']} frames")
    elif "image" not in task:
        order.append(f"{request['seconds']:g} s")
    if any(part["name"] in ("unet", "transformer") for part in view["parts"] or ()):
        order.append(f"{request['steps']} steps with guidance {request['guidance']:g}")
    return f"{weights}; a result of {', '.join(order)}"


def _part_cells(part: PartView) -> dict[str, Any]:
    operations = part["operations"]
    return {
        "network": part["name"],
        "weights": f"{part['parameters']:,}",
        "TFLOP a pass": None if operations is None else f"{operations / TERA:.4g}",
        "passes": part["runs"],
    }


def _memory_cells(row: PlannedDeviceView, view: PlanView) -> dict[str, Any]:
    cells = {
        "device": row["name"],
        "memory": _gb(row["memory_bytes"]),
        "fits": "yes" if row["fits"] else f"no, needs {row['devices_needed']}",
    }
    text = row["text"]
    if text is not None:
        request: Any = view["request"]
        cells |= {
            "kv room": _gb(text["kv_room_bytes"]),
            "kv tokens": f"{text['kv_room_tokens']:,}",
            f"sequences of {request['context']:,}": f"{text['sequences']:,}",
        }
    return cells


def _speed_cells(row: PlannedDeviceView, view: PlanView) -> dict[str, Any]:
    text = row["text"]
    assert text is not None
    request: Any = view["request"]
    ridge = None
    if text["ridge_operations_per_byte"] is not None:
        ridge = (
            f"{text['ridge_operations_per_byte']:.0f} operations/byte, "
            f"{text['ridge_tokens']} tokens"
        )
    return {
        "device": row["name"],
        "decode, batch 1": _rate(text["decode_tokens_per_s_batch_1"]),
        "decode": f"{_rate(text['decode_tokens_per_s'])} at batch {text['decode_batch']}",
        f"prefill of {request['context']:,}": _rate(text["prefill_tokens_per_s"]),
        "compute-bound from": ridge,
    }


def _costs(row: PlannedDeviceView) -> list[tuple[str, str, MillionView]]:
    text = row["text"]
    assert text is not None
    found = (
        ("output", text["usd_per_million_output_tokens"]),
        ("input", text["usd_per_million_input_tokens"]),
    )
    return [(row["name"], kind, cost) for kind, cost in found if cost is not None]


def _cost_cells(device: str, kind: str, cost: MillionView) -> dict[str, Any]:
    return {
        "device": device,
        "tokens": kind,
        "roofline": cost["roofline"],
        "expected": cost["expected"],
        "catalog": cost["catalog"],
        "margin": _percent(cost["margin_percent"]),
    }


def _result_cells(name: str, result: Any) -> dict[str, Any]:
    return {
        "device": name,
        "figures": result["basis"],
        "device s": f"{result['device_seconds']:.4g}",
        "per second": f"{result['results_per_second']:.4g}",
        "cost": result["cost_usd"],
        "price": result["price_usd"],
        "margin": _percent(result["margin_percent"]),
        "devices": result["devices"],
    }


def _measured_name(one: MeasuredView) -> str:
    return f"{one['device']}, {one['dtype'] or 'unknown precision'}, {one['requests']} requests"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} %"


def _gb(size: int) -> str:
    return f"{size / GIGA:.4g} GB"


def _rate(tokens_per_second: float | None) -> str | None:
    if tokens_per_second is None:
        return None
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"
