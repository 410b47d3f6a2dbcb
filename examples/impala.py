"""IMPALA on CartPole: actors in processes of their own, and a learner that corrects for their lag by V-trace.

    lockstep fit examples/impala.yaml                           # needs lockstep-trainer[examples]
    lockstep fit examples/impala.yaml data.actors=4             # the same bits from four processes
    lockstep fit examples/impala.yaml data.record=FILE          # and data.replay=FILE: the same bits without actors
    lockstep fit examples/impala.yaml strategy=ddp devices=2    # each rank has actors of its own

Expect a mean return of 500, the most there is, within a minute on two cores. docs/methods/actors.md has the method.
"""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import DataModule, Loss, Module

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])  # an actor is a fork of a process that has imported this


def net(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


def vtrace(log_ratios: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of the values, advantages of the actions; `values` is `[T + 1, ...]`, all others are `[T, ...]`.

    `log_ratios`: the learner's log-probability of an action less the actor's, -inf where a step does not count."""
    rhos = log_ratios.exp().clamp(max=1)
    deltas = rhos * (rewards + discounts * values[1:] - values[:-1])
    corrections = [torch.zeros_like(values[0])]
    for t in reversed(range(len(deltas))):
        corrections.append(deltas[t] + discounts[t] * rhos[t] * corrections[-1])
    targets = values + torch.stack(corrections[::-1])
    return targets[:-1], rhos * (rewards + discounts * targets[1:] - values[:-1])


class Policy(Module):
    def __init__(self, width: int = 64, lr: float = 3e-3, discount: float = 0.99, entropy: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.policy, self.value = net(width, 2), net(width, 1)

    def on_fit_start(self):
        strategy, place = self.trainer.strategy.capabilities, self.trainer.strategy.topology
        fits = strategy.runs_step_once and place.data_size == place.world_size
        if not self.trainer.datamodule.replay and (self.trainer.accumulate_grad_batches > 1 or not fits):
            raise ValueError("actors need single, ddp or fsdp, and no accumulation: they wait for each batch's weights")

    def publish(self, *_):
        if not self.trainer.datamodule.replay:
            with self.trainer.whole(self):  # on every rank, whatever shards the model
                self.trainer.datamodule.publish(parameters_to_vector(self.policy.parameters()).detach())

    on_train_start = on_train_batch_end = publish

    def training_step(self, batch, batch_idx):
        batch = {name: value.transpose(0, 1) for name, value in batch.items()}  # [groups, T, ...] -> [T, groups, ...]
        valid, count = batch["valid"], batch["valid"].sum()
        values = self.value(batch["obs"]).squeeze(-1)
        logp = self.policy(batch["obs"][:-1]).log_softmax(-1)
        taken = logp.gather(-1, batch["action"].long().unsqueeze(-1)).squeeze(-1)
        ratios = (taken.detach() - batch["logp"]).masked_fill(valid == 0, -torch.inf)
        discounts = self.hparams.discount * (1 - batch["terminated"])  # what follows a truncated episode has a value
        targets, advantages = vtrace(ratios, discounts, batch["reward"] * (1 - self.hparams.discount), values.detach())
        value_loss = (values[:-1] - targets).square().mul(valid).sum() / 2
        entropy = -(logp.exp() * logp).sum(-1).mul(valid).sum()
        self.log("train/value_loss", value_loss / count, batch_size=count.item())
        self.log("train/return", batch["returned"].mean(), prog_bar=True)
        self.log("train/lag", batch["lag"].max(), reduce_fx="max")
        return Loss(value_loss - (taken * advantages).sum() - self.hparams.entropy * entropy, count)

    def validation_step(self, batch, batch_idx):
        """An episode for each seed of `batch[0]`, 500 steps even if all end earlier: under fsdp ranks keep pace."""
        games = gymnasium.make_vec("CartPole-v1", len(batch[0]), vectorization_mode="sync")
        obs, _ = games.reset(seed=batch[0].tolist())
        returns, alive = np.zeros(len(obs)), np.ones(len(obs))
        for _ in range(500):
            action = self.policy(torch.tensor(obs, device=self.device, dtype=self.dtype)).argmax(-1).cpu().numpy()
            obs, reward, terminated, truncated, _ = games.step(action)
            returns += alive * reward
            alive *= ~(terminated | truncated)
        self.log("val/return", returns.mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer, steps = torch.optim.Adam(self.parameters(), lr=self.hparams.lr), self.trainer.max_steps
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


class Plan(NamedTuple):
    """What makes the rollouts of given weights; the number of actors and ranks does not."""

    seed: int = 0
    groups: int = 4  # of games that are played together; a rollout of each is an item of the dataset at every step
    games: int = 8  # of a group
    length: int = 20  # steps of a rollout
    max_lag: int = 1  # steps of the learner from the weights that make a rollout to those that it moves
    width: int = 64

    @property
    def rollout(self) -> np.dtype:
        shapes = dict.fromkeys(["action", "logp", "reward", "terminated", "valid"], (self.length, self.games))
        shapes |= {"obs": (self.length + 1, self.games, 4), "returned": (self.games,), "lag": (1,)}
        return np.dtype([(name, np.float32, shape) for name, shape in shapes.items()])


class Group:
    """Games that go from rollout to rollout. The first step after the end of an episode only resets its game."""

    def __init__(self, plan: Plan, seed: list[int]):
        self.plan, self.noise = plan, np.random.default_rng(seed)
        self.env = gymnasium.make_vec("CartPole-v1", plan.games, vectorization_mode="vector_entry_point")
        self.obs, _ = self.env.reset(seed=int(self.noise.integers(2**31)))
        self.done, self.score, self.returned = np.zeros((3, plan.games), np.float32)

    def play(self, policy: nn.Module, lag: int, out: np.ndarray) -> None:
        for t in range(self.plan.length):
            logp = policy(torch.from_numpy(self.obs)).log_softmax(-1).numpy()
            action = (self.noise.random(self.plan.games) < np.exp(logp[:, 1])).astype(np.int64)
            out["obs"][t], out["action"][t], out["valid"][t] = self.obs, action, 1 - self.done
            out["logp"][t] = np.take_along_axis(logp, action[:, None], 1)[:, 0]
            self.obs, reward, terminated, truncated, _ = self.env.step(action)
            out["reward"][t], out["terminated"][t] = reward, terminated
            self.score = (self.score + reward) * (1 - self.done)
            self.done = (terminated | truncated).astype(np.float32)
            self.returned = np.where(self.done, self.score, self.returned)
        out["obs"][-1], out["returned"], out["lag"] = self.obs, self.returned, lag


def act(orders: Any, plan: Plan, seeds: dict[int, list[int]], weights: Any, rollouts: Any) -> None:
    """The process of an actor: plays its groups at each step that it receives, until the learner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_grad_enabled(False), torch.set_num_threads(1)
    policy, slots = net(plan.width, 2), plan.max_lag + 1
    versions = torch.frombuffer(weights, dtype=torch.float32).view(slots, -1)
    out = np.frombuffer(rollouts, plan.rollout).reshape(slots, plan.groups)
    groups = {number: Group(plan, seed) for number, seed in seeds.items()}
    with suppress(EOFError, OSError):
        while True:
            step = orders.recv()
            version = max(0, step - plan.max_lag)
            vector_to_parameters(versions[version % slots], policy.parameters())
            for number, group in groups.items():
                group.play(policy, step - version, out[step % slots, number])
            orders.send(step)


class Rollouts(DataModule, IterableDataset):
    """The rollouts of this rank's groups, step by step, counted from the start or resume of a run.

    Step s is played with version s - max_lag of the weights. Both are in shared memory, version v and the rollouts of
    step v in slot v modulo max_lag + 1. So version s + 1 replaces what step s used, and is published after that.
    """

    shards_itself = True

    def __init__(self, actors: int = 2, record: str | None = None, replay: str | None = None, **plan: int):
        super().__init__()
        self.plan, self.num_actors, self.record, self.replay = Plan(**plan), actors, record, replay
        self.actors: list[tuple[Any, Any]] = []  # process and connection
        self.start = self.step = self.version = 0

    def prepare_data(self):
        if self.record:
            open(self.record, "x").close()

    def train_dataloader(self):
        rank, size = self.trainer.strategy.topology.data_rank, self.trainer.strategy.topology.data_size
        self.groups = range(rank * self.plan.groups // size, (rank + 1) * self.plan.groups // size)
        dataset = np.memmap(self.replay, self.plan.rollout, "r") if self.replay else self
        return DataLoader(dataset, self.plan.groups, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(10_000, 10_100)), batch_size=50)

    def teardown(self, stage):
        self.actors = []  # which end as their connections close

    def state_dict(self) -> dict[str, int]:
        return {"step": self.start + self.step}  # a resumed run begins new games

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["step"]

    def publish(self, weights: Tensor) -> None:
        """Let the actors play one more step, with the next version of the weights, which are flat."""
        slots = self.plan.max_lag + 1
        if not self.version:
            self.weights = FORKS.RawArray("f", slots * len(weights))
            self.rollouts = FORKS.RawArray("b", slots * self.plan.groups * self.plan.rollout.itemsize)
        torch.frombuffer(self.weights, dtype=torch.float32).view(slots, -1)[self.version % slots] = weights
        for _, orders in self.actors:
            with suppress(OSError):  # a dead one is found when its rollouts are due
                orders.send(self.version + self.plan.max_lag)
        self.version += 1

    def launch(self, number: int) -> tuple[Any, Any]:
        orders, theirs = FORKS.Pipe()
        seeds = {g: [self.plan.seed, g, self.start + self.step] for g in self.groups[number :: self.num_actors]}
        process = FORKS.Process(target=act, args=(theirs, self.plan, seeds, self.weights, self.rollouts), daemon=True)
        process.start()
        theirs.close()
        for step in range(self.step, self.version + self.plan.max_lag):
            orders.send(step)
        return process, orders

    def wait(self, number: int) -> None:
        """Until an actor has played the step. One that was killed is replaced."""
        process, orders = self.actors[number]
        try:
            orders.recv()
        except (EOFError, OSError):
            process.join()
            name = f"actor {number} (process {process.pid})"
            if process.exitcode >= 0:
                raise RuntimeError(f"{name} ended with exit code {process.exitcode}; see its traceback") from None
            killer = signal.Signals(-process.exitcode).name
            warnings.warn(f"{name} was killed by {killer} at step {self.step}; another begins new games", stacklevel=2)
            self.actors[number] = self.launch(number)
            self.wait(number)

    def __iter__(self) -> Iterator[np.ndarray]:
        slots = np.frombuffer(self.rollouts, self.plan.rollout).reshape(-1, self.plan.groups)
        self.actors = self.actors or [self.launch(number) for number in range(min(self.num_actors, len(self.groups)))]
        with open(self.record or os.devnull, "r+b") as file:
            while True:
                for number in range(len(self.actors)):
                    self.wait(number)
                played = slots[self.step % len(slots), self.groups]
                place = (self.start + self.step) * self.plan.groups + self.groups[0]
                os.pwrite(file.fileno(), played.tobytes(), place * played.itemsize)
                self.step += 1
                yield from played


def collate(rollouts: list[np.ndarray]) -> dict[str, Tensor]:
    stacked = np.stack(rollouts)
    return {name: torch.from_numpy(stacked[name]) for name in stacked.dtype.names}  # [groups, ...]
