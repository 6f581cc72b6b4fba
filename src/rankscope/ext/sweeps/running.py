"""``sweep``: many models, checkpoints, variants, seeds and verbs into one data set, safe to kill at any time."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rankscope.errors import InputError
from rankscope.ext.sweeps.plan import Plan, plan_of
from rankscope.ext.sweeps.results import FAILURES, ROWS, Chunk, Results
from rankscope.ext.sweeps.status import SweepStatus, status_in
from rankscope.ext.sweeps.tasks import Task, tasks_of
from rankscope.ext.sweeps.working import Limits, Work, run_chunk
from rankscope.models.loading.named import no_named_code


@no_named_code("a plan")
def sweep(
    plan: Plan | Mapping[str, Any] | str | Path,
    folder: str | os.PathLike[str],
    *,
    chunk: int | None = None,
    serial: bool = False,
    address: str | None = None,
    workers: int | None = None,
    shard: str | None = None,
    progress: bool = False,
) -> SweepStatus:
    """Run every task of a plan that has no result in ``folder`` yet, and save results as soon as they are there.

    It can be killed at any time. Run it again with the same arguments to resume: finished tasks are skipped, failed and
    lost ones are rerun. A task is identified by a hash of its description, the identity of its weights and the version
    of rankscope; a task that runs twice leaves its rows once.

    Args:
        plan: a YAML file, or the same content as a mapping.
        folder: folder of the data set, created if necessary, or an address (``s3://bucket/name``, ``gs://``, ``az://``).
        chunk: tasks whose rows share a file. A kill costs the chunks at work. By default 1, or as many as are needed
            for at most 10,000 files; the number of the first start applies.
        serial: run one task after the other in this process, without Ray.
        address: address of a Ray cluster, e.g. ``"auto"`` or ``"ray://host:10001"``; None starts one on this machine.
        workers: number of cores of a cluster started here; None for all.
        shard: run a share of the tasks in this process, while other processes run the same plan and folder, without
            Ray: ``"0/8"`` for the first of eight, ``"auto"`` for the place in a Slurm job array or a Kubernetes indexed
            job. A process that has done its share does what the others have not finished yet.
        progress: show a progress bar.

    Returns:
        Which tasks are done, which failed, and why.

    Raises:
        InputError: the plan cannot be read, ``shard`` is combined with another way to run, or ``chunk`` is not that of
            the first start.
        ResultError: nothing can be written to the folder.
        MissingExtraError: without the packages of the extra ``sweep``.

    Example:
        >>> import tempfile
        >>> plan = {"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": {"sequences": 1, "tokens": 8}}
        >>> sweep(plan, tempfile.mkdtemp(), serial=True).counts
        {'done': 1, 'failed': 0, 'missing': 0}
    """
    if shard is not None and (serial or address is not None or workers is not None):
        raise InputError("shard runs the tasks in this process; leave out serial, address and workers.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk={chunk!r}: expected a whole number, 1 or more.")
    part = None if shard is None else shard_of(shard)
    read = plan_of(plan)
    results = Results.at(folder)
    tasks = list({task.key: task for task in tasks_of(read)}.values())
    limits = Limits(read.retries, read.timeout, read.cpus)
    run_tasks(tasks, results, limits, chunk=chunk, serial=serial, address=address, workers=workers, shard=part,
              progress=progress)  # fmt: skip
    return status_in(results.contents())


def run_tasks(
    tasks: Sequence[Task],
    results: Results,
    limits: Limits,
    *,
    chunk: int | None = None,
    serial: bool = False,
    address: str | None = None,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    progress: bool = False,
    work: Work | None = None,
) -> Counter[str]:
    """Run the tasks that are left, in the way that was asked for; returns how many were done and failed."""
    chunks = results.begin(tasks, chunk)
    waiting = results.waiting(chunks)
    left = sum(len(one.tasks) for one in waiting)
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        if not waiting:
            arriving: Iterator[Counter[str]] = iter(())
        elif shard is not None:
            arriving = in_share(chunks, waiting, shard, results, limits, work)
        elif serial:
            arriving = (run_chunk(one, results, limits, work=work) for one in waiting)
        else:
            from rankscope.ext.sweeps.on_ray import cluster, on_ray

            arriving = on_ray(stack.enter_context(cluster(address, workers)), waiting, results, limits, work)
        bar = stack.enter_context(
            tqdm(total=len(tasks), initial=len(tasks) - left, desc="sweep", unit="task", disable=not progress)
        )
        for counts in arriving:
            found += counts
            bar.set_postfix({"failed": found["failed"]}, refresh=False)
            bar.update(counts.total())
    return found


def in_share(
    chunks: Sequence[Chunk],
    waiting: Sequence[Chunk],
    shard: tuple[int, int],
    results: Results,
    limits: Limits,
    work: Work | None,
) -> Iterator[Counter[str]]:
    """Run the chunks of one of several processes, then those that nobody has finished yet.

    Nobody waits and nothing is locked: at worst two processes do the same chunk, and write equal rows.
    """
    index, count = shard
    # Shares are by place in the plan, which is the same whenever a process starts.
    places = {chunk.name: place for place, chunk in enumerate(chunks)}

    def turn(chunk: Chunk) -> tuple[int, int]:
        place = places.get(chunk.name, 0)
        distance = (place - index) % count
        # The shares of the others from their end: a process that is at work is probably near its beginning.
        return distance, place if distance == 0 else -place

    for chunk in sorted(waiting, key=turn):
        is_mine = turn(chunk)[0] == 0
        if is_mine or not any(results.place.holds(f"{folder}/{chunk.name}.parquet") for folder in (ROWS, FAILURES)):
            yield run_chunk(chunk, results, limits, work=work)


def shard_of(word: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Read ``"2/8"``, or ``"auto"`` for the place in a Slurm job array or a Kubernetes indexed job.

    Returns:
        The number of this process, from 0, and how many there are.

    Raises:
        InputError: neither, or ``"auto"`` outside of such a job.

    Example:
        >>> shard_of("2/8")
        (2, 8)
        >>> slurm = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9"}
        >>> shard_of("auto", {**slurm, "SLURM_ARRAY_TASK_STEP": "2"})
        (3, 5)
    """
    if word == "auto":
        index, count = _from_scheduler(environment)
    else:
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", word)
        if not match:
            raise InputError(f"shard={word!r}: expected INDEX/COUNT, such as 0/8, or auto in a job array.")
        index, count = int(match[1]), int(match[2])
    if not 0 <= index < count:
        raise InputError(
            f"shard {index}/{count}: shards are numbered from 0, so the last of {count} is {max(count - 1, 0)}/{count}."
        )
    return index, count


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int]:
    def number(name: str, default: str = "") -> int:
        text = environment.get(name, default)
        if not text.isdecimal():
            raise InputError(f"shard=auto: the variable {name} is {text!r}, and a number is needed.")
        return int(text)

    if "SLURM_ARRAY_TASK_ID" in environment:
        first, step = number("SLURM_ARRAY_TASK_MIN", "0"), number("SLURM_ARRAY_TASK_STEP", "1") or 1
        last = number("SLURM_ARRAY_TASK_MAX")
        # Not SLURM_ARRAY_TASK_COUNT: of an array such as 0,3,7 it is 3, and the numbers run to 7.
        return (number("SLURM_ARRAY_TASK_ID") - first) // step, (last - first) // step + 1
    if "JOB_COMPLETION_INDEX" in environment:
        return number("JOB_COMPLETION_INDEX"), number("JOB_COMPLETIONS")
    raise InputError(
        "shard=auto needs the variables of a Slurm job array (SLURM_ARRAY_TASK_ID) or of a Kubernetes indexed job "
        "(JOB_COMPLETION_INDEX, and JOB_COMPLETIONS set in its manifest). Elsewhere, give --shard INDEX/COUNT."
    )
