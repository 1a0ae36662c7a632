"""What weights of 16 and of 8 bits cost in exactness, on a real model and on real text: perplexity, and kept choices.

python bench/weights_int8.py                                       the bundled model, on this project's own pages
python bench/weights_int8.py --text book.txt --words 4000

perplexity   exp of the mean loss of each token given those before it, in windows of `--window` tokens
KL           nats that the changed distribution loses against float32's, on those positions
top 1        of those positions, how many keep the likeliest token
greedy       tokens written after each of some prompts before the first that differs, of all that there are
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.kv_dtype import BLOCK_SIZE, CHAT, CPU, PROMPTS, greedy, logits_of, same_until
from kilburn.kernels.dispatch import kernels_for
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.models.weights import LoadedModel, load
from kilburn.worker.prepare import prepare

ROOT = Path(__file__).parents[1]
OWN_PAGES = ("docs/ARCHITECTURE.md", "docs/OPERATING.md", "docs/KERNELS.md")


@dataclass
class Found:
    """What one form of the weights made of the text and of the prompts."""

    losses: Tensor  # of each position
    logs: list[Tensor]  # log probabilities [positions, vocab] of each window
    written: list[list[int]]


def look(loaded: LoadedModel, windows: list[list[int]], prompts: list[list[int]], num_tokens: int) -> Found:
    config, kernels = loaded.config, kernels_for(CPU)
    longest = max(max(map(len, windows)), max(map(len, prompts)) + num_tokens)
    layout = KVLayout(BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim, "float32")
    cache = KVCache(layout, blocks_for(longest, BLOCK_SIZE), 0, CPU, kernels)
    logs = [logits_of(loaded, kernels, cache, window, 0)[:-1].log_softmax(-1) for window in windows]
    losses = [F.nll_loss(log, torch.tensor(w[1:]), reduction="none") for log, w in zip(logs, windows, strict=True)]
    return Found(torch.cat(losses), logs, [greedy(loaded, kernels, cache, p, num_tokens) for p in prompts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, nargs="*", default=[ROOT / page for page in OWN_PAGES])
    for name, default in (("words", 3000), ("window", 512), ("prompts", 8), ("tokens", 64), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder = prepare(given.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = " ".join(path.read_text() for path in given.text).split()[: given.words]
    ids = tokenizer.encode(" ".join(words)).ids
    windows = [ids[i : i + given.window] for i in range(0, len(ids) - 1, given.window)]
    prompts = [tokenizer.encode(CHAT.format(text)).ids for text in PROMPTS[: given.prompts]]
    print(f"{folder.name}: {len(words)} words, {len(ids)} tokens in windows of {given.window}")
    print(f"{'weights':10}{'perplexity':>12}{'ratio':>9}{'KL':>11}{'top 1':>9}{'greedy':>14}")
    exact: Found | None = None
    for name in ("none", "float16", "int8"):
        loaded = load(folder, torch.float32, CPU, quantization=name)
        found = look(loaded, windows, prompts, given.tokens)
        exact = exact or found
        print(row_of(name, found, exact, sum(map(len, prompts))), flush=True)


def row_of(name: str, found: Found, exact: Found, num_prompt: int) -> str:
    pairs = list(zip(found.logs, exact.logs, strict=True))
    lost = sum(float(F.kl_div(a, b, log_target=True, reduction="sum")) for a, b in pairs) / len(exact.losses)
    kept = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs) / len(exact.losses)
    perplexity, ratio = found.losses.mean().exp(), (found.losses.mean() - exact.losses.mean()).exp()
    same = sum(same_until(a, b) for a, b in zip(found.written, exact.written, strict=True)) - num_prompt
    greedy_of = sum(map(len, exact.written)) - num_prompt
    return f"{name:10}{perplexity:12.3f}{ratio:9.4f}{lost:11.2e}{100 * kept:8.2f}%{same:7} of {greedy_of}"


if __name__ == "__main__":
    with torch.inference_mode():
        main()
