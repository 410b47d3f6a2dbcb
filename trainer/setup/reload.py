"""The loaders of a fit: made once, or with `reload_dataloaders_every_n_epochs` again as epochs begin."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.strategies.data.randomness import Randomness
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.trainer.kept import numbers
from lockstep.trainer.kept.agreed import alike
from lockstep.trainer.kept.identity import Reference
from lockstep.trainer.kept.owners import has_no_state, is_of_program
from lockstep.trainer.kept.reads import ReadsOf
from lockstep.trainer.kept.values import copied, is_small
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import overrides
from lockstep.trainer.seeding import derive
from lockstep.trainer.setup.loaders import Sources, combined, evaluation_loaders, length_of, limit_of

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.prepare import FitLoop

_log = logging.getLogger("lockstep")


def make(run: RunState, module: Module, sources: Sources, resumes: bool = True) -> dict[str, Any]:
    """The loaders of a fit and what is measured of them, by their names in a `FitLoop`. Every rank calls it.

    `resumes`: a run that is resumed continues with the windows that it had.
    """
    with nullcontext() if run.reload is None else run.reload.drawing():
        source = combined(sources.get(module, "train"))
        return _with_validation(run, module, sources, source, train_loader(run, module, source, resumes=resumes))


def _with_validation(
    run: RunState, module: Module, sources: Sources, training: Any, made: tuple[ShardedLoader, int | None, int | None]
) -> dict[str, Any]:
    loader, limit, num_batches = made
    val_loaders = _val_loaders(run, module, sources, training)
    return {
        "train_loader": loader,
        "limit": limit,
        "num_batches": num_batches,
        "val_loaders": val_loaders,
        "val_every": validation_interval(run, num_batches) if val_loaders else None,
    }


_SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


@dataclass(frozen=True)
class Seen:
    """What loader methods see where they are called again, and what a run knows of them later."""

    made_for: int = 0
    """The epoch in which that was due."""
    global_step: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """By name of the Trainer's attribute."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """As `Changes` saves them, also of what says by itself what is saved."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Those of up to 1 MiB."""
    same: list[str] = field(default_factory=list)
    """The attributes that are the objects that they were then."""
    moved_on: list[str] = field(default_factory=list)
    """Those that are others now, while somebody still holds the former objects."""
    lengths: list[int] = field(default_factory=list)
    """Of the data that is trained on."""
    numbers: dict[str, int | None] = field(default_factory=dict)
    """Of the Trainer: `Numbers.now`."""
    weights: bool = False
    """Whether loader methods have read weights, which are those of the start of the epoch there."""


class Reload:
    """`reload_dataloaders_every_n_epochs`.

    A run that is resumed calls loader methods as a new run does, and then once more with what they saw as the run that
    was saved had called them last.
    """

    def __init__(self, run: RunState, module: Module, sources: Sources) -> None:
        """Raises ValueError if `fit` was given both loaders, so that no method makes any."""
        self._every = run.arguments.reload_dataloaders_every_n_epochs
        if sources.loaders.get("train") is not None and sources.loaders.get("val") is not None:
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={self._every} calls train_dataloader and val_dataloader again, but "
                "loaders were given to fit; define these methods in the Module or a DataModule"
            )
        self._run, self._module, self._sources = run, module, sources
        self._seen = self._now({}) if self._due() else Seen()
        self._held: dict[str, Reference] = {}
        """The attributes of which `Seen.same` says whether they are the same objects."""
        self._is_old = False

    @classmethod
    def of(cls, run: RunState, module: Module, sources: Sources) -> Reload | None:
        return cls(run, module, sources) if run.arguments.reload_dataloaders_every_n_epochs else None

    def state_dict(self) -> dict[str, Any]:
        assert self._run.attributes is not None
        same, moved_on = self._run.attributes.since(self._held)
        return asdict(replace(self._seen, same=same, moved_on=moved_on))

    def load_state_dicts(self, saved: list[dict[str, Any]], epoch: int) -> None:
        """Take up what this rank had saved, or all ranks of another number of them, in `epoch`; versions that saved
        nothing are in the epoch that was due."""
        if all(saved):
            own = alike([state["attributes"] for state in saved]) if len(saved) > 1 else saved[0]["attributes"]
            self._seen = Seen(**(saved[0] | {"attributes": own}))
        else:
            self._seen, self._is_old = Seen(epoch - epoch % self._every), True

    @property
    def is_of_later_epoch(self) -> bool:
        """Whether loader methods have been called again."""
        return self._seen.made_for > 0

    @property
    def is_due(self) -> bool:
        """Whether loaders are made again at the start of the epoch after this one."""
        return self._due(1) > self._seen.made_for

    def __call__(self, loop: FitLoop) -> None:
        """Make the loaders again if that is due. Every rank calls it at the start of an epoch."""
        run = self._run
        if self._due() <= self._seen.made_for:
            return
        assert run.attributes is not None
        seen, before = self._now(copied(run.attributes.state_dict(whole=True))), run.train_dataloader.plan
        with self.drawing(), ReadsOf(self._module) as reads:
            source = combined(self._sources.get(self._module, "train"))
            made = train_loader(run, self._module, source, before)
            vars(loop).update(_with_validation(run, self._module, self._sources, source, made))
        self._held = run.attributes.held()
        self._seen = replace(seen, weights=reads.found, lengths=made[0].lengths(seen.made_for))

    def make_again(self, later: Mapping[str, Any]) -> dict[str, Any]:
        """The loaders of the run that is resumed, as `make` returns them. Every rank calls it, once weights are back
        and before attributes are, which are to be `later`."""
        run, seen = self._run, self._seen
        assert run.attributes is not None and run.resumed is not None
        run.progress.current_epoch, run.progress.global_step = seen.made_for, seen.global_step
        for name, shown in seen.metrics.items():
            own = {key: torch.tensor(value, dtype=torch.float64) for key, value in shown.items()}
            getattr(run, name).update(own)
        device = run.strategy.topology.device
        as_seen = run.attributes.as_seen(seen.attributes, later, seen.same, seen.moved_on, device)
        with self._buffers_as_seen() as resized, numbers.as_seen(run, seen.numbers), as_seen as missing:
            made = make(run, self._module, self._sources)
            self._held = run.attributes.held()
        for name in _SHOWN:
            getattr(run, name).clear()
        self._warn(made["train_loader"], [*missing, *resized])
        return made

    def drawing(self) -> AbstractContextManager[None]:
        """What loader methods draw within is the same on all ranks and in a resumed run; at the beginning of a run the
        streams of its `setup` are."""
        due = self._due()
        return Randomness(derive(self._run.seed, "loaders", due)) if due else nullcontext()

    @property
    def objects(self) -> tuple[list[str], list[str]]:
        """`same` and `moved_on` of the run that is resumed."""
        return self._seen.same, self._seen.moved_on

    def _due(self, after: int = 0) -> int:
        epoch = self._run.progress.current_epoch + after
        return epoch - epoch % self._every

    def _now(self, attributes: dict[str, Any]) -> Seen:
        run = self._run
        metrics = {name: {key: float(value) for key, value in getattr(run, name).items()} for name in _SHOWN}
        buffers = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        return Seen(self._due(), run.progress.global_step, metrics, attributes, buffers, numbers=numbers.now(run))

    def _buffers(self) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if type(buffer) is Tensor and not buffer.is_meta and is_small(buffer)
        }

    @contextmanager
    def _buffers_as_seen(self) -> Iterator[list[str]]:
        """While it lasts buffers are as loader methods saw them. Yields the names of those that have no place."""
        seen, now = self._seen.buffers, self._buffers()
        alike = {name for name in seen.keys() & now.keys() if seen[name].shape == now[name].shape}
        before = {name: now[name].detach().clone() for name in alike}
        with torch.no_grad():
            for name in alike:
                now[name].copy_(seen[name])
            try:
                yield sorted(seen.keys() - alike)
            finally:
                for name in alike:
                    now[name].copy_(before[name])

    def _has_foreign_data(self) -> bool:
        """Whether the DataModule saves a state of its own, and its attributes are not read."""
        data = self._run.datamodule
        return data is not None and not (is_of_program(data) or has_no_state(data))

    def _warn(self, loader: ShardedLoader, missing: list[str]) -> None:
        """Name what of the loaders may be other than in the run that was saved."""
        assert self._run.resumed is not None
        seen, done = self._seen, self._run.resumed.state["progress"]
        epoch = done["current_epoch"] + done["epoch_closed"]
        lengths = loader.lengths(seen.made_for)
        reasons = [
            *(["its version kept nothing of what loader methods saw"] if self._is_old else []),
            *(["its DataModule, of a package, has the state of the save"] if self._has_foreign_data() else []),
            *(["loader methods read weights as that epoch began, which are gone"] if seen.weights else []),
            *([f"nothing holds {', '.join(missing[:5])} yet, which they may read"] if missing else []),
            *([f"the data has {lengths} samples and had {seen.lengths}"] if seen.lengths not in ([], lengths) else []),
        ]
        if reasons and epoch - epoch % self._every == seen.made_for and self._run.is_global_zero:
            _log.warning(
                f"the loaders of epoch {seen.made_for} may be others than in the run that was saved: "
                f"{'; '.join(reasons)}; resume from the end of an epoch after which they are made again, or keep in "
                "attributes of the module what loader methods make of the run"
            )


def train_loader(
    run: RunState, module: Module, source: Any, plan: Mapping[str, Any] | None = None, resumes: bool = True
) -> tuple[ShardedLoader, int | None, int | None]:
    """The sharded training loader, the limit of its batches in an epoch, and their number, if known.

    `plan` is that of the loader whose place it takes in this run. `resumes`: a run that is resumed continues with the
    windows that it had.
    """
    arguments, checkpoint = run.arguments, run.resumed if resumes else None
    if source is None:
        raise ValueError(
            "fit needs training data: give train_dataloaders, or a DataModule or Module with train_dataloader"
        )
    overfit = arguments.overfit_batches
    accumulate = run.accumulation_at_start if plan is None else plan["accumulate"]
    saved = None if checkpoint is None else checkpoint.state.get("accumulation")
    if checkpoint is not None and plan is None and saved is not None and saved["at_start"] == accumulate:
        accumulate = checkpoint.state["windows"]["accumulate"]  # hooks had changed it
    loader = run.strategy.shard_loader(
        source,
        seed=derive(run.seed, "train"),
        shuffle=False if overfit else None,
        accumulate=accumulate,
        split=arguments.split_batches,
    )
    run.train_dataloader = loader
    if plan is not None:
        loader.resume_windows({**loader.plan, "ranks": plan["ranks"]}, 0, whole=not module.automatic_optimization)
    elif run.resumed is not None and not resumes:
        began = {**loader.plan, "ranks": run.resumed.state["windows"]["ranks"]}
        loader.resume_windows(began, 0, whole=not module.automatic_optimization)
    elif checkpoint is not None:
        seen = checkpoint.state["progress"]["samples_seen"]
        done = loader.resume_windows(checkpoint.state["windows"], seen, whole=not module.automatic_optimization)
        if done is not None and run.is_global_zero:
            _log.info(done)
    limit, num_batches = _measured(run, loader)
    if accumulate != run.accumulation_at_start and plan is None and num_batches is not None and not loader.splits:
        run.windows_per_epoch = -(-num_batches // run.accumulation_at_start)  # as configure_optimizers had seen it
    return loader, limit, num_batches


def _measured(run: RunState, loader: ShardedLoader) -> tuple[int | None, int | None]:
    """The limit of the batches in an epoch, and their number, if known."""
    total, overfit = length_of(loader), run.arguments.overfit_batches
    name = "overfit_batches" if overfit else "limit_train_batches"
    limit = limit_of(overfit or run.arguments.limit_train_batches, total, name)
    num_batches = total if limit is None else limit if total is None else min(limit, total)
    if num_batches == 0:
        raise ValueError("the training loader has no batch: its dataset is empty, or drop_last drops its only batch")
    run.num_training_batches = math.inf if num_batches is None else num_batches
    run.windows_per_epoch = loader.num_windows(limit)
    return limit, num_batches


def change_accumulation(run: RunState, loop: FitLoop) -> None:
    """Make the windows that follow of `run.accumulate_grad_batches`. Every rank calls it at the start of an epoch.

    Raises ValueError in manual optimization, and if the strategy cannot change it during a run.
    """
    assert run.module is not None
    number = run.accumulate_grad_batches
    refused = run.strategy.capabilities.refuses.get("accumulation_schedule")
    if not run.module.automatic_optimization:
        refused = f"{type(run.module).__name__} optimizes manually, so accumulate in its training_step"
    if refused is not None:
        raise ValueError(f"accumulate_grad_batches was set to {number} during the run, but {refused}")
    loop.train_loader.set_accumulation(number)
    measure_again(run, loop)  # fractions are of other numbers, where it splits


def measure_again(run: RunState, loop: FitLoop) -> None:
    """Measure an epoch of data of which another length is known."""
    loop.limit, loop.num_batches = _measured(run, loop.train_loader)
    loop.val_every = validation_interval(run, loop.num_batches) if loop.val_loaders else None


def validates(run: RunState, module: Module) -> bool:
    """Whether validation runs if there is data for it."""
    return overrides(module, "validation_step", Module) and run.arguments.limit_val_batches != 0


def _val_loaders(run: RunState, module: Module, sources: Sources, training: Any) -> list[ShardedLoader]:
    overfit = run.arguments.overfit_batches
    given = None
    if validates(run, module):
        given = training if overfit else sources.get(module, "val")
    run.given_loaders["val"] = given
    return evaluation_loaders(run, given, "val", overfit)


def validation_interval(run: RunState, num_batches: int | None) -> int | None:
    wanted = run.arguments.val_check_interval
    if wanted is None or (isinstance(wanted, float) and wanted == 1.0):
        return None
    if isinstance(wanted, int):
        if run.arguments.check_val_every_n_epoch is not None and num_batches is not None and wanted > num_batches:
            raise ValueError(
                f"val_check_interval={wanted} is more than the {num_batches} batches of an epoch; "
                "lower it, or set check_val_every_n_epoch=None to count across epochs"
            )
        return wanted
    if num_batches is None:
        raise ValueError(
            f"val_check_interval={wanted} is a fraction, which needs a training loader of known length; give a number "
            "of batches"
        )
    return max(1, int(num_batches * wanted))
