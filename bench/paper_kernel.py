"""Decode attention of this machine's kernels over block sizes: the paper's Figure 18 (a), where a CPU can."""

import time
from collections.abc import Sequence
from statistics import median

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 4, 3, 3, 64  # heads as the bundled model's
NUM_SEQS, CONTEXT = 16, 1024


def attention_by_block(sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Seconds of decode attention of all sequences in all layers, over that of a plain read of the same memory.

    Blocks lie scattered. Each round has every size and its read, one after the other; medians of rounds are returned.
    """
    import torch

    from kilburn.kernels.dispatch import Batch, Shapes, kernels_for

    kernels, torch_rng = kernels_for(torch.device("cpu")), torch.Generator().manual_seed(0)
    width = KV_HEADS * GROUP * HEAD_DIM
    queries = torch.randn(NUM_SEQS, KV_HEADS * GROUP, HEAD_DIM, generator=torch_rng)
    made = {}
    for size in sizes:
        num_blocks = NUM_SEQS * CONTEXT // size
        shapes = Shapes(width, 3 * width, KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, size, torch.float32)
        kernels.warm_up(shapes, lambda _: None)
        tables = torch.randperm(num_blocks, generator=torch_rng).to(torch.int32).view(NUM_SEQS, -1)
        batch = Batch(
            query_start=torch.arange(NUM_SEQS + 1, dtype=torch.int32),
            context_len=torch.full((NUM_SEQS,), CONTEXT, dtype=torch.int32),
            tables=tables,
            positions=torch.full((NUM_SEQS,), CONTEXT - 1),
            slots=tables[:, -1].long() * size + size - 1,
            max_query=1,
            max_context=CONTEXT,
        )
        made[size] = (torch.randn(num_blocks, LAYERS, 2, KV_HEADS, size, HEAD_DIM, generator=torch_rng), batch)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size, (pool, batch) in made.items():
            begun = time.perf_counter()
            for layer in range(LAYERS):
                kernels.paged_attention(queries, pool[:, layer], batch, HEAD_DIM**-0.5)
            attended = time.perf_counter()
            pool.view(-1).sum()
            if number:  # the first is slow for reasons of its own
                taken[size].append((attended - begun) / (time.perf_counter() - attended))
    return {size: median(some) for size, some in taken.items()}
