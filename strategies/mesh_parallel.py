"""Several kinds of parallelism at once, on a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from strategies.mesh import devices_of, parse
from strategies.options import Options
from strategies.sharded import ShardedStrategy


class MeshParallel(ShardedStrategy):
    """Several kinds of parallelism at once, such as `"fsdp=2,tensor=2"` on four ranks.

    `axes`: names and sizes of the axes ddp, fsdp and tensor, in any order; ranks are numbered with tensor
        innermost and ddp outermost. One axis may have no size and takes the ranks that are left: `"fsdp,tensor=2"`.
    `options`: what FSDP and TensorParallel take, each in its own words; see `Options`.
    `timeout_s`: seconds that a collective waits for the other ranks.
    """

    def __init__(self, axes: str, *, options: Options | None = None, timeout_s: float = 1800.0) -> None:
        self._parsed = parse(axes)
        if "pipeline" in self._parsed:
            raise ValueError(f"MeshParallel places the axes ddp, fsdp and tensor, but axes={axes!r} has pipeline; give it as the strategy's name")
        super().__init__(options or Options(), timeout_s)

    @property
    def _axes(self) -> Mapping[str, int | None]:
        return self._parsed

    def configure(self, *, devices: int | str = "auto", accelerator: str = "auto", num_nodes: int = 1, precision: str = "32-true") -> None:
        super().configure(devices=devices_of(self._parsed, devices, num_nodes), accelerator=accelerator, num_nodes=num_nodes, precision=precision)
