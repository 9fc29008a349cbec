"""One document, many questions, in vLLM's offline engine. Runs on a CPU in an environment that `make vllm` made."""

import random

from vllm import SamplingParams

from gatesight_hf.reference import ESTIMATOR_PATH, MODEL_PATH, documents
from gatesight_hf.vllm import GateSightLLM

MODEL, ESTIMATOR = MODEL_PATH, ESTIMATOR_PATH  # the bundled small model; put your own here


def main() -> None:
    document = documents.needles(random.Random(0), 1024, count=8, asked=4)
    llm = GateSightLLM(MODEL, ESTIMATOR, kept_fraction=0.1, dtype="bfloat16", max_model_len=2048)

    session = llm.open(document.text)  # prefilled once, compacted; freed blocks are back in the pool
    print(f"kept per layer and head: {session.kept} of {session.tokens}")
    print(f"blocks held: {session.blocks} of {session.blocks_before}; seconds: {session.seconds}")

    questions = [question.text for question in document.questions]
    outputs = llm.ask(session, questions, SamplingParams(temperature=0, max_tokens=5))  # one batch of children
    for question, output in zip(document.questions, outputs, strict=True):
        print(question.text, "->", output.outputs[0].text.strip(), "| expected:", " ".join(question.answer))
    llm.drop(session)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
