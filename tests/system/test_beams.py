"""Beam search on the bundled model equals transformers': the real core, the real worker, token by token.

Both compute in float32. Sequences may differ only where two hypotheses score so alike that rounding decides (less than
1e-4 apart), and then no more than one in a hundred.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Beam, BeamSettings, EarlyStopping, Event, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.prepared import prepared_folder
from kilburn.shared.config import WorkerSettings
from kilburn.shared.messages import StepPlan
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.shared.sampling import Sampling
from kilburn.worker.start import Ready, make_ready, use_threads

TOLERANCE = 1e-4  # of a log probability, in float32
NEW_TOKENS = 8
PEER = b"worker.0"
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at",
    "To make a cup of tea, first",
    "The three primary colours are",
    "In the year 1969, people",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Q: What is 2 + 2?\nA:",
)
CASES = (  # width, length penalty, early stopping by either name, how many of the prompts
    (2, 1.0, EarlyStopping.HEURISTIC, False, 10),
    (4, 1.0, EarlyStopping.HEURISTIC, False, 10),
    (6, 1.0, EarlyStopping.HEURISTIC, False, 10),
    (4, 0.3, EarlyStopping.FULL, True, 3),
    (2, 2.0, EarlyStopping.NEVER, "never", 3),
)
Hypotheses = list[tuple[tuple[int, ...], float]]  # (tokens, score), best first


def searched(
    ready: Ready, prompts: list[list[int]], beams: BeamSettings, stop_ids: tuple[int, ...]
) -> list[Hypotheses]:
    """By the engine and the worker, all prompts at once."""
    engine = Engine(EngineSettings(depth=2))
    ready.executor.clear()
    events: list[Event] = [Arrived(PEER, ready.hello)]
    for i, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0, stop_ids=stop_ids)
        events.append(Submit(i, prompt, NEW_TOKENS, sampling, n=beams.width, beams=beams))
    found: list[Hypotheses] = [[] for _ in prompts]
    while events:
        answers: list[Event] = []
        for effect in engine.handle(events, now=0.0):
            match effect:
                case Send(message=StepPlan() as plan):
                    answers.append(Arrived(PEER, ready.executor.run(plan)))
                case Beam(request_id, index, tokens, score=score):
                    assert index == len(found[request_id])
                    found[request_id].append((tokens, score))
        engine.validate()
        events = answers
    assert engine.is_idle
    assert engine.snapshot().groups[0].owned_blocks == 0
    return found


def expected(
    model: torch.nn.Module, prompts: list[list[int]], beams: BeamSettings, early: object, eos: int
) -> list[Hypotheses]:
    """By transformers, all prompts in one batch, padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[eos] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        num_beams=beams.width,
        num_return_sequences=beams.width,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        length_penalty=beams.length_penalty,
        early_stopping=early,
        eos_token_id=eos,
        pad_token_id=eos,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found: list[Hypotheses] = [[] for _ in prompts]
    for i, (sequence, score) in enumerate(zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True)):
        tokens = sequence[longest:]
        end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        found[i // beams.width].append((tuple(tokens[:end]), score))
    return found


def test_beams_of_the_bundled_model_equal_those_of_transformers() -> None:
    folder = prepared_folder(BUNDLED_NAME, "")
    threads = torch.get_num_threads()
    use_threads(1)  # more would wait for each other on a busy machine
    try:
        settings = WorkerSettings(model=str(folder), name="w", device="cpu", dtype="float32", num_blocks=1024)
        ready = make_ready(settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        eos, num_compared, num_different = tokenizer.eos_token_id, 0, 0
        for width, penalty, stopping, early, num_prompts in CASES:
            beams, some = BeamSettings(width, penalty, stopping), prompts[:num_prompts]
            all_ours, all_theirs = searched(ready, some, beams, (eos,)), expected(model, some, beams, early, eos)
            for prompt, ours, theirs in zip(some, all_ours, all_theirs, strict=True):
                assert len(ours) == len(theirs) == width
                for place, ((tokens, score), (their_tokens, their_score)) in enumerate(zip(ours, theirs, strict=True)):
                    num_compared += 1
                    num_different += tokens != their_tokens
                    gap = abs(score - their_score) * len(tokens) ** (penalty - 1.0)  # per token
                    assert gap < TOLERANCE, (width, early, tokenizer.decode(prompt), place, tokens, their_tokens, gap)
        assert num_different <= num_compared / 100
    finally:
        use_threads(threads)
