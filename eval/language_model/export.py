"""Write a run's weights as a model folder of transformers: bfloat16, with the tokenizer and the state of training.

python eval/language_model/export.py --run runs/language --out eval/language_model/checkpoint
"""

import argparse
import json
from pathlib import Path

import network
import tokens
import torch
from transformers import GenerationConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder of train.py")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    args = parser.parse_args()
    saved = torch.load(args.run / "checkpoint.pt", weights_only=True)
    tokenizer = tokens.load()
    state = saved["state"]
    size = network.size_options(state.get("hidden_size", 256), state.get("layers", 16))
    model = network.build(len(tokenizer), state["phase"], 0, **size)
    model.load_state_dict(saved["model"])
    model.to(torch.bfloat16)
    ends = tokenizer.convert_tokens_to_ids([tokens.TURN_END, tokens.END])
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "state.json").write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    main()
