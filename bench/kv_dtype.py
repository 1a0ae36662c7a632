"""What KV of 8 bits costs in exactness and saves in bytes, on a real model and on text that it wrote itself.

`python bench/kv_dtype.py [--model smollm2-135m-instruct] [--prompts 8] [--tokens 96] [--threads 2]`

For each form of KV, against float32:

    bytes       of one token, scales included
    logits      the model is led over the texts that it wrote with float32 KV: the mean and the largest difference of
                its logits, and how much information the changed distribution loses (mean KL divergence, nats)
    top 1       of those positions, how many keep the likeliest token
    greedy      tokens that it writes itself before the first one that differs, of all that there are
"""

import argparse
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, kernels_for
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.worker import calibrate
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.models.weights import LoadedModel, load
from kilburn.worker.prepare import prepare

CPU = torch.device("cpu")
BLOCK_SIZE = 16
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # as the bundled model has it
PROMPTS = (
    "What is gravity?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List the planets of the solar system with one fact about each.",
    "def fibonacci(n):",
    "Once upon a time, in a village by the river,",
    "Translate into French: the weather is fine today and the children play in the garden.",
    "What are three good reasons to learn to cook, and how does one begin?",
)


@dataclass
class Form:
    """One way to keep KV, and a cache that does."""

    name: str
    cache: KVCache


def forms_of(loaded: LoadedModel, kernels: Kernels, num_blocks: int) -> list[Form]:
    config = loaded.config
    wide = KVLayout(BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim, "float32")
    narrow = replace(wide, dtype="int8")
    scales = calibrate.scales_for(calibrate.largest_seen(loaded, torch.float32, CPU), torch.int8)
    return [
        Form("float32", KVCache(wide, num_blocks, 0, CPU, kernels)),
        Form("int8, static scales", KVCache(narrow, num_blocks, 0, CPU, kernels, scales)),
        Form("int8, scales in the blocks", KVCache(narrow.with_scale_area(), num_blocks, 0, CPU, kernels)),
    ]


def logits_of(loaded: LoadedModel, kernels: Kernels, cache: KVCache, tokens: list[int], start: int) -> Tensor:
    """Logits of the positions [start, end) of a sequence whose earlier ones are in the cache, in scattered blocks."""
    table = torch.arange(cache.num_blocks, dtype=torch.int32).flip(0)[: blocks_for(len(tokens), BLOCK_SIZE)]
    positions = torch.arange(start, len(tokens))
    batch = Batch(
        query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
        context_len=torch.tensor([len(tokens)], dtype=torch.int32),
        tables=table[None].contiguous(),
        positions=positions,
        slots=table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query=len(positions),
        max_context=len(tokens),
    )
    hidden = loaded.model.forward(torch.tensor(tokens[start:]), cache.pool, batch, kernels, cache.scales)
    return loaded.model.logits(hidden)


def greedy(loaded: LoadedModel, kernels: Kernels, cache: KVCache, prompt: list[int], count: int) -> list[int]:
    """The prompt and what follows it. Goes on past the end of a text: what counts is the number of choices."""
    tokens, start = list(prompt), 0
    for _ in range(count):
        row = logits_of(loaded, kernels, cache, tokens, start)[-1]
        start = len(tokens)
        tokens.append(int(row.argmax()))
    return tokens


def same_until(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    for name, default in (("prompts", 8), ("tokens", 96), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder = prepare(given.model)
    loaded, kernels = load(folder, torch.float32, CPU), kernels_for(CPU)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(CHAT.format(text)).ids for text in PROMPTS[: given.prompts]]
    forms = forms_of(loaded, kernels, blocks_for(max(map(len, prompts)) + given.tokens, BLOCK_SIZE))
    texts, told = [greedy(loaded, kernels, forms[0].cache, prompt, given.tokens) for prompt in prompts], []
    exact = [logits_of(loaded, kernels, forms[0].cache, text, 0) for text in texts]
    for form in forms:
        led = [logits_of(loaded, kernels, form.cache, text, 0) for text in texts]
        told.append(row_of(form, torch.cat(led), torch.cat(exact)))
        own = [greedy(loaded, kernels, form.cache, prompt, given.tokens) for prompt in prompts]
        same = [same_until(a, b) - len(p) for a, b, p in zip(own, texts, prompts, strict=True)]
        told[-1] += f"{sum(same):8} of {given.tokens * len(texts)}"
    positions = sum(map(len, texts))
    print(f"{folder.name}: {len(texts)} texts, {positions} positions, {given.tokens} tokens written after each prompt")
    print(f"{'KV':30}{'bytes':>8}{'mean':>10}{'largest':>10}{'KL':>11}{'top 1':>9}{'greedy':>16}")
    print("\n".join(told))


def row_of(form: Form, led: Tensor, exact: Tensor) -> str:
    apart = (led - exact).abs()
    lost = F.kl_div(led.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean")
    kept = (led.argmax(-1) == exact.argmax(-1)).double().mean()
    size = form.cache.layout.bytes_per_token
    return f"{form.name:30}{size:8.0f}{apart.mean():10.4f}{apart.max():10.3f}{lost:11.2e}{100 * kept:8.2f}%"


if __name__ == "__main__":
    with torch.inference_mode():
        main()
