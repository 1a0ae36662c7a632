"""Beam search on the bundled model equals transformers': the real core, the real worker, token by token.

Both compute in float32. Sequences may differ only where two hypotheses score so alike that rounding decides (less than
1e-4 apart), and then no more than one in a hundred.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kilburn.controller.core.engine import Engine, EngineSettings
from kilburn.controller.core.events import Arrived, Beam, BeamSettings, EarlyStopping, Event, Send, Submit
from kilburn.controller.prepared import prepared_folder
from kilburn.shared.config import WorkerSettings
from kilburn.shared.messages import StepPlan
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.shared.sampling import Sampling
from kilburn.worker.start import Ready, make_ready, use_threads

TOLERANCE = 1e-4  # of scores, in float32
NEW_TOKENS = 14
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
    "A list of animals: cat, dog,",
    "Yes.",
)
CASES = (
    (2, 1.0, EarlyStopping.HEURISTIC, False),
    (4, 1.0, EarlyStopping.HEURISTIC, False),
    (6, 1.0, EarlyStopping.HEURISTIC, False),
    (4, 0.3, EarlyStopping.FULL, True),
    (2, 2.0, EarlyStopping.NEVER, "never"),
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


def expected(model: torch.nn.Module, prompt: list[int], beams: BeamSettings, early: object, eos: int) -> Hypotheses:
    """By transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
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
    found: Hypotheses = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        found.append((tuple(tokens[:end]), score))
    return found


def test_beams_of_the_bundled_model_equal_those_of_transformers() -> None:
    folder = prepared_folder(BUNDLED_NAME, "")
    threads = torch.get_num_threads()
    use_threads(2)
    try:
        settings = WorkerSettings(model=str(folder), name="w", device="cpu", dtype="float32", num_blocks=1024)
        ready = make_ready(settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        eos, num_compared, num_different = tokenizer.eos_token_id, 0, 0
        for width, penalty, stopping, early in CASES:
            beams = BeamSettings(width, penalty, stopping)
            for prompt, ours in zip(prompts, searched(ready, prompts, beams, (eos,)), strict=True):
                theirs = expected(model, prompt, beams, early, eos)
                assert len(ours) == len(theirs) == width
                for place, ((tokens, score), (their_tokens, their_score)) in enumerate(zip(ours, theirs, strict=True)):
                    num_compared += 1
                    num_different += tokens != their_tokens
                    gap = abs(score - their_score)
                    assert gap < TOLERANCE, (width, early, tokenizer.decode(prompt), place, tokens, their_tokens, gap)
        assert num_different <= num_compared / 100
    finally:
        use_threads(threads)
