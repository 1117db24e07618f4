"""Train a Llama of transformers on real text, and leave a folder that `from_pretrained` loads.

    python examples/finetune_transformers.py                        # CPU or one GPU
    torchrun --nproc-per-node 2 examples/finetune_transformers.py   # FSDP2
    python examples/finetune_transformers.py --pretrained FOLDER    # go on from such a folder

Without --pretrained the weights are random and the tokenizer is trained on the spot, on the text: the Python
standard library's sources. Run it again and it goes on where it stopped. At the end the folder is loaded by
transformers, and its logits are compared with the trained model's. Needs the extra `examples`.
"""

import argparse
import json
import math
import os
import shutil
import zlib
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import checked, common, positive, run_folder
from rich.console import Console
from tokens import prepare, train_tokenizer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import overlapkit as ok
from overlapkit.checkpoint import export, load_pretrained
from overlapkit.input import inputs_and_targets
from overlapkit.measure import ProgressLine

PROMPT = "def __init__(self, name):\n    self."


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = common(
        "Train a Llama on the Python standard library.", steps=200, batch=16, lr=2e-3, save_every=50
    )
    parser.add_argument("--pretrained", type=Path, help="a folder to begin with: weights, config, tokenizer")
    new = {"vocab": 2048, "width": 128, "layers": 4}
    for name, default in new.items():
        parser.add_argument(f"--{name}", type=positive, help=f"of a new model ({default})")
    parser.add_argument("--window", type=positive, default=128, help="tokens a window (128)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text (4)")
    parser.add_argument("--data", type=Path, default=Path("runs/tokens"), help="the tokens (runs/tokens)")
    args = checked(parser)
    for name, default in new.items():
        if args.pretrained and getattr(args, name):
            parser.error(f"--{name}: leave it out, --pretrained {args.pretrained} has one")
        setattr(args, name, getattr(args, name) or default)
    if args.width % 8:
        parser.error(f"--width {args.width}: give a multiple of 8, for four heads of even width")
    if args.vocab < 257:
        parser.error(f"--vocab {args.vocab}: give at least 257, for each byte and the end of a document")
    if args.megabytes <= 0:
        parser.error(f"--megabytes {args.megabytes:g}: give more than 0")
    vocabulary = f"{args.vocab}"
    if args.pretrained:
        for name in ("config.json", "tokenizer.json"):
            if not (args.pretrained / name).is_file():
                parser.error(f"--pretrained {args.pretrained}: there is no {name} in it")
        vocabulary = f"{zlib.crc32((args.pretrained / 'tokenizer.json').read_bytes()):08x}"
    # A folder for each tokenizer and amount of text: no run reads what was written for another one.
    args.data /= f"{vocabulary}-{args.megabytes:g}MB"
    world = os.environ.get("WORLD_SIZE", "1")
    kind = ["from", args.pretrained.name] if args.pretrained else []
    args.out = args.out or run_folder("llama", *kind, world if world != "1" else None)
    return args


def main() -> None:
    """One training run."""
    args = arguments()
    device = args.device
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The loop."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(quiet=rank > 0)
    torch.manual_seed(args.seed)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one of each node, whether nodes share this folder or not
        prepare(args.data, args.megabytes, partial(tokenizer_for, args))
    if dist.is_initialized():
        dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")

    config = AutoConfig.from_pretrained(args.pretrained) if args.pretrained else new_config(args, tokenizer)
    model: Any = AutoModelForCausalLM.from_config(config).to(device)
    console.print(str(ok.kernels.swap(model)))  # norms and gated layers; before they are sharded
    if dist.is_initialized():
        model = ok.shard(model, init_device_mesh(device.type, (world,)))
    if args.pretrained:
        load_pretrained(model, args.pretrained)  # each rank reads its own shards, and no others

    def batches(part: str) -> ok.DeviceLoader:
        shards = ok.TokenShards(args.data / part, args.window, args.batch // world, seed=args.seed)
        return ok.DeviceLoader(shards, device, transform=inputs_and_targets)

    loader, held_out = batches("train"), batches("held_out")
    opt = ok.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, partial(learning_rate, steps=args.steps))
    ckpt = ok.Checkpointer(args.out, keep=2)

    state = {"model": model, "optimizer": opt, "scheduler": sched, "loader": loader}
    first = step = ckpt.restore(state)
    console.print(f"going on after step {step}" if step else f"starting; everything goes to {args.out}")
    last = min(args.steps, args.stop_at or args.steps)
    meter = ok.StepMeter(model, opt, loader, ckpt, progress=ProgressLine(args.steps, first_step=step))

    while step < last:
        loader.set_epoch(step // len(loader))
        for x, y in loader:
            with meter.step(tokens=x.numel()):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = loss_of(model, x, y)
                loss.backward()
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
                meter.log(loss=loss)
            step += 1
            if step % args.save_every == 0 or step == last:
                ckpt.save(step, state)
            if step == last:
                break
    ckpt.close()
    meter.close()
    if step == first:
        console.print(f"there was nothing left to do: delete {args.out} to begin again, or raise --steps")
        return
    result: dict[str, Any] = {"world": world, "step": step}
    if step == args.steps:
        result["held_out"] = evaluate(model, held_out)
        console.print(f"loss of held-out text: {result['held_out']:.3f} nats a token")
        logits = logits_of(model, tokenizer)
        if rank == 0:
            result["difference"] = export_and_load(args, tokenizer, config, logits)
    if rank == 0:
        report = meter.report()
        print(report)
        (args.out / "result.json").write_text(json.dumps({**result, "report": report.to_dict()}, indent=1))
    if dist.is_initialized():
        dist.barrier()  # no rank leaves before rank 0 has written and compared everything


def tokenizer_for(args: argparse.Namespace, texts: list[str]) -> PreTrainedTokenizerFast:
    """The pretrained model's tokenizer, or a new one."""
    if args.pretrained:
        return AutoTokenizer.from_pretrained(args.pretrained)
    return train_tokenizer(texts, args.vocab)


def new_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A small Llama with grouped queries, whose head shares the embedding's weight."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=32 * round(args.width * 8 / 3 / 32),
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(args.window, 128),  # room for what is generated below
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def learning_rate(step: int, steps: int) -> float:
    """A short warm-up, then a cosine down to a tenth; relative to --lr."""
    return min((step + 1) / 20, 1.0) * (0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))


def loss_of(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of tokens and targets (B, T): the fused loss in place of the model's own."""
    return ok.kernels.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: ok.DeviceLoader) -> float:
    """The mean loss of up to 20 batches of each rank."""
    model.eval()
    loss = torch.stack([loss_of(model, x, y) for x, y in islice(loader, 20)]).mean()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """What a model makes of a line of Python; all ranks of a sharded one call it."""
    line = tokenizer(PROMPT, return_tensors="pt").to(next(model.parameters()).device)
    return model.eval()(line["input_ids"]).logits.cpu()


def export_and_load(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, config: Any, logits: Tensor
) -> float:
    """Write a folder as transformers does, and load it as anybody would.

    Args:
        args: The command line.
        tokenizer: The model's.
        config: The model's.
        logits: The trained model's, of the prompt.

    Returns:
        The largest difference of the loaded model's logits from them.
    """
    folder = args.out / f"model-{args.steps}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run in the same folder
    export(args.out, folder, only="model")  # slice by slice from the checkpoint: no rank holds it all
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    loaded = logits_of(model, tokenizer)
    torch.testing.assert_close(loaded, logits, rtol=1e-4, atol=1e-4)
    line = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(**line, max_new_tokens=24, do_sample=False)
    print(f"{folder}, loaded by transformers, goes on like this:\n{tokenizer.decode(written[0])}")
    return (loaded - logits).abs().max().item()


if __name__ == "__main__":
    main()
