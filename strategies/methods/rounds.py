"""Learners that train by themselves for a round of steps and then average: when they are apart, and what then holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, StepFn, StepHooks, StepResult, StepVote, W
from lockstep.strategies.checkpoint_state import Reader, State
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.methods import learner_state
from lockstep.strategies.methods.beside import Beside
from lockstep.strategies.methods.compared import ComparedWeights
from lockstep.strategies.methods.learner import Learner, Marks, OwnNumbers, buffers_of, make_learners, put_buffers
from lockstep.strategies.methods.options import Rounds
from lockstep.strategies.methods.outer import Counterparts, Outer
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers import modes
from lockstep.strategies.sync.buffers import FollowedShapes, share_buffers
from lockstep.strategies.sync.step_agreement import StepAgreement

_log = logging.getLogger("lockstep")

REFUSES = {
    "manual_optimization": "automatic_optimization = False steps the optimizers of the module, with a closure too, but "
    "in local updates each learner has its own; use automatic optimization",
    "closures": "local updates compute a gradient once, not by closures that optimizers call; use another optimizer",
    "16-mixed": "precision='16-mixed' scales losses by what overflowed on a rank; with local updates use 'bf16-mixed'",
    "assigned_optimizers": "each learner of local updates steps its own",
    "gradient_norm": "GradientNorm shows one gradient of all ranks, but each learner has its own; use self.log",
    "parameter_state": "the learners of local updates have weights of their own between rounds, so that a state beside "
    "the parameters would be another one on each rank; average weights with the outer optimizer",
}


class LearnerRounds(ComparedWeights[W]):
    """Base of the strategies whose learners train by themselves for a round: on a rank, or on an island of ranks.

    Another base gives the step of a learner. It agrees on it with `_own_agreement` and `_own_peers`.
    """

    def __init__(
        self, rounds: Rounds, outer: Callable[[list[nn.Parameter]], Optimizer], *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.rounds = rounds
        self.outer = outer
        self._seed = 0
        self._counterparts = Counterparts([range(1)], 0)
        self._own_agreement: StepAgreement | None = None
        """That of the ranks that run a learner together; None if one rank does."""
        self._own_peers: dist.ProcessGroup | None = None
        self._held: StepAgreement | None = None
        """The agreement of all ranks, while learners step by themselves."""
        self._turn: Learner | None = None
        self._opened = False  # whether the step of now is within `turns`
        self._apart = False  # whether learners have stepped by themselves in the last one
        self._learners: list[Learner] = []
        self._loaded = 0  # which of them is in the model
        self._state_of: Learner | None = None  # whose state is in the optimizers
        self._together, self._buffers_together = True, True
        self._windows, self._position = 0, 0
        """Since the run began; since learners were last together."""
        self._outer: Outer | None = None
        self._warns = True
        self._refuse_weights = _nothing
        self._numbers = OwnNumbers()
        self._names: dict[int, str] = {}
        self.sender: Callable[[], Executor] = partial(ThreadPoolExecutor, 1, "outer")
        """What sends beside the steps is made by this."""
        self._thread: Executor | None = None
        self._beside: Beside | None = None

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 1, split: bool = False
    ) -> ShardedLoader:
        self._seed = self._seed or seed
        return super().shard_loader(loader, seed=seed, shuffle=shuffle, accumulate=accumulate, split=split)

    def setup_optimizers(self, wrapped: W, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        for optimizer in optimizers.values():
            if modes.has_modes(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} evaluates other weights than it trains, which would differ by "
                    "learner; use an optimizer without train() and eval()"
                )
        optimizers = super().setup_optimizers(wrapped, optimizers)
        self._windows = 0 if self.of_run is None else self.of_run.global_step  # a second fit continues the first
        self._names = {id(optimizer): key for key, optimizer in optimizers.items()}
        model = self.unwrap(wrapped)
        self._outer = Outer(model, optimizers, self.rounds, self.outer, self._counterparts, self._seed)
        self._refuse_weights = partial(self._outer.refuse_different, True)
        return optimizers

    def teardown(self) -> None:
        self._end_turns()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = self._beside = None
        self._refuse_weights = _nothing
        super().teardown()

    def trainability_changed(self, wrapped: W, names: list[str]) -> None:
        if not self._together:
            raise RuntimeError(
                f"requires_grad was changed while learners are apart ({shortened(names)}); change it in a hook such as "
                "on_train_epoch_start, before which they come together"
            )
        super().trainability_changed(wrapped, names)

    def take_share(self, wrapped: W, optimizers: dict[str, Optimizer], share: int) -> bool:
        if not self._apart or len(self._learners) < 2:
            return False
        assert self._state_of is not None
        self._state_of.gradients = [parameter.grad for parameter in wrapped.parameters()]
        self._load(wrapped, optimizers, share - self._learners[0].number)
        for parameter, gradient in zip(wrapped.parameters(), self._state_of.gradients, strict=True):
            parameter.grad = gradient
        return True

    def turns(self, wrapped: W, optimizers: dict[str, Optimizer], window: Window) -> Iterator[Window]:
        self._opened = True
        self._apart = self._windows >= self.rounds.start
        if not self._apart:
            self.ranks_meet = True
            yield window
        else:
            yield from self._rounds(wrapped, optimizers, window)
        self._windows += 1
        self._opened = False

    def forward_backward(self, wrapped: W, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS) -> StepResult:
        if not self._opened and not self.capabilities.synchronous:
            raise RuntimeError(
                f"{self.name}.forward_backward was called outside of a learner's turn; call it with each "
                "window that strategy.turns(wrapped, optimizers, window) yields"
            )
        if self._turn is None:
            return super().forward_backward(wrapped, step_fn, window, hooks)
        votes: list[StepVote] = []

        def vote() -> StepVote:
            votes.append(hooks.vote())
            return votes[0]

        result = super().forward_backward(wrapped, step_fn, window, hooks._replace(vote=vote))
        self._turn.counted += result.count
        if not self.ranks_meet or self._turn is not self._learners[-1]:
            return result._replace(stop=0, loss=None)
        result = result._replace(loss=None)  # that of one learner
        if self._held is None:
            return result
        self._held.send(votes[0], 0, result.count, result.non_finite is None)
        of_all = self._held.receive()
        return result._replace(stop=of_all.stop, non_finite=result.non_finite or of_all.non_finite)

    def synchronize(self, wrapped: W) -> None:
        outer = self._outer
        if outer is None or not self._learners:
            return
        if not self._together:
            self._take_over(wrapped)
            self._warn_early(outer)
            outer.drain(self._learners, self.rounds.mixing)
            for fragment in range(self.rounds.fragments):
                outer.send(fragment, self._learners)
                outer.apply(self._learners, 0.0, early=True)
            self._meet()
            self.ranks_meet = True
        if not self._buffers_together:
            self._load(wrapped, {}, 0)
            if self._in_group:
                FollowedShapes().follow(self.unwrap(wrapped).modules())
                share_buffers(self.unwrap(wrapped).modules())
                outer.share_still()
            self._buffers_together = True
        if self._state_of is not None:  # hooks follow, which may write through numpy
            self._state_of.marks = Marks.of(self._state_of.state, bits=True)

    def _warn_early(self, outer: Outer) -> None:
        """Say once that a round was ended early, if the outer optimizer has not stepped yet and has more to do than to
        take the mean."""
        rounds = self.rounds
        if self._warns and not outer.is_mean and self._windows < rounds.start + rounds.period // rounds.fragments:
            self._warns = False
            if self.topology.rank == 0:
                _log.warning(
                    f"a validation, a save or the end of an epoch has ended a round of period={rounds.period} after "
                    f"{self._position} steps, where the outer optimizer of {self.name} does not step, and it has not "
                    "stepped yet; choose intervals that are multiples of period, or a shorter period"
                )

    def _rounds(self, wrapped: W, optimizers: dict[str, Optimizer], window: Window) -> Iterator[Window]:
        """A window of learners that step by themselves, and what follows it."""
        outer = self._outer
        assert outer is not None
        if self._together:
            self._part(wrapped, optimizers, outer)
        self._position += 1
        self._held, self._agreement, self._peers = self._agreement, self._own_agreement, self._own_peers
        self.ranks_meet = self._position % self.rounds.period == 0
        number = len(window.micro_batches) // len(self._learners)
        if len(self._learners) > 1:
            self._numbers.begin(optimizers)
        for i, learner in enumerate(self._learners):
            own = window.micro_batches[i * number : (i + 1) * number]
            self._load(wrapped, optimizers, i)
            self._turn, self._refusal = learner, _within_turn
            if window.num_shares:
                yield Window(own, max(1, sum(part.num_samples for part in own)), 1, window.num_batches)
            else:  # its ranks have the others
                yield replace(window, num_samples=max(1, window.in_group))
            self._take_over(wrapped)
            if len(self._learners) > 1:
                learner.keep_state(optimizers)
                learner.buffers = buffers_of(self.unwrap(wrapped))
                self._numbers.end_turn(optimizers, learner, more=learner is not self._learners[-1])
                learner.gradients = [parameter.grad for parameter in wrapped.parameters()]
                outer.note()
        self._end_turns()
        outer.apply_due(self._windows, self._learners, self.rounds.mixing)
        for fragment in outer.due(self._position):
            if self.rounds.delay:
                if self._beside is None:
                    self._thread = self.sender()
                    self._beside = Beside(self._thread, self.topology.device)
                outer.send(fragment, self._learners, self._beside, self._windows + self.rounds.delay)
            else:
                outer.send(fragment, self._learners)
                outer.apply(self._learners, 0.0)
        rounds = self.rounds
        if self.ranks_meet and not rounds.delay and rounds.fragments == 1 and not rounds.keeps_unsent:
            self._meet()

    def _end_turns(self) -> None:
        if self._held is not None:
            self._agreement, self._held, self._peers = self._held, None, None
        self._turn = self._refusal = None

    def _create(self, wrapped: W, optimizers: dict[str, Optimizer]) -> None:
        """Make this rank's learners, with what model and optimizers hold now."""
        self._learners = make_learners(self._counterparts.own, self.unwrap(wrapped), optimizers)
        self._loaded, self._state_of = 0, None

    def _part(self, wrapped: W, optimizers: dict[str, Optimizer], outer: Outer) -> None:
        """The beginning of a round: all learners start from the model's weights."""
        if not self._learners:
            self._create(wrapped, optimizers)
        model = self.unwrap(wrapped)
        outer.follow(optimizers)
        outer.refuse_different(self._buffers_together)
        weights, buffers = [p.data for p in model.parameters()], buffers_of(model)
        places = range(len(weights)) if self._buffers_together else outer.moving
        common = {place: weights[place] for place in places}
        for i, learner in enumerate(self._learners):
            if i == self._loaded:
                learner.weights, learner.buffers = weights, buffers
            else:
                learner.start_from(common, buffers if self._buffers_together else {})
        outer.begin(self._learners)
        outer.note()
        self._together = self._buffers_together = False
        self._position = 0

    def _load(self, wrapped: W, optimizers: dict[str, Optimizer], index: int) -> None:
        """Put learner `index` of this rank into the model and into `optimizers`."""
        learner, together = self._learners[index], self._together and self._buffers_together
        if len(self._learners) > 1:
            assert self._outer is not None
            self._refuse_changes(self._outer, optimizers)
            for key, optimizer in optimizers.items():
                optimizer.state.clear()
                optimizer.state.update(learner.state[key])
            if optimizers:
                self._numbers.put(optimizers, learner)
                self._state_of = learner
            if together:  # what the model holds is that of all learners
                return
            for parameter, value in zip(wrapped.parameters(), learner.weights, strict=True):
                parameter.data = value
                parameter.grad = None
            put_buffers(self.unwrap(wrapped), learner.buffers)
            self._outer.note()
        self._loaded = index

    def _refuse_changes(self, outer: Outer, optimizers: dict[str, Optimizer]) -> None:
        """Raise RuntimeError for what other code than a learner's turn has changed, as one learner of several."""
        changed = [] if self._together and self._buffers_together else outer.changed()
        if optimizers and self._state_of is not None and self._state_of.marks is not None:
            changed += self._state_of.marks.changed(optimizers)
        if changed:
            raise RuntimeError(
                f"{shortened(changed)} was changed outside of a learner's turn, but this rank runs "
                f"{len(self._learners)} learners, each with its own; use as many ranks as learners"
            )

    def _take_over(self, wrapped: W) -> None:
        """Let the weights of the learner in the model be those that user code has assigned to `data`, if it did."""
        self._learners[self._loaded].weights = [parameter.data for parameter in wrapped.parameters()]

    def _meet(self) -> None:
        """All learners have the same weights now."""
        for learner in self._learners:
            learner.counted, learner.counted_at = 0.0, {}
        self._together, self._position = True, 0

    def _forget(self) -> None:
        self._learners, self._numbers = [], OwnNumbers()
        self._together = self._buffers_together = True
        self._position = self._loaded = 0
        self._state_of = None
        self._opened, self.ranks_meet = False, True
        self._end_turns()

    def state_dict(self, wrapped: W, optimizers: dict[str, Optimizer]) -> State:
        self.synchronize(wrapped)
        if not optimizers or not self._learners:
            return super().state_dict(wrapped, optimizers)
        self._load(wrapped, optimizers, 0)
        state = super().state_dict(wrapped, optimizers)
        put = partial(self._load, wrapped, optimizers)
        gather = partial(self._gather_state, wrapped, optimizers, self._counterparts.shard)
        learner_state.save(state, self._learners, put, gather, self.broadcast, self.topology.world_size)
        self._load(wrapped, optimizers, 0)
        assert self._outer is not None
        self._outer.save(state, self.local_shard, self)
        return state

    def load_state_dict(self, wrapped: W, optimizers: dict[str, Optimizer], state: Reader) -> None:
        super().load_state_dict(wrapped, optimizers, state)
        self._forget()
        if not optimizers or "learners" not in state.meta or self._windows < self.rounds.start:
            return  # learners that step together have one state, which is learner 0's
        assert self._outer is not None
        self._create(wrapped, optimizers)
        restore = partial(self._restore_state, wrapped, optimizers)
        numbers = learner_state.load(state, optimizers, self._learners, restore)
        self._numbers.restore(optimizers, self._learners, numbers)
        self._outer.follow(optimizers)  # with groups that the saved run has added
        self._outer.load(state, self.read_shard)

    def extra_state(self, wrapped: W) -> dict[str, Any]:
        return {"steps": self._windows}

    def load_extra_state(self, wrapped: W, saved: dict[str, Any]) -> None:
        self._windows = saved.get("steps", 0)


def _nothing() -> None: ...


def _within_turn(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called within a learner's step, where its result would depend on the number of ranks; call it at "
        "the end of an epoch, or train without local updates"
    )
