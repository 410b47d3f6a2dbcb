"""Parameters sharded over a mesh of ranks: FSDP, tensor parallelism, and meshes of them."""
