"""From text to token shards with a tokenizer of its own: written once, each of them whole or not at all."""

import itertools
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from text import sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import overlapkit as ok

END = "<|end|>"
"""Stands after each document."""


def documents(megabytes: float) -> tuple[list[str], list[str]]:
    """Files of the Python standard library: so many megabytes to train on, and a tenth of it held out."""
    train, held_out = sources()
    return some(train, megabytes * 1e6), some(held_out, megabytes * 1e5)


def some(files: list[bytes], nbytes: float) -> list[str]:
    """Files until there are so many bytes, at least one, in an order that is random and always the same."""
    ordered = sorted(files, key=zlib.crc32)
    ends = itertools.accumulate(map(len, ordered))
    return [
        file.decode(errors="replace")
        for file, end in zip(ordered, ends, strict=True)
        if end - len(file) < nbytes
    ]


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


def prepare(
    folder: Path, megabytes: float, tokenizer: Callable[[list[str]], PreTrainedTokenizerFast]
) -> None:
    """Write folder/tokenizer, folder/train and folder/held_out, whichever of them is not there.

    Args:
        folder: Where to.
        megabytes: Of text to train on.
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
