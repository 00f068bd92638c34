"""What a plan takes: shared memory, bandwidth, hours, space and money. Pure functions, but for a look at a disk."""

import dataclasses
import shutil

from ray_extract.config import Job
from ray_extract.errors import PlanError
from ray_extract.layout import SHARDS_PREFIX
from ray_extract.plan import PlanSummary, show_bytes
from ray_extract.store import Store

GB = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What only the user knows; None is not known.

    Args:
        tokens_per_second: of one engine.
        node_gpus: GPUs of a node.
        gpu_hour: price of one GPU for an hour.
        gb_month: price of storing a GB (10^9 bytes) for a month, in the same currency.
    """

    tokens_per_second: float | None = None
    node_gpus: int = 8
    gpu_hour: float | None = None
    gb_month: float | None = None


def cost_lines(job: Job, plan: PlanSummary, arena_bytes: int, rates: Rates) -> list[str]:
    """For people, one line a fact, as PlanSummary.lines.

    Args:
        job, plan: what is asked and what it comes to.
        arena_bytes: shared memory of one engine.
        rates: what follows from none of them.
    """
    engines = min(job.engine.count, max(1, rates.node_gpus // job.num_gpus)) if job.num_gpus else 1
    node = f", {show_bytes(engines * arena_bytes)} for the {engines} of a node" if engines > 1 else ""
    each = f"each of {job.engine.count} engines" if job.engine.count > 1 else "the engine"
    lines = [f"/dev/shm  {show_bytes(arena_bytes)} for {each}{node}"]
    hours = None
    if rates.tokens_per_second:
        hours = plan.tokens / (rates.tokens_per_second * job.engine.count) / 3600
        speed = round(rates.tokens_per_second * plan.state_bytes / max(1, plan.tokens))
        node = f", {show_bytes(engines * speed)} for the {engines} of a node" if engines > 1 else ""
        lines += [
            f"writes    {show_bytes(speed)} a second for each engine{node}",
            f"hours     {hours:,.2f} at {rates.tokens_per_second:,.0f} tokens/s an engine",
        ]
    month = None if rates.gb_month is None else plan.state_bytes / GB * rates.gb_month
    if month is not None:
        lines.append(f"storage   {month:,.2f} a month at {rates.gb_month:g} a GB")
    if rates.gpu_hour is not None and job.num_gpus and hours is None:
        lines.append("compute   not known without --tokens-per-second or --trial")
    elif rates.gpu_hour is not None and job.num_gpus and hours is not None:
        gpu_hours = hours * job.engine.count * job.num_gpus
        lines.append(
            f"compute   {gpu_hours * rates.gpu_hour:,.2f} for {gpu_hours:,.2f} GPU hours at {rates.gpu_hour:g}"
        )
        if month:
            lines.append(
                f"          so keeping the states is cheaper than computing them again within "
                f"{gpu_hours * rates.gpu_hour / month:,.1f} months, and dearer after that"
            )
    return lines


def check_space(store: Store, state_bytes: int) -> None:
    """Whether the states fit where they are to go, if that can be known: for a local folder.

    Raises:
        PlanError: they do not.
    """
    folder = store.local_path("")
    if folder is None:
        return
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    left = state_bytes - sum(item.size for item in store.list(SHARDS_PREFIX))
    if left > free:
        raise PlanError(
            f"output.url: {folder} has {show_bytes(free)} left, and the states take {show_bytes(left)}; choose "
            "another place, fewer boundaries, capture.keep = supervised or capture.dtype = float8_e4m3"
        )
