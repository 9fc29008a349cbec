"""One document, many questions, over HTTP. First start a server, for example with the bundled model:

    gatesight serve gatesight_hf/reference/model --estimator gatesight_hf/reference/estimator -- --dtype bfloat16

and then `python examples/vllm_client.py [URL]`.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from openai import OpenAI

from gatesight_hf.reference import documents

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
SESSION = "my-document"


def complete(client: OpenAI, text: str, kind: str, **options: Any) -> Any:
    """A chat completion that opens or asks the session."""
    model = client.models.list().data[0].id
    about = {"gatesight": kind, "session": SESSION, **options.pop("about", {})}
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=model, messages=messages, temperature=0, extra_body={"kv_transfer_params": about}, **options
    )


document = documents.needles(random.Random(0), 1024, count=8, asked=4)
client = OpenAI(base_url=f"{URL}/v1", api_key="none")

opened = complete(client, document.text, "open", about={"kept_fraction": 0.1})
print("opened:", opened.kv_transfer_params)  # entries kept per layer, blocks and bytes, seconds


def answer(question: Any) -> str:
    # The question follows the document in its message, after an empty line; only the question is computed.
    response = complete(client, f"{document.text}\n\n{question.text}", "ask", max_tokens=5)
    return response.choices[0].message.content.strip()


with ThreadPoolExecutor() as pool:  # children are batched with each other and with ordinary requests
    for question, text in zip(document.questions, pool.map(answer, document.questions), strict=True):
        print(question.text, "->", text, "| expected:", " ".join(question.answer))

print("dropped:", httpx.delete(f"{URL}/gatesight/sessions/{SESSION}").json())
