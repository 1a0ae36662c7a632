"""vLLM's own V1 scheduler on queues of requests, for `bench/core.py --against-vllm`.

    VENV/bin/python bench/peer_scheduler.py

Run by the Python that has vLLM, so it needs only the standard library beside it; `vllm.v1.core` is all that is used of
it: no model is loaded and no worker started. Its first line is `"ready"`; then, for each line of JSON in, a line out:

    {"prompts": [[id, ...], ...], "num_outputs": [n, ...], "max_rows": n, "block_size": n, "max_step_tokens": n,
     "most_steps": n}
    {"begin_us": ..., "steps": [[rows, positions, tokens drawn, us], ...]}

`begin_us` is what it takes to make the requests and add them; a step's `us` is `schedule` and `update_from_output`, all
in CPU time of the one thread that runs. Every row that reaches the end of its known tokens draws TOKEN.
"""

import gc
import json
import sys
from importlib import import_module
from time import thread_time
from typing import Any

TOKEN = 7


class TextModel:
    """What a scheduler asks about a model, which is a plain one: whatever else it asks for, there is none.

    vLLM's own description would import the model's classes, and with them all that these want installed.
    """

    runner_type, skip_tokenizer_init = "generate", True

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def __getattr__(self, name: str) -> None:
        return None


def scheduler_for(asked: dict[str, Any]) -> Any:
    """A scheduler with blocks enough that nobody is ever preempted."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    size = asked["block_size"]
    lengths = [len(p) + n for p, n in zip(asked["prompts"], asked["num_outputs"], strict=True)]
    num_blocks = sum(-(-length // size) + 1 for length in lengths) + 16
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=asked["max_rows"],
            max_num_batched_tokens=asked["max_step_tokens"],
            max_model_len=max(lengths) + 1,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    config.model_config = TextModel(max(lengths) + 1)
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        log_stats=False,
    )


def requests_of(asked: dict[str, Any]) -> list[Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(asked["block_size"], sha256)
    made = []
    for i, (prompt, num_output) in enumerate(zip(asked["prompts"], asked["num_outputs"], strict=True)):
        wish = SamplingParams(temperature=0.0, max_tokens=num_output, stop_token_ids=[2])
        wish.update_from_generation_config({}, 2)
        made.append(Request(str(i), prompt, wish, None, block_hasher=hasher))
    return made


def run(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = scheduler_for(asked)
    begun = thread_time()
    requests = requests_of(asked)
    for request in requests:
        scheduler.add_request(request)
    begin_us = (thread_time() - begun) * 1e6
    by_id = {request.request_id: request for request in requests}
    gc.collect()
    gc.freeze()  # as vLLM's own engine does before it serves
    steps = []
    while scheduler.has_unfinished_requests() and len(steps) < asked["most_steps"]:
        begun = thread_time()
        plan = scheduler.schedule()
        planned = thread_time()
        ids = list(plan.num_scheduled_tokens)
        # `schedule` has moved num_computed_tokens on already: who reached the end of his tokens draws one.
        drawn = [[TOKEN] if by_id[i].num_computed_tokens >= by_id[i].num_tokens else [] for i in ids]
        made = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={id: at for at, id in enumerate(ids)}, sampled_token_ids=drawn
        )
        landed = thread_time()
        scheduler.update_from_output(plan, made)
        us = (planned - begun + thread_time() - landed) * 1e6
        steps.append([len(ids), plan.total_num_scheduled_tokens, sum(map(len, drawn)), us])
    gc.unfreeze()
    return {"begin_us": begin_us, "steps": steps}


def main() -> None:
    import_module("vllm")  # fails at once where it is not there
    run({"prompts": [[5, 6, 7]], "num_outputs": [2], "max_rows": 4, "block_size": 16, "max_step_tokens": 64,
         "most_steps": 4})  # fmt: skip
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
