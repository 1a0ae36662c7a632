"""Two tokenizers made on the spot, of the two families that split characters over ids.

byte level     GPT-2, Llama 3, Qwen, SmolLM2: every byte is an id; nothing is added to plain text
sentencepiece  Llama 2, Mistral: a space is \u2581 and one is put in front; bytes of unknown characters; a BOS is added
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kilburn.controller.text import Text

CORPUS = ["hello world it is leading x. It is. injury. the quick brown fox jumps over the lazy dog"] * 5
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ (message['content'] or '') | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}</s>{% endfor %}"
)


@cache
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@cache
def sentencepiece_json() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=["\u2581", "I"],
        special_tokens=["<unk>", "<s>", "</s>"],
    )
    tokenizer.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS], trainer)
    # The bytes stand in the vocabulary as plain tokens, as they do in converted sentencepiece models.
    raw = json.loads(tokenizer.to_str())
    vocab = raw["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return str(tokenizer.to_str())


def byte_level(template: str | None = CHATML) -> Text:
    variables = {"eos_token": "<|im_end|>"}
    return Text(byte_level_json(), template_source=template, variables=variables, eos_ids=(2, 0))


def sentencepiece(template: str | None = WITH_BOS) -> Text:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return Text(sentencepiece_json(), template_source=template, variables=variables, eos_ids=(2,))


FAMILIES = {"byte level": byte_level, "sentencepiece": sentencepiece}


def write_folder(folder: Path, **config: object) -> Path:
    """What a controller needs of a model folder."""
    (folder / "tokenizer.json").write_text(byte_level_json())
    about = {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "vocab_size": 330} | config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder
