"""A Llama of two layers with random weights and a tokenizer of its own, some 10 MB: a model that a
real engine loads in seconds. The same seed gives the same bytes.

    python -m tests.jobscripts.llm.random_llama FOLDER [--seed 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAGES = Path(__file__).parents[3] / "docs"
VOCABULARY = 2048
"""Of which 256 are single bytes: answers have characters that several ids make, and ids that are
no character.
"""
CONTEXT_TOKENS = 4096
SPREAD = 0.25
"""Standard deviation of the weights: with less an answer soon repeats one id."""
START, END = "<|start|>", "<|end|>"
CHAT = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Template of chats; tools are no part of the prompt."""


def write_model(folder: Path, seed: int = 1) -> None:
    """Write configuration, weights and tokenizer.

    Args:
        folder: is made.
        seed: of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds; modules of tests import this

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=SPREAD,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and frequent pairs, trained with the pages of this tree."""
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((p.read_text() for p in sorted(PAGES.glob("*.md"))), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=START, eos_token=END, chat_template=CHAT
    )


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_model(options.folder, options.seed)


if __name__ == "__main__":
    main()
