"""Where groups of cells are computed: here, or by Ray's workers on this machine or a cluster."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch

from analysis.errors import InputError
from analysis.experiments.machine import available
from analysis.experiments.study import Group, code, compute, policies, told
from analysis.grid import Grid
from eviction import Policy
from hooks.reference import LoadedModel, load

Outcome = tuple[Group, str, dict[str, Any] | str]
"""A group, one of its cells, and that cell's row or why there is none."""
NO_RAY = "--engine ray needs Ray: pip install 'criticalkv[ray]'"
LOSSES = 2
"""Workers that may be lost one after the other on a group, none of its cells done, before its cells are computed each by itself."""


@dataclass(frozen=True)
class Job:
    """A group and the ids of its cells that are wanted."""

    group: Group
    wanted: frozenset[str]
    losses: int = 0
    """Workers that were lost on it, one after the other."""


@runtime_checkable
class Engine(Protocol):
    """Computes jobs; outcomes come one by one, in any order, each as soon as it is there."""

    def run(self, grid: Grid, jobs: Iterable[Job], begins: Callable[[str], None]) -> Iterator[Outcome]:
        """`begins` is told what is under way."""
        ...


def load_for(grid: Grid, model: str) -> LoadedModel:
    """A model of the grid, where the grid says.

    Raises:
        InputError: the device is not there.
        ModelUnavailable: the model cannot be loaded here.
    """
    dtype = getattr(torch, grid.dtype)
    if grid.device_map is not None:
        return load(model, dtype=dtype, device_map=grid.device_map)
    return load(model, dtype=dtype, device=available(grid.device))


class Local:
    """One after the other in this process, a model at a time. `loaded` are models that are there already."""

    def __init__(self, loaded: Mapping[str, LoadedModel] | None = None) -> None:
        self.loaded = dict(loaded or {})

    def run(self, grid: Grid, jobs: Iterable[Job], begins: Callable[[str], None]) -> Iterator[Outcome]:
        """As `Engine`."""
        chosen, held = policies(grid), ("", None)
        for job in jobs:
            name = job.group.model
            model = self.loaded.get(name)
            if model is None:
                if held[0] != name:
                    begins(f"loading {name}")
                    held = ("", None)  # the one before is let go of first
                    held = (name, load_for(grid, name))  # type: ignore[assignment]
                model = held[1]
            assert model is not None
            begins(job.group.name)
            for cell, found in compute(model, chosen, grid.judge, job.group, job.wanted):
                yield job.group, cell, found


class Worker:
    """What runs in a Ray worker: a model, loaded once, and groups answered on it."""

    def __init__(self, grid: Grid, chosen: Mapping[str, Policy], threads: int, digest: str) -> None:
        torch.set_num_threads(threads)
        self.grid, self.chosen, self.same = grid, chosen, code() == digest
        self.held: tuple[str, LoadedModel] | None = None

    def answer(self, group: Group, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """A group's wanted cells, one by one.

        Raises:
            InputError: this worker's code or libraries are others than those that the cells were planned by.
        """
        if not self.same:
            raise InputError("a worker has other code, or another torch, transformers or numpy; install the same on every node")
        if self.held is None or self.held[0] != group.model:
            self.held = None
            self.held = (group.model, load_for(self.grid, group.model))
        yield from compute(self.held[1], self.chosen, self.grid.judge, group, wanted)


def carried(module: ModuleType) -> None:
    """Let Ray take what a user's module defines to the workers as it is, since they cannot import it.

    Raises:
        InputError: Ray is not installed.
    """
    try:
        from ray import cloudpickle
    except ImportError as error:
        raise InputError(NO_RAY) from error
    cloudpickle.register_pickle_by_value(module)


class Ray:
    """Groups as tasks of Ray workers, each with the CPUs, GPUs and memory that it asks for, and a model loaded once.

    A worker that is lost costs its unfinished cells, which others take over. Where `LOSSES` workers in a row are lost on a group, its cells
    are computed each by itself, and one on which another worker is lost is given up.

    Args:
        address: of a cluster ("auto", "ray://host:10001"); None starts Ray on this machine.
        workers: how many.
        cpus: threads of each.
        gpus: of each; a fraction shares one.
        memory: bytes of each that Ray sets aside; None leaves that out.

    Raises:
        InputError: Ray is not installed, cannot be reached, or has not what a worker asks for.
    """

    def __init__(
        self, address: str | None = None, *, workers: int = 2, cpus: int = 1, gpus: float = 0, memory: int | None = None
    ) -> None:
        if workers < 1 or cpus < 1 or gpus < 0 or (memory is not None and memory < 1):
            raise InputError(
                f"a worker has at least 1 CPU and there is at least 1; not {workers=}, {cpus=}, {gpus=}, {memory=}"
            )
        try:
            import ray
        except ImportError as error:
            raise InputError(NO_RAY) from error
        self.ray: Any = ray
        self.address, self.workers, self.cpus, self.gpus, self.memory = address, workers, cpus, gpus, memory

    def run(self, grid: Grid, jobs: Iterable[Job], begins: Callable[[str], None]) -> Iterator[Outcome]:
        """As `Engine`."""
        ray = self.ray
        mine = not ray.is_initialized()
        if mine:
            self._start()
        try:
            self._require_room()
            yield from self._run(grid, deque(jobs), begins)
        finally:
            if mine:
                ray.shutdown()

    def _start(self) -> None:
        """Join the cluster, or start Ray here with as many CPUs as the workers ask for."""
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        here = {"address": "local", "num_cpus": self.workers * self.cpus} if self.address is None else {"address": self.address}
        if self.address is not None:
            del quiet["include_dashboard"]
        try:
            self.ray.init(**here, **quiet)
        except Exception as error:  # of many kinds
            raise InputError(f"Ray cannot be reached at {self.address or 'this machine'}: {told(error)}") from error

    def _require_room(self) -> None:
        """Whether one worker at least can ever be placed."""
        has = self.ray.cluster_resources()
        for name, asked in (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory or 0)):
            if asked > has.get(name, 0):
                raise InputError(f"a worker asks for {asked:g} {name}, and Ray has {has.get(name, 0):g} in all")

    def _worker(self, grid: Grid, chosen: Mapping[str, Policy]) -> Any:
        asked = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0}
        if self.memory is not None:
            asked["memory"] = self.memory
        return self.ray.remote(Worker).options(**asked).remote(grid, chosen, self.cpus, code())

    def _run(self, grid: Grid, waiting: deque[Job], begins: Callable[[str], None]) -> Iterator[Outcome]:
        ray, chosen = self.ray, policies(grid)
        idle: list[Any] = []
        busy: dict[Any, tuple[Any, Job, set[str]]] = {}
        while waiting or busy:
            while waiting and len(busy) < self.workers:
                job = waiting.popleft()
                worker = idle.pop() if idle else self._worker(grid, chosen)
                begins(job.group.name)
                stream = worker.answer.options(num_returns="streaming").remote(job.group, job.wanted)
                busy[stream] = (worker, job, set(job.wanted))
            (stream,), _ = ray.wait(list(busy), num_returns=1, fetch_local=False)
            worker, job, left = busy[stream]
            try:
                cell, found = ray.get(next(stream))
            except StopIteration:
                del busy[stream]
                idle.append(worker)
                continue
            except ray.exceptions.RayActorError as error:
                del busy[stream]
                again, given_up = recovered(job, left)
                waiting.extendleft(reversed(again))
                for one in given_up:
                    yield job.group, one, f"{LOSSES + 1} workers were lost on it: {told(error)}"
                continue
            except Exception as error:  # raised in the worker beside its cells: the model cannot be loaded there
                del busy[stream]
                idle.append(worker)
                for one in sorted(left):
                    yield job.group, one, told(error)
                continue
            left.discard(cell)
            yield job.group, cell, found
        for worker in idle:
            ray.kill(worker)


def recovered(job: Job, left: Collection[str]) -> tuple[list[Job], list[str]]:
    """What is tried again after a worker was lost on a job of which `left` are unfinished, and the cells that are given up.

    The rest of the job at first; from `LOSSES` workers in a row on, its cells one by one; a cell on which one more is lost is given up.
    """
    losses = job.losses + 1 if set(left) == job.wanted else 1
    cells = [one.id for one in job.group.cells if one.id in left]
    if losses > LOSSES:
        return [], cells
    if losses < LOSSES:
        return ([Job(job.group, frozenset(cells), losses)] if cells else []), []
    return [Job(job.group, frozenset([cell]), losses) for cell in cells], []
