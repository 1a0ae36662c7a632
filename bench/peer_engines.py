"""Engines that have no server, asked in process: OpenVINO GenAI and CTranslate2.

    VENV/bin/python bench/peer_engines.py genai MODEL.gguf  --threads 2 --max-running 16
    VENV/bin/python bench/peer_engines.py ctranslate2 FOLDER --threads 2 --compute-type float32

Run by the Python that has the engine, so it needs nothing else but the standard library. `bench/peers.py` starts it and
keeps it between rounds. Its first line is `"ready"`; then, for each line of JSON in, a line out:

    {"prompts": [[id, ...], ...], "num_outputs": [n, ...]}     all submitted at once; greedy, the end of text ignored
    [{"first_s": ..., "last_s": ..., "ids": [...]}, ...]       seconds since the line came
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = list[dict[str, Any]]
Engine = Callable[[list[list[int]], list[int]], Answers]


def genai(options: argparse.Namespace) -> Engine:
    """The continuous-batching pipeline, which is what its server form uses; its prefix cache is on, as ours is."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gib
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
    num_asked = 0

    def ask(prompts: list[list[int]], num_outputs: list[int]) -> Answers:
        nonlocal num_asked
        import numpy as np  # openvino's own tensors are made of its arrays

        begun = time.perf_counter()
        answers: Answers = [{"first_s": 0.0, "last_s": 0.0, "ids": []} for _ in prompts]
        waiting, running = deque(range(len(prompts))), dict[int, Any]()
        while waiting or running:
            # Its max_num_seqs bounds nothing while prompts and decodes share steps (dynamic_split_fuse, the default).
            while waiting and len(running) < options.max_running:
                place = waiting.popleft()
                wish = openvino_genai.GenerationConfig()
                wish.max_new_tokens, wish.ignore_eos, wish.do_sample = num_outputs[place], True, False
                ids = openvino.Tensor(np.array([prompts[place]], dtype=np.int64))
                running[place] = pipeline.add_request(num_asked, ids, wish)
                num_asked += 1
            pipeline.step()
            now_s = time.perf_counter() - begun
            for place, handle in list(running.items()):
                answer = answers[place]
                while handle.can_read():
                    for output in handle.read().values():
                        answer["ids"] += output.generated_ids
                    answer["first_s"] = answer["first_s"] or now_s
                    answer["last_s"] = now_s
                if running[place].get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del running[place]
        return answers

    return ask


def ctranslate2(options: argparse.Namespace) -> Engine:
    """Its generator batches what is given at once and pads; it has no continuous batching and no prefix cache."""
    import ctranslate2 as engine

    generator = engine.Generator(
        options.model, "cpu", compute_type=options.compute_type, intra_threads=options.threads, inter_threads=1
    )
    words = json.loads((Path(options.model) / "vocabulary.json").read_text())

    def ask(prompts: list[list[int]], num_outputs: list[int]) -> Answers:
        begun = time.perf_counter()
        answers: Answers = [{"first_s": 0.0, "last_s": 0.0, "ids": []} for _ in prompts]

        def heard(step: Any) -> bool:
            answer = answers[step.batch_id]
            answer["ids"].append(step.token_id)
            answer["last_s"] = time.perf_counter() - begun
            answer["first_s"] = answer["first_s"] or answer["last_s"]
            return len(answer["ids"]) >= num_outputs[step.batch_id]

        generator.generate_batch(
            [[words[i] for i in prompt] for prompt in prompts],
            max_batch_size=options.max_running,
            max_length=max(num_outputs),
            min_length=max(num_outputs),
            include_prompt_in_result=False,
            callback=heard,
        )
        return answers

    return ask


ENGINES = {"genai": genai, "ctranslate2": ctranslate2}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="what the engine reads: a GGUF file or a folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-running", type=int, default=32, help="requests that run at once; more wait")
    parser.add_argument("--cache-gib", type=int, default=2, help="of KV, where the engine has a pool")
    parser.add_argument("--compute-type", default="float32", help="of CTranslate2: float32, int8, ...")
    options = parser.parse_args()
    ask = ENGINES[options.engine](options)
    ask([[20, 21, 22]], [2])  # whatever is compiled at first use
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(ask(asked["prompts"], asked["num_outputs"])), flush=True)


if __name__ == "__main__":
    main()
