"""`lockstep plan --fit` and `--options`: which layouts and options fit, what they cost, and why others do not."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from lockstep.callbacks._support.tables import columns, human_size
from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import Plan
from lockstep.strategies.planning.timing import Estimate
from lockstep.trainer.cli.config.signatures import arguments_of
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.plan import report, trial
from lockstep.trainer.module import Module

MAX_PIPELINE = 16
"""Ranks of the longest pipeline that a search tries."""

MAX_PROCESSES = 4
"""Processes that try candidates side by side, each with up to half a GB; fewer if there are fewer cores."""

Settings = dict[str, str]
"""Overrides by key."""
Job = tuple[str | None, str | None, Settings, Settings]
"""A layout, words for its options, arguments of the strategy and overrides; words of None: those with which it fits."""
_FORK = multiprocessing.get_context("fork")
"""What a search has imported is there in each process; no trial runs here, so torch has started no thread to lose."""


@dataclass(frozen=True)
class Candidate:
    """One layout with options, tried."""

    layout: str
    options: str
    """What differs from the config beside the layout, in words."""
    overrides: tuple[str, ...]
    plan: Plan | None = field(repr=False)
    estimate: Estimate | None = field(repr=False)
    reason: str
    """Why it does not fit, or cannot be; "" if it fits."""

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def seconds_a_sample(self) -> float:
        return float("inf") if self.estimate is None else 1 / self.estimate.samples_per_s


class Search:
    """Tries candidates of one config on one kind of device."""

    def __init__(
        self,
        files: Sequence[str],
        overrides: Sequence[str],
        device: Device,
        devices: int | None,
        show: Callable[[str], None],
    ) -> None:
        self._files, self._overrides, self._device, self._show = files, overrides, device, show
        self._base = trial.resolve(files, overrides, devices)
        settings = self._base.values.get("trainer") or {}
        given = settings.get("devices", 1)
        self._num_devices = given if isinstance(given, int) and given > 0 else 1
        self._settings: dict[str, Any] = settings
        self._blocks: list[str] = []
        self._tried: dict[tuple[str, ...], Candidate] = {}
        self._started = time.monotonic()

    def layouts(self) -> list[Candidate]:
        """Every layout, as it is and with the mildest options with which it fits; those that fit come first, the
        fastest first."""
        found = self._each([(layout, None, {}, {}) for layout in layouts_of(self._num_devices, self._device.node)])
        return sorted(found, key=lambda entry: (not entry.fits, entry.seconds_a_sample))

    def options(self, layout: str | None = None, base: str = "") -> list[Candidate]:
        """Options that change what a layout with the options `base` needs, one at a time; None is the config's own
        layout."""
        strategy, settings = self._rung(base)
        (first,) = self._each([(layout, base, strategy, settings)])
        changes: list[Job] = [
            (layout, words, {**strategy, **of_strategy}, {**settings, **others})
            for words, of_strategy, others in self._changes(layout, first.plan)
        ]
        found = [first, *self._each(changes)]
        return list({entry.overrides: entry for entry in reversed(found)}.values())[::-1]  # without what is the same

    def _each(self, jobs: Sequence[Job]) -> list[Candidate]:
        """The candidate of each job, in their order, tried side by side in processes. The first of a search is tried
        alone: it finds the names of the model's blocks, which the others need."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_processes = min(MAX_PROCESSES, cores)
        if num_processes == 1:
            return [self._shown(number, len(jobs), self._run(job)) for number, job in enumerate(jobs, 1)]
        found: dict[int, Candidate] = {}
        first = 0 if self._blocks else 1
        with ProcessPoolExecutor(num_processes, _FORK, _begin_process, (self,)) as pool:
            try:
                for indices in (range(first), range(first, len(jobs))):
                    futures = {pool.submit(_run_in_process, jobs[i], self._blocks): i for i in indices}
                    for future in as_completed(futures):
                        candidate, tried, self._blocks = future.result()
                        self._tried.update(tried)
                        found[futures[future]] = self._shown(len(found) + 1, len(jobs), candidate)
            except BrokenProcessPool:
                raise ConfigError(
                    "a process that tried a layout was killed, probably for its memory; plan layouts without --fit"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return [found[i] for i in range(len(jobs))]

    def _run(self, job: Job) -> Candidate:
        layout, words, strategy, settings = job
        if words is not None:
            return self._try(layout, words, strategy, settings)
        assert layout is not None
        return self._fitting(layout)

    def _shown(self, number: int, total: int, found: Candidate) -> Candidate:
        name = " with ".join(filter(None, (found.layout, found.options)))
        verdict = "fits" if found.fits else "does not fit"
        self._show(f"{number} of {total}: {name} {verdict} ({time.monotonic() - self._started:.0f} s)")
        return found

    def _fitting(self, layout: str) -> Candidate:
        """The candidate with the fewest memory-saving options that fits; else the last that was tried."""
        first = self._try(layout, "", {}, {})
        if first.fits or first.plan is None:
            return first
        rungs = self._ladder(layout, self._state_is_too_large(first.plan))
        if not rungs:
            return first
        last = self._try(layout, rungs[-1], *self._rung(rungs[-1]))
        if not last.fits:
            return last
        tried = (self._try(layout, rung, *self._rung(rung)) for rung in rungs)
        return next(found for found in tried if found.fits)

    def _state_is_too_large(self, plan: Plan) -> bool:
        """Whether no option that saves activations can help."""
        return any(
            not rank.host
            and rank.parameters + rank.gradients + rank.optimizer + timing.CONTEXT_BYTES > self._device.memory
            for rank in plan.ranks
        )

    def _ladder(self, layout: str, state_is_too_large: bool) -> list[str]:
        """Options that save memory at the price of time, the mildest first."""
        rungs = ["checkpointing selective", "checkpointing full"]
        if self._chunks_losses():
            rungs.append("checkpointing full, loss in 8 chunks")
        if state_is_too_large:
            rungs.clear()
        if "fsdp" in layout and "pipeline" not in layout and self._device.host_memory is not None:
            rungs.append("checkpointing full, offload to the host")
        return rungs

    def _rung(self, words: str) -> tuple[Settings, Settings]:
        """Arguments of the strategy, and overrides, of a rung of the ladder."""
        strategy = {}
        if "checkpointing" in words:
            strategy["activation_checkpointing"] = self._rule("selective" if "selective" in words else "full")
        if "offload" in words:
            strategy["cpu_offload"] = "true"
        return strategy, {"module.loss_chunks": "8"} if "chunks" in words else {}

    def _rule(self, name: str) -> str:
        """`activation_checkpointing` of a strategy: all blocks, every second, or none."""
        if name == "selective" and len(self._blocks) > 1:
            return f"[{', '.join(self._blocks[1::2])}]"
        return "false" if name == "off" else "true"

    def _changes(self, layout: str | None, plan: Plan | None) -> Iterator[tuple[str, Settings, Settings]]:
        """Each option, with arguments of the strategy and overrides that differ."""
        axes = {} if plan is None else dict(plan.axes)
        if (layout or self._configured) not in ("auto", "single", ""):
            for name in ("off", "selective", "full"):
                yield f"checkpointing {name}", {"activation_checkpointing": self._rule(name)}, {}
            if axes.get("fsdp", 1) > 1 and "pipeline" not in axes:
                for value, words in (("true", "reshard after forward"), ("false", "keep gathered after forward")):
                    yield words, {"reshard_after_forward": value}, {}
                if str(self._settings.get("precision")).endswith("mixed"):
                    yield "gather all in 16 bits", {"low_precision_gather": "all"}, {}
                if self._device.host_memory is not None:
                    yield "offload to the host", {"cpu_offload": "true"}, {}
        if self._chunks_losses():
            for chunks in (1, 8):
                yield f"loss in {chunks} chunk{'s' * (chunks > 1)}", {}, {"module.loss_chunks": str(chunks)}
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            yield f"precision {precision}", {}, {"trainer.precision": precision}
        accumulate = int(self._settings.get("accumulate_grad_batches", 1))
        batch = (self._base.values.get("data") or {}).get("batch_size")
        for factor in (2, 4):
            settings = {"trainer.accumulate_grad_batches": str(accumulate * factor)}
            if not self._settings.get("split_batches"):
                if not isinstance(batch, int) or batch % factor:
                    continue
                settings["data.batch_size"] = str(batch // factor)
            yield f"micro-batches of 1/{factor}", {}, settings
        if isinstance((self._base.values.get("module") or {}).get("optimizer"), dict):
            for name in ("SGD", "AdamW"):
                yield f"optimizer {name}", {}, {"module.optimizer": f"{{class: {name}}}"}

    @property
    def _configured(self) -> str:
        """The config's own layout, if it is a name or a mesh."""
        given = self._settings.get("strategy", "auto")
        return given if isinstance(given, str) else ""

    def _chunks_losses(self) -> bool:
        """Whether the module has the argument loss_chunks."""
        from lockstep.trainer.cli.config.check import checked_calls

        return "loss_chunks" in arguments_of(checked_calls(self._base).module.target, Module)[0]

    def _try(self, layout: str | None, options: str, strategy: Settings, settings: Settings) -> Candidate:
        words = tuple(f"{key}={value}" for key, value in settings.items())
        if layout is not None or strategy:
            words = (f"trainer.strategy={_strategy(layout or self._configured, strategy)}", *words)
        if words not in self._tried:
            self._tried[words] = self._tried_now(layout, options, words)
        return dataclasses.replace(self._tried[words], options=options)

    def _tried_now(self, layout: str | None, options: str, words: tuple[str, ...]) -> Candidate:
        name = layout or self._configured or "as configured"
        try:
            plan, _ = trial.try_config(trial.resolve(self._files, [*self._overrides, *words], self._num_devices))
        except ConfigError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:  # what a strategy or step refuses, in its words
            return Candidate(name, options, words, None, None, " ".join(str(error).split()))
        self._blocks = self._blocks or [block.name for rank in plan.ranks for block in rank.blocks if block.name]
        return Candidate(name, options, words, plan, trial.timed(plan, self._device), why_not(plan, self._device))


_search: Search
"""In a process of a search: the search that began it."""


def _begin_process(search: Search) -> None:
    global _search
    _search = search
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a traceback


def _run_in_process(job: Job, blocks: list[str]) -> tuple[Candidate, dict[tuple[str, ...], Candidate], list[str]]:
    """The candidate of a job, all that were tried for it, and the names of the model's blocks."""
    _search._blocks = blocks or _search._blocks
    before = set(_search._tried)
    candidate = _search._run(job)
    tried = {words: entry for words, entry in _search._tried.items() if words not in before}
    return candidate, tried, _search._blocks


def why_not(plan: Plan, device: Device) -> str:
    """One sentence if a rank does not fit, else ""."""
    fullest = max(plan.ranks, key=timing.reserved)
    needed = timing.reserved(fullest)
    if needed <= device.memory:
        return ""
    kinds = sorted(fullest.peak_by_kind, key=lambda item: -item[1])[:3]
    most = ", ".join(f"{kind} {human_size(value)}" for kind, value in kinds if value)
    return f"{human_size(needed)} of {human_size(device.memory)}: {most}"


def table(found: Sequence[Candidate], device: Device, price: float | None) -> str:
    """A row for each candidate, then why others do not fit."""
    rows = [("layout", "options", "of " + human_size(device.memory), "a step", "samples/s", "MFU", "")]
    for entry in found:
        if entry.plan is None or entry.estimate is None:
            continue
        needed = max(timing.reserved(rank) for rank in entry.plan.ranks)
        verdict = "fits" if entry.fits else "does not fit"
        if price is not None:
            million = 1e6 / entry.estimate.samples_per_s / 3600 * entry.plan.world_size * price
            verdict += f", {million:,.2f} for 1,000,000 samples"
        rows.append(
            (
                entry.layout,
                entry.options or "-",
                human_size(needed),
                report.seconds(entry.estimate.seconds),
                f"{entry.estimate.samples_per_s:,.1f}",
                f"{entry.estimate.mfu:.1%}",
                verdict,
            )
        )
    lines = columns(rows, right=(2, 3, 4, 5)) if len(rows) > 1 else []
    lines += [f"{_named(entry)}: {entry.reason}" for entry in found if not entry.fits]
    return "\n".join(lines)


def command_words(found: Sequence[Candidate]) -> str:
    """The overrides of the first candidate that fits, as one line for a shell; "" if none does."""
    best = next((entry for entry in found if entry.fits), None)
    return "" if best is None else " ".join(_quoted(word) for word in best.overrides)


def to_dict(found: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {
            "layout": entry.layout,
            "options": entry.options,
            "overrides": list(entry.overrides),
            "fits": entry.fits,
            "reason": entry.reason,
            "peak": None if entry.plan is None else max(rank.peak for rank in entry.plan.ranks),
            "reserved": None if entry.plan is None else int(max(map(timing.reserved, entry.plan.ranks))),
            "seconds": None if entry.estimate is None else entry.estimate.seconds,
            "samples_per_s": None if entry.estimate is None else entry.estimate.samples_per_s,
            "mfu": None if entry.estimate is None else entry.estimate.mfu,
        }
        for entry in found
    ]


def layouts_of(num_devices: int, node: int) -> Iterator[str]:
    """Strategies on `num_devices`: ddp, fsdp, both, tensor within a node of `node`, pipelines."""
    if num_devices == 1:
        yield "single"
        return
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    inner = [("", 1), *((f"tensor={size}", size) for size in sizes if 1 < size <= node)]
    outer = [(f"pipeline={size}", size) for size in sizes if 1 < size <= MAX_PIPELINE]
    for name, size in inner + outer:
        data = num_devices // size
        within = next((each for each in reversed(sizes) if each * size <= node and data % each == 0), 1)
        axes = ["" if data == 1 else f"ddp={data}", f"fsdp={data}", f"ddp={data // within},fsdp={within}"]
        for number, each in enumerate(axes):
            if number and (data == 1 or (number == 2 and within in (1, data))):
                continue
            alone = (each or name).partition("=")[0]
            yield f"{each},{name}" if each and name else each if "," in each else alone


def _strategy(layout: str, options: Settings) -> str:
    """The override of `trainer.strategy`."""
    if not options:
        return layout
    classes = {"ddp": "DDP", "fsdp": "FSDP", "tensor": "TensorParallel", "pipeline": "Pipeline"}
    words = [f"{name}: {value}" for name, value in options.items()]
    kind = f"Pipeline, mesh: '{layout}'" if "pipeline" in layout else f"MeshParallel, axes: '{layout}'"
    return f"{{class: {', '.join([classes.get(layout, kind), *words])}}}"


def _named(entry: Candidate) -> str:
    return entry.layout + (f" ({entry.options})" if entry.options else "")


def _quoted(word: str) -> str:
    return f'"{word}"' if set(word) & set(" {}[]'") else word


def check_flops(device: Device) -> None:
    """Raise ConfigError if a search could not order what it finds."""
    if not device.flops:
        raise ConfigError(
            "a search orders layouts by time: give the device's FLOP/s, as in --gpu memory=80,flops=989e12"
        )
