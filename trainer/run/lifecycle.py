"""The life of a run on one rank: what is joined, seeded and attached before it, and how all of it is undone."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.checkpoint_state import unpack
from lockstep.strategies.launch import launcher
from lockstep.strategies.launch.failure import ends_well, shortened
from lockstep.strategies.launch.phase import current_phase, set_phase
from lockstep.strategies.launch.rng import kept_streams, take_first_streams
from lockstep.strategies.launch.watchdog import SETTING_UP, where
from lockstep.strategies.modules.parameter_hooks import reserve_hook_ids
from lockstep.strategies.modules.sharded_errors import explanation
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.kept.elsewhere import layers_alike
from lockstep.trainer.lightning_names import MODULE, missing
from lockstep.trainer.metrics.sync import synced_metrics
from lockstep.trainer.module import Module, attach
from lockstep.trainer.run import publish, saving
from lockstep.trainer.run.folder import conclude
from lockstep.trainer.run.hooks import Hooks, exchangeable
from lockstep.trainer.run.signals import end_in_one_line
from lockstep.trainer.seeding import continue_streams, rng_state, seed_everything, set_rng_state, torch_settings
from lockstep.trainer.setup import held_parameters, start
from lockstep.trainer.setup.compilation import Compiled

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.loaders import Sources

_log = logging.getLogger("lockstep")


@contextmanager
def noted(run: RunState, module: Module, stage: str, sources: Sources) -> Iterator[None]:
    """What the Trainer shows of a run, in the process that the user called it in: status, module and loaders. A fit
    begins without gradients."""
    run.datamodule = sources.datamodule
    run.final = run.final and stage != "fit" and module is run.module
    if not run.stage == stage == "fit":  # only a fit that counts on begins with what another run has measured
        run.callback_metrics, run.logged_metrics, run.progress_bar_metrics = {}, {}, {}
    run.module, run.stage, run.status, run.batch_idx = module, stage, "running", -1
    run.given_loaders = {
        **run.given_loaders,
        **{kind: given for kind, given in sources.loaders.items() if given is not None},
    }
    for parameter in module.parameters() if stage == "fit" else ():
        parameter.grad = None  # of code before it, or of a fit that failed: ranks that are started have none
    with launcher.late_signals_held():
        try:
            yield
        except BaseException as error:
            run.status = "interrupted"
            if isinstance(error, KeyboardInterrupt):
                end_in_one_line(error)
            raise
        run.status, run.final = "finished", stage == "fit" or run.final
        if stage == "fit":
            saving.note_end(run)


class attached:
    """The life of a run on this rank: processes joined, module and callbacks attached, and all of it undone. Every rank
    enters it.

    Raises what user code raises, as itself, but for a `sys.exit` that would end the program with code 0: that is a
    RuntimeError. Raises SystemExit(143) or KeyboardInterrupt after a signal.
    """

    def __init__(self, run: RunState, module: Module, sources: Sources, stage: str, ckpt_path: str | None) -> None:
        self._life = _life(run, module, sources, stage, ckpt_path)

    def __enter__(self) -> None:
        try:
            self._life.__enter__()
        except RuntimeError as error:
            self._raise(error)

    def __exit__(self, *raised: Any) -> None:
        try:
            self._life.__exit__(*raised)
        except RuntimeError as error:
            self._raise(error)

    def _raise(self, error: RuntimeError) -> NoReturn:
        own = _of_the_user(error)
        raise error if own is error else own from None


@contextmanager
def _life(run: RunState, module: Module, sources: Sources, stage: str, ckpt_path: str | None) -> Iterator[None]:
    run.begun = run.active = True
    process, streams = os.getpid(), rng_state()
    run.hooks = Hooks()  # those of an earlier run must not get this one's failure
    _attach(run, module)
    run.signals.catch()
    try:
        open_run(run, module, sources.datamodule, stage, ckpt_path)
        with metrics_of_all(run, module), layers_alike(run.strategy, module, run.callbacks):
            yield
        _close(run, module, stage)
    except BaseException as caught:
        if os.getpid() != process:  # a process that user code forked: the run is its parent's
            raise
        error = _report(run, stage, caught)
        with suppress(RuntimeError):  # of a GPU that the error has left unusable, which is not to hide it
            continue_streams(streams)  # those of started ranks have ended too, and with others' samples
        if error is not caught:
            raise error from (None if error is caught.__cause__ else caught)
        raise
    finally:
        if os.getpid() == process:
            undo_run(run)
    if run.signals.number:  # since the run's folder was closed
        late = run.signals.error()
        if run.log_dir is not None and run.is_global_zero:
            conclude(Path(run.log_dir), late)
        raise late


def _attach(run: RunState, module: Module) -> None:
    """Before anything is registered on the module."""
    attach(module, run.trainer)
    reserve_hook_ids(module)


def open_run(
    run: RunState,
    module: Module,
    datamodule: DataModule | None,
    stage: str,
    ckpt_path: str | None,
    building: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """Join the processes, build the model, and call the `setup` of everything.

    `building`: of a run that is only planned, the context in which the module is built.
    """
    run.strategy.setup()
    _start(run, module, stage)
    fn = run.trainer.state.fn or stage  # `stage` in the words of that Trainer
    run.resumed = start.open_checkpoint(run, ckpt_path) if building is None else None
    for callback in run.callbacks:
        callback._module = module
    if datamodule is not None:
        datamodule.trainer = run.trainer
    run.datamodule = datamodule
    if run.strategy.topology.local_rank == 0:
        for owner in _owners(run, module):
            if owner.prepare_data_per_node or run.is_global_zero:
                owner.prepare_data()
        set_phase(None, SETTING_UP)  # a heartbeat: what took long is over
    run.strategy.barrier()
    # An evaluation draws from its own streams once it is set up.
    with kept_streams() if run.resumed is not None and stage != "fit" else nullcontext():
        _continue_streams(run)
        for owner in _owners(run, module):
            with nullcontext() if building is None or owner is not module else building():
                owner.setup(fn)
        _build(run, module, building)
        for callback in run.callbacks:
            _call(run, callback, callback.setup, module, fn)


def _continue_streams(run: RunState) -> None:
    """Let what is set up now draw what it drew in the run that `run` continues or evaluates, and as rank 0 draws: data
    is split at random here."""
    checkpoint = run.resumed
    saved = None if checkpoint is None else checkpoint.state.get("rng_at_setup")
    if checkpoint is not None and run.stage == "fit":
        run.seed = checkpoint.state["seed"]
    if checkpoint is not None and saved is not None:
        with refused(checkpoint.path):
            set_rng_state(unpack(saved, checkpoint.read))
    elif run.world_size > 1:  # whose process may have drawn in prepare_data, or was not started by this program
        take_first_streams(run.strategy.broadcast, run.is_global_zero)
    run.rng_at_setup = rng_state()


def _build(run: RunState, module: Module, building: Callable[[], AbstractContextManager[Any]] | None) -> None:
    on_meta = run.strategy.capabilities.builds_on_meta
    meta = torch.device("meta") if on_meta and not run.is_global_zero else nullcontext()
    with meta if building is None else building():
        module.configure_model()
    if on_meta and run.world_size > 1:  # where a rank has drawn nothing
        take_first_streams(run.strategy.broadcast, run.is_global_zero)
    _attach(run, module)  # with what was built just now
    if run.compile_options is not None:
        run.compiled = Compiled(module, run.compile_options)
    run.hooks, run.at_setup = Hooks.find(run, module), exchangeable(run, module)


def _start(run: RunState, module: Module, stage: str) -> None:
    """Seed the streams."""
    run.module, run.stage, run.reporting_ranks = module, stage, None
    run.should_stop = run.asked_to_stop = run.window_is_open = run.manually_stepped = False
    run.streams.clear()
    given = run.arguments.seed
    if given is not None:
        seed_everything(given)
    run.seed = int(run.strategy.broadcast(given if given is not None else torch.initial_seed() % 2**63))
    run.undo.extend(torch_settings(run.arguments))
    if run.strategy_reason is not None and run.is_global_zero:
        _log.info(run.strategy_reason)
        run.strategy_reason = None


def _close(run: RunState, module: Module, stage: str) -> None:
    """The end of a run that has not failed."""
    saving.finish(run)
    fn = run.trainer.state.fn or stage
    for owner in _owners(run, module):
        owner.teardown(fn)
    for callback in run.callbacks:
        _call(run, callback, callback.teardown, module, fn)
    optimizers = run.optimizers.values() if stage == "fit" else ()  # an earlier fit may have failed with its own
    evaluated = run.strategy.evaluation_weights(run.wrapped, optimizers, restore=False)
    with evaluated, held_parameters.following(run, module, refuses=False):
        run.strategy.teardown_module(run.wrapped)
    if run.world_size > 1 and not run.signals.launched:  # each rank is the program, whose later code draws alike
        take_first_streams(run.strategy.broadcast, run.is_global_zero)
    if run.signals.number:
        raise run.signals.error()
    _end(run, "success")


def _report(run: RunState, stage: str, caught: BaseException) -> BaseException:
    """Tell callbacks, loggers and the run's folder what ends the run; return what to raise."""
    if run.signals.number and not run.signals.deferred and run.is_global_zero:
        name = signal.Signals(run.signals.number).name
        _log.warning(f"stopped by {name}" + (" before the first step" if stage == "fit" else ""))
    run.signals.defer()  # another one must not cut short what follows
    error = _early_exit(run, caught) or explanation(caught, _entered(caught)) or _of_the_user(caught)
    _name_what_to_write(error)
    _name_the_method(error, run.module)
    if not run.signals.launched:  # the launcher does it for its ranks
        shortened(error)
    saving.settle(run, error)
    for hook in run.hooks.on_exception:
        try:
            hook(error)
        except Exception as later:  # the first error is the one to show
            if hasattr(error, "add_note"):
                error.add_note(f"on_exception failed too: {type(later).__name__}: {str(later)[:500]}")
    locked = run.folder is not None
    _end(run, "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed", error)
    if run.is_global_zero:
        own = run.log_dir
        for folder in {own, *(logger.run_dir for logger in run.loggers)} - {None}:
            removed = start.remove_unused(run, str(folder), locked and folder == own)
            if removed and folder == own:  # else it holds what this Trainer has written before
                run.log_dir = None
    return error


def _end(run: RunState, status: str, error: BaseException | None = None) -> None:
    """Close the loggers and the run's folder."""
    for logger in run.loggers:
        publish.guarded(run, logger, logger.finalize, status)
    if run.folder is not None:
        run.executed = list(run.executed)
        run.folder.end(run, error)
        run.folder = None
    while run.undo:
        run.undo.pop()()


def undo_run(run: RunState) -> None:
    """Give back what the run took: module, optimizers, processes, signal handlers."""
    try:
        run.active = False
        if run.compiled is not None:
            run.compiled.undo()
            run.compiled = None
        run.parameter_states, run.strategy.of_run = {}, None
        for handle in run.user_optimizers:
            handle.close()
        for callback in run.callbacks:
            callback._module = None
        run.strategy.teardown()
    finally:
        run.signals.give_back()


@contextmanager
def metrics_of_all(run: RunState, module: Module) -> Iterator[None]:
    """While it lasts torchmetrics objects compute over all ranks, or over all shares."""
    if not run.strategy.virtual_ranks:
        with synced_metrics(module, run.strategy, run.callbacks):
            yield
        return
    from lockstep.trainer.shares.metric_states import shared_metrics
    from lockstep.trainer.shares.shares import Shares

    run.shares = Shares(run, module)
    try:
        with shared_metrics(run.shares, module):
            yield
    finally:
        run.shares = None


def _owners(run: RunState, module: Module) -> list[Any]:
    return [module] if run.datamodule is None else [run.datamodule, module]


def _call(run: RunState, callback: Callback, method: Any, module: Module, stage: str) -> None:
    if isinstance(callback, Logger):
        publish.guarded(run, callback, method, run.trainer, module, stage)
    else:
        method(run.trainer, module, stage)


def _of_the_user(error: BaseException) -> BaseException:
    """The StopIteration of user code, if `error` is what Python made of it where it left a generator of ours; else
    `error`."""
    cause = error.__cause__
    if not isinstance(error, RuntimeError) or not isinstance(cause, StopIteration) or cause.__traceback__ is None:
        return error
    ours = Path(__file__).parents[2] in Path(cause.__traceback__.tb_frame.f_code.co_filename).parents
    return cause if ours and str(error) == "generator raised StopIteration" else error


def _name_what_to_write(error: BaseException) -> None:
    """Say what to write instead in an AttributeError of a name that Lightning's modules have, and in torch's error of a
    second backward.

    Here and not in `Module.__getattr__`, which would be called for each submodule that a step uses.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("Trying to backward through the graph a second time"):
        error.args = (
            "a loss was computed from what an earlier backward has freed: let training_step return its loss without "
            "calling backward (or set automatic_optimization = False and call self.manual_backward), and detach what "
            "it keeps of the batch before, such as a hidden state",
        )
    name = error.name if isinstance(error, AttributeError) and isinstance(error.obj, Module) else None
    if name is not None and name in MODULE:
        owner = type(error.obj).__name__  # type: ignore[attr-defined]
        error.args = (missing(f"{owner} has no attribute", name, MODULE),)


_METHODS = re.compile(r"\b(training_step|validation_step|test_step|predict_step|configure_optimizers)\b")


def _name_the_method(error: BaseException, module: Module | None) -> None:
    """Add the class, file and line of the module's method that a message of ours is about."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and Path(__file__).parents[2] in Path(trace.tb_frame.f_code.co_filename).parents
    found = _METHODS.search(str(error)) if ours and type(error) in (ValueError, TypeError, RuntimeError) else None
    method = inspect.unwrap(getattr(type(module), found[1], Module.__init__)) if found else None
    if isinstance(method, FunctionType) and method.__module__ != Module.__module__:
        place = f"{type(module).__name__}.{method.__name__}, {os.path.basename(method.__code__.co_filename)}"
        error.args = (f"{error} ({place}, line {method.__code__.co_firstlineno})",)


def _entered(error: BaseException) -> str:
    """The first function of the user's that an error came through, such as a hook; else the first of another package
    than this one, such as torch's."""
    root, trace, found = Path(__file__).parents[2], error.__traceback__, list[str]()
    ours = {root / "trainer", root / "strategies", root / "callbacks"}
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if ours.isdisjoint(Path(code.co_filename).parents):
            name = code.co_name.strip("<>")
            named = name if owner is None else f"{type(owner).__name__}.{name}"
            if Path(torch.__file__).parent not in Path(code.co_filename).parents:
                return named
            found.append(named)
        trace = trace.tb_next
    return found[0] if found else "a hook"


def _early_exit(run: RunState, error: BaseException) -> RuntimeError | None:
    """What to raise in place of a `sys.exit` within the run that would end the program with code 0; None for anything
    else."""
    if not isinstance(error, SystemExit) or not ends_well(error):
        return None
    place = where(run.rank, *current_phase())
    return RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called on {place} before the run was done, and exit "
        "code 0 "
        "says that it is; set trainer.should_stop = True to end training early, or exit with another code"
    )
