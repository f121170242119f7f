"""What a load test leaves behind besides its tables: figures for the manifest, and Parquet of requests and readings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.loadgen import tables
from jobs.loadgen.stats import Record

KEY_NUMBERS = (
    "variant", "concurrency", "rate", "completed", "failed", "request_throughput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "median_e2el_ms", "stopped_early", "client_saturated", "intervals",
    "goodput", "slo_broken",
)  # fmt: skip


def key_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a level that its artifact's manifest holds."""
    return {key: row[key] for key in KEY_NUMBERS}


def write_requests(kept: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One row per request as Parquet; times are seconds since the epoch, `arrivals` seconds after `sent`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, text, count = pa.float64(), pa.string(), pa.int32()
    times = ("scheduled", "sent", "first_byte", "first_token", "last_token", "end")
    columns: dict[str, Any] = {
        "variant": text,
        "concurrency": count,
        "rate": number,
        "index": count,
        **dict.fromkeys(times, number),
    }
    columns |= dict.fromkeys(("prompt_len", "output_len", "prompt_tokens", "completion_tokens", "cached_tokens"), count)
    columns |= {"estimated": pa.bool_(), **dict.fromkeys(("finish_reason", "failure", "detail"), text)}
    columns |= {"arrivals": pa.list_(number), "chars": pa.list_(count)}
    pq.write_table(pa.Table.from_pylist([dict(k) for k in kept], schema=pa.schema(list(columns.items()))), path)


def write_timeline(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The server's own readings, taken out of the rows, as Parquet; nothing where the server gave none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [
        {"variant": tables.variant_name(r["variant"]), "load": tables.load_name(r), **reading}
        for r in rows
        for reading in r.pop("timeline")
    ]
    if flat:
        pq.write_table(pa.Table.from_pylist(flat), path)


def flat(record: Record, *, variant: Mapping[str, Any], concurrency: int | None, rate: float | None) -> dict[str, Any]:
    """A request as a row of requests.parquet."""
    names = (
        "index", "scheduled", "sent", "first_byte", "first_token", "last_token", "end", "prompt_len", "output_len",
        "prompt_tokens", "completion_tokens", "cached_tokens", "estimated", "finish_reason", "failure", "detail",
    )  # fmt: skip
    return {
        "variant": tables.variant_name(variant),
        "concurrency": concurrency,
        "rate": rate,
        **{name: getattr(record, name) for name in names},
        "arrivals": [t - record.sent for t in record.times],
        "chars": record.chars.tolist(),
    }
