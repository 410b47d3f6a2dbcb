"""Steps a second over a link of 100 Mbit/s, as a share of those over the loopback device, and bytes beside the formula.

    python -m benchmarks.slow_link [--rows "ddp,topk=0.01"] [--mbit 100] [--batch 640] [--json FILE]
    python -m benchmarks.slow_link --delay 50 [--rows "ddp,diloco"]
    python -m benchmarks.slow_link --quality "topk=0.01 powersgd=4 diloco" [--seeds 3]

Needs root on Linux, `ip` and `tc`. Two network namespaces are joined by a veth pair, each end with `tc qdisc … tbf`;
one rank runs in each, started by the variables of torchrun. The same two ranks over the loopback device are the
reference, in the same run. The model is four layers of a million parameters each, and `--batch` is such that without
compression its gradients take six times as long as the rest of the step or longer. Bytes are what the kernel counts on
the veth of rank 0 (`tx_bytes`), with headers and control messages. The namespaces are gone at the end, also after an
error or a kill.

Steps within a round are those after which learners do not meet. Of them the table has the median time beside that of
the loopback device, and what was sent during all of them; of the others, how much longer they take, beside the time
that the bytes need at the rate of the link. With `--delay 50` each packet takes 50 milliseconds (`_delay_line.py`).

`--quality` trains examples/digits.yaml on two ranks with each compressor or method for its 10 epochs, and shows the
validation accuracy of the worst seed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from benchmarks._rounds import described, machine, table, write_json
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import DDP, DiLoCo, LocalSGD, Strategy
from tests.multinode.hosts import ADDRESSES, INTERFACE, Host, enter, two_hosts

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS = 1024, 4
NUMEL = LAYERS * WIDTH * WIDTH
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One strategy of the table."""

    make: Callable[[], Strategy]
    payload: Callable[[int], float] | None = None
    """Bytes sent per step by each of two ranks, from the number of parameters; None without a formula."""
    steps: int = 8
    """To be timed over the slow link, after the first ones."""
    warmup: int = WARMUP_STEPS


def compressed(name: str, payload: Callable[[int], float], steps: int = 25) -> Row:
    return Row(lambda: DDP(compress=name), payload, steps)


ROWS: dict[str, Row] = {
    "ddp": Row(DDP, lambda n: 4 * n),
    "fp16": compressed("fp16", lambda n: 2 * n, 8),
    "int8": compressed("int8", lambda n: n + 4 * n / 256, 8),
    "topk=0.01": compressed("topk=0.01", lambda n: 8 * 0.01 * n),
    "powersgd=4": compressed("powersgd=4", lambda n: 4 * 4 * 2 * (LAYERS * n) ** 0.5),
    "qsgd=4": compressed("qsgd=4", lambda n: n / 2 + 4 * n / 512, 8),
    "sign": compressed("sign", lambda n: n / 8),
    "local_sgd+topk": Row(lambda: LocalSGD(period=1, compress="topk=0.01"), lambda n: 8 * 0.01 * n, 25),
    "diloco": Row(lambda: DiLoCo(period=50), lambda n: 3 * 4 * n / 147, 147),
    "diloco+int8": Row(
        lambda: DiLoCo(period=50, fragments=4, delay=5, mixing=0.0, compress="int8"),
        lambda n: 5 * (n + 4 * n / 256) / 197,
        197,
    ),
}
"""By name what is compared. A round of DiLoCo is 50 steps; the end of the run sends once more what is under way."""
TRAINED = {
    "ddp": ["strategy=ddp"],
    "local_sgd+topk": ["strategy=local_sgd", "strategy.period=1", "strategy.compress=topk=0.01"],
    "diloco": ["strategy=diloco", "strategy.period=50"],
    "diloco+int8": [
        *("strategy=diloco", "strategy.period=50", "strategy.fragments=4", "strategy.delay=5"),
        *("strategy.mixing=0.0", "strategy.compress=int8"),
    ],
}
"""What `--quality` trains, beside compressors; a validation ends a round early."""
TARGETS = {
    "ddp": "< 20 %",
    "topk=0.01": ">= 80 %",
    "local_sgd+topk": ">= 80 %",
    "diloco": ">= 80 %",
    "diloco+int8": ">= 95 %",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure strategies over a slow link.")
    parser.add_argument("--rows", default="ddp,topk=0.01", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0, help="milliseconds that a packet takes, each way")
    parser.add_argument("--batch", type=int, default=640, help="samples a rank and step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quality", help="compressors and rows, with spaces: train the digits with them instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        on_rank(arguments.rank_of, arguments.batch)
    elif arguments.quality:
        quality(arguments.quality.split(), arguments.seeds)
    else:
        rows = over_links(arguments.rows.split(","), arguments.mbit, arguments.batch, arguments.delay)
        columns = {
            "ms on loopback": ("loopback_ms", ".0f"),
            f"ms at {arguments.mbit} Mbit/s": ("slow_ms", ".0f"),
            "share of loopback": ("share", ".1%"),
            "of ddp's loopback": ("share_of_ddp", ".1%"),
            "kB sent": ("sent_kb", ".0f"),
            "of the formula": ("of_formula", ".3f"),
            "target": ("target", ""),
        }
        rounds = {
            "steps within rounds": ("within", ""),
            "ms on loopback": ("within_loopback_ms", ".2f"),
            "ms over the link": ("within_ms", ".2f"),
            "ratio": ("within_ratio", ".3f"),
            "bytes sent in them": ("within_sent", ""),
            "s to meet": ("meet_s", ".2f"),
            "of its bytes' time": ("of_bytes_time", ".3f"),
        }
        facts = machine()
        print(described(facts))
        print(table(rows, columns))
        met = {name: row for name, row in rows.items() if row["within"]}
        if met:
            print(table(met, rounds))
        if "ddp" in rows:
            link = rows["ddp"]["slow_ms"] - rows["ddp"]["loopback_ms"]
            print(f"gradients over the link take {link / rows['ddp']['loopback_ms']:.1f} x the rest of ddp's step")
        write_json(arguments.json, facts, rows, columns={"": columns}, rounds=1)


def over_links(names: list[str], mbit: int, batch: int, delay_ms: float) -> dict[str, dict[str, Any]]:
    """Of each row milliseconds a step without and with the slow link, and what was sent over it."""
    rows: dict[str, dict[str, Any]] = {}
    with two_hosts() as hosts, delay_line(hosts, delay_ms) if delay_ms else contextlib.nullcontext():
        for host in hosts:
            shape = f"tc qdisc add dev {INTERFACE} root tbf rate {mbit}mbit burst 64kb latency 50ms"
            subprocess.run([*enter(host.pid, "--net"), *shape.split()], check=True)
        for name in names:
            fast, slow = ranks(name, None, batch), ranks(name, hosts, batch)
            payload = ROWS[name].payload
            rows[name] = {
                "loopback_ms": fast["ms"],
                "slow_ms": slow["ms"],
                "share": fast["ms"] / slow["ms"],
                "sent_kb": slow["sent"] / 1000,
                "of_formula": None if payload is None else slow["sent"] / payload(NUMEL),
                "target": TARGETS.get(name),
                "within": slow["within"],
            }
            if slow["within"]:
                rows[name] |= {
                    "within_loopback_ms": fast["within_ms"],
                    "within_ms": slow["within_ms"],
                    "within_ratio": slow["within_ms"] / fast["within_ms"],
                    "within_sent": slow["within_sent"],
                }
            if slow["meet_sent"] and slow["meet_sent"] > slow["within_sent"]:
                seconds = (slow["meet_ms"] - slow["within_ms"]) / 1000
                rows[name] |= {"meet_s": seconds, "of_bytes_time": seconds / (slow["meet_sent"] * 8 / mbit / 1e6)}
            print(f"{name}: {fast['ms']:.0f} ms a step, {slow['ms']:.0f} ms over the link", file=sys.stderr, flush=True)
    for row in rows.values():
        row["share_of_ddp"] = rows["ddp"]["loopback_ms"] / row["slow_ms"] if "ddp" in rows else None
    return rows


@contextlib.contextmanager
def delay_line(hosts: tuple[Host, Host], delay_ms: float) -> Iterator[None]:
    """Replace the cable between hosts by one on which packets take so long, each way."""
    hosts[0].ip(f"link delete {INTERFACE}")
    command = [sys.executable, "-m", "benchmarks._delay_line", *(str(host.pid) for host in hosts), str(delay_ms)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as line:
        assert line.stdout is not None
        if not line.stdout.readline():
            raise SystemExit("the delay line has ended")
        for host in hosts:
            host.ip(f"address add {host.address}/24 dev {INTERFACE}")
            host.ip(f"link set {INTERFACE} up")
        yield
        line.communicate()


def ranks(name: str, hosts: tuple[Host, Host] | None, batch: int) -> dict[str, Any]:
    """What rank 0 found, with a rank on each of the hosts, or two on this machine."""
    command = [sys.executable, "-m", "benchmarks.slow_link", "--rank-of", name, "--batch", str(batch)]
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, ended(started):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        outputs = [Path(folder, f"rank{rank}") for rank in range(2)]
        for rank, output in enumerate(outputs):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0 if hosts else rank, "MASTER_PORT": port}
            variables |= {"LOCAL_WORLD_SIZE": 1 if hosts else 2, "MASTER_ADDR": ADDRESSES[0] if hosts else "127.0.0.1"}
            variables |= {"GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo", "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
            environment = os.environ | {key: str(value) for key, value in variables.items()}
            if hosts:
                started.append(hosts[rank].start(command, output, environment, ROOT))
            else:
                with output.open("wb") as file:
                    started.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT))
        until = time.monotonic() + 280
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            if any(process.poll() for process in started):
                break
            time.sleep(0.2)
        codes = [process.poll() for process in started]
        texts = [output.read_text() for output in outputs]
    if any(code != 0 for code in codes):
        raise SystemExit(f"{name} ended with {codes}:\n" + "\n".join(texts))
    return json.loads(texts[0].splitlines()[-1])


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Kill what still runs at the end."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


class Wide(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Marks(Callback):
    """Time and bytes at the beginning of each timed step and at the end, and whether learners met in it."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.marks, self.met = warmup, [], []

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), sent_bytes()))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.warmup:
            self._mark()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.marks:
            self.met.append(trainer.strategy.ranks_meet)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._mark()

    def found(self) -> dict[str, float | None]:
        steps = [(t - s, sent - before) for (s, before), (t, sent) in itertools.pairwise(self.marks)]
        within = [step for step, met in zip(steps, self.met, strict=True) if not met]
        meets = [step for step, met in zip(steps, self.met, strict=True) if met] if within else []
        return {
            "ms": statistics.mean(seconds for seconds, _ in steps) * 1e3,
            "sent": statistics.mean(sent for _, sent in steps),
            "within": len(within),
            "within_ms": statistics.median(seconds for seconds, _ in within) * 1e3 if within else None,
            "within_sent": sum(sent for _, sent in within),
            "meet_ms": statistics.median(seconds for seconds, _ in meets) * 1e3 if meets else None,
            "meet_sent": statistics.median(sent for _, sent in meets) if meets else None,
        }


def on_rank(name: str, batch: int) -> None:
    row = ROWS[name]
    torch.manual_seed(0)
    marks, steps = Marks(row.warmup), row.warmup + row.steps
    data = ConcatDataset([TensorDataset(torch.randn(8 * batch, WIDTH))] * (steps // 4 + 1))  # one epoch
    Trainer(
        strategy=row.make(),
        accelerator="cpu",
        max_steps=steps,
        callbacks=[marks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_nodes=2 if os.environ["LOCAL_WORLD_SIZE"] == "1" else 1,
    ).fit(Wide(), DataLoader(data, batch))
    print(json.dumps(marks.found()))


def sent_bytes() -> int:
    """What the kernel has sent over the link, in this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def quality(names: list[str], seeds: int) -> None:
    from benchmarks.methods import measure

    print("| | seed | val/acc |\n|---|---|---|")
    for name in ["ddp", *names]:
        worst = 1.0
        for seed in range(seeds):
            strategy = TRAINED.get(name, ["strategy=ddp", f"strategy.compress='{name}'"])
            history, *_ = measure("digits", [*strategy, "devices=2", f"seed={seed}"])
            worst = min(worst, history["val/acc"][-1][1])
            print(f"| {name} | {seed} | {history['val/acc'][-1][1]:.4f} |", flush=True)
        print(f"| {name} | worst | {worst:.4f} |", flush=True)


if __name__ == "__main__":
    main()
