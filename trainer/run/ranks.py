"""A run on ranks that Lockstep starts: what travels to them, restarts, and what rank 0 brings back."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.callbacks.base import Logger
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.launch import launcher, restart
from lockstep.strategies.modules.model_changes import renamed
from lockstep.trainer.checkpoint import store
from lockstep.trainer.checkpoint.manifest import UnusableCheckpointError, WeightsOnlyError
from lockstep.trainer.checkpoint.rank_state import kept_tensors, put_tensors
from lockstep.trainer.kept import left_on_ranks
from lockstep.trainer.kept.elsewhere import others_of
from lockstep.trainer.kept.fields import put_tensor
from lockstep.trainer.kept.owners import shown
from lockstep.trainer.kept.returned import Holders, Left
from lockstep.trainer.kept.values import own_data, take_data
from lockstep.trainer.module import Module, attach
from lockstep.trainer.run import evaluate, fit, publish, saving
from lockstep.trainer.run.folder import conclude
from lockstep.trainer.run.lifecycle import attached
from lockstep.trainer.run.state import RESULTS, RunState
from lockstep.trainer.seeding import continue_streams, rng_state, set_rng_state
from lockstep.trainer.setup import ahead, start
from lockstep.trainer.setup.resume import restore_trainability, trainability

if TYPE_CHECKING:
    from lockstep.trainer.setup.loaders import Sources


def launch_fit(run: RunState, module: Module, sources: Sources, ckpt_path: str | None) -> None:
    """Launch ranks that fit, again from the newest checkpoint when they die; adopt what rank 0 brought back."""
    before, streams = run.log_dir, rng_state()
    run.module, run.stage = module, "fit"
    ahead.check(run, module, sources, "fit", resumes=ckpt_path is not None)
    holders = Holders(_owners(run), module, run.callbacks, sources.loaders)
    attempts = _Attempts(run, (module, sources), (streams, (holders.names, holders.given())), ckpt_path)
    run.begun = True
    try:
        result = restart.keep_going(
            attempts.launch,
            run.arguments.max_restarts,
            name=lambda number: attempts.begins_from(number) or "the beginning",
        )
    except BaseException:
        run.log_dir = before
        raise
    _adopt(run, module, result, holders)


class _Attempts:
    """The launches of one run. All have the same folder, which is chosen here."""

    def __init__(
        self, run: RunState, trained: tuple[Module, Sources], given: tuple[Any, ...], ckpt_path: str | None
    ) -> None:
        """`given`: the last arguments of `_on_rank`."""
        self._run, self._trained, self._given, self._ckpt_path = run, trained, given, ckpt_path
        self._log_dir = run.log_dir
        self._skipped: set[Any] = set()
        """Checkpoints that cannot be resumed."""
        self._choose()

    def _choose(self) -> None:
        run = self._run
        run.log_dir = self._log_dir
        choice = start.checked_choice(start.choose(run, self._ckpt_path, self._skipped))
        run.log_dir, self._first = choice["log_dir"], choice["checkpoint"]
        self._of_others = saving.present(run)

    def begins_from(self, number: int) -> str | None:
        """The checkpoint that an attempt resumes: the newest of this run, or what the first one began with."""
        run = self._run
        if not number or not run.log_dir or run.checkpoint_callback is None:
            return self._first
        with suppress(WeightsOnlyError):
            without = self._of_others | self._skipped
            found = start.newest(run, saving.folder_of(run), without)
            self._skipped |= without - self._of_others
            return str(found) if found else self._first
        return self._first

    def launch(self, number: int) -> dict[str, Any]:
        """What rank 0 brings back. A checkpoint that the ranks find unusable is skipped, and another one tried."""
        run, (module, sources) = self._run, self._trained
        while True:
            checkpoint = self.begins_from(number)
            for logger in run.loggers if number else ():  # ranks of an attempt before have written it
                logger.forget_held()
            searched = not number and self._ckpt_path == "auto"
            work = (run, "fit", module, sources, checkpoint, *self._given, searched)
            try:
                if run.strategy.starts_ranks:
                    return run.strategy.launch(_on_rank, *work)
                return launcher.launch(_on_rank, work, 1)
            except BaseException as error:
                if not (isinstance(error, UnusableCheckpointError) and error.begins_run):
                    if run.log_dir:
                        conclude(Path(run.log_dir), error)
                    raise
                unusable = UnusableCheckpointError(str(error))
            if checkpoint == self._first and not start.searches(self._ckpt_path):
                run.begun = number > 0
                raise unusable  # as one that this process finds: nothing has happened on ranks that would help
            store.skip(str(checkpoint), unusable, self._skipped)
            if checkpoint == self._first:
                self._choose()


def launch_evaluation(run: RunState, stage: str, module: Module, sources: Sources, ckpt_path: str | None) -> Any:
    """Launch ranks that validate, test or predict; return what rank 0 returned."""
    ahead.check(run, module, sources, stage)
    run.begun = True
    holders = Holders(_owners(run), module, run.callbacks, sources.loaders)
    sent = holders.names, holders.given()
    result = run.strategy.launch(_on_rank, run, stage, module, sources, ckpt_path, rng_state(), sent)
    _adopt(run, module, result, holders)
    return result["returned"]


def _on_rank(
    run: RunState,
    stage: str,
    module: Module,
    sources: Sources,
    ckpt_path: str | None,
    random_streams: dict[str, Any],
    of_program: tuple[Collection[str], Any],
    searched: bool = False,
) -> dict[str, Any]:
    """What a started rank does; only rank 0's result is brought back. `of_program`: the `names` of its `Holders`, and
    what is `given`."""
    run.searched = searched
    continue_streams(random_streams)
    returned, run.datamodule, paths = None, sources.datamodule, _paths(module)
    holders = Holders(_owners(run), module, run.callbacks, sources.loaders, of_program[0])
    holders.take_given(of_program[1])
    left = Left(holders)
    with attached(run, module, sources, stage, ckpt_path):
        left.note_setup(module)
        hooks, optimizers = left_on_ranks.hooks_of(module), left_on_ranks.watched(module)
        if stage == "fit":
            fit.fit(run, module, sources)
        else:
            returned = evaluate.run_stage(run, module, sources, stage)
    if not run.is_global_zero:
        return {}
    kept = {
        "left": left.packed(module, run.attributes.made_at_start() if run.attributes else ()),
        "hooks": left_on_ranks.left(module, hooks),
        "optimizers": left_on_ranks.stepped(module, optimizers),
        "children": _exchanged(paths),
    }
    return _result(run, module, returned) | kept


def _owners(run: RunState) -> list[Any]:
    """Beside the layers, whose attributes user code may have set on the ranks."""
    own = ("lockstep.callbacks.", "lockstep.trainer.")
    users = [item for item in run.callbacks if item.keeps_a_record or not type(item).__module__.startswith(own)]
    return [run.trainer, *users] if run.datamodule is None else [run.trainer, run.datamodule, *users]


def _paths(module: Module) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """Path and object of each layer, with what it holds."""
    return [(path, layer, layer._modules.copy()) for path, layer in module.named_modules()]


def _exchanged(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> dict[str, dict[str, str | None]]:
    """What layers hold of those that there were `before`, by path, if that has changed."""
    path_of = {id(layer): path for path, layer, _ in before} | {id(None): None}
    return {
        path: {name: path_of[id(child)] for name, child in layer._modules.items()}
        for path, layer, held in before
        if layer._modules != held or [*layer._modules] != [*held]
        if path_of.keys() >= set(map(id, layer._modules.values()))
    }


def _places(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where the layers hold what the model's state dict holds, by name; by no `state_dict` of user code, which may
    leave some out."""
    return {
        shown(path, name): (tensors, name)
        for path, layer in module.named_modules()
        for tensors in (layer._parameters, layer._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    }


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that keep something beside their tensors, by name."""
    own = nn.Module.set_extra_state
    return {path: layer for path, layer in module.named_modules() if type(layer).set_extra_state is not own}


def _put_weights(places: dict[str, tuple[dict[str, Any], str]], weights: dict[str, Tensor]) -> None:
    """Copy trained values into the tensors that are there; those on the meta device are replaced."""
    made = dict[int, Tensor]()
    for name, (tensors, key) in places.items():
        now, trained = tensors[key], weights[name]
        if now.is_meta:
            value = nn.Parameter(trained, now.requires_grad) if isinstance(now, nn.Parameter) else trained
            tensors[key] = made.setdefault(id(now), value)  # tied ones are one tensor
        else:
            put_tensor(now, trained)


def _result(run: RunState, module: Module, returned: Any) -> dict[str, Any]:
    """What is brought back."""
    return {
        "returned": returned,
        "weights": {name: tensors[key].detach().cpu() for name, (tensors, key) in _places(module).items()},
        "extra": {path: layer.get_extra_state() for path, layer in _with_extra_state(module).items()},
        "metrics": kept_tensors(module),
        "progress": run.progress.state_dict(),
        "callbacks": [publish.state_of(run, item) for item in run.callbacks],
        "trainability": trainability(module),
        "parameters": {name: own_data(parameter) for name, parameter in module.named_parameters()},
        "log_dirs": [item.run_dir for item in run.loggers],
        "results": {name: vars(run)[name] for name in RESULTS},
        "streams": rng_state(),
    }


def _adopt(run: RunState, module: Module, result: dict[str, Any], holders: Holders) -> None:
    """Take over what rank 0 brought back."""
    if run.apart:
        for item, state in zip(run.callbacks, result["callbacks"], strict=True):
            publish.load_state_of(run, item, state)
        vars(run).update(result["results"])
        return
    weights, own = result["weights"], dict(module.named_modules())
    for path, children in result["children"].items() if own.keys() >= result["children"].keys() else ():
        found = {name: None if of is None else own.get(of) for name, of in children.items()}
        own[path]._modules.clear()
        own[path]._modules.update(found)
    if _places(module).keys() != weights.keys():
        module.configure_model()
    places = _places(module)
    if changed := sorted(places.keys() ^ weights.keys()):
        raise renamed(changed, run.strategy.name)
    _put_weights(places, weights)
    for path, layer in _with_extra_state(module).items():
        layer.set_extra_state(result["extra"][path])
    put_tensors(module, result["metrics"])
    run.progress.load_state_dict(result["progress"])
    for item, state in zip(run.callbacks, result["callbacks"], strict=True):
        if isinstance(item, ModelCheckpoint):
            item.dirpath = None  # by default that of this run, not of the fit before
        if state is not None or not isinstance(item, Logger):
            publish.load_state_of(run, item, state)
    holders.follow(module)
    left_on_ranks.note_made(module, holders.take(result["left"]))
    left_on_ranks.note_left(module, result["hooks"])
    left_on_ranks.note_stepped(module, result["optimizers"])
    restore_trainability(module, result["trainability"])
    parameters = dict(module.named_parameters())
    for name in parameters.keys() & result["parameters"]:  # a run may have tied some
        take_data(parameters[name], others_of(vars(parameters[name]), result["parameters"][name]))
    for logger, folder in zip(run.loggers, result["log_dirs"], strict=True):
        logger.run_dir = folder
        logger.forget_held()
    vars(run).update(result["results"])
    attach(module, run.trainer)
    if not torch.cuda.is_initialized():  # in the program, whose own GPU memory that would take
        result["streams"].pop("cuda", None)
    set_rng_state(result["streams"])  # at last, as `configure_model` may have drawn
