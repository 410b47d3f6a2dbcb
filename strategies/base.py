"""The Strategy contract: where the model lives, how gradients are reduced, who sees which sample, what is saved.

A strategy works on plain `nn.Module`s, optimizers, loaders and callables, so a hand-written loop can drive it. It holds
no user module or optimizer, and uses no trainer: `setup_module` returns the module to give to the other verbs.

The life of a strategy, in order:

    strategy = strategy.configure(devices=…, precision=…)            # may refuse; nothing has started
    strategy.check(model)                                            # optional: may refuse; nothing has started
    if strategy.starts_ranks: return strategy.launch(fn, *args)      # fn runs on every rank, from here
    topology = strategy.setup()                                      # which rank this is, of how many, on which device
    wrapped = strategy.setup_module(model)                                   # move, wrap or shard
    optimizers = strategy.setup_optimizers(wrapped, optimizers)                 # built on the wrapped parameters
    strategy.load_state_dict(wrapped, optimizers, reader)             # optional
    loader = strategy.shard_loader(loader, seed=0)
    for window in loader.windows(epoch=0):
        strategy.forward_backward(wrapped, step_fn, window)
        strategy.clip_gradients(wrapped, optimizer, 1.0)               # optional, as is: with strategy.whole(wrapped):
        ... strategy.optimizer_step(wrapped, optimizer)
        optimizer.zero_grad()
        strategy.adopt_changes(wrapped)                               # after own code that freezes layers or adds hooks
    strategy.state_dict(wrapped, optimizers)
    strategy.teardown_module(wrapped)                                         # the model is the caller's again
    strategy.teardown()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from lockstep.strategies.precision import Precision as Precision

if TYPE_CHECKING:
    from lockstep.strategies.checkpoint_state import Reader, State
    from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window

W = TypeVar("W", bound=nn.Module, default=Any)
"""What a strategy has made of a model: a class of its own, or, where it does not say, any module."""
T = TypeVar("T")
StepFn: TypeAlias = Callable[[Any, int], Any]
"""The user's step: takes a batch and its index, returns a loss."""


class Loss(NamedTuple):
    """A loss given as its sum and what it counts: the gradient of a step is that of Σ total / Σ count over all
    micro-batches and ranks, so that a token-weighted mean stays exact however tokens fall on them."""

    total: Tensor
    """Sum of the loss terms: a scalar with gradient."""
    count: int | float | Tensor  # type: ignore[assignment]  # hides tuple.count
    """How many terms were summed (tokens, pixels, samples): at least zero."""


class StepVote(NamedTuple):
    """What one rank tells the others in the control message of a step."""

    stop: int = 0
    """Why this rank asks to stop after this step: 0 it does not, 1 the run asked, above that a signal's number."""
    keys: int = 0
    """Hash (below 2**52) of the metric names that this rank has logged."""
    names: Callable[[], list[str]] | None = None  # for the message
    rates: int = 0  # hash (below 2**32) of the optimizers' learning rates and the like
    order: tuple[int, str] = (0, "")  # as `ShardedLoader.order`


class StepResult(NamedTuple):
    """What all ranks know after `forward_backward`, equal on every rank."""

    count: float  # type: ignore[assignment]  # hides tuple.count
    """Σ of what the losses counted over ranks and micro-batches; 0 where there is no gradient."""
    stop: int
    """The largest `StepVote.stop` of all ranks."""
    non_finite: str | None
    """The first loss, by rank, or gradient, by name, that was NaN or infinite, if any; no gradient is left then."""
    loss: float | None = None
    """The loss of the window, Σ total / Σ count; None where that would make the host wait."""
    later: Callable[[], str | None] | None = None
    """In place of `non_finite` on accelerators: the same, for which the device is waited. An optimizer skips such a
    step; where none is to be called, this is called before the next window, and drops the gradients."""
    some_lack: bool = False
    """Whether a micro-batch of some rank had no samples, where ranks step together."""


@dataclass(frozen=True)
class Topology:
    """Where a rank is in its run. `Strategy.setup` returns it."""

    rank: int = 0
    """Index of this process among all, 0 on the first node."""
    local_rank: int = 0
    """Index of this process on its node."""
    world_size: int = 1
    """Number of processes on all nodes."""
    node_rank: int = 0
    """Index of this process's node."""
    num_nodes: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    """Where this rank computes."""
    data_rank: int = 0
    """Index of this rank among those that see different samples; ranks that share samples share it."""
    data_size: int = 1
    """Number of different shares into which the global batch is split."""
    is_reporting_rank: bool = True
    """Of the ranks that share samples exactly one is True: what it logs and predicts stands for all of them."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do, known before anything starts. `docs/strategies/index.md` has the table of all."""

    bitwise: bool = False
    """Takes `virtual_ranks`, with which the bits are the same on any number of ranks."""
    synchronous: bool = True
    """Ranks meet in every step; else in those of `Strategy.ranks_meet`, for which collectives wait; a window is one."""
    exact: bool = True
    """The numbers are those of one process, up to floating-point order, as `lockstep compare` needs of a reference."""
    dynamic_shapes: bool = True
    """False if torch.compile needs a graph for each shape, as one for all of them fails on the wrapped model."""
    preserves_memory_format: bool = True
    """False if `setup_module` lays parameters out in memory again, so that a layout of the user's is lost."""
    local_steps: bool = False
    """Optimizers step within `forward_backward` too: the caller clips in `StepHooks.step`, not before its own step."""
    runs_step_once: bool = True
    """Each rank runs the user's step once for a micro-batch; else in parts, some more than once or at the same time."""
    builds_on_meta: bool = False
    """Ranks other than 0 build modules on the meta device, as their values come from rank 0 in `setup_module`."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What the strategy refuses ("manual_optimization", "several_optimizers", "closures", "compile", "detect_anomaly",
    "parameter_state" of callbacks, a precision, a user's method), and why: a sentence, raised when asked."""

    @property
    def steps_together(self) -> bool:
        """Whether each step is one that all ranks make, so that what they hold is alike after it."""
        return self.synchronous and not self.local_steps


def _nothing_logged(num_samples: int) -> AbstractContextManager[Any]:
    return nullcontext()


class StepHooks(NamedTuple):
    """What a caller of `Strategy.forward_backward` hangs into a step. All are optional."""

    vote: Callable[[], StepVote] = StepVote
    """Called after the last forward; the votes of all ranks are exchanged during the last backward."""
    log_scope: Callable[[int], AbstractContextManager[Any]] = _nothing_logged
    """A strategy that runs the step on parts of a micro-batch does so within `log_scope(number of samples)`; the caller
    weights by it what the step logs. What is logged within `log_scope(0)` does not count: the step runs on these
    samples a second time, or on another rank. Entering it may give the list of what is logged."""
    before_backward: Callable[[Tensor], None] | None = None
    """Called with each loss, as the step returned it."""
    backward: Callable[[Tensor], Any] | None = None
    """Runs backward from the loss that the step returned, in place of the strategy, which weights it."""
    after_backward: Callable[[], None] | None = None
    """Called after each backward; after the last one with the gradients that the optimizer gets."""
    after_loss: Callable[[], None] | None = None
    """Called after the backward of each loss, the last one included, before anything else is done with gradients."""
    whole_gradients: bool = False
    """Whether `after_backward` reads or changes gradients, so that within a window too they must be of all ranks."""
    parameters: Mapping[str, Sequence[nn.Parameter]] | None = None
    """By the name of an optimizer the parameters that its loss moves, if there is a loss for each."""
    prepare: Callable[[Window], Iterable[MicroBatch]] | None = None
    """Yields the micro-batches of a window, prepared one at a time."""
    step: Callable[[Optimizer], Any] | None = None
    """Clips and steps an optimizer, for a strategy with `Capabilities.local_steps`."""
    streams: dict[str, torch.Generator] | None = None
    """Named generators that a step may draw from, as from torch's own; it may add some."""
    log: Callable[[str, float, str, float], None] | None = None
    """Takes what a strategy measures of a batch: name, value, "mean" or "max", weight."""
    folder: str | None = None  # the run's, in which a strategy may record what it did
    shares_outputs: bool = False  # whether each rank needs what the step returned, also those that run a part of it
    automatic: bool = True
    """False if the step itself runs backward and steps (manual optimization): it is called only, on padding too."""


NO_HOOKS = StepHooks()


class Strategy(ABC, Generic[W]):
    """Four duties behind twenty-six verbs: processes and devices, gradient sync, sampler seeding, checkpointing.

    Unless a verb says otherwise every rank calls it, in the same order.
    """

    capabilities: Capabilities = Capabilities()
    """Valid after `configure`."""
    topology: Topology = Topology()
    """Valid after `setup`, which returns it; before, that of one process on CPU."""
    num_devices: int = 1
    """Devices of this node. Valid after `configure`."""
    precision = Precision()
    """Number formats of the run, and loss scaling."""
    virtual_ranks: int = 0
    """Shares into which each step is cut, as if there were so many ranks; 0 for none."""
    ranks_meet: bool = True
    """Whether all ranks meet in the step of now, after which collectives may follow. Always, if synchronous."""
    in_turn: bool = False
    """Whether a learner that is one rank or a part of it takes a step of its own."""
    rank_of_layer: Mapping[str, int] | None = None
    """By name the rank that runs a layer for all, after `setup_module`; None if each rank runs all layers."""
    of_run: Any = None
    """The Trainer whose fit runs, for code that expects its optimizers here."""
    _stands_for = ""
    starts_ranks: bool
    """True if this process is the launcher and `launch` is to start the ranks. Valid after `configure`."""

    @property
    def name(self) -> str:
        """What messages and checkpoints call it: its class, or that of the strategy in whose place it runs."""
        return self._stands_for or type(self).__name__

    # ---- 1. processes and devices ----------------------------------------------------------------

    @abstractmethod
    def configure(
        self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true"
    ) -> Strategy:
        """Take the run's layout and return the strategy to use: another one if one rank needs no code of its own.

        One process calls it, before anything starts; starts nothing. `devices` is the number of devices on this node.
        Raises ValueError for a layout that this strategy or this machine cannot give.
        """

    @property
    def expected_topology(self) -> Topology:
        """What is known of rank 0's topology once `configure` has run."""
        return self.topology

    def check(self, model: nn.Module) -> None:
        """Raise ValueError for a model that `setup_module`, which calls it too, would refuse, as its modules show.

        One process calls it between `configure` and `launch`. It runs and changes nothing."""

    @abstractmethod
    def launch(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn(*args)` on every rank and return what rank 0 returned.

        Where the ranks run already (one process, torchrun, Slurm, MPI, or inside `launch`) it calls `fn` here. An
        exception of a rank comes out as itself, its traceback on that rank as cause; a rank that died without one
        raises RankFailure.
        """

    @abstractmethod
    def setup(self) -> Topology:
        """Join the ranks (rendezvous, process group) and return where this rank is, which `topology` holds then."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave the process group. Idempotent, safe after a failed `setup`, calls no collective."""

    @abstractmethod
    def setup_module(self, model: nn.Module) -> W:
        """Move, wrap or shard `model` in place; return the module that the other verbs take.

        Call it before optimizers exist: parameters may be replaced. The caller keeps using `model`.
        """

    def teardown_module(self, wrapped: W) -> None:
        """Undo `setup_module`: the caller's module is plain again and holds the trained weights, whole.

        Needs the memory of the whole model where parameters were sharded over ranks. Of the ranks that `launch`
        started, all but rank 0 may leave their modules as they are.
        """

    def setup_optimizers(self, wrapped: W, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Take the optimizers that were built on the wrapped parameters; return those to step."""
        return optimizers

    def adopt_changes(self, wrapped: W, after: bool = True) -> None:
        """Take over `requires_grad` and gradient hooks that user code has changed since the model was wrapped.

        Every rank calls it after such code, with `after=False` also before: ranks that change different parameters
        are an error in the next step. Raises RuntimeError for what this strategy cannot take over, by name.
        """

    @contextmanager
    def whole(self, wrapped: W) -> Iterator[None]:
        """While it lasts every parameter of the caller's model and its `.grad` are whole plain tensors on every rank.

        `state_dict()` is complete too. What was changed within, alike on all ranks, holds afterwards. Every rank calls
        it, between steps; it needs the memory of the whole model. Raises RuntimeError where it is called within a step.
        """
        yield

    @contextmanager
    def evaluation_weights(self, wrapped: W, optimizers: Iterable[Optimizer], restore: bool = True) -> Iterator[None]:
        """While it lasts the model holds the weights to evaluate, where `optimizers` train other ones; afterwards, with
        `restore`, those to train again, bit for bit. Every rank calls it, between steps."""
        yield

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """Return `batch` with its tensors on `device`, floating point ones in the precision's dtype.

        Walks tuples, lists, dicts, dataclasses and objects that have their own `.to`.
        """

    # ---- 2. gradient sync ------------------------------------------------------------------------

    @abstractmethod
    def forward_backward(self, wrapped: W, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS) -> StepResult:
        """Compute the gradient of one optimizer step and leave it in `.grad`, equal on all replicas.

        `step_fn(batch, batch_idx)` returns the mean loss of a micro-batch, `Loss`, a dict with `"loss"`, a dict of
        losses by optimizer name (with `hooks.parameters`), or None for no weight. `window` holds this rank's
        micro-batches and the global number of samples, by which plain means are weighted.

        Raises RuntimeError where ranks disagree on the step, on the collectives issued so far or on the names logged,
        naming the rank, before any parameter changes.
        """

    def turns(self, wrapped: W, optimizers: dict[str, Optimizer], window: Window) -> Iterable[Window]:
        """Yield what of `window` belongs together: by default all of it.

        A strategy whose learners have weights of their own yields a part for each that this rank runs. Until the next
        is asked for, model and optimizers are that learner's: call `forward_backward` and `optimizer_step` within.
        """
        return (window,)

    def synchronize(self, wrapped: W) -> None:
        """Bring replicas together that drift apart by design: before validation, a save and the end of an epoch.

        Every rank calls it, between steps. Afterwards the model is the same on all of them.
        """

    @abstractmethod
    def evaluate(
        self, wrapped: W, step_fn: Callable[..., Any], micro_batch: MicroBatch, *args: Any, hooks: StepHooks = NO_HOOKS
    ) -> Any:
        """Return `step_fn(micro_batch.batch, *args)` without gradient sync; None for a micro-batch of padding.

        A rank that does not report may return None as well. Of `hooks` only `log_scope` counts.
        """

    @abstractmethod
    def backward(self, wrapped: W, loss: Tensor, weight: float = 1.0, retain_graph: bool = False) -> None:
        """Manual optimization: accumulate the gradient of `loss` times `weight` on this rank only.

        `clip_gradients` and `optimizer_step` bring the ranks together. `retain_graph` as torch's, or RuntimeError.
        """

    @abstractmethod
    def clip_gradients(self, wrapped: W, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        """Clip what `optimizer` will apply, by the 2-norm of the global gradient or by element ("value").

        Returns the norm before clipping, the same on all ranks (0-dim), or None for "value".
        """

    @abstractmethod
    def optimizer_step(self, wrapped: W, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step `optimizer`; False where loss scaling skipped the step, on all ranks alike."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over all ranks: "sum", "mean", "max" or "min". Returns a new tensor, equal on all ranks."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensor of every rank in rank order: shape `[world_size, *tensor.shape]`. Shapes must agree."""

    @abstractmethod
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s value everywhere: a tensor (its shape known on all ranks) or JSON data."""

    @abstractmethod
    def barrier(self, name: str = "") -> None:
        """Wait until every rank is here. `name` changes nothing."""

    # ---- 3. sampler seeding ----------------------------------------------------------------------

    @abstractmethod
    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        """Return this rank's share of `loader`.

        Global batch k holds the same samples on any number of ranks. `shuffle` None keeps what the loader does: a
        RandomSampler becomes the permutation of (seed, epoch), other samplers keep their order. `accumulate` is the
        number of micro-batches a window; with `split` the loader's batch is the global batch of a window and is split
        over ranks and micro-batches.
        """

    # ---- 4. checkpointing ------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self, wrapped: W, optimizers: dict[str, Optimizer]) -> State:
        """This rank's pieces of model and optimizer state under canonical names with global shapes."""

    @abstractmethod
    def load_state_dict(self, wrapped: W, optimizers: dict[str, Optimizer], state: Reader) -> None:
        """Take over what any strategy saved on any number of ranks. Raises KeyError or ValueError by name."""
