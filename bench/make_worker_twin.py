"""Writes `fixtures/worker_twin.safetensors`: what transformers says on a CPU to the small model of `gpu_worker.py`.

`python bench/make_worker_twin.py`. Greedy tokens, and the logits that chose the first of them; float32.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gpu_worker import FIXTURE, NUM_OUTPUT, digest_of, prompts, small_folder, small_weights
from safetensors.torch import save_file
from transformers import LlamaForCausalLM


def main() -> None:
    with TemporaryDirectory() as name:
        small_folder(Path(name))
        model = LlamaForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    tokens, logits, narrowest = [], [], float("inf")
    with torch.inference_mode():
        for prompt in prompts():
            known = list(prompt)
            for _ in range(NUM_OUTPUT):
                last = model(torch.tensor([known])).logits[0, -1]
                if len(known) == len(prompt):
                    logits.append(last.clone())
                best = last.topk(2).values
                narrowest = min(narrowest, float(best[0] - best[1]))
                known.append(int(last.argmax()))
            tokens.append(torch.tensor(known[len(prompt) :]))
    digest = torch.from_numpy(np.frombuffer(digest_of(small_weights()).encode(), np.uint8).copy())
    FIXTURE.parent.mkdir(exist_ok=True)
    save_file({"tokens": torch.stack(tokens), "logits": torch.stack(logits), "digest": digest}, FIXTURE)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes; the narrowest choice was won by {narrowest:.2g}")


if __name__ == "__main__":
    main()
