"""``sweep``: many models, checkpoints, variants, seeds and verbs into one data set, safe to kill at any time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rankscope._types import path_of
from rankscope.errors import InputError, ResultError
from rankscope.ext.sweeps.claims import Claims, shard_of
from rankscope.ext.sweeps.folder import SweepFolder
from rankscope.ext.sweeps.plan import Plan, plan_of
from rankscope.ext.sweeps.status import SweepStatus, status_of
from rankscope.ext.sweeps.tasks import Task, tasks_of
from rankscope.ext.sweeps.working import TRAFFIC, TRANSIENT, Outcome, do, failed


def sweep(
    plan: Plan | Mapping[str, Any] | str | Path,
    folder: str | os.PathLike[str],
    *,
    serial: bool = False,
    address: str | None = None,
    workers: int | None = None,
    shard: str | None = None,
    progress: bool = False,
) -> SweepStatus:
    """Run every task of a plan that has no result in ``folder`` yet, and save each result as soon as it is finished.

    It can be killed at any time. Run it again with the same arguments to resume: finished tasks are skipped, failed and
    lost ones are rerun. A task is identified by a hash of its description, the identity of its weights and the version
    of rankscope; a task that runs twice leaves one file.

    Args:
        plan: a YAML file, or the same content as a mapping.
        folder: folder of the data set; created if necessary.
        serial: run one task after the other in this process, without Ray.
        address: address of a Ray cluster, e.g. ``"auto"`` or ``"ray://host:10001"``; None starts one on this machine.
        workers: number of cores of a cluster started here; None for all.
        shard: share the folder with other processes that run the same plan, on this machine or others, without Ray:
            ``"0/8"`` for the first of eight, ``"auto"`` for the place in a Slurm job array or a Kubernetes indexed
            job. Each task is claimed by one process; the tasks of a process that was killed are taken by those that
            come after, or by itself when it is started again.
        progress: show a progress bar.

    Returns:
        Which tasks are done, which failed, and why.

    Raises:
        InputError: the plan cannot be read, or ``shard`` is combined with another way to run.
        MissingExtraError: without the packages of the extra ``sweep``.

    Example:
        >>> import tempfile
        >>> plan = {"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": {"sequences": 1, "tokens": 8}}
        >>> sweep(plan, tempfile.mkdtemp(), serial=True).counts
        {'done': 1, 'failed': 0, 'missing': 0}
    """
    if shard is not None and (serial or address is not None or workers is not None):
        raise InputError("shard runs the tasks in this process; leave out serial, address and workers.")
    place = None if shard is None else shard_of(shard)
    read = plan_of(plan)
    home = SweepFolder(path_of(folder, "folder", "the folder of a sweep"))
    tasks = {task.key: task for task in tasks_of(read)}
    home.begin(task.expected for task in tasks.values())
    done = home.read(lambda contents: contents.done)
    waiting = [task for key, task in tasks.items() if key not in done]
    with ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=len(tasks), initial=len(tasks) - len(waiting), desc="sweep", unit="task", disable=not progress)
        )
        if not waiting:
            arriving: Iterator[Outcome] = iter(())
        elif serial:
            arriving = outcomes_here(waiting, read.retries)
        elif place is not None:
            arriving = outcomes_here(Claims(home).waiting(place.order(waiting)), read.retries)
        else:
            from rankscope.ext.sweeps.on_ray import cluster, outcomes_on_ray

            ray = stack.enter_context(cluster(address, workers))
            arriving = outcomes_on_ray(ray, waiting, read.cpus, read.retries)
        shown: Counter[str] = Counter(failed=0)
        for outcome in arriving:
            shown["failed"] += _kept(home, outcome)
            shown.update({name: outcome.facts[name] for name in TRAFFIC if name in outcome.facts})
            bar.set_postfix(
                {name: bar.format_sizeof(count) if name in TRAFFIC else count for name, count in shown.items()},
                refresh=False,
            )
            bar.update()
    return status_of(home.home)


def outcomes_here(tasks: Iterable[Task], retries: int) -> Iterator[Outcome]:
    """Yield the outcomes of the tasks, run one after the other in this process."""
    for task in tasks:
        yield _tried(task, retries)


def _tried(task: Task, retries: int) -> Outcome:
    for left in range(retries, -1, -1):
        try:
            return do(task)
        except TRANSIENT as error:
            last = error
            if not left:
                break
    return failed(task, last)


def _kept(home: SweepFolder, outcome: Outcome) -> int:
    """Save an outcome; returns 1 for a failure, else 0."""
    try:
        if outcome.table is None:
            home.keep_failure(outcome.task.expected, outcome.facts)
            return 1
        home.keep_rows(outcome.task.expected, outcome.table, outcome.facts)
    except OSError as error:
        raise ResultError(
            f"A result could not be written to {home.home} ({error.strerror}). The results already there are "
            "complete: free some space and start the sweep again."
        ) from error
    return 0
