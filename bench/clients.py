"""Asks a running server by litellm, which speaks every API that it has, and says what came back.

    python bench/clients.py --url http://127.0.0.1:8000 --model smollm2-135m-instruct --api-key none

The suite asks by the packages `openai` and `anthropic`. litellm is 250 MB with what it brings, and takes longer to
import than the suite of the REST side may take, so it is asked by this command: `pip install litellm` first. Ends with
status 1 where an answer is not what the same question, asked in another way, was answered.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

QUESTION: list[Any] = [{"role": "user", "content": "Count to ten."}]


def asked(model: str, url: str, key: str) -> dict[str, Callable[[], str]]:
    """Each way to ask, and the text that it is answered."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it fetches prices from the network
    import litellm

    openais: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "temperature": 0}
    anthropics: dict[str, Any] = {"model": f"anthropic/{model}", "api_base": url, "api_key": key, "temperature": 0}
    said: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24}

    def whole(about: dict[str, Any]) -> str:
        return str(litellm.completion(**about, **said).choices[0].message.content)

    def streamed(about: dict[str, Any]) -> str:
        chunks = litellm.completion(**about, **said, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def responses() -> str:
        answer = litellm.responses(**openais, input=QUESTION[0]["content"], max_output_tokens=24)
        return "".join(part.text for item in answer.output if item.type == "message" for part in item.content)

    return {
        "chat, whole": lambda: whole(openais),
        "chat, streamed": lambda: streamed(openais),
        "messages, whole": lambda: whole(anthropics),
        "messages, streamed": lambda: streamed(anthropics),
        "responses, whole": responses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    texts: dict[str, str] = {}
    for way, ask in asked(args.model, args.url.rstrip("/"), args.api_key).items():
        begun = time.perf_counter()
        texts[way] = ask()
        print(f"{way:20} {time.perf_counter() - begun:6.3f} s  {texts[way][:80]!r}")
    is_same = len(set(texts.values())) == 1
    print("all the same" if is_same else "they differ")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
