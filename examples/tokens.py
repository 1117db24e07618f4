"""From text to token shards with a tokenizer of its own: written once, each of them whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from text import sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import overlapkit as ok

END = "<|end|>"
"""Stands after each document."""


def documents(megabytes: int) -> tuple[list[str], list[str]]:
    """Files of the Python standard library, to train on and held out, about so many megabytes of them."""
    train, held_out = (
        sorted((text.decode(errors="replace") for text in part), key=len) for part in sources()
    )
    whole = sum(map(len, train)) / 1e6
    every = max(1, round(whole / megabytes))  # of all lengths
    return train[::every], held_out[::every]


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's: any text has tokens, and they give it back."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)


def prepare(folder: Path, megabytes: int, tokenizer: Callable[[list[str]], PreTrainedTokenizerFast]) -> None:
    """Write folder/tokenizer, folder/train and folder/held_out, whichever of them is not there.

    Args:
        folder: Where to.
        megabytes: How much text.
        tokenizer: Makes one from the texts to train on, or loads one.
    """
    if (folder / "held_out").exists():  # the last to be written
        return
    parts = dict(zip(("train", "held_out"), documents(megabytes), strict=True))
    if not (folder / "tokenizer").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
            tokenizer(parts["train"]).save_pretrained(f"{unfinished}/tokenizer")
            os.rename(f"{unfinished}/tokenizer", folder / "tokenizer")
    made = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for name, texts in parts.items():
        if not (folder / name).exists():
            encoded = made([text + END for text in texts])["input_ids"]
            dtype = "uint16" if len(made) <= 1 << 16 else "uint32"
            ok.write_token_shards(encoded, folder / name, dtype=dtype)
