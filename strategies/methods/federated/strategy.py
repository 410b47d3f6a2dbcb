"""Federated averaging: clients, each with its own samples, train apart, and a server averages what they became.

A simulation on one machine or cluster: no secure aggregation, no differential privacy, no devices.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Capabilities, StepFn, StepHooks, StepResult, Topology
from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, names_of, pack, parameter_names, unpack
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.losses import own_backward_refused
from lockstep.strategies.methods.federated.client import ClientSteps, RoundRun
from lockstep.strategies.methods.federated.clients import parse as parse_clients
from lockstep.strategies.methods.federated.control import ClientStates, Control
from lockstep.strategies.methods.federated.copy import FreshOptimizers, RefusedOnClient, ServerCopy
from lockstep.strategies.methods.federated.loader import FederatedLoader, Round, RoundSummary
from lockstep.strategies.methods.federated.server import Server
from lockstep.strategies.methods.federated.server import parse as parse_server
from lockstep.strategies.methods.kept import Kept
from lockstep.strategies.methods.options import check_whole, made_by
from lockstep.strategies.modules.blocks import Rule
from lockstep.strategies.modules.model_changes import refuse_sync_batch_norm
from lockstep.strategies.optimizers import modes
from lockstep.strategies.optimizers.closures import needs_closure
from lockstep.strategies.sync.buffers import share_model
from lockstep.strategies.sync.collectives import broadcast

_log = logging.getLogger("lockstep")
_REFUSES = {
    "manual_optimization": "Federated steps each client itself, so it needs automatic optimization; return a loss",
    "backward": own_backward_refused("Federated runs it on each client"),
    "closures": "Federated computes each local step once, so an optimizer that calls a closure again is refused; "
    "use another optimizer",
    "assigned_optimizers": "Federated steps them for several clients",
    "16-mixed": "precision='16-mixed' adapts one loss scale to all steps, and clients are independent of each other; "
    "with Federated use 'bf16-mixed'",
}


class Federated(ClientSteps):
    """Federated averaging: in each round some clients train the server's model on their own samples, and the server
    steps along the mean of how far they moved, weighted by what their losses counted.

    A round is one `global_step` and one epoch. Clients run one after the other on each rank, from the server's weights,
    with the user's optimizer as it was built, and draw from random streams of (seed, round, client). What they send is
    added in fixed point, so losses and weights are bit for bit the same on any number of ranks. BatchNorm's running
    statistics, other floating-point buffers and parameters without an optimizer are averaged with the same weights.
    `gradient_clip_val` and `accumulate_grad_batches` apply to each client's local steps, learning-rate schedulers step
    by round.

    Args:
        clients: Whose sample it is: a key of the dataset's items, a function of a sample's index, or
            `dirichlet(0.3, n=100)`, also as a string.
        fraction: Part of the clients that is drawn for each round, at least one client.
        local_epochs: How often a client goes through its samples in a round.
        server: "fedavg" (McMahan et al., 2017), "fedadam" (Reddi et al., 2021), "fedprox=0.01" (Li et al., 2020, with
            its mu), "scaffold" (Karimireddy et al., 2020), or a function of parameters that returns the server's
            optimizer, which gets the mean of (server - client) as the gradient.
        server_lr: The server's learning rate; None is 1, with "fedadam" 0.01.
        num_threads: Threads of each rank on a CPU: their number decides the order of sums within an operation.
        state_dir: Where SCAFFOLD keeps the state of each client on disk, in a file that goes with the process; None is
            the system's temporary folder.
    """

    capabilities = Capabilities(exact=False, local_steps=True, refuses=_REFUSES)
    stays_on_one_rank = sees_whole_gradients = True
    client_states = ClientStates
    """What keeps the vectors of SCAFFOLD's clients."""

    def __init__(
        self,
        clients: Any = None,
        *,
        fraction: float = 0.1,
        local_epochs: int = 1,
        server: str | Server = "fedavg",
        server_lr: float | None = None,
        num_threads: int = 1,
        state_dir: str | None = None,
        activation_checkpointing: bool | Rule = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, but fraction={fraction}")
        for name, number in (("local_epochs", local_epochs), ("num_threads", num_threads)):
            check_whole(name, number, 1)
        self.clients = None if clients is None else parse_clients(clients)
        self.server, self._make_server, self._mu = parse_server(server, server_lr)
        self.fraction, self.local_epochs, self.num_threads = fraction, local_epochs, num_threads
        self.timeout_s, self.state_dir = timeout_s, state_dir
        self.last_round: RoundSummary | None = None
        """The last round; None before the first."""
        self._threads: int | None = None
        self._servers: dict[int, Optimizer] = {}
        self._fresh, self._kept, self._optimizers = FreshOptimizers([]), Kept({}), []
        self._scale, self._samples, self._population, self._has_clients = 1.0, 0, 0, False

    def setup(self) -> Topology:
        super().setup()
        self._has_clients = False
        if self._on_cpu and self._threads is None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(self.num_threads)
        return self.topology

    def teardown(self) -> None:
        super().teardown()
        self._fresh = FreshOptimizers([])  # what servers hold stays for a checkpoint after the run
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    def check(self, model: nn.Module) -> None:
        refuse_sync_batch_norm(model, "clients train apart")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_complex():
                raise ValueError(f"Federated averages real numbers, but {name} is {tensor.dtype}; hold it as two")
        super().check(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.topology.device)
        if self._in_group:
            share_model(model)
        return model

    def setup_optimizers(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        for optimizer in filter(modes.has_modes, optimizers.values()):
            raise ValueError(
                f"{type(optimizer).__name__} has weights to train and weights to evaluate, of which a client would "
                "send one kind; use an optimizer without train() and eval() with Federated"
            )
        if any(map(needs_closure, optimizers.values())):
            self._refuse("closures")
        optimizers = super().setup_optimizers(wrapped, optimizers)
        self._optimizers = list(optimizers.values())
        self._fresh = FreshOptimizers(self._optimizers)
        self._servers = {
            id(optimizer): made_by(self._make_server, _held(optimizer), "server") for optimizer in self._optimizers
        }
        self._kept = Kept({key: self._servers[id(optimizer)] for key, optimizer in optimizers.items()})
        if self._control is not None:
            self._control.close()
        if self.server == "scaffold":
            self._control = Control(self.client_states(self.state_dir))
        return optimizers

    def shard_loader(
        self, loader: Any, *, seed: int, shuffle: bool | None = None, accumulate: int = 0, split: bool = False
    ) -> ShardedLoader:
        """With `accumulate` the loader to train on, in rounds; without it one to evaluate, as every strategy shards
        it."""
        if not accumulate:
            return super().shard_loader(loader, seed=seed, shuffle=shuffle, split=split)
        if self.clients is None:
            raise ValueError(
                "Federated needs clients: a key of the dataset's items, a function of a sample's index or "
                "dirichlet(0.3, n=100); give strategy=Federated(clients=…)"
            )
        if split:
            raise ValueError(
                "split_batches=True cuts one global batch, but the batch_size of Federated is each client's own; "
                "remove it"
            )
        size = self.topology.world_size
        sharded = FederatedLoader(
            loader,
            self.clients,
            rank=self.topology.rank,
            size=size,
            seed=seed,
            shuffle=shuffle,
            accumulate=accumulate,
            fraction=self.fraction,
            local_epochs=self.local_epochs,
            rank_of=None if self.server != "scaffold" else lambda client: client % size,
        )
        population = sharded.population
        largest = max(population.num_samples(client) for client in range(len(population)))
        self._scale = 0.5 ** (largest * self.local_epochs).bit_length()
        self._samples = len(population.order)
        before = self._population
        self._population = zlib.crc32(repr((population.names, population.starts.tolist())).encode())
        if self._has_clients and self.server == "scaffold" and before != self._population:
            raise ValueError(
                "the training data was loaded again and now has other clients, for which server='scaffold' would take "
                "the control variates of those before; keep the clients, or use another server"
            )
        self._has_clients = True
        return sharded

    # ---- a round -------------------------------------------------------------------------------------

    def forward_backward(
        self, wrapped: nn.Module, step_fn: StepFn, window: Window, hooks: StepHooks = NO_HOOKS
    ) -> StepResult:
        """Train this rank's participants, and leave the weighted mean of (server - client) in `.grad`."""
        if not hooks.automatic:
            self._refuse("manual_optimization")
        if not isinstance(window, Round):
            raise TypeError("Federated trains in rounds: give shard_loader the training loader with accumulate=1")
        began, self._step_hooks, model = time.perf_counter(), hooks, self.unwrap(wrapped)
        held = {id(parameter) for optimizer in self._optimizers for parameter in _held(optimizer)}
        server = ServerCopy(model, held, self.topology.device)
        if self._control is not None:
            self._control.begin([server.named[i] for i in server.trained])
        run = RoundRun(model, self.run_step(wrapped, step_fn), hooks, server, window, held, self._scale)
        for parameter in model.parameters():
            parameter.grad = None
        self._refusal = _on_client
        try:
            self._run_clients(run)
        finally:
            self._refusal = None
            server.put()
            self._fresh.reset()
            seed_streams(window.seed)
            for name, stream in (hooks.streams or {}).items():
                stream.manual_seed(mix(window.seed, zlib.crc32(name.encode())))
        for parameter in model.parameters():  # which the loop finds
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in run.unowned else None
        vote = hooks.vote()
        result = StepResult(0, vote.stop, None)
        if self._agreement is not None:
            vote = vote._replace(keys=0)  # some ranks may have no client yet: names are compared where they are shown
            self._agreement.send(vote, window.num_samples, run.counted, True)
            result = self._receive(wrapped, self._agreement)
        return self._average(run, result, began)

    def _average(self, run: RoundRun, result: StepResult, began: float) -> StepResult:
        """Add what all participants have become, and leave the mean for the server's step. Every rank calls it."""
        window, server = run.window, run.server
        total, weight, loss, clients = server.reduce()
        dropped = self._name_failures(run) if clients < len(window.participants) else []
        bad = next((note for note in dropped if "bad" in note), None)
        if bad is None and self._control is not None:
            self._control.reduce()
        if bad is None and weight:
            server.finish(total, weight)
        size = server.num_bytes + (0 if self._control is None else self._control.num_bytes)
        self.last_round = RoundSummary(
            window.number,
            clients,
            len(dropped),
            weight / run.scale,
            size * len(window.participants),
            size * clients,
            time.perf_counter() - began,
        )
        if run.hooks.log is not None:
            for name in ("participants", "dropped", "samples", "bytes_down", "bytes_up"):
                run.hooks.log(f"federated/{name}", getattr(self.last_round, name), "mean", 1.0)
        if bad is not None:
            return result._replace(count=1.0, non_finite=f"{bad['bad']} of client {bad['name']!r}")
        return result._replace(count=weight / run.scale, loss=loss / weight if weight else None)

    def _name_failures(self, run: RoundRun) -> list[dict[str, Any]]:
        """Log which clients have raised, on rank 0; return the notes of all ranks in the order of clients. Raises the
        error of the first one if no client is left. Every rank calls it."""
        number, notes = run.window.number, run.notes
        if self._in_group:
            notes = [note for rank in range(self.topology.world_size) for note in broadcast(run.notes, rank)]
        notes = sorted(notes, key=lambda note: note["client"])
        raised = [note for note in notes if "error" in note]
        if len(raised) == len(run.window.participants):
            first = raised[0]
            if first["client"] in run.errors:
                raise run.errors[first["client"]]
            raise RuntimeError(
                f"each participant of round {number} raised, first client {first['name']!r}: {first['error']}"
            )
        if self.topology.rank == 0:
            for note in raised:
                _log.warning(
                    f"client {note['name']!r} raised in round {number} and is dropped from it: {note['error']}"
                )
        return notes

    def optimizer_step(
        self, wrapped: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> bool:
        """On a client a step of its optimizer; else the server's step for the parameters of `optimizer`."""
        if closure is not None:
            self._refuse("closures")
        if self._refusal is _on_client:
            optimizer.step()
            return True
        if self._agreement is not None and self._on_cpu:
            self._agreement.check()
        server = self._servers[id(optimizer)]
        known = set(map(id, _held(server)))
        if added := [parameter for parameter in _held(optimizer) if id(parameter) not in known]:
            server.add_param_group({"params": added})
        server.step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # by no client of this rank, and torch would warn
        if self._control is not None:
            self._control.commit(self._samples * self._scale)
        return True

    @contextmanager
    def whole(self, wrapped: nn.Module) -> Iterator[None]:
        if self._refusal is not None:
            raise self._refusal("trainer.whole")
        with super().whole(wrapped):
            yield

    # ---- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer]) -> State:
        state = super().state_dict(wrapped, optimizers)
        if not (optimizers := self._with_servers(optimizers)):
            return state
        names, kept = parameter_names(self.unwrap(wrapped)), self._kept.save(state.tensors, self)
        saved: dict[str, Any] = {"server": self.server, "kept": kept, "optimizers": {}}
        for key, optimizer in optimizers.items():
            of_server = {names_of(p, names, key): value for p, value in self._servers[id(optimizer)].state.items()}
            saved["optimizers"][key] = {
                name: pack(value, f"strategy/server/{key}/{name}", state.tensors, self.local_shard)
                for name, value in of_server.items()
            }
        if self._control is not None:
            saved["population"] = self._population
            saved["control"] = pack(self._control.server, "strategy/control", state.tensors, self.local_shard)
            for client in self._control.states.clients():
                state.tensors[f"strategy/clients/{client}"] = TensorShard.whole(self._control.mapped(client))
        state.meta.setdefault("extra", {})[self.name] = saved
        return state

    def _with_servers(self, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Those of clients: what callbacks keep beside the parameters is saved as an optimizer too."""
        return {key: optimizer for key, optimizer in optimizers.items() if id(optimizer) in self._servers}

    def load_state_dict(self, wrapped: nn.Module, optimizers: dict[str, Optimizer], state: Reader) -> None:
        super().load_state_dict(wrapped, optimizers, state)
        if not (optimizers := self._with_servers(optimizers)):
            return
        saved = state.meta.get("extra", {}).get(self.name, {})
        if saved and saved["server"] != self.server:
            raise ValueError(
                f"the checkpoint is of server={saved['server']!r}, whose state is not that of {self.server!r}; "
                "resume with the same server, or begin a new run from its weights"
            )
        parameters = dict(self.unwrap(wrapped).named_parameters())
        self._kept.load(saved.get("kept", {}), state)
        for key, optimizer in optimizers.items():
            server = self._servers[id(optimizer)]
            server.state.clear()
            for name, value in saved.get("optimizers", {}).get(key, {}).items():
                device = parameters[name].device
                server.state[parameters[name]] = {
                    k: v.to(device) if isinstance(v, Tensor) and v.dim() else v
                    for k, v in unpack(value, state.read).items()
                }
        if self._control is not None:
            if saved and saved["population"] != self._population:
                raise ValueError(
                    "the checkpoint has control variates of other clients than the training data now has; resume with "
                    "the same data and clients, or begin a new run from its weights"
                )
            control = unpack(saved.get("control", {}), state.read)
            ranks, rank, prefix = self.topology.world_size, self.topology.rank, "strategy/clients/"
            mine = (int(name.removeprefix(prefix)) for name in state.names(prefix))
            self._control.load(
                {name: value.to(self.topology.device) for name, value in control.items()},
                ((client, state.read(f"{prefix}{client}")) for client in mine if client % ranks == rank),
            )


def _on_client(what: str) -> RuntimeError:
    return RefusedOnClient(
        f"{what} was called while a client trained, which it does on one rank; call it in a hook of the epoch"
    )


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
