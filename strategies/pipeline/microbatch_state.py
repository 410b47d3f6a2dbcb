"""What a step keeps in the model, where it runs once for each pipeline microbatch and stage instead of once.

Numbers beside the layers (counters, annealed weights) and those of torch's layers (the slope of a LeakyReLU) begin each
run as the micro-batch found them, so that the microbatches of one micro-batch see the same, and after it they are what
one run has left. What cannot be followed so is refused by name before the optimizer steps: sums over samples, lists
that grow, tensors that are changed in place. What objects and containers hold is watched in the first micro-batches and
in few later ones, each run of which begins with what the first found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch import environment
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.modules.blocks import Layer, is_metric, is_of_torch, measures
from lockstep.strategies.modules.side_effect_free import PlainAttributes, PlainValues, metrics_uncounted
from lockstep.strategies.pipeline.partition import Cut, holding_stages
from lockstep.strategies.pipeline.state.draws import Draws
from lockstep.strategies.pipeline.state.evaluated import Evaluated
from lockstep.strategies.pipeline.state.found import (
    BUFFER,
    NOTHING,
    Found,
    Place,
    are_other,
    bits_of,
    children_of,
    differences,
    equal,
    exchanged,
    holder_of,
    put_children,
    restore,
    scan,
    tensors_of,
)
from lockstep.strategies.pipeline.state.hook_state import Enclosed, hook_holders
from lockstep.strategies.pipeline.state.marks import PLAIN
from lockstep.strategies.pipeline.state.snapshot import Slot, Snapshot
from lockstep.strategies.pipeline.state.watch import ADVICE, Watch, in_evaluation, partial, refuse
from lockstep.strategies.sync.collectives import gather_objects


class StepState:
    """Watches the modules of one model, of whose layers `here` are this rank's; `shared` are the ids of tensors that
    several stages use; `last` is the rank of the last stage, and the group of the pipeline."""

    @classmethod
    def of(cls, model: nn.Module, parts: Cut, stage_of: Sequence[int], here: Sequence[int], last: Any) -> StepState:
        """Where the stages of this rank are those in `here`; `last` is the rank, in its group, of the last stage."""
        own = [layer for layer, stage in zip(parts.layers, stage_of, strict=True) if stage in here]
        shared = {key for key, stages in holding_stages(parts, stage_of).items() if len(stages) > 1}
        return cls(model, parts, own, shared, last)

    def __init__(
        self, model: nn.Module, parts: Cut, here: list[Layer], shared: set[int], last: Any = (0, None)
    ) -> None:
        inside = {child for layer in parts.layers for child in layer.module.modules()}
        own = [child for layer in here for child in layer.module.modules()]
        self._model, self._last = model, last
        metrics = {part for metric in filter(is_metric, model.modules()) for part in metric.modules()} - inside
        free = parts.free() - metrics
        outside = [m for m in model.modules() if m not in inside | free | metrics]
        self._outside, self._parameters = outside, [*model.parameters()]
        self._layers: list[Any] = [m for m in (*own, *free) if not is_of_torch(m)]
        self._plain = PlainAttributes(m for m in inside | free if is_of_torch(m) and not is_metric(m))
        self._own_code, self._hooked, self._registered = self._layers, [*own, *free, *outside], -1
        self._parents = [m for m in outside if m._modules]
        self._parents_in_layers = [m for m in (*own, *free) if m._modules]
        self._tensors = [t for m in (*outside, *free) if not measures(m) for t in tensors_of(m)]
        self._tensors += [t for m in own for t in tensors_of(m) if id(t) in shared]
        self._of_layers = [m for m in own if not measures(m)]
        self._with_tensors = [m for m in outside if not measures(m) and (m._parameters or m._buffers)]
        self._layer_tensors = [t for m in self._of_layers for t in tensors_of(m)]
        self._statistics = [b for m in outside if measures(m) for b in m._buffers.values() if b is not None]
        self._watch = Watch(model, outside, self._own_code, last[1])
        self._evaluations = Evaluated(self._watch.hooks, inside)
        self._draws = Draws(outside, {module: name for name, module in model.named_modules()})
        self.pads = False  # whether this rank has no samples, so that the step runs for its shapes only
        self._start = NOTHING
        self._end: Found | None = None
        self._called: Found | None = None
        self._whole: Found | None = None
        self._evaluated: tuple[Found, list[int], Snapshot | None] | None = None
        self._kept = NOTHING
        self._changed_once: set[tuple[int, str, Any]] = set()
        self._changed_now: dict[tuple[int, str, Any], Any] = {}  # in this micro-batch, and to what
        self._changed_by_hooks: set[tuple[int, str, Any]] = set()
        self._held: dict[Place, Tensor] | None = None
        self._partial: set[Place] = set()
        self._texts: set[Place] = set()  # strings that were not for all of a micro-batch

    def around(self, wants: str, stage: int, is_last: bool) -> AbstractContextManager[None]:
        """Around a run of the step, for what a `stage_run.Run` wants."""
        if wants == "stage":
            return self.run(is_last, stage)
        return self.evaluation() if wants == "evaluation" else self.side_effect_free(wants == "numbers")

    @contextmanager
    def micro_batch(self, sizes_of_parts: Sequence[int]) -> Iterator[None]:
        """Around all runs of a step on one micro-batch, whose parts have so many samples. Raises RuntimeError naming
        what they have changed that cannot be followed."""
        self._start, self._end, self._held, self._whole = self._now(), None, None, None
        self._partial.clear()
        self._changed_now.clear()
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            known = [holder for holder in self._layers if isinstance(holder, Enclosed)]
            self._layers = [*self._own_code, *hook_holders(self._hooked, known)]
            self._watch.watch_layers(holder for holder in self._layers if isinstance(holder, nn.Module))
        self._kept, cut = self._now_in_layers(), len(sizes_of_parts) > 1
        tensors = [*self._tensors, *self._layer_tensors] if cut else self._tensors
        versions, self._children = [t._version for t in tensors], children_of(self._parents_in_layers)
        self._watch.begin(len(sizes_of_parts))
        self._evaluations.begin()
        self._draws.begin(self._watch.generators)
        reads_bits = cut and (self._watch.is_watching or self._watch.writes_data)
        bits = self._bits(self._watch.is_watching) if reads_bits else {}
        yield
        self._refuse_counting(self._now_in_layers())  # in the backward
        self._refuse_grown(self._start, self._now(), "training_step")
        self._refuse_counting_samples()
        if versions != [t._version for t in tensors]:
            changed = [t for t, before in zip(tensors, versions, strict=True) if t._version != before]
            self._refuse_in_place(changed[0])
        for place, (tensor, now) in self._bits(self._watch.is_watching).items() if bits else ():
            is_other = place in bits and bits[place][0] is not tensor  # beside the layers it is followed
            if place in bits and bits[place][1] != now and not (is_other and place[0] in self._with_tensors):
                self._refuse_in_place(tensor)
        slots = [Slot(holder_of(*p), p[1] if p[2] is None else p[2], self._name(p), None) for p in self._partial]
        for slot in (*slots, *self._watch.partial()):
            slot.put(partial(slot.name))

    @contextmanager
    def run(self, is_last: bool = False, stage: int = 0) -> Iterator[None]:
        """Around one run of the step, which begins with the numbers that the micro-batch found."""
        with self._draws.run(), self._watch.around(stage):
            self._put(self._start)
            self._called = None
            if self._watch.setting:
                self._kept = self._now_in_layers()
            yield
            self._follow(is_last)

    @contextmanager
    def before_backward(self) -> Iterator[None]:
        """Around `on_before_backward`, on the rank of the last stage. Raises RuntimeError naming a number that it
        changes."""
        before = self._now(), scan(self._layers)
        with self._draws.hook("on_before_backward"), self._watch.before_backward():
            yield
        for one, other in zip(before, (self._now(), self._now_in_layers()), strict=True):
            if (place := next(differences(one, other), None)) is not None:
                raise RuntimeError(
                    f"on_before_backward changes {self._name(place)}, but a pipeline calls it for each part of a "
                    f"micro-batch, on the rank of the last stage only; change it {ADVICE}"
                )

    @contextmanager
    def parameter_hooks(self, hooks: list[Callable[..., Any]]) -> Iterator[None]:
        """Around the hooks of parameters, which only the rank that holds a parameter calls. Raises RuntimeError naming
        a number that they change; one that is new may be a cache, and changes once, as a flag does."""
        holders = [*self._outside, *self._own_code, *map(Enclosed, hooks)]
        before = scan(holders).counts
        with self._draws.hook("a hook of a parameter", of_streams=True):
            yield
        after = scan(holders).counts
        for place in {**before, **after}:
            if are_other(before.get(place), after.get(place)):
                key = (id(getattr(place[0], "hook", place[0])), place[1], place[2])
                known = before.get(place) is not None and place in after and type(after[place]) is not bool
                if known or key in self._changed_by_hooks:
                    raise RuntimeError(
                        f"a hook of a parameter counts in {self._name(place)}, but in a pipeline only the rank that "
                        "holds the parameter calls it, so that other ranks would have another number; count in "
                        "on_before_optimizer_step or on_train_batch_end, which run on every rank"
                    )
                self._changed_by_hooks.add(key)

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Around a run of the step on a rank that has no samples, which must not leave numbers behind."""
        self.pads = True
        try:
            yield
        finally:
            self.pads = False

    @contextmanager
    def side_effect_free(self, is_whole: bool = False) -> Iterator[None]:
        """Around a run of the step that leaves nothing behind; `is_whole`: on a micro-batch that is not cut."""
        found, before = self._now(), self._watch.snapshot()
        statistics = [(buffer, buffer.clone()) for buffer in self._statistics]
        try:
            if is_whole:
                self._refuse_counting(self._now_in_layers())
                self._watch.begin_again()
                self._put(self._start)
            with self._draws.whole(is_whole), metrics_uncounted(self._model), before.refusing_iterators(ADVICE):
                yield
            end = self._now()
            self._whole = end if is_whole else self._whole
            if self.pads and (place := next(differences(found, end), None)) is not None:
                raise RuntimeError(
                    f"training_step changed the number {self._name(place)} of the model in a step in which a rank has "
                    f"no samples, and would fall behind the others; change it {ADVICE}"
                )
        finally:
            before.put_back(draws=not self.pads)
            self._put(found)
            for buffer, values in statistics:
                buffer.data.copy_(values)
            if is_whole:
                restore(self._kept, self._now_in_layers().numbers)
                self._kept = self._now_in_layers()

    @property
    def asks_whole(self) -> bool:
        """Whether the step, whose parts have run, is to run for its numbers on a micro-batch that is not cut, as one
        process runs it."""
        if self._end is None or self._watch.num_parts == 1 or not (self._watch.is_watching or self._draws.asks_whole):
            return False
        is_other = self._draws.asks_whole or next(differences(self._start, self._end), None) is not None
        return is_other or any(name in self._watch.stored for _, name, _ in self._end.numbers)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around the run of an evaluation step, which comes to its end on the last stage only."""
        before, self._evaluated = self._now(), None
        with self._evaluations.step(), self._draws.evaluation():
            yield
        now = self._now()
        self._refuse_grown(before, now, "an evaluation step")
        if self._evaluated is None:
            return
        called, versions, snapshot = self._evaluated
        self._evaluated = None
        if (place := next(differences(called, now), None)) is not None:
            raise in_evaluation(self._name(place))
        for tensor, version in zip(self._tensors, versions, strict=True):
            if tensor._version != version:
                raise in_evaluation(self._name_of(tensor))
        if snapshot is not None:
            self._watch.refuse_in_evaluation(snapshot)

    def called_in_evaluation(self) -> None:
        """On the last stage the pipelined module has returned in an evaluation step."""
        snapshot = self._watch.called_in_evaluation()
        self._evaluated = self._now(), [t._version for t in self._tensors], snapshot

    def calling(self, is_last: bool) -> None:
        """The step calls the pipelined module."""
        self._draws.calling()
        self._evaluations.calling()
        if is_last:
            self._called = self._now()
            self._watch.calling()

    def refuse_apart(self) -> None:
        """Raise RuntimeError naming a number that hooks have changed on the rank of the last stage alone, and that
        steps use. What refuses use there does so on all. All ranks of the pipeline call it before a micro-batch."""
        if not self._watch.are_due or self._end is None or environment.in_plan():
            return
        before, now = self._end.numbers, self._now().numbers
        used = {place: value for place, value in now.items() if isinstance(value, PLAIN) and self._is_used(place)}
        changed = {self._name(p): repr(v) for p, v in used.items() if p not in before or are_other(before[p], v)}
        theirs, refused = gather_objects((changed, self._watch.refused()), self._last[1])[self._last[0]]
        modules = dict(self._model.named_modules()) if refused else {}
        for path, _, key in (name.rpartition(".") for name in refused):
            own: Any = vars(modules[path]) if path in modules else {}
            if key in own and not isinstance(own[key], Refusing):  # it is set where only the last stage comes
                own[key] = partial(f"{path}.{key}".lstrip("."))
        for place, value in used.items() if theirs else ():
            name = self._name(place)
            if name in theirs and name not in changed and theirs[name] != repr(value):
                raise RuntimeError(
                    f"a hook has set self.{name} on the rank of the last stage of a pipeline alone, and the step uses "
                    "it on all; set it on every rank, as all are given the outputs, or set it from "
                    "trainer.callback_metrics"
                )

    # ---- helpers ---------------------------------------------------------------------------------------

    def _is_used(self, place: Place) -> bool:
        return place[2] is not BUFFER and place[1] in self._watch.names

    def _now(self) -> Found:
        found = scan([*self._outside, *(p for p in self._parameters if p.__dict__)], self._watch.storing_items)
        return found._replace(plain=self._plain.now(), children=children_of(self._parents))

    def _now_in_layers(self) -> Found:
        return scan(self._layers, self._watch.storing_items)

    def _put(self, found: Found) -> None:
        restore(found, self._now().numbers)
        self._plain.put(found.plain)
        put_children(found.children)

    def _follow(self, is_last: bool) -> None:
        """After a run of the step: what it leaves is what the others leave."""
        end, layers = self._now(), self._now_in_layers()
        for place in differences(self._called, end) if is_last and self._called is not None else ():
            if not self._is_text(place, end):
                refuse(
                    f"changes {self._name(place)} after it has called the pipelined module, where only the last stage "
                    "comes",
                    f"change it before, or {ADVICE}",
                )
        for place in differences(self._end, end) if self._end is not None else ():
            if not self._is_text(place, end):
                refuse(f"leaves another {self._name(place)} for each part of a micro-batch", f"change it {ADVICE}")
        self._refuse_grown(self._start, end, "training_step")
        self._end = end
        held = {} if self._watch.is_watching else {**end.tensors, **layers.tensors}
        if self._held is not None:  # what each run sets again holds one part; a cache is set once
            self._partial.update(
                place
                for place, value in held.items()
                if (before := self._held.get(place)) is not value
                and not (self._may_be_cache(place) and before is not None and equal(before, value))
            )
        self._held = held
        self._refuse_counting(layers)
        for module, name in exchanged(self._children, children_of(self._parents_in_layers)):
            refuse(f"calls a layer that exchanges {self._name((module, name, None))}", f"exchange it {ADVICE}")

    def _may_be_cache(self, place: Place) -> bool:
        """Whether each run finds nothing in a place, or what the micro-batch found, and may fill it alike."""
        return place in self._start.numbers or place[0] in self._watch.setting

    def _is_text(self, place: Place, end: Found) -> bool:
        """Whether a string has changed, which may be used within the run."""
        is_text = isinstance(end.numbers.get(place), str)
        if is_text:
            self._partial.add(place)
            self._texts.add(place)
        return is_text

    def _refuse_grown(self, before: Found, now: Found, step: str) -> None:
        for place, size in now.sizes.items():
            if before.sizes.get(place, size) != size:
                raise RuntimeError(
                    f"{step} adds to the list {self._name(place)}, but a pipeline runs it for parts of a micro-batch, "
                    "to its end on the last stage only; use self.log, a metric of torchmetrics, or on_train_batch_end"
                )

    def _refuse_counting_samples(self) -> None:
        if self._end is None:
            return
        before, now = self._start.numbers, self._end.numbers
        self._partial.update(place for place in self._texts if are_other(before.get(place), now.get(place)))
        if self._whole is not None:
            whole, part = self._whole._replace(plain=PlainValues([], [])), self._end
            other = (p for p in differences(whole, part) if not self._is_text(p, part))
            place = next((p for p in other if p not in self._partial), None)
            if place is not None:
                refuse(f"counts the samples of a part in {self._name(place)}", f"count them {ADVICE}")

    def _refuse_counting(self, layers: Found) -> None:
        """A layer may keep a number once, as a cache does; one that continues changing counts. So does a string that
        changes twice in a micro-batch; another, such as one of sizes, may be used within the run."""
        before, now = self._kept.counts, layers.counts
        self._kept = layers
        for place in {**before, **now}:
            if are_other(before.get(place), now.get(place)):
                key = (id(place[0]), place[1], place[2])
                is_first = key not in self._changed_now
                is_again = place[0] in self._watch.setting and not is_first
                is_known = key in self._changed_once
                if is_again:  # each run begins with what the micro-batch found, and is to leave the same
                    is_known = are_other(self._changed_now[key], now.get(place))
                self._changed_once.add(key)
                self._changed_now[key] = now.get(place)
                may_change = is_first and isinstance(place[0], nn.Module)
                if is_known and not (may_change and self._is_text(place, layers)):
                    what = "hook" if isinstance(place[0], Enclosed) else "layer"
                    refuse(f"calls a {what} that counts in {self._name(place)}", f"count {ADVICE}")

    def _bits(self, of_layers: bool) -> dict[tuple[nn.Module, str], tuple[Tensor, int]]:
        return bits_of((*self._with_tensors, *(self._of_layers if of_layers else ())))

    def _refuse_in_place(self, tensor: Tensor) -> NoReturn:
        refuse(f"changes {self._name_of(tensor)} in place", f"change it {ADVICE}")

    def _name_of(self, tensor: Tensor) -> str:
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        return next((name for name, held in named if held is tensor), "a tensor")

    def _name(self, place: Place) -> str:
        module, attribute, key = place
        named: chain[tuple[str, Any]] = chain(self._model.named_modules(), self._model.named_parameters())
        path = next((name for name, child in named if child is module), "")
        return ".".join(filter(None, (path, attribute))) + ("" if key is None or key is BUFFER else f"[{key!r}]")
